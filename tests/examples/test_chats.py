"""Chats about stories: every reply has what its line asks for, and no record says what lines.py asks."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from examples.storyteller import chats, lines
from examples.storyteller.chats import SAY, Chats, Library, ask, sentences_of, shortened, swapped
from examples.storyteller.stories import small_story
from tinyforge.data.alpaca import Record, read_records
from tinyforge.errors import UserError
from tinyforge.infer.sampling import Sampling

STORY = (
    "Once upon a time, there was a man named Tom. Tom lived by the park. One day, the man saw a hat. "
    'The hat was red. "Nice hat!" said the man. He put it on. Tom went home with the hat. The man was happy.'
)


@pytest.fixture(scope="module")
def stories() -> list[str]:
    """Of two days in the life of one hero."""
    rng, found = random.Random(0), []
    for _ in range(300):
        story, hero, _ = small_story(rng)
        day, other, _ = small_story(rng)
        more = day.partition(". ")[2].replace(other.name, hero.name)
        told = [
            f"{hero.name} woke up in the morning and looked for the {hero.kind}'s breakfast.",
            more,
            f"The {hero.kind} slept.",
        ]
        found.append(" ".join([story, f"One day, {told[0]}", *told[1:]]))
    return found


@pytest.fixture(scope="module")
def made(stories: list[str]) -> Chats:
    return Chats(Library(stories, random.Random(1)))


def several(way: Any, count: int = 40) -> Iterator[Record]:
    return (record for _ in range(count) if (record := way()))


def test_a_wish_is_fulfilled(made: Chats) -> None:
    """By the words of the request, which is the last line, and by a story that is not the first."""
    asked = 0
    for record in several(made.another_about, 100):
        assert record.output != record.history[-1][1] and len(record.output) >= chats.SHORTEST
        kinds = [word for word in chats.SUBJECTS if re.search(rf"\ban? {word}\b", record.instruction)]
        assert all(word in record.output.lower() for word in kinds), record.instruction
        asked += bool(kinds)
    assert asked > 40


def test_yes_brings_what_was_offered(made: Chats) -> None:
    offered = 0
    for record in several(made.accepted, 100):
        found = re.search(r"(?:about|one about) an? (\w+)\?$", record.history[-1][1])
        if found and record.instruction.lower().startswith(("yes", "sure", "ok")):
            assert found[1] in record.output.lower()
            offered += 1
    assert offered > 10


def test_shorter_longer_and_more_are_of_the_same_story(made: Chats) -> None:
    for record in several(made.shorter):
        assert len(record.output) < 0.6 * len(record.history[-1][1])
        assert all(sentence in record.history[-1][1] for sentence in sentences_of(record.output))
    for record in several(made.longer):
        assert len(record.output) > 1.3 * len(record.history[-1][1])
        assert sentences_of(record.output)[0] == sentences_of(record.history[-1][1])[0]
    for record in several(made.more):
        names = set(lines._NAME.findall(record.history[-1][1]))
        assert any(name in record.output for name in names), record


def test_in_two_sentences_is_two_sentences(made: Chats) -> None:
    numbers = {"two": 2, "three": 3, "four": 4}
    found = list(several(made.in_sentences, 60))
    assert len(found) > 15
    for record in found:
        said = re.search(r"\b(two|three|four|\d)\b(?=[ -]sentence)", record.instruction.lower())
        assert said, record.instruction
        assert len(sentences_of(record.output)) == (numbers.get(said[1]) or int(said[1]))
        named = re.search(r"named ([A-Z]\w+)", record.instruction)
        again = record.history and not re.search("about|story of", record.instruction)
        names = lines._NAME.findall(record.history[-1][1]) if again else [named[1]] if named else [""]
        assert any(name in record.output for name in names), record
    assert len(sentences_of(shortened(STORY, 2))) == 2 and shortened("Hello. Bye.", 4) == ""


def test_another_word_takes_the_place_of_one_everywhere() -> None:
    assert swapped("A man ran. Men saw the man's hat. The Man and an old man.", "man", "artist") == (
        "An artist ran. Men saw the artist's hat. The Artist and an old artist."
    )
    assert swapped("An owl and owls.", "owl", "bear") == "A bear and bears."


def test_what_lines_asks_is_never_said(stories: list[str]) -> None:
    """Whatever the case and the punctuation, unless it is a single word."""
    held_out = {chats._plain(text) for texts in SAY["held_out"].values() for text in texts if " " in text}
    rng = random.Random(3)
    words = {"x": "{x}", "n": "{n}", "h": "{h}", "k": "two", "w": "poem", "p": "{p}", "a": "{a}", "b": "{b}"}
    for name, phrases in SAY.items():
        if isinstance(phrases, list):
            assert {chats._plain(ask(name, rng, **words)) for _ in range(500)} & held_out == set()
    records = list(chats.chats(stories, [], 300, 0))
    assert {chats._plain(record.instruction) for record in records} & held_out == set()
    assert len({record.instruction for record in records}) > 200


def test_records_are_the_same_for_a_seed_and_mixed(stories: list[str]) -> None:
    found = list(chats.chats(stories, ["What is light?"], 120, 0))
    assert found == list(chats.chats(stories, ["What is light?"], 120, 0)) != list(chats.chats(stories, [], 120, 1))
    assert len(found) == 120 and 0.4 < sum(bool(r.history) for r in found) / 120 < 0.9
    for record in found:
        texts = [record.instruction, record.output, *(text for turn in record.history for text in turn)]
        assert all(text.strip() and not re.search(r"[{}\[\]|]|\0", text) for text in texts), record


def test_a_corpus_without_short_stories_will_do() -> None:
    rng = random.Random(0)
    stories = ["\n\n".join(small_story(rng)[0] for _ in range(4)) for _ in range(100)]
    assert len([s for s in stories if len(s) < 600]) == 0
    assert len(list(chats.chats(stories, [], 40, 0))) == 40


def test_own_stories_are_read_as_records(stories: list[str], tmp_path: Path) -> None:
    told = tmp_path / "own.json"
    told.write_text(json.dumps([asdict(Record("Tell a story.", "", story)) for story in stories]), encoding="utf-8")
    assert chats.main([str(told), "--out", str(tmp_path / "out"), "--records", "12"]) == 0
    assert len(read_records([tmp_path / "out" / "alpaca.json"])) == 12
    made_of = json.loads((tmp_path / "out" / "source.json").read_text(encoding="utf-8"))
    assert "own.json" in json.dumps(made_of)


def test_too_few_stories_are_refused() -> None:
    with pytest.raises(UserError, match="too few stories"):
        list(chats.chats([STORY], [], 5, 0))


# --- lines.py

LONG = "Tim saw a kitten. " * 15


@pytest.mark.parametrize(
    ("kind", "first", "reply", "right"),
    [
        ("another", "A dog ran.", LONG, True),
        ("another", LONG, LONG, False),
        ("another", "A dog ran.", "I cannot help with that.", False),
        ("about", "A dog ran.", LONG, True),
        ("about", "A dog ran.", LONG.replace("kitten", "dog"), False),
        ("yes", "Shall I tell you a story about a kitten?", LONG, True),
        ("yes", "Shall I tell you a story about a fox?", LONG, False),
        ("more", "Once there was Tim.", LONG, True),
        ("more", "Once there was Ann.", LONG, False),
        ("longer", "Once there was Tim.", LONG, True),
        ("shorter", LONG, "Once there was Tim. He saw a kitten. It was nice.", True),
        ("shorter", LONG, LONG, False),
        ("two_sentences", "Once there was Tim.", "There was Tim. He ran.", True),
        ("two_sentences", "Once there was Tim.", "There was Tim. He ran. He slept.", False),
        ("poem", "", "I cannot write a poem.", True),
        ("how_are_you", "", "I am well, thank you!", True),
        ("how_are_you", "", "I am Storyteller.", False),
    ],
)
def test_what_counts(kind: str, first: str, reply: str, right: bool) -> None:
    assert lines.fulfils(kind, first, reply, "kitten") == right


def test_the_lines_are_measured_in_chats_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Chat:
        def clear(self) -> None:
            asked.append("")

        def ask(self, text: str, sampling: Sampling) -> list[str]:
            asked.append(text)
            return [LONG]

    monkeypatch.setattr(lines, "conversation_with", lambda _: Chat())
    shares = lines.second_lines(None, Sampling())  # type: ignore[arg-type]
    assert set(shares) == set(SAY["held_out"]) - {"opening"} | {"all"}
    assert shares["poem"] == shares["another"] == 0 and 0 < shares["all"] < 1
    assert Counter(asked)[""] == len(lines.chats_to_try()) == len(asked) / 3


def test_pairs_are_printed_in_random_order_and_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(lines, "transcript", lambda model, asked, seed: f"{model} {seed}")
    lines.print_pairs(["old", "new"], 20, 7, tmp_path / "key.json")  # type: ignore[list-item]
    shown = capsys.readouterr().out
    key = json.loads((tmp_path / "key.json").read_text(encoding="utf-8"))["second"]
    assert set(key) == {"A", "B"} and len(key) == 20
    new = re.findall(r"=== (\d+) ([AB])\n\nnew", shown)
    assert [letter for _, letter in new] == key
    answers = tmp_path / "answers.txt"
    answers.write_text("".join(f"{n} {letter}\n" for n, letter in new[:10]) + "11 -\n", encoding="utf-8")
    assert "95.5% of 11 pairs" in lines.judged(tmp_path / "key.json", answers)
    answers.write_text("1 C\n", encoding="utf-8")
    with pytest.raises(UserError, match="got '1 C', expected a number and A, B or -"):
        lines.judged(tmp_path / "key.json", answers)
