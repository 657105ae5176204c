"""Launches qk_norm_rope.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import qk_norm_rope as body
from tinyforge.ops.rope_cuda import tables

FILE = "ops/qk_norm_rope.cu"
PARTS = 32
"""Parts of the sum over tokens for a learned scale."""


def launched(entry: str, y: Array, x: Array, queries: int, rotated: int, before: Any, saved: Any, numbers: Any) -> None:
    """y, before, x, saved, numbers: the kernel's arguments, in this order. In place only rotated heads are visited."""
    tokens, positions, heads, half = x.shape[0] * x.shape[1], x.shape[1], x.shape[2], x.shape[3] // 2
    visited = rotated if y is x else heads
    if not tokens * visited:
        return
    full = [a for a in saved if a is not None and (a.ndim == 2 or a.shape == x.shape)]
    vec = vector(half, x, y, *full)
    lanes = min(32, 1 << (half // vec - 1).bit_length())
    total = tokens * visited * lanes
    counts = map(np.uint32, (total, positions, heads, visited, rotated, queries, half // vec, lanes))
    launch = load(FILE, entry, SCALAR=scalar(x.dtype), VEC=vec)
    floats = map(wide(x.dtype).type, numbers)
    launch(blocks(total), (256,), (y, *before, x, *map(or_null, saved), *floats, *counts))


@body.qk_norm_rope_fwd.on("cupy")
def qk_norm_rope_fwd(
    out: Array | None,
    x: Array,
    scale: Array | None,
    cos: Array,
    sin: Array,
    heads: int,
    rotated: int,
    factor: float,
    eps: float,
) -> tuple[Array, Array]:
    given, x = x, contiguous(x)
    y = x if out is given and given is x else new(x.shape, x.dtype)
    rstd = new((*x.shape[:2], rotated), wide(x.dtype))
    saved = (scale, *tables(cos, sin, x))
    launched("qk_norm_rope_fwd", y, x, heads, rotated, (rstd,), saved, (factor, eps))
    if out is not None and y is not out:
        out[...] = y
        return out, rstd
    return y, rstd


@body.qk_norm_rope_bwd.on("cupy")
def qk_norm_rope_bwd(
    out: Array | None,
    dscale: Array | None,
    dy: Array,
    scale: Array | None,
    y: Array,
    rstd: Array,
    cos: Array,
    sin: Array,
    heads: int,
    rotated: int,
    factor: float,
) -> Array:
    given, dy, y = dy, contiguous(dy), contiguous(y)
    dx = dy if out is given and given is dy else new(dy.shape, dy.dtype)
    tokens = dy.shape[0] * dy.shape[1]
    along = None if dscale is None else new((tokens, heads), rstd.dtype)
    saved = (scale, y, rstd, *tables(cos, sin, dy))
    launched("qk_norm_rope_bwd", dx, dy, heads, rotated, (or_null(along),), saved, (factor,))
    if dscale is not None and along is not None and tokens:
        partial = new((min(PARTS, -(-tokens // 256)), heads), along.dtype)
        launch = load(FILE, "qk_scale_bwd", SCALAR=scalar(dy.dtype), VEC=1)
        launch((heads, len(partial)), (256,), (partial, along, scale, np.int32(tokens), np.int32(heads)))
        add_columns(dscale, None, partial)
    if out is not None and dx is not out:
        out[...] = dx
        return out
    return dx
