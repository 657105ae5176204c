"""Launches softmax.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.cupy_backend import blocks, contiguous, cupy_kernel, new
from tinyforge.op import Array
from tinyforge.ops.rmsnorm_cuda import ROWS, row_kernel

FILE = "ops/softmax.cu"


@cupy_kernel
def softmax_fwd(x: Array) -> Array:
    x = contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    y = new(x.shape, x.dtype)
    if rows:
        launch, _ = row_kernel("softmax_fwd", width, x, y, file=FILE)
        launch(blocks(rows, ROWS), (32, ROWS), (x, y, np.int32(rows), np.int32(width)))
    return y


@cupy_kernel
def softmax_bwd(dy: Array, y: Array) -> Array:
    dy, y = contiguous(dy), contiguous(y)
    rows, width = y.size // y.shape[-1], y.shape[-1]
    dx = new(y.shape, y.dtype)
    if rows:
        launch, _ = row_kernel("softmax_bwd", width, y, dy, dx, file=FILE)
        launch(blocks(rows, ROWS), (32, ROWS), (dy, y, dx, np.int32(rows), np.int32(width)))
    return dx
