"""Launches mix.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import mix

FILE = "ops/mix.cu"
MOST_BLOCKS = 1024
"""Of mix_bwd: as many as a large GPU runs at a time."""


@mix.mix_fwd.on("cupy")
def mix_fwd(x: Array, first: Array, a: Array, b: Array) -> Array:
    x, first = contiguous(x), contiguous(first)
    y = new(x.shape, x.dtype)
    if y.size:
        vec = vector(y.size, y, x, first)
        launch = load(FILE, "mix_fwd", SCALAR=scalar(y.dtype), VEC=vec)
        launch(blocks(y.size // vec), (256,), (y, x, first, a, b, np.uint32(y.size // vec)))
    return y


@mix.mix_bwd.on("cupy")
def mix_bwd(
    da: Array | None, db: Array | None, dfirst: Array | None, dy: Array, x: Array, first: Array, a: Array, b: Array
) -> tuple[Array, Array]:
    dy, x, first = contiguous(dy), contiguous(x), contiguous(first)
    dx, sums = new(dy.shape, dy.dtype), new(dy.shape, dy.dtype) if dfirst is None else dfirst
    if not dx.size:
        return dx, sums
    vec = vector(dx.size, dx, sums, dy, x, first)
    vectors = dx.size // vec
    partial = new((min(*blocks(vectors), MOST_BLOCKS), 2), wide(dx.dtype))
    launch = load(FILE, "mix_bwd", SCALAR=scalar(dx.dtype), VEC=vec)
    numbers = np.uint32(vectors), np.uint32(dfirst is not None)
    launch((len(partial),), (256,), (dx, sums, partial, dy, x, first, a, b, *numbers))
    if da is not None and db is not None:
        add_columns(da, db, partial)
    return dx, sums
