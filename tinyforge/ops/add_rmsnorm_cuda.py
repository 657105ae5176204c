"""Launches the kernel of rmsnorm.cu that adds the residual."""

from __future__ import annotations

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import add_rmsnorm
from tinyforge.ops.rmsnorm_cuda import FILE, gain_macro
from tinyforge.ops.rows_cuda import launch_rows


@add_rmsnorm.add_rmsnorm_fwd.on("cupy")
def add_rmsnorm_fwd(
    residual: Array, delta: Array, weight: Array, eps: float, plus_one: bool = False
) -> tuple[Array, Array, Array]:
    residual, delta = contiguous(residual), contiguous(delta)
    x, y, rstd = new(delta.shape, delta.dtype), new(delta.shape, delta.dtype), new(delta.shape[:-1], wide(delta.dtype))
    launch_rows(
        FILE, "add_rmsnorm_fwd", (x, y, rstd, residual, delta, weight), rstd.dtype.type(eps), **gain_macro(plus_one)
    )
    return x, y, rstd
