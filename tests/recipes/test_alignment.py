"""dpo.py and grpo.py: they learn, resume to the same bytes, and say in one line what is wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.storyteller import own_pairs
from tinyforge import checkpoint
from tinyforge.backends import get_backend
from tinyforge.data.alpaca import Record, names_of, read_records
from tinyforge.data.answers import answered
from tinyforge.data.preferences import Pair, encode_pairs, read_pairs, read_split, world_pairs
from tinyforge.data.rewards import (
    EASY,
    EASY_LARGEST,
    HELD_OUT,
    last_number,
    number_in,
    one_step_sums,
    open_questions,
    worked,
)
from tinyforge.data.rewards import main as make_sums
from tinyforge.data.world import Instruction, documents, harder_sums, sum_rewards
from tinyforge.errors import UserError, run_command
from tinyforge.formats import load
from tinyforge.infer import Sampling, evaluate
from tinyforge.infer.evaluate import Reply, reply_shares
from tinyforge.recipes import dpo, grpo, pretrain, sft
from tinyforge.train import metrics, tuning
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.policy import worth_learning
from tinyforge.train.tuning import prompt_ids

MAINS: dict[str, Callable[[list[str]], int]] = {"dpo": dpo.main, "grpo": grpo.main}
CPU = get_backend("numpy", "fp32", workers=1)
SHAPE = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=300 --batch-size 2 --workers 1"
PLAN = "--base tuned --steps 7 --save-every 3 --eval-every 4 --keep 0"
FIRST = {
    "dpo": f"{PLAN} --data pairs.json --batch-size 4 --label-smoothing 0.1 --workers 2",
    "grpo": f"{PLAN} --data sums.json --batch-size 4 --num-generations 4 --iterations 2 --max-tokens 4 --workers 2",
}
PAIR = {"instruction": "Add.", "input": "1 and 2", "chosen": "3", "rejected": "4"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned model, pairs and sums, good and bad, and a run of each recipe."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    sums = [
        {"instruction": f"Add {a}.", "input": f"{b}", "output": f"{(a + b) % 3}"} for a in range(6) for b in range(9)
    ]
    pairs = [{"instruction": f"Say {a}.", "input": "", "chosen": "yes " * a, "rejected": "no"} for a in range(1, 6)] * 6
    files = {
        "sums.json": sums,
        "pairs.json": [PAIR | {"chosen": "4"}, *pairs, PAIR | {"rejected": " "}],
        "equal.json": [PAIR | {"rejected": "3"}] * 5,
        "empty.json": [PAIR | {"chosen": ""}] * 5,
        "long.json": [PAIR | {"rejected": "4 " * 99}] * 5,
        "one.json": [PAIR],
        "number.json": [PAIR, PAIR | {"input": 3}],
        "field.json": [{"instruction": "Add.", "input": "", "output": "3"}],
        "words.json": [{"instruction": "Say.", "input": "", "output": "yes"}] * 3,
        # Whatever the model says, its last number is not this one: every reward is 0.
        "never.json": [{"instruction": f"Say {i}.", "input": "", "output": "123456789"} for i in range(9)],
        "wide.json": [{"instruction": "Add " * 60, "input": "", "output": "3"}] * 9,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    before = os.getcwd()
    os.chdir(folder)
    try:
        pretrain.main(f"{SHAPE} --data text.txt --steps 2 --out run".split())
        sft.main("--base run --data sums.json --steps 12 --batch-size 4 --workers 1 --lr 5e-3 --out tuned".split())
        for recipe, flags in FIRST.items():
            extra = ["--cache", "cache"] if recipe == "dpo" else []
            MAINS[recipe]([*flags.split(), "--out", recipe, "--card", *extra])
    finally:
        os.chdir(before)
    return folder


@pytest.mark.parametrize("recipe", [pytest.param("dpo", marks=pytest.mark.slow), "grpo"])
def test_it_resumes_to_the_same_bytes(folder: Path, recipe: str) -> None:
    """From its first checkpoint, with the reference computed anew; grpo in the middle of replies it learns twice."""
    shutil.copytree(recipe, "again")
    for step in (6, 7):
        shutil.rmtree(f"again/step-{step:08d}")
    extra = ["--cache", "another"] if recipe == "dpo" else []
    assert MAINS[recipe](["--resume", "--out", "again", *extra]) == 0
    for name in ("model.safetensors", "optimizer.safetensors"):
        got, expected = (Path(run, "step-00000007", name).read_bytes() for run in ("again", recipe))
        assert got == expected, name
    assert Path("again/samples.jsonl").read_bytes() == Path(recipe, "samples.jsonl").read_bytes()
    rows = [metrics.read(Path(run, "metrics.jsonl")) for run in ("again", recipe)]
    for row in sum(rows, []):
        for differs in ("seconds", "tokens_per_second", "peak_memory_mib"):
            row.pop(differs, None)
    assert rows[0] == rows[1]


def test_what_dpo_logs_and_keeps(folder: Path) -> None:
    rows = metrics.read(Path("dpo/metrics.jsonl"))
    first = rows[0]
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-5)  # the model is the reference still
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert f"rewards/{name}" in first and f"val_rewards/{name}" in rows[-1]
    assert rows[-1]["val_rewards/margins"] > 0.02
    found = checkpoint.load(Path("dpo"))
    assert found.meta["kind"] == "dpo" and found.meta["reference"]["base"] == "../tuned/step-00000012"
    assert [stage["kind"] for stage in found.meta["stages"]] == ["sft"]
    assert load(Path("dpo"), CPU).template.name == "alpaca"
    card = Path("dpo/README.md").read_text(encoding="utf-8")
    assert all(f"python recipes/{recipe}.py" in card for recipe in ("pretrain", "sft", "dpo"))
    assert len(list(Path("cache").iterdir())) == 2
    assert Path("dpo/loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_reference_is_read_where_it_is_and_made_again_where_it_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(out: str) -> str:
        capsys.readouterr()
        assert dpo.main([*FIRST["dpo"].split(), "--out", out, "--cache", "cache"]) == 0
        return capsys.readouterr().out

    cached = {path: path.read_bytes() for path in Path("cache").iterdir()}
    assert run("read").count("the reference's log-probabilities are those of cache/") == 2
    damaged = next(iter(cached))
    damaged.write_bytes(cached[damaged][:-5])
    assert f"{damaged} is damaged; computing it again" in run("mended")
    assert {path: path.read_bytes() for path in Path("cache").iterdir()} == cached
    expected = Path("dpo/step-00000007/model.safetensors").read_bytes()
    assert all(Path(out, "step-00000007/model.safetensors").read_bytes() == expected for out in ("read", "mended"))


def test_the_reference_has_the_format_of_the_frozen_weights(folder: Path) -> None:
    """Also in a resumed run, and where the cache has that of the plain weights."""
    quantised = "--lora 2 --weights nf4 --workers 1"
    for recipe in ("dpo", "grpo"):
        assert MAINS[recipe]([*FIRST[recipe].split(), *f"{quantised} --out {recipe}-nf4".split()]) == 0
    shutil.copytree("dpo-nf4", "again")
    for step in (6, 7):
        shutil.rmtree(f"again/step-{step:08d}")
    assert dpo.main("--resume --out again --cache another".split()) == 0
    got, expected = (Path(run, "step-00000007/model.safetensors").read_bytes() for run in ("again", "dpo-nf4"))
    assert got == expected
    assert metrics.read(Path("dpo-nf4/metrics.jsonl"))[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert metrics.read(Path("grpo-nf4/metrics.jsonl"))[0]["kl"] == pytest.approx(0, abs=1e-9)


def test_times_of_the_reference_name_its_pairs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYFORGE_TIMES", "1")
    dpo.main("--base tuned --data pairs.json --steps 1 --batch-size 4 --workers 1 --out timed --cache fresh".split())
    said = capsys.readouterr().out
    for pairs in ("training pairs", "held-out pairs, pairs"):
        assert said.count(f"the reference's log-probabilities of the {pairs}: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ipo", "simpo", "orpo"])
def test_other_objectives(folder: Path, objective: str) -> None:
    """They learn; those without a reference cache none."""
    flags = f"--base tuned --data pairs.json --steps 8 --lr 5e-3 --batch-size 4 --workers 1 --objective {objective}"
    assert dpo.main([*flags.split(), "--out", "other", "--cache", "empty"]) == 0
    assert Path("empty").exists() == (objective == "ipo")
    rows = [row["loss"] for row in metrics.read(Path("other/metrics.jsonl")) if "loss" in row]
    assert rows[-1] < rows[0]


@pytest.mark.slow
def test_adapters(folder: Path) -> None:
    """The base is frozen, and both recipes hold on to it."""
    for recipe, flags in FIRST.items():
        extra = ["--cache", "cache"] if recipe == "dpo" else []
        assert MAINS[recipe]([*flags.split(), "--lora", "2", "--out", f"lora-{recipe}", *extra]) == 0
        found = checkpoint.load(Path(f"lora-{recipe}"))
        assert all(".lora_" in name for name in found.weights)
        assert load(Path(f"lora-{recipe}"), CPU).meta["kind"] == recipe


def test_what_grpo_logs(folder: Path) -> None:
    rows = [row for row in metrics.read(Path("grpo/metrics.jsonl")) if "loss" in row]
    for name in (
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "rewards/correct",
        "rewards/format",
        "kl",
        "entropy",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "completions/mean_length",
    ):
        assert name in rows[0], name
    assert rows[0]["kl"] == 0 and any(row["kl"] > 0 for row in rows)
    assert rows[0]["rewards/correct"] == rows[1]["rewards/correct"]  # the same replies, learned from twice
    held = checkpoint.load(Path("grpo/step-00000003")).optimizer()
    assert {"task.ids", "task.old", "task.reference"} <= held.keys()


def test_a_reply_depends_on_its_prompt_and_seed_alone(folder: Path) -> None:
    """Not on the ranks: of three prompts one rank has a batch of two, the other a single row."""
    drawn = []
    for workers in (1, 2):
        backend = get_backend("numpy", "fp32", workers=workers)
        loaded = load(Path("tuned"), backend)
        prompts = [prompt_ids(loaded, "Add.", f"{i} and {i}") for i in range(3)]
        sampling = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_tokens=30, seed=5)
        drawn.append(grpo.draw_replies(DataParallel(loaded.model, backend), prompts, sampling, end=257))
    assert drawn[0] == drawn[1] and len(set(map(tuple, drawn[0]))) == 3


def test_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dpo.main("--base tuned --plan".split()) == 0
    assert "a step of 32 x 96 tokens" in capsys.readouterr().out
    assert dpo.main("--base tuned --plan --gpus 2".split()) == 0
    assert "a step of 32 x 96 tokens in fp32 divided among 2 GPUs; each takes:" in capsys.readouterr().out
    assert grpo.main("--base tuned --plan".split()) == 0
    assert "a step of 128 x 96 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("dpo --base tuned --data equal.json", "4 prefer a reply to itself, 0 have an empty reply"),
        ("dpo --base tuned --data empty.json", "0 prefer a reply to itself, 4 have an empty reply"),
        ("dpo --base tuned --data long.json", "0 have an empty reply, 4 take more than 96 tokens; give others"),
        ("dpo --base tuned --data one.json", "data: 1 preference pair, expected at least 2 in a file; give more"),
        ("dpo --base tuned --data field.json", "record 0 (counted from 0), line 1: it has no 'chosen'; a preference"),
        ("dpo --base tuned --data number.json", "record 1 (counted from 0), line 1: 'input' is 3, expected a string"),
        ("dpo --base tuned --data text.txt", "text.txt: record 0 (counted from 0), line 1, column 1: malformed JSON"),
        ("dpo --base tuned --label-smoothing 0.5", "--label-smoothing is 0.5, expected a share from 0 to below 0.5"),
        ("dpo --base tuned --gamma 1", "--gamma is given without --objective simpo; add it, or leave this out"),
        (
            "dpo --base tuned --objective ipo --label-smoothing 0.1",
            "--label-smoothing is given without --objective dpo",
        ),
        ("dpo --base tuned --decay-fraction 0.3", "--decay-fraction is given without --schedule wsd; add it"),
        ("grpo --base tuned --task one-step --data words.json", "--task and --data both say what is asked; drop one"),
        ("dpo --base tuned --beta 0", "--beta is 0.0, expected a number above 0"),
        ("dpo --resume --out dpo --beta 1", "--resume: --beta is 1.0, the run in dpo has none"),
        ("dpo --resume --out sft", "--resume: nothing to resume in sft"),
        ("grpo --base tuned --num-generations 1", "--num-generations is 1, expected at least 2"),
        ("grpo --base tuned --zero 1", "--zero is for pretrain, sft, dpo and classify; leave it out here"),
        ("dpo --base tuned --gpus 2", "--gpus is 2, "),
        ("grpo --base tuned --data words.json", "words.json: 0 of 3 records have a number in their output"),
        ("grpo --base tuned --data wide.json", "the model's context is 96; use a smaller --max-tokens"),
        ("grpo --base nothing", "no checkpoint in nothing"),
    ],
)
def test_one_line(folder: Path, capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    recipe, *flags = command.split()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run_command(lambda: MAINS[recipe](flags))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.startswith("error: ") and shown.count("\n") == 1, shown
    assert message in shown
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


def test_rewards_that_are_always_equal(folder: Path) -> None:
    flags = (
        "--base tuned --data never.json --steps 99 --batch-size 2 --num-generations 2 --max-tokens 2 --format-weight 0"
    )
    with pytest.raises(UserError, match="rewards of each question's 2 replies have been equal for 20 rollouts"):
        grpo.main([*flags.split(), "--workers", "1", "--beta", "0", "--out", "never"])


def test_a_base_that_has_gone(folder: Path) -> None:
    shutil.move("tuned", "elsewhere")
    with pytest.raises(UserError, match="it started from, tuned/step-00000012, is missing; put it back"):
        dpo.main(["--resume", "--out", "dpo"])


# --- what is asked


def test_pairs_of_the_world_prefer_the_right_answer() -> None:
    for split in ("train", "val"):
        found = world_pairs(split, 400, 3)
        assert found == world_pairs(split, 500, 3)[:400]
        assert all(pair.chosen != pair.rejected and pair.rejected.strip() for pair in found)


def test_a_reply_without_an_end_gets_none(folder: Path) -> None:
    """Else what is learned most is that a reply must never end, where it had not."""
    tokenizer = load(Path("tuned"), CPU).tokenizer
    end = tokenizer.specials["</s>"]
    whole, cut = encode_pairs([Pair("Say 1.", "", "yes", "no", cut) for cut in (False, True)], tokenizer, 96, "pairs")
    assert whole[1] == [*cut[1], end] and cut[0] == whole[0] and cut[0][-1] == end != cut[1][-1]


def test_pairs_of_own_replies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of records that are not held out, where the model's reply is not well-formed; DPO makes that reply less likely.
    (The model is not fine-tuned: it does not end.)"""
    records = [{"instruction": f"Say {i}.", "input": "", "output": "yes. " * (3 if i % 4 else 1)} for i in range(40)]
    Path("own.json").write_text(json.dumps(records), encoding="utf-8")
    flags = "--base run --data own.json --records 6 --max-tokens 10 --backend numpy --out found.json"
    assert own_pairs.main(flags.split()) == 0
    found = read_pairs(["found.json"])
    assert f"12 replies to 6 records, {len(found)} not well-formed: found.json" in capsys.readouterr().out
    # A record that repeats itself is no example of how to do better, nor is one asked that is measured on.
    assert found and {pair.instruction for pair in found} <= {f"Say {4 * i}." for i in range(10)}
    assert all(pair.chosen == "yes. " and pair.rejected.strip() for pair in found) and any(pair.cut for pair in found)
    assert not any(reply_shares([Reply(pair.rejected, 10, not pair.cut)])["all_three"] for pair in found)
    tuning = "--base run --data found.json --steps 8 --batch-size 4 --lr 1e-3 --workers 1 --out orderly --cache cache"
    assert dpo.main(tuning.split()) == 0
    assert metrics.read(Path("orderly/metrics.jsonl"))[-1]["val_rewards/rejected"] < -0.02


def test_there_is_nothing_to_learn_where_all_is_well_formed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "reply_to", lambda _, prompts, *_a, **_k: [([70, 71], True) for _ in prompts])
    assert own_pairs.main("--base tuned --data sums.json --max-tokens 4 --out none.json --backend numpy".split()) == 0
    assert "records, 0 not well-formed: nothing to learn from, none.json is not written" in capsys.readouterr().out
    assert not Path("none.json").exists()


def test_pairs_of_stories(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The best of three is preferred to the worst: first what was asked for and an end, then the fewer known words."""
    copied = "He was so sad, so I ran to Max."
    records = [{"instruction": "Tell a story about Max.", "input": "", "output": copied}] * 19
    others = [{"instruction": "Say.", "input": "", "output": "yes"}] * 40
    Path("told.json").write_text(json.dumps(records + others + records[:3]), encoding="utf-8")
    texts = ["A big red box of jam is by Max.", f"{copied} Bye.", "A cat is here now and it is red."]
    drawn, seeds = [0, 1, 2, 0, 1, 1, 1, 2, 2, 0, 0, 0], list[int]()
    tokenizer = load(Path("tuned"), CPU).tokenizer

    def replies(
        _: Any, prompts: list[list[int]], sampling: Sampling, *__: Any, what: str
    ) -> list[tuple[list[int], bool]]:
        seeds.append(sampling.seed)
        return [(tokenizer.encode(texts[i]), n != 5) for n, i in zip(range(len(prompts)), drawn, strict=True)]

    monkeypatch.setattr(evaluate, "reply_to", replies)
    flags = "--base tuned --data told.json --stories 3 --records 4 --max-tokens 34 --seed 7 --backend numpy"
    assert own_pairs.main([*flags.split(), "--out", "own.json"]) == 0
    said = capsys.readouterr().out
    assert "12 stories: 91.7% end" in said and "3 pairs of 12 stories: own.json" in said
    best, copy, wrong = texts
    found = [(pair.chosen, pair.rejected, pair.cut) for pair in read_pairs(["own.json"])]
    # The second of the copies did not end. All four of the last record are alike.
    assert found == [(best, wrong, False), (best, copy, True), (copy, wrong, False)]
    assert seeds == [7]


def test_records_of_its_own_stories(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the first line of every chat: those that end, repeat nothing and are about whom it was asked for."""
    story, request = "A big red box of jam is by Max.", "Tell a story about Max."
    chat = {"instruction": "More.", "input": "", "output": "Bye.", "history": [[request, story], ["Yes.", "No."]]}
    other = {"instruction": "Say.", "input": "", "output": "yes", "history": [["Who are you?", "Max."]]}
    Path("chats.json").write_text(json.dumps([chat] * 5 + [other] * 40), encoding="utf-8")
    texts = [f" {story}", "A cat is here now and it is red.", story, "Max ran. " * 3, story]
    tokenizer = load(Path("tuned"), CPU).tokenizer

    def replies(_: Any, prompts: list[list[int]], *__: Any, what: str) -> list[tuple[list[int], bool]]:
        assert len(prompts) == 5
        return [(tokenizer.encode(text), n != 2) for n, text in enumerate(texts)]

    monkeypatch.setattr(evaluate, "reply_to", replies)
    flags = "--base tuned --data chats.json --stories 1 --records 5 --max-tokens 34 --backend numpy --out own.json"
    assert own_pairs.main(flags.split()) == 0
    assert "2 stories without a fault, of 5: own.json" in capsys.readouterr().out
    assert read_records(["own.json"]) == [Record(request, "", story)] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stories -1", "--stories is -1, expected 1 for records of stories, or more"),
        ("--stories 4", "--data: no record asks for a story"),
        ("--records 0", "--records is 0, expected 1 or more"),
        ("--max-tokens 0", "--max-tokens is 0, expected 1 or more"),
        (
            "--max-tokens 96",
            "no record has a well-formed reply of up to 96 tokens, --max-tokens, and a prompt that leaves "
            "them room in the context of 96; give shorter ones, or a smaller --max-tokens",
        ),
    ],
)
def test_wrong_flags_of_own_pairs(folder: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        own_pairs.main(f"--base tuned --data sums.json --out own.json --backend numpy {flags}".split())


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("absent/own.json", "absent/own.json: cannot be written (No such file or directory); check --out"),
        ("tuned", "tuned: cannot be written (a folder or a device is there); check --out"),
        ("sums.json/own.json", "sums.json/own.json: cannot be written ("),
    ],
)
def test_own_pairs_sees_at_once_that_it_cannot_write(folder: Path, out: str, message: str) -> None:
    before = sorted(Path().rglob("*"))
    with pytest.raises(UserError, match="^" + re.escape(message)):  # before it looks at --data and samples
        own_pairs.main(["--base", "tuned", "--data", "absent.json", "--out", out])
    assert sorted(Path().rglob("*")) == before


def test_other_fields_of_a_pair_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(PAIR | {"output": 5, "note": "x"}) for _ in range(3)), encoding="utf-8")
    assert [pair.chosen for pair in read_pairs([path])] == ["3"] * 3


def test_each_file_of_records_has_its_own_figure(folder: Path) -> None:
    """Next to that of all, in which a file counts by its bytes: a file of easy records hides nothing."""
    for name in ("hard", "easy"):
        Path(name).mkdir()
        records = [
            {"instruction": f"Say {i}.", "input": "", "output": f"{'no ' * (i % 3 * (name == 'easy'))}{i}"}
            for i in range(40)
        ]
        Path(name, "alpaca.json").write_text(json.dumps(records), encoding="utf-8")
    files = ["hard/alpaca.json", "easy/alpaca.json", "sums.json"]
    assert names_of([*files, "sums.json"]) == ["hard", "easy", "sums.json", "sums.json"]
    sft.main(["--base", "run", "--data", *files, *"--steps 2 --eval-every 1 --workers 1 --out several".split()])
    last = [row for row in metrics.read(Path("several/metrics.jsonl")) if "val_bits_per_byte" in row][-1]
    bits = {name: last[f"val_bits_per_byte_{name}"] for name in ("hard", "easy", "sums")}
    sizes = {"hard": 2 + 2, "easy": 8 + 2, "sums": 1 + 1}  # bytes of the two replies of each that are held out
    assert len(set(bits.values())) == 3
    assert last["val_bits_per_byte"] == pytest.approx(sum(sizes[n] * bits[n] for n in bits) / sum(sizes.values()))


def test_the_last_fifth_of_each_file_is_held_out(tmp_path: Path) -> None:
    """Of two files joined, the last fifth would be of the second alone."""
    paths = [tmp_path / name for name in ("large.json", "small.json")]
    for path, count in zip(paths, (20, 5), strict=True):
        path.write_text(json.dumps([PAIR | {"input": f"{path.stem} {i}"} for i in range(count)]), encoding="utf-8")
    training, by_file = read_split(paths)
    assert [[pair.input for pair in pairs] for pairs in by_file] == [
        ["large 16", "large 17", "large 18", "large 19"],
        ["small 4"],
    ]
    assert {*training, *by_file[0], *by_file[1]} == {*read_pairs(paths)} and len(training) == 20


def test_each_file_of_pairs_has_its_own_accuracy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Next to that of all, in which each pair counts once. A file whose held-out pairs are all unusable has none."""
    for name, count in (("many", 20), ("few", 10), ("none", 5)):
        pairs = [
            PAIR | {"input": f"{name} {i}", "rejected": PAIR["chosen"] if name == "none" and i == 4 else "no"}
            for i in range(count)
        ]
        Path(f"{name}.json").write_text(json.dumps(pairs), encoding="utf-8")
    dpo.main(
        [
            "--base",
            "run",
            "--data",
            "many.json",
            "few.json",
            "none.json",
            *"--steps 2 --eval-every 1 --workers 1 --out pairs-of-files".split(),
        ]
    )
    last = [row for row in metrics.read(Path("pairs-of-files/metrics.jsonl")) if "val_rewards/accuracies" in row][-1]
    of_each = {name: last[f"val_rewards/accuracies_{name}"] for name in ("many", "few")}
    assert last["val_rewards/accuracies"] == pytest.approx((4 * of_each["many"] + 2 * of_each["few"]) / 6)
    assert not any("none" in name for name in last)
    assert f"(many {of_each['many']:.1%}, few {of_each['few']:.1%})" in capsys.readouterr().out


def test_questions_are_asked_in_their_conversation(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [("system", "Add."), ("user", "1 + 1?"), ("assistant", "2"), ("user", "And 1?"), ("assistant", "3")]
    chats = [{"messages": [{"role": role, "content": text} for role, text in said[: 3 + 2 * n]]} for n in (0, 1)]
    (tmp_path / "chats.json").write_text(json.dumps([chats[0], *chats]), encoding="utf-8")
    found = open_questions("one-step", [str(tmp_path / "chats.json")], "utf-8")
    loaded = load(Path("tuned"), get_backend("numpy", "fp32", 1))
    text = loaded.tokenizer.decode(grpo.prompt_of(loaded, found.held_out[0]))
    places = [text.index(part) for part in ("Add.", "1 + 1?", "2", "And 1?")]
    assert places == sorted(places)
    # So is what is shown during training.
    monkeypatch.setattr(tuning, "generate", lambda model, prompt, *_: prompt)
    shown = answered(loaded, Record("And 1?", "", "3", (("1 + 1?", "2"),), "Add."))
    assert shown == f"  And 1? -> {text}".replace("\n", "\n  ")


def test_questions_of_each_file_are_held_out(tmp_path: Path) -> None:
    """And those that are asked are of every file, though not all are asked."""
    counts = {"large.json": 20 * HELD_OUT, "small.json": 400}
    for name, count in counts.items():
        records = [{"instruction": f"{name} {i}", "input": "", "output": f"{i}"} for i in range(count)]
        (tmp_path / name).write_text(json.dumps(records), encoding="utf-8")
    found = open_questions("one-step", [str(tmp_path / name) for name in counts], "utf-8")
    asked = [question.instruction for question in found.held_out]
    assert len(asked) == len(set(asked)) == HELD_OUT and 10 < sum(name.startswith("small") for name in asked) < 30
    assert len(found.training) == 19 * HELD_OUT + 380
    assert not {*asked} & {question.instruction for question in found.training}


def numbers_of(example: Instruction) -> tuple[int, int]:
    """The pair of numbers that a one-step sum is about: what is added, or what is taken away and what is left."""
    first, second = map(int, re.findall(r"\d+", example.instruction))
    first = first - second if "-" in example.output else first
    return min(first, second), max(first, second)


def test_no_held_out_pair_of_numbers_is_in_fine_tuning(tmp_path: Path) -> None:
    held_out = {numbers_of(example) for example in one_step_sums("val", HELD_OUT)}
    easy, harder = (one_step_sums("train", EASY, easy) for easy in (True, False))
    assert len(easy) == len(harder) == EASY
    assert not held_out & ({numbers_of(e) for e in easy} | {numbers_of(e) for e in harder})
    assert sum(sum(pair) <= EASY_LARGEST for pair in held_out) > 10  # the easy ones could have had some of them
    large = [e.output for e in easy if max(map(int, re.findall(r"\d+", e.output))) > EASY_LARGEST]
    assert len(large) > 1000 and not any("," in solution for solution in large)
    assert sum("," in e.output for e in easy) > 1000 and sum("," in e.output for e in harder) > 4000
    assert make_sums(["--out", str(tmp_path), "--count", "50"]) == 0
    written = read_records([tmp_path / "alpaca.json"])
    assert [r.instruction for r in written] == [e.instruction for e in easy[:50]]
    assert all(last_number(e, r.output)["correct"] for e, r in zip(easy, written, strict=False))
    assert 25 < sum("=" not in r.output for r in written) < 42
    assert make_sums(["--out", str(tmp_path), "--count", "50", "--brief", "0"]) == 0
    assert [r.output for r in read_records([tmp_path / "alpaca.json"])] == [e.output for e in easy[:50]]
    with pytest.raises(UserError, match="--brief is 2.0, expected 0 to 1"):
        make_sums(["--out", str(tmp_path), "--count", "50", "--brief", "2"])


def test_a_sum_is_worked_tens_first() -> None:
    assert worked(38, 57) == "38 + 50 = 88, 88 + 7 = 95" and worked(95, -57) == "95 - 50 = 45, 45 - 7 = 38"
    assert worked(38, 7) == "38 + 7 = 45" and worked(38, 20) == "38 + 20 = 58"
    for example in one_step_sums("train", 300):
        first, second = numbers_of(example)
        sums = [re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)", part) for part in example.output.split(", ")]
        assert all(s and int(s[1]) + int(s[2] + s[3]) == int(s[4]) for s in sums)
        assert number_in(example.output) in (first + second, first, second)
        assert last_number(example, example.output) == {"correct": 1.0, "format": 1.0}


def test_no_held_out_sum_is_learned_from() -> None:
    training, held_out = ({example.instruction for example in harder_sums(split)} for split in ("train", "val"))
    assert len(training) == 164 and len(held_out) == 88 and not training & held_out


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3,4", "4"),
        ("1,234", "1234"),
        ("12,345,678.5 in all", "12345678.5"),
        ("1\u00a0000", "1000"),
        ("1,2345", "2345"),
        ("10-15", "15"),
        ("10\u201315", "15"),
        ("(2)-3", "3"),
        ("COVID-19", "19"),
        ("so -.5", "-.5"),
        (".5", ".5"),
        ("it ends...5", "5"),
        ("\u22127", "-7"),
        ("-$5", "-5"),
        ("2.5e-3", "0.0025"),
        ("9007199254740993", "9007199254740993"),
        ("9" * 5000, "9" * 5000),
        ("v1.2.3", "3"),
    ],
)
def test_the_last_number_as_a_person_reads_it(text: str, number: str) -> None:
    assert number_in(text) == Decimal(number) and number_in("none") is None
    assert number_in("9007199254740993") != number_in("9007199254740992")


@pytest.mark.parametrize(
    ("reply", "correct", "form"),
    [
        ("13 14 15, so 15", 1, 1),
        (" 2 3 4 5 6 7 8 9 10 11 12 13 14 15, so 15 ", 1, 1),
        ("13 14, so 14", 0, 1),
        ("13 14 15, so 16", 0, 0),
        ("15", 0, 0),
        ("13 14 15, so 15...", 0, 0),
        ("15 14 13, so 13", 0, 1),
        ("", 0, 0),
    ],
)
def test_what_a_reply_to_a_sum_is_worth(reply: str, correct: float, form: float) -> None:
    example = next(e for split in ("train", "val") for e in harder_sums(split) if e.instruction == "Add 2 and 13.")
    assert sum_rewards(example, reply) == {"correct": correct, "format": form}


def test_the_last_number_counts() -> None:
    example = one_step_sums("val", 1)[0]
    right = example.output.rpartition(" ")[2]
    assert last_number(example, f"It is {right}.") == {"correct": 1.0, "format": 1.0}
    assert last_number(example, f"It is {right}, or 1,000") == {"correct": 0.0, "format": 1.0}
    assert last_number(example, f"{right} apples") == {"correct": 1.0, "format": 0.0}
    assert last_number(example, f"It is {right}...") == {"correct": 0.0, "format": 0.0}
    assert not {e.instruction for e in one_step_sums("train", 500)} & {e.instruction for e in one_step_sums("val", 200)}


def test_a_rollout_that_teaches_nothing_is_cut_to_a_group() -> None:
    rewards = np.array([1, 1, 0, 1, 0, 0.0])
    assert worth_learning(rewards, 2).tolist() == [*range(6)]  # equal ones count in the mean
    assert worth_learning(np.ones(6), 2).tolist() == [0, 1]
