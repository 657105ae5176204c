"""Launches gelu.wgsl; the formula with erf runs on the host."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new, on_host
from tinyforge.kernel import Array
from tinyforge.ops import geglu
from tinyforge.ops.gelu_webgpu import FILE


@geglu.geglu_fwd.on("webgpu")
def geglu_fwd(gu: Array, approximate: str) -> Array:
    if approximate == "erf":
        found: Array = on_host(geglu.geglu_fwd.body)(gu, approximate)
        return found
    y = new(gu, (*gu.shape[:-1], gu.shape[-1] // 2))
    launch(FILE, "geglu_fwd", groups(y.size), {"y": y, "x": contiguous(gu)}, (y.size, y.shape[-1]))
    return y


@geglu.geglu_bwd.on("webgpu")
def geglu_bwd(dy: Array, gu: Array, approximate: str) -> Array:
    if approximate == "erf":
        found: Array = on_host(geglu.geglu_bwd.body)(dy, gu, approximate)
        return found
    dgu = new(gu, gu.shape)
    arrays = {"dx": dgu, "x": contiguous(gu), "dy": contiguous(dy)}
    launch(FILE, "geglu_bwd", groups(dy.size), arrays, (dy.size, dy.shape[-1]))
    return dgu
