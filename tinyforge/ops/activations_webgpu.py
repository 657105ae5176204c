"""Launches activations.wgsl."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import activations

FILE = "ops/activations.wgsl"
RELU, SIGMOID, SILU, TANH = range(4)


def forward(x: Array, kind: int) -> Array:
    y = new(x, x.shape)
    launch(FILE, "forward", groups(x.size), {"out": y, "x": contiguous(x)}, (x.size,), {"KIND": kind})
    return y


def backward(dy: Array, saved: Array, kind: int) -> Array:
    dx = new(saved, saved.shape)
    arrays = {"out": dx, "x": contiguous(saved), "dy": contiguous(dy)}
    launch(FILE, "backward", groups(dx.size), arrays, (dx.size,), {"KIND": kind})
    return dx


@activations.relu_fwd.on("webgpu")
def relu_fwd(x: Array) -> Array:
    return forward(x, RELU)


@activations.relu_bwd.on("webgpu")
def relu_bwd(dy: Array, y: Array) -> Array:
    return backward(dy, y, RELU)


@activations.sigmoid_fwd.on("webgpu")
def sigmoid_fwd(x: Array) -> Array:
    return forward(x, SIGMOID)


@activations.sigmoid_bwd.on("webgpu")
def sigmoid_bwd(dy: Array, y: Array) -> Array:
    return backward(dy, y, SIGMOID)


@activations.silu_fwd.on("webgpu")
def silu_fwd(x: Array) -> Array:
    return forward(x, SILU)


@activations.silu_bwd.on("webgpu")
def silu_bwd(dy: Array, x: Array) -> Array:
    return backward(dy, x, SILU)
