"""Launches layernorm.cu."""

from __future__ import annotations

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, cupy_kernel, new
from tinyforge.op import Array
from tinyforge.ops.rows_cuda import launch_rows, norm_backward

FILE = "ops/layernorm.cu"


@cupy_kernel
def layernorm_fwd(x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
    x = contiguous(x)
    y, xhat, rstd = new(x.shape, x.dtype), new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    launch_rows(FILE, "layernorm_fwd", (x, weight, bias, y, xhat), rstd, rstd.dtype.type(eps))
    return y, xhat, rstd


@cupy_kernel
def layernorm_bwd(dy: Array, xhat: Array, rstd: Array, weight: Array, dweight: Array, dbias: Array) -> Array:
    dy, xhat = contiguous(dy), contiguous(xhat)
    alone = ("layernorm_columns", (dy, xhat))
    return norm_backward(FILE, "layernorm_bwd", (dy, xhat), rstd, weight, (dweight, dbias), alone)
