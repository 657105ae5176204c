"""Foreign text that steers a terminal or fakes a line, on every way to the terminal."""

from __future__ import annotations

import json
import shlex
import zipfile
from pathlib import Path

import pytest

from tinyforge.data import alpaca, gutenberg, local, shards
from tinyforge.data.corpus import main as corpus
from tinyforge.data.world import documents
from tinyforge.errors import run_command
from tinyforge.recipes import pretrain, sft
from tinyforge.tokenizers import Tokenizer

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b"
SHAPE = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=320 --batch-size 2 --workers 1 --steps 1".split()


def clean(shown: str) -> str:
    """Standard output, where nothing but tqdm's carriage return may steer."""
    kept = shown.replace("\n", "").replace("\r", "").replace("\t", "").replace("\x1b[A", "")
    assert kept.isprintable(), ascii(shown)
    assert not any(line.startswith("error: ") for line in shown.splitlines())
    return shown


def test_samples_and_hints_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(documents("train", 60))
    cut = int(len(text) * 0.9)
    Path("text.txt").write_text(text[:cut] + f"{EVIL}\nerror: fake {EVIL} a b c d" * 99, encoding="utf-8")
    Tokenizer([], ["<|endoftext|>", "</s>"]).save("bytes.json")
    flags = ["--data", "text.txt", "--tokenizer", "bytes.json", *SHAPE[:7], "vocab=258", *SHAPE[7:], "--out", "a run"]
    assert pretrain.main(flags) == 0
    shown = capsys.readouterr()
    hint = next(line for line in shown.out.splitlines() if line.startswith("  or: "))
    assert shlex.split(hint)[shlex.split(hint).index("--checkpoint") + 1] == "a run"
    clean(shown.out)
    clean(shown.err)
    records = [{"instruction": f"Say{EVIL}\nerror: fake", "input": EVIL, "output": f"{EVIL}{n}"} for n in range(40)]
    Path("records.json").write_text(json.dumps(records), encoding="utf-8")
    flags = ["--data", "records.json", "--base", "a run", "--batch-size", "2", "--workers", "1", "--steps", "1"]
    assert sft.main([*flags, "--out", "tuned"]) == 0
    shown = capsys.readouterr()
    clean(shown.out)
    clean(shown.err)


def test_refused_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr(f"a{EVIL}\nerror: fake\n.jsonl", "{")
        archive.writestr("good.txt", "A cat sat.")
    assert local.main([str(tmp_path / "z.zip"), "--out", str(tmp_path / "local"), "--name", "x"]) == 1
    assert "refused: z.zip/a]0;owned[2J error: fake .jsonl:1" in clean(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        run_command(lambda: gutenberg.main([str(tmp_path / "z.zip"), "--out", str(tmp_path / "books")]))
    shown = capsys.readouterr()
    clean(shown.out)
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    lines = [json.dumps({"instruction": "a", "input": "", "output": "b"}), json.dumps({f"{EVIL}\nerror: fake": 1})]
    (tmp_path / "r.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert alpaca.main([str(tmp_path / "r.jsonl"), "--out", str(tmp_path / "records")]) == 0
    clean(capsys.readouterr().out)


def test_names_that_manifests_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t").mkdir()
    for number, text in enumerate(documents("train", 40)):
        Path("t", f"{number}.txt").write_text(text * 4, encoding="utf-8")
    Path("none.sql").write_text("-- filter: none\n-- Nothing.\nSELECT false\n", encoding="utf-8")
    assert local.main(["t", "--out", "s", "--licence", f"free{EVIL}\nerror: fake"]) == 0
    assert corpus("s --out c --workers 1 --filters none.sql".split()) == 0
    assert shards.main("--corpus c --out shards --vocab-size 280 --workers 1".split()) == 0
    clean(capsys.readouterr().out)
    manifest = Path("shards/manifest.json")
    manifest.write_text(manifest.read_text(encoding="utf-8").replace('"s"', json.dumps(f"s{EVIL}\nerror: fake")))
    with pytest.raises(SystemExit):
        run_command(lambda: pretrain.main("--data shards --steps 1".split()))
    shown = capsys.readouterr().err
    assert "its name is" in clean(shown.removeprefix("error: "))
