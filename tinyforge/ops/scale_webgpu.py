"""Scaling by the arrays' own arithmetic, backends/elementwise.wgsl."""

from __future__ import annotations

from tinyforge.kernel import Array
from tinyforge.ops import scale


@scale.scale_fwd.on("webgpu")
def scale_fwd(x: Array, factor: float) -> Array:
    return x * float(factor)
