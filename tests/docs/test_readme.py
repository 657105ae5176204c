"""README: its op is the real one, its ledger row is what the command prints, figures are measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import get_backend, ops
from tinyforge.gradcheck import TOLERANCE, check, main
from tinyforge.kernel import kernel
from tinyforge.op import Op, Stash

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FP64 = get_backend("numpy", "fp64", workers=1)


def readme_op() -> Any:
    codes = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (code,) = (code for code in codes if "class SwiGLU" in code)
    names: dict[str, Any] = {"np": np, "kernel": kernel, "Op": Op, "__name__": "readme"}
    exec(code, names)
    return names["SwiGLU"]


def test_the_op_is_the_real_one() -> None:
    rng = np.random.default_rng(0)
    gu, dy = rng.normal(size=(3, 5, 14)) * 2, rng.normal(size=(3, 5, 7))
    results = []
    for op in (readme_op()(FP64), ops.SwiGLU(FP64)):
        stash = Stash()
        results.append((op.forward(gu, stash), op.backward(dy, stash), op.forward(gu)))
        assert len(stash) == 0
    for shown, real in zip(*results, strict=True):
        np.testing.assert_allclose(shown, real, rtol=1e-13, atol=1e-15)


def test_its_gradient_is_right() -> None:
    op, rng = readme_op()(FP64), np.random.default_rng(0)
    for _, inputs in ops.SwiGLU.cases(FP64, rng):
        assert max(check(op, inputs, rng).values()) <= TOLERANCE


def test_the_ledger_row_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^\$ python -m tinyforge.gradcheck --op SwiGLU --seed 0\n(.*?)^```$", README, re.M | re.S)
    assert main(["--op", "SwiGLU", "--seed", "0"]) == 0
    head, row = capsys.readouterr().out.splitlines()[:2]
    shown_head, shown_row, _ = shown.splitlines()
    assert shown_head.split() == head.split()
    *words, error = row.split()
    *shown_words, shown_error = shown_row.split()
    assert shown_words == words
    assert 0.1 < float(shown_error) / float(error) < 10  # its digits depend on the order of summation


def test_the_table_and_the_picture_are_those_of_the_results() -> None:
    command = [sys.executable, str(ROOT / "docs/pictures/measured.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python docs/pictures/measured.py"
    assert (ROOT / "docs/pictures/measured.svg").stat().st_size < 200_000


@pytest.mark.parametrize("script", ["gemm", "recurrences", "model", "decode", "dispatch", "course", "kernels"])
def test_the_pictures_are_what_their_script_draws(script: str) -> None:
    command = [sys.executable, str(ROOT / f"docs/pictures/{script}.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run python docs/pictures/{script}.py"
