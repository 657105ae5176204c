"""Launches gelu.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import gelu

FILE = "ops/gelu.cu"


@gelu.gelu_fwd.on("cupy")
def gelu_fwd(x: Array, approximate: str) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.size, x, y)
        launch = load(FILE, "gelu_fwd", SCALAR=scalar(x.dtype), VEC=vec, EXACT=int(approximate == "erf"))
        launch(blocks(x.size // vec), (256,), (y, x, np.uint32(x.size // vec)))
    return y


@gelu.gelu_bwd.on("cupy")
def gelu_bwd(hidden: Array | None, dy: Array, x: Array, approximate: str) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    dx = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.size, x, dy, dx, *(() if hidden is None else (hidden,)))
        launch = load(FILE, "gelu_bwd", SCALAR=scalar(x.dtype), VEC=vec, EXACT=int(approximate == "erf"))
        launch(blocks(x.size // vec), (256,), (dx, or_null(hidden), dy, x, np.uint32(x.size // vec)))
    return dx
