"""Launches layernorm.cu."""

from __future__ import annotations

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import layernorm
from tinyforge.ops.rows_cuda import launch_rows, norm_backward

FILE = "ops/layernorm.cu"


@layernorm.layernorm_fwd.on("cupy")
def layernorm_fwd(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    x = contiguous(x)
    y, xhat, rstd = new(x.shape, x.dtype), new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))
    launch_rows(FILE, "layernorm_fwd", (y, xhat, rstd, x, weight, bias), rstd.dtype.type(eps))
    return y, xhat, rstd


@layernorm.layernorm_bwd.on("cupy")
def layernorm_bwd(
    dweight: Array, dbias: Array | None, dy: Array, weight: Array, xhat: Array, rstd: Array
) -> Array:
    dy, xhat = contiguous(dy), contiguous(xhat)
    alone = ("layernorm_columns", (dy, xhat))
    return norm_backward((dweight, dbias), FILE, "layernorm_bwd", dy, weight, xhat, rstd, alone)
