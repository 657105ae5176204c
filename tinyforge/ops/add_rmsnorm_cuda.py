"""Launches the kernels of rmsnorm.cu that add the residual."""

from __future__ import annotations

import cupy

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, cupy_kernel, new
from tinyforge.op import Array
from tinyforge.ops.rmsnorm_cuda import FILE, rmsnorm_bwd
from tinyforge.ops.rows_cuda import launch_rows, norm_backward


@cupy_kernel
def add_rmsnorm_fwd(residual: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array, Array]:
    residual, delta = contiguous(residual), contiguous(delta)
    x, y, rstd = new(delta.shape, delta.dtype), new(delta.shape, delta.dtype), new(delta.shape[:-1], wide(delta.dtype))
    launch_rows(FILE, "add_rmsnorm_fwd", (residual, delta, weight, x, y), rstd, rstd.dtype.type(eps))
    return x, y, rstd


@cupy_kernel
def add_rmsnorm_bwd(dx: Array, dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    if not isinstance(dx, cupy.ndarray):  # the number 0: at the end of a stream nothing else reads x
        return rmsnorm_bwd(dy, x, rstd, weight, dweight)
    dx, dy, x = contiguous(dx), contiguous(dy), contiguous(x)
    alone = ("rmsnorm_dweight", (dy, x, rstd))
    return norm_backward(FILE, "add_rmsnorm_bwd", (dx, dy, x), rstd, weight, (dweight,), alone)
