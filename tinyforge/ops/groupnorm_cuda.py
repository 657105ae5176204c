"""Launches groupnorm.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import groupnorm

FILE = "ops/groupnorm.cu"


def _kernel(entry: str, x: Array, shift: Array | None, groups: int, silu: bool, *arrays: Array) -> Any:
    """For images like x; arrays: others that it accesses by vectors."""
    vec = vector(x.shape[-1] // groups, x, *(a for a in (*arrays, shift) if a is not None))
    return load(FILE, entry, SCALAR=scalar(x.dtype), VEC=vec, SILU=int(silu), SHIFT=int(shift is not None))


def _sizes(x: Array) -> tuple[np.int32, np.int32]:
    """Positions of an image, and channels."""
    return np.int32(x.size // (len(x) * x.shape[-1])), np.int32(x.shape[-1])


@groupnorm.groupnorm_fwd.on("cupy")
def groupnorm_fwd(
    x: Array, shift: Array | None, weight: Array, bias: Array, groups: int, eps: float, silu: bool
) -> tuple[Array, Array, Array]:
    x, shift = contiguous(x), None if shift is None else contiguous(shift)
    y, mean, rstd = new(x.shape, x.dtype), *(new((len(x), groups), wide(x.dtype)) for _ in range(2))
    if x.size:
        launch = _kernel("groupnorm_fwd", x, shift, groups, silu, y, weight, bias)
        launch(
            (groups, len(x)), (256,), (y, mean, rstd, x, or_null(shift), weight, bias, *_sizes(x), rstd.dtype.type(eps))
        )
    return y, mean, rstd


@groupnorm.groupnorm_bwd.on("cupy")
def groupnorm_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dy: Array,
    weight: Array,
    bias: Array,
    x: Array,
    shift: Array | None,
    mean: Array,
    rstd: Array,
    silu: bool,
) -> tuple[Array, Array | None]:
    dy, x, shift = contiguous(dy), contiguous(x), None if shift is None else contiguous(shift)
    dx, dshift = new(x.shape, x.dtype), None if shift is None else new(shift.shape, shift.dtype)
    if not x.size:
        return dx, dshift
    partial = new((len(x), 2 * x.shape[-1]), rstd.dtype)
    launch = _kernel("groupnorm_bwd", x, shift, mean.shape[1], silu, dx, dy, weight, bias)
    arrays = (dx, or_null(dshift), partial, dy, weight, bias, x, or_null(shift), mean, rstd)
    launch((mean.shape[1], len(x)), (256,), (*arrays, *_sizes(x)))
    # The kernel makes both sums; one that is not needed goes to scratch memory.
    if dweight is not None or dbias is not None:
        first, second = (new(weight.shape, rstd.dtype) if out is None else out for out in (dweight, dbias))
        add_columns(first, second, partial)
    return dx, dshift
