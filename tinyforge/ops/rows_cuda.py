"""Launches kernels that are written over rows.cuh: a warp takes a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import add_columns, blocks, new, processors, scalar, vector, vectors_a_lane
from tinyforge.kernel import Array

HEADER = "ops/rows.cuh"
STAGES, BLOCKS = constant(HEADER, "STAGES"), constant(HEADER, "BLOCKS")
WARPS = 8  # a block's, each with a row at a time


def rows_and_width(x: Array) -> tuple[int, int]:
    return x.size // x.shape[-1], x.shape[-1]


def launch_rows(file: str, entry: str, arrays: tuple[Array, ...], rstd: Array | None = None, *more: Any) -> None:
    """One warp for each row. arrays: what is read and written by vectors; `rstd` and numbers follow them."""
    rows, width = rows_and_width(arrays[0])
    if rows:
        vec, dtype = vector(width, *arrays), arrays[0].dtype
        launch = load(file, entry, SCALAR=scalar(dtype), VEC=vec, PER=vectors_a_lane(width, vec, dtype))
        beside = () if rstd is None else (rstd,)
        launch(blocks(rows, WARPS), (32, WARPS), (*arrays, *beside, np.int32(rows), np.int32(width), *more))


def norm_backward(
    file: str, entry: str, streamed: tuple[Array, ...], rstd: Array, weight: Array, sums: tuple[Array, ...],
    sums_alone: tuple[str, tuple[Array, ...]],
) -> Array:  # fmt: skip
    """dx, and each of `sums` (gradients of gain and bias) added to.

    streamed: what is read row by row, dy and x last. sums_alone: the kernel, and its arguments, that makes the partial
    sums where a row does not fit in registers.
    """
    rows, width = rows_and_width(streamed[-1])
    dx = new(streamed[-1].shape, streamed[-1].dtype)
    if not rows:
        return dx
    vec = vector(width, dx, *streamed, weight)
    per = vectors_a_lane(width, vec, dx.dtype)
    warps = WARPS if per <= 4 else WARPS // 2  # as in rows.cuh
    shared = STAGES * len(streamed) * per * warps * 32 * 16
    launch = load(file, entry, shared, SCALAR=scalar(dx.dtype), VEC=vec, PER=per)
    partial = new((min(*blocks(rows, warps), BLOCKS * processors()), len(sums) * width), rstd.dtype)
    scalars = (np.int32(rows), np.int32(width))
    # With the sums in registers each warp takes many rows, else a row.
    grid = (len(partial),) if per else blocks(rows, warps)
    launch(grid, (32, warps), (*streamed, rstd, weight, dx, partial, *scalars), shared_mem=shared)
    if not per:
        name, arguments = sums_alone
        alone = load(file, name, SCALAR=scalar(dx.dtype), VEC=1, PER=0)
        alone((*blocks(width, 32), len(partial)), (32, 8), (*arguments, partial, *scalars))
    add_columns(partial, *sums)
    return dx
