"""Launches softmax.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import softmax
from tinyforge.ops.rows_cuda import launch_rows

FILE = "ops/softmax.cu"


@softmax.softmax_fwd.on("cupy")
def softmax_fwd(x: Array) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    launch_rows(FILE, "softmax_fwd", (y, x))
    return y


@softmax.softmax_bwd.on("cupy")
def softmax_bwd(dy: Array, y: Array) -> Array:
    dy, y = contiguous(dy), contiguous(y)
    dx = new(y.shape, y.dtype)
    launch_rows(FILE, "softmax_bwd", (dx, dy, y))
    return dx
