"""Launches rope.wgsl."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import rope as op
from tinyforge.ops.linear_webgpu import linear_fwd


@op.rope.on("webgpu")
def rope(out: Array | None, x: Array, cos: Array, sin: Array, rotated: int) -> Array:
    same = out is x
    out = new(x, x.shape) if out is None else out
    heads, half = x.shape[2], x.shape[3] // 2
    sizes = (x.size // 2, heads, half, rotated, x.shape[1])
    arrays = {"y": out, "x": None if same else contiguous(x), "cosines": cos, "sines": sin}
    launch("ops/rope.wgsl", "rope", groups(x.size // 2), arrays, sizes, {"IN_PLACE": same})
    return out


@op.linear_rope_fwd.on("webgpu")
def linear_rope_fwd(x: Array, weight: Array, cos: Array, sin: Array, rotated: int) -> Array:
    y = linear_fwd(x, weight, None).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return rope(y, y, cos, sin, rotated)
