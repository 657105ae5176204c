"""Launches dropout.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import dropout as body


@body.dropout.on("cupy")
def dropout(x: Array, key: tuple[int, int], rate: float) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.size, x, y)
        launch = load("ops/dropout.cu", "dropout", SCALAR=scalar(x.dtype), VEC=vec)
        words = (x.size // vec, *key, int(rate * 2**32))
        scale = wide(x.dtype).type(1.0 / (1.0 - rate))
        launch(blocks(x.size // vec), (256,), (y, x, *map(np.uint32, words), scale))
    return y
