"""mypy checks the calls of kernels, and a project that installs tinyforge sees its types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CALLS = """
from tinyforge.kernel import Array
from tinyforge.ops import SwiGLU

class Right(SwiGLU):
    def forward(self, gu: Array, stash: object = None) -> Array:  # type: ignore[override]
        return self.bwd(None, self.fwd(gu), gu)

class Wrong(SwiGLU):
    def calls(self, gu: Array) -> None:
        self.fdw(gu)
        self.fwd(gu, gu)
        self.bwd(None, gu)
        self.fwd("nonsense")
        self.fwd(gu).no_such
"""

ERRORS = [
    (11, 'has no attribute "fdw"', "attr-defined"),
    (12, "Too many arguments", "call-arg"),
    (13, "Too few arguments", "call-arg"),
    (14, 'incompatible type "str"; expected "ndarray', "arg-type"),
    (15, 'has no attribute "no_such"', "attr-defined"),
]

REVEALED = """
import tinyforge.ops
from tinyforge.ops.swiglu import swiglu_bwd

reveal_type(tinyforge.ops.Linear.forward)
reveal_type(tinyforge.ops.SwiGLU.bwd)
reveal_type(swiglu_bwd)
"""


def mypy(folder: Path, code: str) -> list[str]:
    """The lines that mypy prints about `code`, a file of another project that imports tinyforge."""
    pytest.importorskip("mypy")
    (folder / "calls.py").write_text(code, encoding="utf-8")
    (folder / "mypy.ini").write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--no-error-summary", "calls.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_wrong_calls_of_kernels_are_errors_and_right_ones_are_not(tmp_path: Path) -> None:
    found = [line for line in mypy(tmp_path, CALLS) if ": error:" in line]
    assert len(found) == len(ERRORS), found
    for line, (number, message, code) in zip(found, ERRORS, strict=True):
        assert line.startswith(f"calls.py:{number}:") and message in line and line.endswith(f"[{code}]"), line


@pytest.mark.slow
def test_the_public_ops_have_types(tmp_path: Path) -> None:
    forward, bound, kernel = (
        re.sub(r"^calls.py:\d+: note: Revealed type is ", "", x) for x in mypy(tmp_path, REVEALED)
    )
    assert re.search(r"def \(self: tinyforge.ops.linear.Linear, x: (numpy\.)?ndarray", forward), forward
    assert bound == kernel and "Kernel[[hidden: " in kernel and "gu: " in kernel, (bound, kernel)
    assert (ROOT / "tinyforge/py.typed").exists()
