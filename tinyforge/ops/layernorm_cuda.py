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
    y, mean, rstd = new(x.shape, x.dtype), *(new(x.shape[:-1], wide(x.dtype)) for _ in range(2))
    launch_rows(FILE, "layernorm_fwd", (y, mean, rstd, x, weight, bias), rstd.dtype.type(eps))
    return y, mean, rstd


@layernorm.layernorm_bwd.on("cupy")
def layernorm_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dy: Array,
    weight: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    residual: Array | None,
) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    # The kernel computes both sums; one that is not needed goes to scratch memory.
    if dweight is not None or dbias is not None:
        dweight, dbias = (new(weight.shape, rstd.dtype) if sums is None else sums for sums in (dweight, dbias))
    alone, sums = ("layernorm_columns", (dy, x, mean, rstd)), (dweight, dbias)
    return norm_backward(sums, FILE, "layernorm_bwd", dy, weight, x, (mean, rstd), alone, residual)
