"""Launches dropout.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, cupy_kernel, new, scalar, vector
from tinyforge.op import Array


@cupy_kernel
def dropout(x: Array, rate: float, key: tuple[int, int], step: int) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.size, x, y)
        launch = load("ops/dropout.cu", "dropout", SCALAR=scalar(x.dtype), VEC=vec)
        words = (x.size // vec, *key, step, int(rate * 2**32))
        scale = wide(x.dtype).type(1.0 / (1.0 - rate))
        launch(blocks(x.size // vec), (256,), (x, y, *map(np.uint32, words), scale))
    return y
