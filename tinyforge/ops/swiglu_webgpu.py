"""Launches swiglu.wgsl."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import swiglu

FILE = "ops/swiglu.wgsl"


@swiglu.swiglu_fwd.on("webgpu")
def swiglu_fwd(gu: Array) -> Array:
    half = gu.shape[-1] // 2
    y = new(gu, (*gu.shape[:-1], half))
    launch(FILE, "swiglu_fwd", groups(y.size), {"y": y, "gu": contiguous(gu)}, (y.size, half))
    return y


@swiglu.swiglu_bwd.on("webgpu")
def swiglu_bwd(hidden: Array | None, dy: Array, gu: Array) -> Array:
    dgu = new(gu, gu.shape)
    arrays = {"dgu": dgu, "y": hidden, "dy": contiguous(dy), "gu": contiguous(gu)}
    launch(FILE, "swiglu_bwd", groups(dy.size), arrays, (dy.size, gu.shape[-1] // 2), {"HIDDEN": hidden is not None})
    return dgu
