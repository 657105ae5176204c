"""Launches losses.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import losses

FILE = "ops/losses.cu"


def _forward(entry: str, x: Array, target: Array) -> Array:
    x, target = contiguous(x), contiguous(target)
    y = new(x.shape[:1], wide(x.dtype))
    if y.size:
        launch = load(FILE, entry, SCALAR=scalar(x.dtype))
        launch((len(x),), (256,), (y, x, target, np.int32(x.size // len(x))))
    return y


def _backward(entry: str, dy: Array, x: Array, target: Array) -> tuple[Array, Array]:
    dy, x, target = contiguous(dy), contiguous(x), contiguous(target)
    dx, dtarget = new(x.shape, x.dtype), new(x.shape, x.dtype)
    if x.size:
        launch = load(FILE, entry, SCALAR=scalar(x.dtype))
        launch(blocks(x.size), (256,), (dx, dtarget, dy, x, target, np.uint32(x.size), np.uint32(x.size // len(x))))
    return dx, dtarget


@losses.mse_fwd.on("cupy")
def mse_fwd(x: Array, target: Array) -> Array:
    return _forward("mse_fwd", x, target)


@losses.mse_bwd.on("cupy")
def mse_bwd(dy: Array, x: Array, target: Array) -> tuple[Array, Array]:
    return _backward("mse_bwd", dy, x, target)


@losses.binary_cross_entropy_fwd.on("cupy")
def binary_cross_entropy_fwd(x: Array, target: Array) -> Array:
    return _forward("binary_cross_entropy_fwd", x, target)


@losses.binary_cross_entropy_bwd.on("cupy")
def binary_cross_entropy_bwd(dy: Array, x: Array, target: Array) -> tuple[Array, Array]:
    return _backward("binary_cross_entropy_bwd", dy, x, target)
