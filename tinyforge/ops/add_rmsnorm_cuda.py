"""Launches the kernels of rmsnorm.cu that add the residual."""

from __future__ import annotations

import cupy
import numpy as np

from tinyforge.backends.cupy_backend import blocks, contiguous, cupy_kernel, new, wide
from tinyforge.op import Array
from tinyforge.ops.rmsnorm_cuda import ROWS, norm_backward, row_kernel


@cupy_kernel
def add_rmsnorm_fwd(residual: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array, Array]:
    residual, delta = contiguous(residual), contiguous(delta)
    rows, width = delta.size // delta.shape[-1], delta.shape[-1]
    x, y, rstd = new(delta.shape, delta.dtype), new(delta.shape, delta.dtype), new(delta.shape[:-1], wide(delta.dtype))
    if rows:
        launch, _ = row_kernel("add_rmsnorm_fwd", width, residual, delta, weight, x, y)
        scalars = (np.int32(rows), np.int32(width), rstd.dtype.type(eps))
        launch(blocks(rows, ROWS), (32, ROWS), (residual, delta, weight, x, y, rstd, *scalars))
    return x, y, rstd


@cupy_kernel
def add_rmsnorm_bwd(dx: Array, dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    # At the end of a stream nothing else reads x: its own gradient is the number 0.
    return norm_backward(dx if isinstance(dx, cupy.ndarray) else None, dy, x, rstd, weight, dweight)
