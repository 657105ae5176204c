"""A signal before anything could be lost ends a command at once, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinyforge.data.world import documents

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--set dim=32 heads=4 kv_heads=2 layers=1 hidden=48 context=96 vocab=280 --batch-size 2 --workers 1".split()
HANG = """
import time
from tinyforge.recipes import pretrain
from tinyforge.errors import run_command
from tinyforge.train.run import Run
Run.take_step = lambda self: time.sleep(60)
run_command(lambda: pretrain.main({flags}))
"""
# Python imports a module of this name at its start: the import of another is then as if Ctrl-C had been pressed.
INTERRUPT = """
import sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "tinyforge.errors":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_in_the_first_step(tmp_path: Path, number: signal.Signals, status: int) -> None:
    (tmp_path / "text.txt").write_text("\n".join(documents("train", 40)), encoding="utf-8")
    flags = [*SHAPE, "--data", "text.txt", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-c", HANG.format(flags=flags)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    end = time.monotonic() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.5)  # the loop begins
    process.send_signal(number)
    try:
        _, shown = process.communicate(timeout=40)  # the step sleeps for longer
    finally:
        process.kill()
    assert process.returncode == status and "Traceback" not in shown


@pytest.mark.parametrize("command", ["recipes/pretrain.py", "-m data.corpus", "-m tinyforge.chat", "-m data.local"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )
    assert done.returncode == -signal.SIGINT and done.stderr == "\nstopped\n"
