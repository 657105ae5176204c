"""The op of docs/add-an-op.md, its CUDA kernel in a folder outside the package, checked on the GPU as the page says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.gradcheck import TOLERANCE, check_op

pytestmark = pytest.mark.gpu
PAGE = Path(__file__).parents[2] / "docs/add-an-op.md"
NAMES = ("squared_reglu", "squared_reglu_cuda")


@pytest.fixture
def example(
    tmp_path: Path, write_examples: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    write_examples(PAGE, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("squared_reglu")
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_kernel_is_found_beside_the_op_and_its_gradients_are_right(example: Any) -> None:
    rows = check_op(example.SquaredReGLU, get_backend("cupy", "fp64"))
    assert [row.name for row in rows] == ["input 0", "input 1"]
    assert max(row.error for row in rows) <= TOLERANCE


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-6), ("bf16", 1e-2)])
def test_it_agrees_with_numpy_in_low_precision(example: Any, precision: str, tolerance: float) -> None:
    backend = get_backend("cupy", precision)
    dy, g, u = (np.random.default_rng(i).normal(size=(3, 700)) for i in range(3))
    on_gpu = example.SquaredReGLU(backend).bwd(*map(backend.asarray, (dy, g, u)))
    for found, expected in zip(on_gpu, example.squared_reglu_bwd(dy, g, u), strict=True):
        error = np.abs(np.float64(backend.to_numpy(found)) - expected).max()
        assert error <= tolerance * np.abs(expected).max()
