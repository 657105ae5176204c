"""`import tinyforge` is light: it loads nothing that only some commands need, and is over in a moment."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("duckdb", "matplotlib", "cupy", "tqdm", "torch")

# Time is taken inside: the interpreter's own start is not ours.
PROGRAM = f"""
import sys, time
start = time.perf_counter()
import tinyforge
print(time.perf_counter() - start)
print([name for name in {HEAVY} if name in sys.modules])
"""


def fresh_import() -> tuple[float, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    seconds, loaded = done.stdout.split("\n")[:2]
    return float(seconds), loaded


def test_import_loads_nothing_heavy_and_is_quick() -> None:
    fresh_import()  # the files come from the disk, and are compiled, the first time
    results = [fresh_import() for _ in range(3)]
    assert {loaded for _, loaded in results} == {"[]"}
    assert min(seconds for seconds, _ in results) < 0.3
