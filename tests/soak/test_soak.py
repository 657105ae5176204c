"""A short soak, and that growth would be seen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("commands are forked, and /proc is read", allow_module_level=True)

from tests.soak.__main__ import Soaked

ROOT = Path(__file__).resolve().parents[2]


def test_growth_is_that_of_the_last_quarter_over_the_second() -> None:
    steady = Soaked("steady", 0, [50, *[100] * 10, 101], "")
    assert steady.growth == 0.0 and steady.good
    leak = Soaked("leak", 0, [100 + n for n in range(40)], "")
    assert 0.15 < leak.growth < 0.20 and not leak.good
    assert not Soaked("killed", -9, [100] * 12, "").good
    assert not Soaked("short", 0, [100] * 3, "").good


@pytest.mark.slow
def test_a_short_run_ends_well_in_little_memory() -> None:
    """Too short to judge growth by: only how both parts end."""
    command = [sys.executable, "-m", "tests.soak", "--seconds", "16"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [(row[0], row[1]) for row in rows] == [("pretrain", "0"), ("chat", "0")], done.stdout + done.stderr
