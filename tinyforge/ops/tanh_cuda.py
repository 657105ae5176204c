"""Launches tanh.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import tanh

FILE = "ops/tanh.cu"


@tanh.tanh_fwd.on("cupy")
def tanh_fwd(x: Array) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.size, x, y)
        launch = load(FILE, "tanh_fwd", SCALAR=scalar(x.dtype), VEC=vec)
        launch(blocks(x.size // vec), (256,), (y, x, np.uint32(x.size // vec)))
    return y


@tanh.tanh_bwd.on("cupy")
def tanh_bwd(dy: Array, y: Array) -> Array:
    dy, y = contiguous(dy), contiguous(y)
    dx = new(y.shape, y.dtype)
    if y.size:
        vec = vector(y.size, y, dy, dx)
        launch = load(FILE, "tanh_bwd", SCALAR=scalar(y.dtype), VEC=vec)
        launch(blocks(y.size // vec), (256,), (dx, dy, y, np.uint32(y.size // vec)))
    return dx
