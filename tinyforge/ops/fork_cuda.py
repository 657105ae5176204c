"""Launches fork.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import fork
from tinyforge.ops.rows_cuda import launch_elements


@fork.fork_bwd.on("cupy")
def fork_bwd(first: Array, second: Array) -> Array:
    dx = new(first.shape, first.dtype)
    return launch_elements("ops/fork.cu", "fork_bwd", dx, contiguous(first), contiguous(second))
