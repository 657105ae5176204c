"""Exact resume: a run that is killed, at any moment and several times, ends with the bytes of one that was not."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinyforge import checkpoint
from tinyforge.data.world import documents
from tinyforge.train import metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_EVERY = 120, 3
SHAPE = ["dim=32", "heads=4", "kv_heads=2", "layers=1", "hidden=48", "vocab=300"]
PLAN = [
    "--steps",
    STEPS,
    "--save-every",
    SAVE_EVERY,
    "--eval-every",
    40,
    "--batch-size",
    2,
    "--workers",
    2,
    "--backend",
    "numpy",
]


def start(recipe: str, folder: Path, *flags: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "recipes" / recipe), *map(str, flags)]
    with open(folder / "stderr", "wb") as log:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=log)


def finish(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.wait(60) == 0, (folder / "stderr").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus and a file of instructions."""
    path = tmp_path_factory.mktemp("resume")
    (path / "text.txt").write_text("\n".join(documents("train", 60)), encoding="utf-8")
    records = [{"instruction": f"Add {a}.", "input": str(b), "output": str(a + b)} for a in range(6) for b in range(9)]
    (path / "alpaca.json").write_text(json.dumps(records), encoding="utf-8")
    return path


BASE = [
    *("--data", "text.txt", "--set", *SHAPE, "context=96"),  # room for the instructions
    *("--steps", 2, "--batch-size", 2, "--backend", "numpy", "--out", "base"),
]
FIRST: dict[str, list[Any]] = {
    "pretrain.py": ["--data", "text.txt", "--set", *SHAPE, "context=32", *PLAN],
    "sft.py": ["--data", "alpaca.json", "--base", "base", *PLAN],
}


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> Callable[[str], Path]:
    """The directory of a recipe's run that nothing disturbed; it runs once."""

    def run(recipe: str) -> Path:
        out = folder / f"whole-{recipe}"
        if not out.exists():
            if recipe == "sft.py":
                finish(start("pretrain.py", folder, *BASE), folder)
            finish(start(recipe, folder, *FIRST[recipe], "--out", out), folder)
        return out

    return run


def go_on(recipe: str, folder: Path, out: Path) -> subprocess.Popen[bytes]:
    """Resume if there is anything to resume, else start again; --resume needs no other flag."""
    return start(recipe, folder, *(["--resume"] if checkpoint.steps(out) else FIRST[recipe]), "--out", out)


def saved_step(out: Path) -> int:
    return int(checkpoint.latest(out).name.removeprefix("step-")) if checkpoint.steps(out) else 0


def wait_for_step(process: subprocess.Popen[bytes], out: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        rows = metrics.read(out / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.001)


def assert_same_run(out: Path, whole: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        got, expected = (hashlib.sha256((run / f"step-{STEPS:08d}" / name).read_bytes()) for run in (out, whole))
        assert got.hexdigest() == expected.hexdigest(), name
    got_rows, wanted_rows = (metrics.read(run / "metrics.jsonl") for run in (out, whole))
    assert [row["step"] for row in got_rows if "loss" in row] == list(range(1, STEPS + 1))
    for row in (*got_rows, *wanted_rows):
        for clock in ("seconds", "tokens_per_second", "peak_memory_mib"):
            row.pop(clock, None)
    assert got_rows == wanted_rows
    assert not list(out.glob(".partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kills"), [("pretrain.py", 5), ("sft.py", 5)])
def test_kill_9_at_random_moments(recipe: str, kills: int, folder: Path, uninterrupted: Callable[[str], Path]) -> None:
    whole, out, random_ = uninterrupted(recipe), folder / f"killed-{recipe}", random.Random(kills)
    process = start(recipe, folder, *FIRST[recipe], "--out", out)
    time.sleep(random_.uniform(0.1, 0.6))  # while it prepares
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for _ in range(kills - 1):
        before = saved_step(out)
        process = go_on(recipe, folder, out)
        # Rows up to the next save may be there from before: wait for one that this process wrote.
        wait_for_step(process, out, before + SAVE_EVERY + 1 + random_.randrange(6))
        time.sleep(random_.uniform(0, 0.03))
        process.kill()
        assert process.wait() == -signal.SIGKILL, (folder / "stderr").read_text()
        assert STEPS > saved_step(out) > before
        checkpoint.load(out)  # whole, or this raises
    finish(go_on(recipe, folder, out), folder)
    assert_same_run(out, whole)


@pytest.mark.parametrize(
    ("recipe", "number", "status"),
    [("pretrain.py", signal.SIGTERM, 143), pytest.param("sft.py", signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_saves_and_leaves(
    recipe: str, number: signal.Signals, status: int, folder: Path, uninterrupted: Callable[[str], Path]
) -> None:
    whole, out = uninterrupted(recipe), folder / f"stopped-{recipe}"
    process = start(recipe, folder, *FIRST[recipe], "--out", out)
    wait_for_step(process, out, 10)
    process.send_signal(number)
    assert process.wait(60) == status
    message = (folder / "stderr").read_text()
    assert "--resume" in message and "Traceback" not in message
    assert metrics.read(out / "metrics.jsonl")[-1]["step"] == saved_step(out) < STEPS
    finish(go_on(recipe, folder, out), folder)
    assert_same_run(out, whole)


def test_a_finished_run_resumes_to_itself(folder: Path, uninterrupted: Callable[[str], Path]) -> None:
    out = uninterrupted("pretrain.py")
    rows, saved = (out / "metrics.jsonl").read_bytes(), checkpoint.latest(out).stat().st_mtime_ns
    finish(go_on("pretrain.py", folder, out), folder)
    assert (out / "metrics.jsonl").read_bytes() == rows
    assert checkpoint.latest(out).stat().st_mtime_ns == saved


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_with_its_batches(folder: Path) -> None:
    """Its checkpoint names no windows: they are the full ones, which a new run can be asked for."""
    flags, whole, out = [*FIRST["pretrain.py"], "--windows", "full"], folder / "whole-full", folder / "earlier"
    finish(start("pretrain.py", folder, *flags, "--out", whole), folder)
    process = start("pretrain.py", folder, *flags, "--out", out)
    wait_for_step(process, out, 2 * SAVE_EVERY + 1)
    process.kill()
    assert process.wait() == -signal.SIGKILL and 0 < saved_step(out) < STEPS
    for meta in out.glob("step-*/meta.json"):
        stored = json.loads(meta.read_text(encoding="utf-8"))
        assert stored["settings"].pop("windows") == "full"
        meta.write_text(json.dumps(stored), encoding="utf-8")
        hashes = json.loads(meta.with_name("hashes.json").read_text(encoding="utf-8"))
        hashes["meta.json"] = hashlib.sha256(meta.read_bytes()).hexdigest()
        meta.with_name("hashes.json").write_text(json.dumps(hashes), encoding="utf-8")
    finish(go_on("pretrain.py", folder, out), folder)
    assert_same_run(out, whole)
