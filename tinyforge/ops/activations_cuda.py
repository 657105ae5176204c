"""Launches activations.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import activations
from tinyforge.ops.rows_cuda import launch_elements

FILE = "ops/activations.cu"


def _launched(entry: str, *arrays: Array) -> Array:
    out = new(arrays[0].shape, arrays[0].dtype)
    launch_elements(FILE, entry, out, *map(contiguous, arrays))
    return out


@activations.relu_fwd.on("cupy")
def relu_fwd(x: Array) -> Array:
    return _launched("relu_fwd", x)


@activations.relu_bwd.on("cupy")
def relu_bwd(dy: Array, y: Array) -> Array:
    return _launched("relu_bwd", dy, y)


@activations.relu2_fwd.on("cupy")
def relu2_fwd(x: Array) -> Array:
    return _launched("relu2_fwd", x)


@activations.relu2_bwd.on("cupy")
def relu2_bwd(dy: Array, x: Array) -> Array:
    return _launched("relu2_bwd", dy, x)


@activations.sigmoid_fwd.on("cupy")
def sigmoid_fwd(x: Array) -> Array:
    return _launched("sigmoid_fwd", x)


@activations.sigmoid_bwd.on("cupy")
def sigmoid_bwd(dy: Array, y: Array) -> Array:
    return _launched("sigmoid_bwd", dy, y)


@activations.silu_fwd.on("cupy")
def silu_fwd(x: Array) -> Array:
    return _launched("silu_fwd", x)


@activations.silu_bwd.on("cupy")
def silu_bwd(dy: Array, x: Array) -> Array:
    return _launched("silu_bwd", dy, x)
