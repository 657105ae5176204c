"""Addition by the arrays' own arithmetic, backends/elementwise.wgsl."""

from __future__ import annotations

from tinyforge.kernel import Array
from tinyforge.ops import add


@add.add_fwd.on("webgpu")
def add_fwd(a: Array, b: Array) -> Array:
    return a + b
