"""Launches the kernels of rmsnorm.cu that mix first; where rows do not fit in shared memory, one pass each."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import (
    add_columns,
    blocks,
    contiguous,
    free_processors,
    new,
    scalar,
    shared_limit,
    vector,
)
from tinyforge.kernel import Array
from tinyforge.ops import mix_rmsnorm
from tinyforge.ops.mix_cuda import mix_bwd
from tinyforge.ops.rmsnorm_cuda import FILE, gain_macro, rmsnorm_bwd
from tinyforge.ops.rows_cuda import STAGES, launch_rows, rows_and_width, vectors_a_lane, warps_of

ARRAYS = 6
"""That backward streams through shared memory."""


@mix_rmsnorm.mix_rmsnorm_fwd.on("cupy")
def mix_rmsnorm_fwd(
    x: Array, first: Array, weight: Array, a: Array, b: Array, eps: float, plus_one: bool = False
) -> tuple[Array, Array, Array]:
    x, first = contiguous(x), contiguous(first)
    mixed, y, rstd = new(x.shape, x.dtype), new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    arrays = (mixed, y, rstd, x, first, weight, a, b)
    launch_rows(FILE, "mix_rmsnorm_fwd", arrays, rstd.dtype.type(eps), **gain_macro(plus_one))
    return mixed, y, rstd


@mix_rmsnorm.mix_rmsnorm_bwd.on("cupy")
def mix_rmsnorm_bwd(
    dweight: Array | None,
    da: Array | None,
    db: Array | None,
    dfirst: Array | None,
    dy: Array,
    residual: Array | None,
    weight: Array,
    y: Array,
    rstd: Array,
    x: Array,
    first: Array,
    a: Array,
    b: Array,
    plus_one: bool = False,
) -> tuple[Array, Array]:
    dy, y, x, first = map(contiguous, (dy, y, x, first))
    rows, width = rows_and_width(y)
    vec = vector(width, dy, weight, y, x, first, *(g for g in (residual, dfirst) if g is not None))
    per = vectors_a_lane(FILE, width, vec, y.dtype)
    warps = warps_of(per)
    shared = STAGES * ARRAYS * per * warps * 32 * 16
    if residual is None or not rows * per or shared > shared_limit():
        between = rmsnorm_bwd(dweight, dy, weight, y, rstd, residual, plus_one)
        return mix_bwd(da, db, dfirst, between, x, first, a, b)
    dx, sums = new(y.shape, y.dtype), new(y.shape, y.dtype) if dfirst is None else dfirst
    partial = new((min(*blocks(rows, warps), free_processors()), width + 2), rstd.dtype)
    launch = load(FILE, "mix_rmsnorm_bwd", shared, SCALAR=scalar(y.dtype), VEC=vec, PER=per, **gain_macro(plus_one))
    arrays = (dx, sums, partial, dy, weight, y, rstd, contiguous(residual), x, first, a, b)
    numbers = np.int32(rows), np.int32(width), np.uint32(dfirst is not None)
    launch((len(partial),), (32, warps), (*arrays, *numbers), shared_mem=shared)
    if dweight is not None or da is not None or db is not None:
        # A frozen one's sum goes nowhere.
        weights, of_first = (new(p.shape, rstd.dtype) if d is None else d for d, p in ((dweight, weight), (db, b)))
        add_columns(weights, da, partial, of_first)
    return dx, sums
