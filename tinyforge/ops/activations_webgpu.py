"""Launches activations.wgsl."""

from __future__ import annotations

from functools import partial

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import activations as op

FILE = "ops/activations.wgsl"
FORWARD = op.relu_fwd, op.sigmoid_fwd, op.silu_fwd, op.tanh_fwd
BACKWARD = op.relu_bwd, op.sigmoid_bwd, op.silu_bwd, op.tanh_bwd


def forward(kind: int, *arrays: Array) -> Array:
    (x,) = arrays
    y = new(x, x.shape)
    launch(FILE, "forward", groups(x.size), {"out": y, "x": contiguous(x)}, (x.size,), {"KIND": kind})
    return y


def backward(kind: int, *arrays: Array) -> Array:
    dy, saved = arrays
    dx = new(saved, saved.shape)
    bound = {"out": dx, "x": contiguous(saved), "dy": contiguous(dy)}
    launch(FILE, "backward", groups(dx.size), bound, (dx.size,), {"KIND": kind})
    return dx


for number in range(4):
    FORWARD[number].on("webgpu")(partial(forward, number))
    BACKWARD[number].on("webgpu")(partial(backward, number))
