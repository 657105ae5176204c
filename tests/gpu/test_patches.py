"""Images cut into patches on a GPU: floats and pixels, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.ops import Patches

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-14), ("fp32", 1e-6), ("bf16", 4e-3)])
@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize(("size", "shape"), [(2, (3, 3, 4, 6)), (7, (5, 1, 28, 28)), (16, (2, 3, 224, 224))])
def test_patches(size: int, shape: tuple[int, ...], pixels: bool, precision: str, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, shape) if pixels else rng.normal(size=shape)
    found = []
    for backend in (get_backend("cupy", precision), get_backend("numpy", "fp64", workers=1)):
        found.append(backend.to_numpy(Patches(size, backend).forward(backend.asarray(images))))
    assert found[0].shape == found[1].shape
    assert np.abs(found[0] - found[1]).max() <= tolerance * np.abs(found[1]).max()
