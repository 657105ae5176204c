"""Pretraining on token shards: what is read, exact resume, and every wrong --data and --mix in one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.errors import run_command
from tinyforge.recipes import pretrain
from tinyforge.shards import SEPARATOR
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics

CONFIG = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=32 --batch-size 3 --workers 1"
PLAN = f"{CONFIG} --steps 8 --save-every 2 --eval-every 4 --keep 0"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_shards: Callable[..., None]) -> Path:
    """Shards of several kinds, and a run on some of them."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = Tokenizer.train(list(documents("train", 60)), 300, progress=False)
    make_shards(folder / "shards", tokenizer, {"books": (40, 4), "web": (15, 3)})
    make_shards(folder / "more", tokenizer, {"web": (9, 2), "tales": (8, 2)}, seed=5)
    make_shards(folder / "other", Tokenizer([], [SEPARATOR, "</s>"]), {"books": (9, 2)})
    make_shards(folder / "unheld", tokenizer, {"books": (9, 0)})
    (folder / "text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"vocab": 512}), encoding="utf-8")
    tokenizer.save(folder / "same.json")
    before = os.getcwd()
    os.chdir(folder)
    try:
        pretrain.main(f"{PLAN} --data shards --mix books=0.7 web=0.3 --out run".split())
    finally:
        os.chdir(before)
    return folder


def fault(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the command ends, with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run_command(lambda: pretrain.main(command.split()))
    shown = capsys.readouterr().err
    assert left.value.code == 2 and shown.startswith("error: ") and shown.count("\n") == 1, shown
    return shown.removeprefix("error: ").strip()


def digests(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.glob("*.safetensors")}


def test_what_a_run_says_and_keeps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(f"{PLAN} --data shards --mix web=1 books=3 --out new".split()) == 0
    shown = capsys.readouterr().out
    assert "vocab 512 -> 300: what the tokenizer of the shards has" in shown
    manifest = json.loads(Path("shards/manifest.json").read_text(encoding="utf-8"))
    books, web = (source["train"] for source in manifest["sources"])
    for name, part, share in (("web", web, 0.25), ("books", books, 0.75)):
        epochs = 8 * 3 * share / (part["tokens"] // 32 - 1)
        assert f"  {name}: {share:.1%} of what is read, {epochs:.2f} epochs; {part['documents']} documents, " in shown
    assert "held out: 7 documents, " in shown and "of books, web; that is few, and figures on it owe much" in shown
    for what in ("held-out text of books: ", "held-out text of web: ", "all held-out text: "):
        assert what in shown
    meta = checkpoint.load(Path("new")).meta
    assert meta["data_hash"] == hashlib.sha256(Path("shards/manifest.json").read_bytes()).hexdigest()
    assert meta["tokenizer_hash"] == manifest["tokenizer_hash"] and meta["config"]["vocab"] == 300
    assert meta["settings"]["mix"] == ["web=1", "books=3"]
    row = next(row for row in metrics.read(Path("new/metrics.jsonl")) if "val_bits_per_byte" in row)
    vals = {source["name"]: source["val"]["bytes"] for source in manifest["sources"]}
    overall = sum(row[f"val_bits_per_byte_{name}"] * size for name, size in vals.items()) / sum(vals.values())
    # Nothing predicts the first token of a source: its bytes are not among those that a source weighs by.
    assert row["val_bits_per_byte"] == pytest.approx(overall, rel=1e-5)


@pytest.mark.parametrize("step", [2, 6])
def test_a_resumed_run_ends_with_the_same_bytes(folder: Path, step: int) -> None:
    whole, rows = digests(Path("run/step-00000008")), metrics.read(Path("run/metrics.jsonl"))
    for path in checkpoint.steps(Path("run")):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    assert pretrain.main(["--resume", "--out", "run"]) == 0
    assert digests(Path("run/step-00000008")) == whole
    clocks = ("seconds", "tokens_per_second", "peak_memory_mib")
    got, expected = (
        [{k: v for k, v in row.items() if k not in clocks} for row in r]
        for r in (metrics.read(Path("run/metrics.jsonl")), rows)
    )
    assert got == expected


def test_without_a_mix_sources_count_by_their_tokens(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain.main(f"{PLAN} --steps 1 --data shards more --out new".split()) == 0
    shown = capsys.readouterr().out
    folders = [json.loads(Path(f"{name}/manifest.json").read_text(encoding="utf-8")) for name in ("shards", "more")]
    tokens: dict[str, int] = {}
    for source in (source for manifest in folders for source in manifest["sources"]):
        tokens[source["name"]] = tokens.get(source["name"], 0) + source["train"]["tokens"]
    assert list(tokens) == ["books", "web", "tales"]
    for name, count in tokens.items():
        assert f"  {name}: {count / sum(tokens.values()):.1%} of what is read, " in shown
        assert f"{count:,} tokens of " in shown


def test_other_ways_that_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same tokenizer named; one source left out and still measured; a run by the clock; the plan."""
    flags = f"{CONFIG} --data shards --tokenizer same.json --mix books=1 web=0 --minutes 0.001 --out new"
    assert pretrain.main(flags.split()) == 0
    shown = capsys.readouterr().out
    assert "  books: 100.0% of what is read, an epoch in " in shown and "  web: " not in shown
    assert "held-out text of web: " in shown
    assert pretrain.main("--data shards --config base --plan".split()) == 0
    assert "vocab 4096 -> 300" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data shards --mix books", "--mix: 'books' expects NAME=WEIGHT with a number, e.g. --mix books=0.7"),
        ("--data shards --mix books=", "--mix: 'books=' expects NAME=WEIGHT"),
        ("--data shards --mix books=much", "--mix: 'books=much' expects NAME=WEIGHT"),
        ("--data shards --mix =1", "--mix: '=1' expects NAME=WEIGHT"),
        ("--data shards --mix poems=1", "--mix: the shards have no source 'poems'; they have books, web"),
        ("--data shards --mix books=1 books=2", "--mix: 'books' is given twice; give it one weight"),
        ("--data shards --mix books=-1 web=2", "--mix: the weight of books is -1, expected a number of 0 or more"),
        ("--data shards --mix books=nan", "--mix: the weight of books is nan, expected a number of 0 or more"),
        ("--data shards --mix books=1e999", "--mix: the weight of books is 1e999, expected a number of 0 or more"),
        ("--data shards --mix books=0 web=0", "--mix: all weights are 0; give a source to be read a weight above 0"),
        ("--data text.txt --mix books=1", "--mix weighs the sources of token shards, --data names none; make some"),
        ("--mix books=1", "--mix weighs the sources of token shards"),
        ("--data shards text.txt", "--data: shards holds token shards, text.txt does not; give the one or the other"),
        ("--data shards other", "other: its shards were made with another tokenizer than those of shards; make them"),
        ("--data shards shards", "name each folder once"),
        ("--data unheld", "--data: unheld: no held-out text, the split val, to measure on; make the corpus from more"),
        ("--data shards --tokenizer other/tokenizer.json", "--tokenizer: other/tokenizer.json is not the one that"),
        ("--data shards --set vocab=512", "config: vocab is 512, the tokenizer of shards has 300 ids; use --set vocab"),
        ("--data shards --config config.json", "config: vocab is 512, the tokenizer of shards has 300 ids"),
        ("--data other --set context=9000", "tokens to train on, one training sequence takes 9,001; leave it out"),
        ("--data other --base run", "--base: run/step-00000008 has another tokenizer than other; make the shards"),
        ("--data shards --base run --model gpt2", "is a nanoeuler, expected a gpt2; give --model too"),
        ("--data shards --base none", "no checkpoint in none; train one first"),
        ("--resume --out run --mix books=1", "--resume: --mix is books=1, the run in run has books=0.7 "),
    ],
)
def test_one_line(folder: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert message in fault(flags, capsys)


def test_shards_that_changed_or_are_not_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("shards/books-train-00000.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"\0" if whole[-1] else whole[:-2] + b"\1\0")
    assert "shards/books-train-00000.bin: got SHA-256 " in fault("--resume --out run", capsys)
    path.write_bytes(whole[:-2])
    assert "shards/books-train-00000.bin: got " in fault("--resume --out run", capsys)
    path.write_bytes(whole)
    manifest = Path("shards/manifest.json")
    manifest.write_text(manifest.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert "was made with another data; give the same data" in fault("--resume --out run", capsys)
    manifest.unlink()
    assert "shards/manifest.json: cannot be read" in fault("--data shards", capsys)
