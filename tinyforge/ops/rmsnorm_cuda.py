"""Launches rmsnorm.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import (
    add_columns,
    blocks,
    contiguous,
    cupy_kernel,
    new,
    processors,
    scalar,
    vector,
    vectors_a_lane,
    wide,
)
from tinyforge.op import Array

FILE = "ops/rmsnorm.cu"
ROWS = 8  # a block's warps, each with a row at a time


def row_kernel(entry: str, width: int, *arrays: Array, file: str = FILE) -> tuple[Any, int]:
    """The kernel for rows of `width`, and its PER: 0 if it does not keep a row in registers."""
    vec, dtype = vector(width, *arrays), arrays[0].dtype
    per = vectors_a_lane(width, vec, dtype)
    return load(file, entry, SCALAR=scalar(dtype), VEC=vec, PER=per), per


def partial_rows(rows: int) -> int:
    """Blocks of a backward, and so rows of partial sums: two to a multiprocessor."""
    return max(1, min(-(-rows // ROWS), 2 * processors()))


@cupy_kernel
def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    x = contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    y, rstd = new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    if rows:
        launch, _ = row_kernel("rmsnorm_fwd", width, x, weight, y)
        scalars = (np.int32(rows), np.int32(width), rstd.dtype.type(eps))
        launch(blocks(rows, ROWS), (32, ROWS), (x, weight, y, rstd, *scalars))
    return y, rstd


@cupy_kernel
def rmsnorm_bwd(dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    return norm_backward(None, dy, x, rstd, weight, dweight)


def norm_backward(extra: Array | None, dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    """dx (plus `extra`, the gradient of the residual stream), and dweight added to."""
    dy, x = contiguous(dy), contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    dx = new(x.shape, x.dtype)
    if not rows:
        return dx
    added = () if extra is None else (contiguous(extra),)
    launch, per = row_kernel("add_rmsnorm_bwd" if added else "rmsnorm_bwd", width, x, dy, weight, dx, *added)
    partial = new((partial_rows(rows), width), wide(x.dtype))
    scalars = (np.int32(rows), np.int32(width))
    # With the sums of dw in registers each warp takes many rows, else a row.
    grid = (len(partial),) if per else blocks(rows, ROWS)
    launch(grid, (32, ROWS), (*added, dy, x, rstd, weight, dx, partial, *scalars))
    if not per:
        sums = load(FILE, "rmsnorm_dweight", SCALAR=scalar(x.dtype), VEC=1, PER=0)
        sums((*blocks(width, 32), len(partial)), (32, 8), (dy, x, rstd, partial, *scalars))
    add_columns(partial, dweight)
    return dx
