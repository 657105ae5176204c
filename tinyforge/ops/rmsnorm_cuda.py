"""Launches rmsnorm.cu."""

from __future__ import annotations

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, cupy_kernel, new
from tinyforge.op import Array
from tinyforge.ops.rows_cuda import launch_rows, norm_backward

FILE = "ops/rmsnorm.cu"


@cupy_kernel
def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    x = contiguous(x)
    y, rstd = new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    launch_rows(FILE, "rmsnorm_fwd", (x, weight, y), rstd, rstd.dtype.type(eps))
    return y, rstd


@cupy_kernel
def rmsnorm_bwd(dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    alone = ("rmsnorm_dweight", (dy, x, rstd))
    return norm_backward(FILE, "rmsnorm_bwd", (dy, x), rstd, weight, (dweight,), alone)
