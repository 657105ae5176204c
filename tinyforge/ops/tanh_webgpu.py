"""Launches activations.wgsl."""

from __future__ import annotations

from tinyforge.kernel import Array
from tinyforge.ops import tanh
from tinyforge.ops.activations_webgpu import TANH, backward, forward


@tanh.tanh_fwd.on("webgpu")
def tanh_fwd(x: Array) -> Array:
    return forward(x, TANH)


@tanh.tanh_bwd.on("webgpu")
def tanh_bwd(dy: Array, y: Array) -> Array:
    return backward(dy, y, TANH)
