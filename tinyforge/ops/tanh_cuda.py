"""Launches tanh.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import tanh
from tinyforge.ops.rows_cuda import launch_elements

FILE = "ops/tanh.cu"


@tanh.tanh_fwd.on("cupy")
def tanh_fwd(x: Array) -> Array:
    y = new(x.shape, x.dtype)
    launch_elements(FILE, "tanh_fwd", y, contiguous(x))
    return y


@tanh.tanh_bwd.on("cupy")
def tanh_bwd(dy: Array, y: Array) -> Array:
    dx = new(y.shape, y.dtype)
    launch_elements(FILE, "tanh_bwd", dx, contiguous(dy), contiguous(y))
    return dx
