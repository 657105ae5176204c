"""Launches softmax.wgsl."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import softmax
from tinyforge.ops.linear_webgpu import rows_of

FILE = "ops/softmax.wgsl"


@softmax.softmax_fwd.on("webgpu")
def softmax_fwd(x: Array) -> Array:
    y, rows = new(x, x.shape), rows_of(x)
    launch(FILE, "softmax_fwd", groups(len(rows), 1), {"out": y, "x": rows}, rows.shape)
    return y


@softmax.softmax_bwd.on("webgpu")
def softmax_bwd(dy: Array, y: Array) -> Array:
    dx, rows = new(y, y.shape), rows_of(y)
    launch(FILE, "softmax_bwd", groups(len(rows), 1), {"out": dx, "y": rows, "dy": contiguous(dy)}, rows.shape)
    return dx
