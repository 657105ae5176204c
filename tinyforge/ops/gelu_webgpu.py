"""Launches gelu.wgsl; the formula with erf runs on the host."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new, on_host
from tinyforge.kernel import Array
from tinyforge.ops import gelu
from tinyforge.ops.linear_webgpu import linear_bwd_bias

FILE = "ops/gelu.wgsl"


@gelu.gelu_fwd.on("webgpu")
def gelu_fwd(x: Array, bias: Array | None, approximate: str) -> Array:
    if approximate == "erf":
        return on_host(gelu.gelu_fwd.body)(x, bias, approximate)
    y = new(x, x.shape)
    arrays = {"y": y, "x": contiguous(x), "bias": bias}
    launch(FILE, "gelu_fwd", groups(x.size), arrays, (x.size, x.shape[-1]), {"BIAS": bias is not None})
    return y


@gelu.gelu_bwd.on("webgpu")
def gelu_bwd(
    hidden: Array | None, dbias: Array | None, dy: Array, x: Array, bias: Array | None, approximate: str
) -> Array:
    if approximate == "erf":
        return on_host(gelu.gelu_bwd.body)(hidden, dbias, dy, x, bias, approximate)
    dx = new(x, x.shape)
    arrays = {"dx": dx, "y": hidden, "x": contiguous(x), "dy": contiguous(dy), "bias": bias}
    flags = {"BIAS": bias is not None, "HIDDEN": hidden is not None}
    launch(FILE, "gelu_bwd", groups(x.size), arrays, (x.size, x.shape[-1]), flags)
    if dbias is not None:
        linear_bwd_bias(dbias, dx)
    return dx
