"""Launches rmsnorm.cu."""

from __future__ import annotations

from typing import Any

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import rmsnorm
from tinyforge.ops.rows_cuda import launch_rows, norm_backward

FILE = "ops/rmsnorm.cu"


def gain_macro(plus_one: bool) -> dict[str, Any]:
    """The macro of a gain 1 + w."""
    return {"PLUS_ONE": 1} if plus_one else {}


@rmsnorm.rmsnorm_fwd.on("cupy")
def rmsnorm_fwd(x: Array, weight: Array, eps: float, plus_one: bool = False) -> tuple[Array, Array]:
    x = contiguous(x)
    y, rstd = new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    launch_rows(FILE, "rmsnorm_fwd", (y, rstd, x, weight), rstd.dtype.type(eps), **gain_macro(plus_one))
    return y, rstd


@rmsnorm.rmsnorm_bwd.on("cupy")
def rmsnorm_bwd(
    dweight: Array | None,
    dy: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    residual: Array | None,
    plus_one: bool = False,
) -> Array:
    dy, y = contiguous(dy), contiguous(y)
    alone = ("rmsnorm_dweight", (dy, y, weight))
    more = gain_macro(plus_one)
    return norm_backward((dweight,), FILE, "rmsnorm_bwd", dy, weight, y, (rstd,), alone, residual, **more)
