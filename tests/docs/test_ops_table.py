"""The table of ops and the ops' pages say what the code has: kernels, numbers of cases, errors in the ledger."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from tinyforge import get_backend, ops
from tinyforge.gradcheck import examine

FOLDER = Path(__file__).parents[2] / "docs/ops"
ROW = re.compile(r"^\| \[(\w+)\]\(([\w.]+)(?:#[\w-]+)?\) \|.*\| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
TABLE = {name: cells for name, *cells in ROW.findall((FOLDER / "README.md").read_text(encoding="utf-8"))}
FP64 = get_backend("numpy", "fp64", workers=1)


def test_the_table_has_every_op_with_its_kernels() -> None:
    assert set(TABLE) == {kind.__name__ for kind in ops.ALL}
    for kind in ops.ALL:
        listed = re.findall(r"`(\w+)`", TABLE[kind.__name__][1])
        inherited = {kernel for base in kind.__mro__[1:] if base in ops.ALL for kernel in base.kernels}
        assert sorted(listed) == sorted(kernel.name for kernel in kind.kernels if kernel not in inherited), kind


def test_the_table_has_the_errors_of_the_ledger() -> None:
    """Their digits depend on the order of summation."""
    for kind in ops.ALL:
        worst = max(row.error for row in examine(kind, FP64, contract=False).rows)
        assert 0.05 < float(TABLE[kind.__name__][2]) / worst < 20, (kind, worst)


def test_every_op_has_a_page_that_counts_its_cases() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md"))
    counted = {name: int(count) for name, count in re.findall(r"gradcheck --op (\w+)`: (\d+)\s+cases", text)}
    assert counted == {kind.__name__: len(list(kind.cases(FP64, np.random.default_rng(0)))) for kind in ops.ALL}
