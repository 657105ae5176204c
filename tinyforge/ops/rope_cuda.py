"""Launches rope.cu, or a matrix product with RoPE as its epilogue."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import CupyBackend, blocks, contiguous, new, scalar, vector
from tinyforge.backends.gemm import Turn, gemm_rope
from tinyforge.kernel import Array
from tinyforge.ops import rope as body
from tinyforge.ops.linear_cuda import linear_fwd


def tables(cos: Array, sin: Array, x: Array) -> tuple[Array, Array]:
    """Cosines and sines in the dtype and layout of the kernels."""
    cos, sin = (contiguous(table.astype(wide(x.dtype), copy=False)) for table in (cos, sin))
    return cos, sin


@body.rope.on("cupy")
def rope(out: Array | None, x: Array, cos: Array, sin: Array, rotated: int) -> Array:
    in_place = out is x and contiguous(x) is x
    x = contiguous(x)
    # A non-contiguous output is rare: compute into a new array and copy.
    y = out if out is not None and out.flags.c_contiguous else new(x.shape, x.dtype)
    positions, heads, dim = x.shape[1:]
    half = dim // 2
    visited = rotated if in_place else heads
    pairs = x.size // dim // max(heads, 1) * visited * half
    if pairs:
        cos, sin = tables(cos, sin, x)
        vec = vector(half, x, y, cos, sin)
        launch = load("ops/rope.cu", "rope", SCALAR=scalar(x.dtype), VEC=vec)
        counts = (pairs // vec, positions, heads, visited, rotated, half // vec)
        launch(blocks(pairs // vec), (256,), (y, x, cos, sin, *map(np.uint32, counts)))
    if out is not None and y is not out:
        out[...] = y
        return out
    return y


@body.linear_rope_fwd.on("cupy")
def linear_rope_fwd(x: Array, weight: Array, cos: Array, sin: Array, rotated: int, *, backend: CupyBackend) -> Array:
    x = contiguous(x)
    made = gemm_rope(x.reshape(-1, x.shape[-1]), weight, Turn(*tables(cos, sin, x), rotated)) if x.size else None
    if made is not None:
        return made.reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    y = linear_fwd(x, weight, None, backend=backend).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return rope(y, y, cos, sin, rotated)
