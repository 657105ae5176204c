"""The linear map on the GPU: matrix products, with the leading axes folded into one, and linear.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cublaslt import gemm_plus
from tinyforge.backends.cupy_backend import (
    CupyBackend,
    add_columns,
    blocks,
    contiguous,
    new,
    processors,
    scalar,
    vector,
)
from tinyforge.backends.gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import linear

FILE = "ops/linear.cu"


@linear.linear_fwd.on("cupy")
def linear_fwd(x: Array, weight: Array, bias: Array | None, *, backend: CupyBackend) -> Array:
    x = contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    y, flat = new((rows, len(weight)), x.dtype), x.reshape(rows, width)
    if bias is None or not y.size:
        gemm(flat, weight, y, transpose_b=True, tf32=backend.tf32)
    elif not (x.size and gemm_plus(flat, weight, y, bias=bias, tf32=backend.tf32)):
        vec = vector(y.shape[1], y, bias)
        launch = load(FILE, "linear_fwd_bias", SCALAR=scalar(y.dtype), VEC=vec)
        launch(blocks(y.size // vec), (256,), (y, bias, np.uint32(y.size // vec), np.uint32(y.shape[1] // vec)))
        gemm(flat, weight, y, transpose_b=True, accumulate=True, tf32=backend.tf32)
    return y.reshape(*x.shape[:-1], len(weight))


@linear.linear_add_fwd.on("cupy")
def linear_add_fwd(x: Array, weight: Array, bias: Array | None, add: Array, *, backend: CupyBackend) -> Array:
    x, add = contiguous(x), contiguous(add)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    y, flat, more = new((rows, len(weight)), x.dtype), x.reshape(rows, width), add.reshape(rows, len(weight))
    if not (x.size and y.size and gemm_plus(flat, weight, y, bias=bias, add=more, tf32=backend.tf32)):
        y[...] = more if bias is None else more + bias
        gemm(flat, weight, y, transpose_b=True, accumulate=True, tf32=backend.tf32)
    return y.reshape(add.shape)


@linear.linear_bwd.on("cupy")
def linear_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dy: Array,
    x: Array | None,
    weight: Array,
    accumulate: bool = True,
    *,
    backend: CupyBackend,
) -> Array:
    dy = contiguous(dy)
    rows, width = dy.size // dy.shape[-1], weight.shape[1]
    up = dy.reshape(rows, dy.shape[-1])
    if dweight is not None and x is not None:
        flat = contiguous(x).reshape(rows, width)
        gemm(up, flat, dweight, transpose_a=True, accumulate=accumulate, tf32=backend.tf32)
    if dbias is not None:
        linear_bwd_bias(dbias, up)
    return gemm(up, weight, tf32=backend.tf32).reshape(*dy.shape[:-1], width)


@linear.linear_bwd_bias.on("cupy")
def linear_bwd_bias(dbias: Array, dy: Array) -> None:
    dy = contiguous(dy)
    rows, width = dy.size // dy.shape[-1], dy.shape[-1]
    if not rows:
        return
    vec = vector(width, dy)
    columns = -(-width // (32 * vec))
    # About eight blocks for each multiprocessor, with at least 64 rows each.
    parts = min(-(-rows // 64), -(-8 * processors() // columns))
    partial = new((parts, width), dbias.dtype)
    launch = load(FILE, "linear_bwd_bias", SCALAR=scalar(dy.dtype), VEC=vec)
    launch((columns, parts), (32, 8), (partial, dy, np.int32(rows), np.int32(width)))
    add_columns(dbias, None, partial)
