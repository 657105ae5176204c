"""Launches rope.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import rope as body


@body.rope.on("cupy")
def rope(out: Array | None, x: Array, cos: Array, sin: Array, rotated: int) -> Array:
    in_place = out is x and contiguous(x) is x
    x = contiguous(x)
    # A tile with gaps to write into is rare (a test's): it is filled from a whole one.
    y = out if out is not None and out.flags.c_contiguous else new(x.shape, x.dtype)
    positions, heads, dim = x.shape[1:]
    half = dim // 2
    visited = rotated if in_place else heads
    pairs = x.size // dim // max(heads, 1) * visited * half
    if pairs:
        cos, sin = (contiguous(table.astype(wide(x.dtype), copy=False)) for table in (cos, sin))
        vec = vector(half, x, y, cos, sin)
        launch = load("ops/rope.cu", "rope", SCALAR=scalar(x.dtype), VEC=vec)
        counts = (pairs // vec, positions, heads, visited, rotated, half // vec)
        launch(blocks(pairs // vec), (256,), (y, x, cos, sin, *map(np.uint32, counts)))
    if out is not None and y is not out:
        out[...] = y
        return out
    return y
