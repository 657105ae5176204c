"""What takes more than a second has a line; with TINYFORGE_TIMES everything has one."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from tinyforge import report


def test_only_what_is_slow_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYFORGE_TIMES", raising=False)
    with report.timed("quick"):
        pass
    report.took("slow", 3.14)
    assert capsys.readouterr().out == "slow: 3.1 s\n"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, "step"), "0 steps"),
        ((1, "step"), "1 step"),
        ((2000, "step"), "2,000 steps"),
        ((1, "story", "stories"), "1 story"),
        ((2, "story", "stories"), "2 stories"),
    ],
)
def test_counts_in_words(given: tuple[Any, ...], said: str) -> None:
    assert report.count_of(*given) == said


def test_all_is_said_on_request() -> None:
    """With the seconds since the process began, in which the interpreter's start and the imports count."""
    program = "from tinyforge.report import timed\nwith timed('nothing'): pass"
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program], env={"TINYFORGE_TIMES": "1"}, capture_output=True, text=True)
    taken = time.perf_counter() - start
    what, at = done.stdout.strip().split(", at ")
    assert what == "nothing: 0.00 s" and 0 < float(at.removesuffix(" s")) <= taken + 0.02
