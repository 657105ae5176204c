"""recipes/large-run.sh and the storyteller's run.sh in small: every stage, moved in parts to a folder, and stopped."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import duckdb
import pytest

from examples.storyteller.stories import small_story
from tinyforge import checkpoint
from tinyforge.data.world import documents

ROOT = Path(__file__).resolve().parents[2]
LARGE, STORYTELLER = "recipes/large-run.sh", "examples/storyteller/run.sh"
PLAIN = ("--backend", "numpy", "--precision", "fp32", "--workers", "1")
TINY = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=160 mtp_heads=2 --batch-size 2"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Stories, a book, articles, instructions, pairs and an evaluation set."""
    folder = tmp_path / "texts"
    folder.mkdir()
    world = list(documents("train", 900))

    def parquet(name: str, rows: list[str]) -> None:
        with duckdb.connect() as database:
            database.execute("CREATE TABLE texts (id INTEGER, title VARCHAR, text VARCHAR)")
            numbered = [(i, f"title {i}", text) for i, text in enumerate(rows)]
            database.executemany("INSERT INTO texts VALUES (?, ?, ?)", numbered)
            database.execute(f"COPY texts TO '{folder / name}' (FORMAT parquet)")

    rng = random.Random(0)
    parquet("tinystories.parquet", ["\n\n".join(small_story(rng)[0] for _ in range(4)) for _ in range(200)])
    parquet("simple.parquet", ["\n".join(world[i : i + 6]) for i in range(200, 600, 6)])
    start, end = (f"*** {mark} OF THE PROJECT GUTENBERG EBOOK A BOOK ***" for mark in ("START", "END"))
    with zipfile.ZipFile(folder / "books.zip", "w") as books:
        books.writestr("1.txt", f"{start}\n\n" + "\n\n".join(world[600:]) + f"\n\n{end}\n")
    records = [{"instruction": f"Add {a}.", "input": str(b), "output": str(a + b)} for a in range(20) for b in range(9)]
    (folder / "alpaca.json").write_text(json.dumps(records), encoding="utf-8")
    pairs = [{"instruction": f"Add {a}.", "input": "1", "chosen": str(a + 1), "rejected": "no"} for a in range(20)]
    (folder / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    question = {
        "question": {
            "stem": "Which of these four animals is it that barks at night in front of the house?",
            "choices": [{"text": "a dog", "label": "A"}, {"text": "a cat", "label": "B"}],
        },
        "answerKey": "A",
    }
    (folder / "eval").mkdir()
    (folder / "eval" / "ARC-Easy-Test.jsonl").write_text(json.dumps(question), encoding="utf-8")
    return folder


def start(script: str, *words: str | Path, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(ROOT / script), *map(str, words)],
        env=os.environ | {"PYTHON": sys.executable} | more,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def call(script: str, *words: str | Path, status: int = 0, **more: str) -> str:
    process = start(script, *words, **more)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == status, out
    return out


def in_parts(script: str, out: Path) -> Path:
    """Another machine's folder, with the parts alone."""
    call(script, "pack", out, PART_MIB="1")
    there = out.with_name("there")
    parts = sorted((out / "parts").iterdir())
    assert parts[0].name == "SHA256" and len(parts) > 1
    (there / "parts").mkdir(parents=True)
    for part in parts[:-1]:
        shutil.copy(part, there / "parts")
    assert f"not here yet: {parts[-1].name}" in call(script, "unpack", there)
    (there / "parts" / parts[-1].name).write_bytes(b"damaged")
    assert "a part is damaged" in call(script, "unpack", there, status=2)
    shutil.copy(parts[-1], there / "parts")
    assert "unpacked into" in call(script, "unpack", there)
    return there


def stopped(run: Path, script: str, *words: str | Path, **more: str) -> None:
    """Ctrl-C as soon as a checkpoint is there."""
    process = start(script, *words, **more)
    deadline = time.monotonic() + 120
    while not list(run.glob("step-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130 and not (run / "complete").exists()


@pytest.mark.slow
def test_the_large_run(texts: Path, tmp_path: Path) -> None:
    named = {
        "eval": "eval",
        "instructions": "alpaca.json",
        "preferences": "pairs.json",
        "gutenberg": "books.zip",
        "simple": "simple.parquet",
        "tinystories": "tinystories.parquet",
    }
    words = [f"{name}={texts / file}" for name, file in named.items()]
    call(LARGE, "data", tmp_path / "out", *words, VOCABULARY="300", SENTENCES="simple=20KB")
    source = tmp_path / "out" / "sentences" / "source" / "source.json"
    for kept in (False, True):  # made again for another choice, and then kept
        before = source.stat().st_mtime_ns
        call(LARGE, "data", tmp_path / "out", *words, VOCABULARY="300", SENTENCES="simple=20KB tinystories=9KB")
        assert (source.stat().st_mtime_ns == before) == kept
    call(LARGE, "tenth", tmp_path / "out", *words)
    tenth = tmp_path / "out" / "tenth"
    assert len(list(tenth.glob("shards-*/manifest.json"))) == 3
    shown = call(LARGE, "vocabulary", tenth, *PLAIN, PRETRAIN=f"--config small {TINY} --steps 2")
    assert "16384 ids" in shown and "bits per byte of held-out text" in shown

    there = in_parts(LARGE, tmp_path / "out")
    assert "pretrain is not complete; first: " in call(LARGE, "sft", there, *PLAIN, status=2)
    learn = {
        "PRETRAIN": f"--config small {TINY} --steps 60 --save-every 5",
        "SFT": "--batch-size 2 --steps 9",
        "DPO": "--batch-size 2 --steps 4",
        "GRPO": "--batch-size 2 --num-generations 2 --max-tokens 4 --steps 3",
        "OWN": "--records 20 --max-tokens 8",
        "TASKS": "arc_easy",
        "EVALUATE": "--any-version",
    }
    stopped(there / "pretrain", LARGE, "pretrain", there, *PLAIN, **learn)
    assert '"sentences"' in json.dumps(checkpoint.read_meta(checkpoint.latest(there / "pretrain")))  # a source
    for flag, said in (("--plan", "MiB"), ("--help", "usage: pretrain.py")):
        assert said in call(LARGE, "pretrain", there, *PLAIN, flag, **learn)
        assert not (there / "pretrain" / "complete").exists()
    assert "--resume" in call(LARGE, "pretrain", there, *PLAIN, **learn)
    assert "complete, skipped" in call(LARGE, "pretrain", there, *PLAIN, **learn)
    for stage, steps in {"sft": 9, "dpo": 4, "grpo": 3}.items():
        call(LARGE, stage, there, *PLAIN, **learn)
        assert checkpoint.latest(there / stage).name == f"step-{steps:08}"
    call(LARGE, "evaluate", there, *PLAIN[:4], **learn)
    assert {file.stem for file in there.glob("*.json")} == {"preferences", "own"} | {
        f"{what}-{run}" for what in ("evaluate", "tasks") for run in ("pretrain", "sft", "dpo", "grpo")
    }
    assert "val_rewards/accuracies_own" in (there / "dpo" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "grpo: card" in (there / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_storyteller(texts: Path, tmp_path: Path) -> None:
    files = [texts / name for name in ("tinystories.parquet", "books.zip", "simple.parquet", "alpaca.json")]
    call(STORYTELLER, "data", tmp_path / "out", *files, RECORDS="40")
    there = in_parts(STORYTELLER, tmp_path / "out")
    tiny = TINY.replace("context=160", "context=340")  # for a whole story
    learn = {
        "TEACHER": f"{tiny} --steps 2",
        "PRETRAIN": f"{tiny} --steps 60 --save-every 5",
        "SFT": "--batch-size 2 --steps 4",
        "OWN": "--records 2 --max-tokens 270 --backend numpy",
        "DPO": "--batch-size 2 --steps 2",
    }
    stopped(there / "base", STORYTELLER, "train", there, *PLAIN, **learn)
    shown = call(STORYTELLER, "train", there, *PLAIN, **learn)
    assert "--resume" in shown and (there / "storyteller" / "model.safetensors").exists()
    assert (there / "storyteller" / "generation_config.json").exists()  # how it is sampled, as the shipped one
    assert shown.count("complete, skipped") == 10  # the teachers'
    # So small a model tells no story that is better than another.
    assert "nothing to learn from" in shown and not (there / "told-5").exists()
    pair = {"instruction": "Tell me a story.", "input": "", "chosen": "Tim ran.", "rejected": "Tim Tim"}
    (there / "told.json").write_text(json.dumps([pair] * 5), encoding="utf-8")
    for name in ("blend", "storyteller"):
        shutil.rmtree(there / name)
    shown = call(STORYTELLER, "train", there, *PLAIN, **learn)
    assert shown.count("complete, skipped") == 13 and f"0.1 {there / 'told-8'}" in shown
    assert (there / "storyteller" / "model.safetensors").exists()

    # The shipped model, whose tokenizer is not that of these shards.
    learn = {"CHATS": "--batch-size 2 --steps 2 --seq-len 128", "RECORDS": "40", "SECOND": "--max-tokens 8"}
    learn |= {"EVALUATE": "--prompts 2", "BASE": "storyteller"}
    (there / "own.json").write_text((there / "chats-0" / "alpaca.json").read_text(encoding="utf-8"), encoding="utf-8")
    shown = call(STORYTELLER, "chats", there, *PLAIN, **learn)
    assert "replay: 1 of 2 rows" in shown and "chats-13" in shown
    assert "complete, skipped" in call(STORYTELLER, "chats", there, *PLAIN, **learn)
    shares = json.loads((there / "lines.json").read_text(encoding="utf-8"))
    assert shares["all"] < 0.5 and (there / "evaluate.json").exists()
    card = (there / "talker" / "README.md").read_text(encoding="utf-8")
    assert "chats" in card and (there / "talker" / "generation_config.json").exists()


def test_without_any_book_the_storyteller_stops(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncase $2 in data.gutenberg) exit 2 ;; esac\n")
    python.chmod(0o755)
    shown = call(STORYTELLER, "data", tmp_path / "out", *[python] * 3, status=1, PYTHON=str(python))
    assert "data.tinystories" in shown and shown.splitlines()[-1].startswith("$ -m data.gutenberg")


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (LARGE, "data", "error: got 1 of 2 arguments, expected data, tenth, pack, "),
        (LARGE, "dance out", "error: dance: expected data, tenth, pack, unpack, "),
        (LARGE, "data out wikipedia.parquet", "error: wikipedia.parquet: expected NAME=PATH, as wikipedia="),
        (LARGE, "data out web=no.parquet", "error: no.parquet: no such file or folder; check the path"),
        (LARGE, "data out web=.", "error: data expects eval=PATH, the evaluation sets that are kept out"),
        (LARGE, "pretrain out", "has no shards; make them: recipes/large-run.sh data "),
        (LARGE, "dpo out", "out/sft is not complete; first: recipes/large-run.sh sft "),
        (LARGE, "pack out", "out has none of: shards shards-4096"),
        (LARGE, "unpack out", "out/parts has no SHA256; copy it there with the parts"),
        (STORYTELLER, "data", "error: got 1 of 2 arguments, expected data, pack, unpack, train or chats, then "),
        (STORYTELLER, "train out", "has no shards; make them: examples/storyteller/run.sh data "),
        (STORYTELLER, "data out a b c", "error: a: no such file; check the path"),
    ],
)
def test_bad_input_is_one_line(
    script: str, words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = call(script, *words.split(), status=2)
    assert message in shown and shown.startswith("error: ") and shown.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [LARGE, STORYTELLER])
def test_help_is_the_whole_comment_that_a_script_begins_with(script: str) -> None:
    shown = call(script, "--help")
    assert f"{script} data OUT" in shown and f"{script} unpack OUT" in shown
    assert "#" not in shown and "set -euo" not in shown
