"""Launches the kernels of rmsnorm.cu that quantise what they write."""

from __future__ import annotations

from typing import Any

from tinyforge.backends import wide
from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import fp8_rmsnorm
from tinyforge.ops.fp8 import BYTE
from tinyforge.ops.rmsnorm_cuda import FILE
from tinyforge.ops.rows_cuda import launch_rows, norm_backward

MACROS: dict[str, Any] = {"arch": "sm_90a", "FP8_ROWS": 1}


@fp8_rmsnorm.rmsnorm_scaled_fwd.on("cupy")
def rmsnorm_scaled_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array, Array, Array]:
    x = contiguous(x)
    kind = wide(x.dtype)
    y, codes, scale, rstd = new(x.shape, x.dtype), new(x.shape, BYTE), *(new(x.shape[:-1], kind) for _ in range(2))
    launch_rows(FILE, "rmsnorm_scaled_fwd", (y, codes, scale, rstd, x, weight), kind.type(eps), **MACROS)
    return y, codes, scale, rstd


@fp8_rmsnorm.rmsnorm_scaled_bwd.on("cupy")
def rmsnorm_scaled_bwd(
    dweight: Array | None, dy: Array, weight: Array, y: Array, rstd: Array, residual: Array | None
) -> tuple[Array, Array, Array]:
    dy, y = contiguous(dy), contiguous(y)
    alone = ("rmsnorm_dweight", (dy, y, weight))
    codes, scale = new(y.shape, BYTE), new(y.shape[:-1], rstd.dtype)
    further = (codes, scale)
    dx = norm_backward(
        (dweight,), FILE, "rmsnorm_scaled_bwd", dy, weight, y, (rstd,), alone, residual, further, **MACROS
    )
    return dx, codes, scale
