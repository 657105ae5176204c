"""Launches take.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import take

FILE = "ops/take.cu"


@take.take_fwd.on("cupy")
def take_fwd(x: Array, where: Array) -> Array:
    x, where = contiguous(x), contiguous(where)
    y = new((*where.shape, x.shape[-1]), x.dtype)
    if y.size:
        vec = vector(x.shape[-1], x, y)
        launch = load(FILE, "take_fwd", SCALAR=scalar(x.dtype), VEC=vec)
        sizes = map(np.uint32, (y.size // vec, where.shape[1], x.shape[1], x.shape[-1] // vec))
        launch(blocks(y.size // vec), (256,), (y, x, where, *sizes))
    return y


@take.take_bwd.on("cupy")
def take_bwd(dy: Array, where: Array, length: int) -> Array:
    dy, where = contiguous(dy), contiguous(where)
    dx = new((len(dy), length, dy.shape[-1]), dy.dtype)
    dx.fill(0)
    if dy.size:
        vec = vector(dy.shape[-1], dy, dx)
        launch = load(FILE, "take_bwd", SCALAR=scalar(dy.dtype), VEC=vec)
        sizes = map(np.uint32, (dy.size // vec, where.shape[1], length, dy.shape[-1] // vec))
        launch(blocks(dy.size // vec), (256,), (dx, dy, where, *sizes))
    return dx
