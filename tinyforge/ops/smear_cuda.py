"""Launches smear.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import smear

FILE = "ops/smear.cu"
PARTS = 64
"""Parts of the sums over rows."""


@smear.smear_fwd.on("cupy")
def smear_fwd(x: Array, gate: Array, scale: Array, starts: Array | None, previous: Array | None) -> tuple[Array, Array]:
    x = contiguous(x)
    batch, length, width = x.shape
    y, shares = new(x.shape, x.dtype), new((batch, length), wide(x.dtype))
    if shares.size:
        before = None if previous is None else contiguous(previous)
        vec = vector(width, x, y, *(() if before is None else (before,)))
        launch = load(FILE, "smear_fwd", SCALAR=scalar(x.dtype), VEC=vec)
        begins = or_null(None if starts is None else contiguous(starts))
        sizes = map(np.int32, (shares.size, length, width, gate.size))
        launch(blocks(shares.size, 8), (256,), (y, shares, x, gate, scale, begins, or_null(before), *sizes))
    return y, shares


@smear.smear_bwd.on("cupy")
def smear_bwd(
    dgate: Array | None,
    dscale: Array | None,
    dy: Array,
    x: Array,
    shares: Array,
    gate: Array,
    scale: Array,
    starts: Any,
) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    dx, rows, (length, width) = new(dy.shape, dy.dtype), shares.size, dy.shape[1:]
    if not rows:
        return dx
    slopes = new((2, *shares.shape), shares.dtype)
    launch = load(FILE, "smear_bwd", SCALAR=scalar(dy.dtype), VEC=vector(width, dx, dy, x))
    begins = or_null(None if starts is None else contiguous(starts))
    sizes = map(np.int32, (rows, length, width, gate.size))
    launch(blocks(rows, 8), (256,), (dx, slopes, dy, x, shares, gate, scale, begins, *sizes))
    if dgate is not None:
        partial = new((min(PARTS, -(-rows // 64)), gate.size + 1), slopes.dtype)
        launch = load(FILE, "smear_dweight", SCALAR=scalar(dy.dtype), VEC=1)
        launch((len(partial),), (256,), (partial, slopes, x, *map(np.int32, (rows, width, gate.size))))
        add_columns(dgate, dscale, partial)
    return dx
