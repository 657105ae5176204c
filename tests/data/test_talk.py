"""Small talk of the built-in world: every request has its reply, and the splits share no wording."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tinyforge.data.talk import REPLIES, WORDINGS, of_split, talk
from tinyforge.data.world import KINDS, WORDS, Instruction

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> dict[str, list[Instruction]]:
    return {split: list(talk(split, 6_000)) for split in ("train", "val")}


def test_a_line_depends_on_seed_split_and_index_alone(made: dict[str, list[Instruction]]) -> None:
    assert list(talk("val", 20)) == made["val"][:20] != list(talk("val", 20, seed=1))
    with pytest.raises(ValueError, match="split is \"test\"|split is 'test'"):
        next(talk("test", 1))


def test_every_kind_occurs_with_its_one_reply(made: dict[str, list[Instruction]]) -> None:
    for lines in made.values():
        kinds = Counter(line.kind for line in lines)
        assert set(kinds) == {*REPLIES, *KINDS} and min(kinds.values()) > 60
        assert all(line.output == REPLIES[line.kind] for line in lines if line.kind in REPLIES)


def test_the_splits_share_no_wording(made: dict[str, list[Instruction]]) -> None:
    for words in WORDINGS.values():
        train, val = of_split(words, "train"), of_split(words, "val")
        assert val and sorted(train + val) == sorted(words) and len(set(words)) == len(words)
    said = {split: {bare(line.instruction) for line in lines if line.kind in REPLIES} for split, lines in made.items()}
    assert not said["train"] & said["val"]


def bare(text: str) -> str:
    return text.lower().rstrip("?.!")


def test_no_question_of_the_world_and_no_sum_is_declined(made: dict[str, list[Instruction]]) -> None:
    """However it is typed, a question keeps its answer; harder sums are left to recipes/grpo.py."""
    declined = [line for line in made["train"] if line.output == REPLIES["unknown"]]
    assert declined and not any(re.search(r"\d", line.instruction) for line in declined)
    asked = [line for line in made["train"] if line.kind in KINDS]
    assert asked and not {line.output for line in asked} & {REPLIES["unknown"]}
    sums = [line for line in asked if line.kind == "add"]
    for line in sums:
        a, b = map(int, re.findall(r"\d+", line.instruction))
        assert line.output.startswith(f"{a} ") and line.output.endswith(f"so {a + b}") and (a, b) in WORDS["train"].sums
    assert any(line.instruction.startswith(("what", "add", "how")) for line in sums)  # typed without a capital


def test_held_out_questions_use_held_out_pairs_alone(made: dict[str, list[Instruction]]) -> None:
    for line in made["val"]:
        if line.kind == "add":
            a, b = map(int, re.findall(r"\d+", line.instruction))
            assert (a, b) in WORDS["val"].sums


def test_the_command_prints_them() -> None:
    command = [sys.executable, "-m", "data.talk", "--n"]
    done = subprocess.run([*command, "3"], capture_output=True, text=True, cwd=ROOT, check=True)
    expected = [f"[{line.kind}] {line.instruction}" for line in talk("train", 3)]
    assert [line.split(" -> ")[0].split(" | ")[0] for line in done.stdout.splitlines()] == expected
    done = subprocess.run([*command, "0"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "error: --n is 0, expected 1 or more\n")
