"""Launches gelu.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import (
    add_columns,
    blocks,
    contiguous,
    new,
    or_null,
    processors,
    scalar,
    vector,
)
from tinyforge.kernel import Array
from tinyforge.ops import gelu

FILE = "ops/gelu.cu"


@gelu.gelu_fwd.on("cupy")
def gelu_fwd(x: Array, bias: Array | None, approximate: str) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if not x.size:
        return y
    macros = {"SCALAR": scalar(x.dtype), "EXACT": int(approximate == "erf")}
    if bias is None:
        vec = vector(x.size, x, y)
        launch = load(FILE, "gelu_fwd", VEC=vec, **macros)
        launch(blocks(x.size // vec), (256,), (y, x, np.uint32(x.size // vec)))
    else:
        width = x.shape[-1]
        vec = vector(width, x, y, bias)
        launch = load(FILE, "gelu_fwd_bias", VEC=vec, **macros)
        launch(blocks(x.size // vec), (256,), (y, x, bias, np.uint32(x.size // vec), np.uint32(width // vec)))
    return y


@gelu.gelu_bwd.on("cupy")
def gelu_bwd(
    hidden: Array | None, dbias: Array | None, dy: Array, x: Array, bias: Array | None, approximate: str
) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    dx = new(x.shape, x.dtype)
    if not x.size:
        return dx
    macros = {"SCALAR": scalar(x.dtype), "EXACT": int(approximate == "erf")}
    written = (dx,) if hidden is None else (dx, hidden)
    if bias is None:
        vec = vector(x.size, x, dy, *written)
        launch = load(FILE, "gelu_bwd", VEC=vec, **macros)
        launch(blocks(x.size // vec), (256,), (dx, or_null(hidden), dy, x, np.uint32(x.size // vec)))
        return dx
    width = x.shape[-1]
    rows, vec = x.size // width, vector(width, x, dy, bias, *written)
    columns = -(-width // (32 * vec))
    # Two rounds of the four blocks that a multiprocessor holds; at least 64 rows each.
    parts = min(-(-rows // 64), -(-8 * processors() // columns))
    partial = new((parts, width), wide(x.dtype))  # nobody reads it where the bias is frozen
    launch = load(FILE, "gelu_bwd_bias", VEC=vec, **macros)
    arrays = (dx, or_null(hidden), partial, dy, x, bias)
    launch((columns, parts), (32, 8), (*arrays, np.int32(rows), np.int32(width)))
    if dbias is not None:
        add_columns(dbias, None, partial)
    return dx
