"""The sum of two gradients by the arrays' own arithmetic, backends/elementwise.wgsl."""

from __future__ import annotations

from tinyforge.kernel import Array
from tinyforge.ops import fork


@fork.fork_bwd.on("webgpu")
def fork_bwd(first: Array, second: Array) -> Array:
    return first + second
