"""Launches layernorm.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, cupy_kernel, new, scalar, wide
from tinyforge.op import Array
from tinyforge.ops.rmsnorm_cuda import ROWS, partial_rows, row_kernel

FILE = "ops/layernorm.cu"


@cupy_kernel
def layernorm_fwd(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    x = contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    y, xhat, rstd = new(x.shape, x.dtype), new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    if rows:
        launch, _ = row_kernel("layernorm_fwd", width, x, weight, bias, y, xhat, file=FILE)
        scalars = (np.int32(rows), np.int32(width), rstd.dtype.type(eps))
        launch(blocks(rows, ROWS), (32, ROWS), (x, weight, bias, y, xhat, rstd, *scalars))
    return y, xhat, rstd


@cupy_kernel
def layernorm_bwd(dy: Array, xhat: Array, rstd: Array, weight: Array, dweight: Array, dbias: Array) -> Array:
    dy, xhat = contiguous(dy), contiguous(xhat)
    rows, width = xhat.size // xhat.shape[-1], xhat.shape[-1]
    dx = new(xhat.shape, xhat.dtype)
    if not rows:
        return dx
    launch, per = row_kernel("layernorm_bwd", width, xhat, dy, weight, dx, file=FILE)
    partial = new((partial_rows(rows), 2 * width), rstd.dtype)
    scalars = (np.int32(rows), np.int32(width))
    grid = (len(partial),) if per else blocks(rows, ROWS)
    launch(grid, (32, ROWS), (dy, xhat, rstd, weight, dx, partial, *scalars))
    if not per:
        sums = load(FILE, "layernorm_columns", SCALAR=scalar(xhat.dtype), VEC=1, PER=0)
        sums((*blocks(width, 32), len(partial)), (32, 8), (dy, xhat, partial, *scalars))
    add_columns(partial, dweight)
    add_columns(partial, dbias, first=width)
    return dx
