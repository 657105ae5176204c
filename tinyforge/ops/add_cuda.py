"""Launches the sum of fork.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import add
from tinyforge.ops.rows_cuda import launch_elements


@add.add_fwd.on("cupy")
def add_fwd(a: Array, b: Array) -> Array:
    y = new(a.shape, a.dtype)
    launch_elements("ops/fork.cu", "fork_bwd", y, contiguous(a), contiguous(b))
    return y
