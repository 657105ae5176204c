"""Launches dropout.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, key_arguments, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops import dropout as body


@body.dropout.on("cupy")
def dropout(x: Array, key: Key, rate: float) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.size, x, y)
        launch = load("ops/dropout.cu", "dropout", SCALAR=scalar(x.dtype), VEC=vec)
        place, *words = key_arguments(key)
        scale = wide(x.dtype).type(1.0 / (1.0 - rate))
        numbers = (np.uint32(x.size // vec), *words, np.uint32(int(rate * 2**32)), scale)
        launch(blocks(x.size // vec), (256,), (y, x, place, *numbers))
    return y
