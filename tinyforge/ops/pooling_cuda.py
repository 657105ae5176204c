"""Launches pooling.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import pooling
from tinyforge.ops.pooling import Shape, pooled_shape

FILE = "ops/pooling.cu"


def _launch(entry: str, out: Array, arrays: tuple[Array, ...], sizes: tuple[int, ...], *more: Any) -> None:
    """A thread for each vector of channels of `out`. The kernel's arguments: out, more, arrays, the vectors, the
    vectors of a position, sizes."""
    if out.size:
        channels = out.shape[-1]
        vec = vector(channels, out, *(a for a in arrays if a.dtype == out.dtype))
        launch = load(FILE, entry, SCALAR=scalar(out.dtype), VEC=vec)
        numbers = (np.uint32(out.size // vec), *map(np.int32, (channels // vec, *sizes)))
        launch(blocks(out.size // vec), (256,), (out, *more, *arrays, *numbers))


@pooling.average_pool_fwd.on("cupy")
def average_pool_fwd(x: Array, size: int, stride: int) -> Array:
    y = new(pooled_shape(x.shape, size, stride), x.dtype)
    _launch("average_pool_fwd", y, (contiguous(x),), (*x.shape[1:3], *y.shape[1:3], size, stride))
    return y


@pooling.average_pool_bwd.on("cupy")
def average_pool_bwd(dy: Array, shape: Shape, size: int, stride: int) -> Array:
    dx = new(shape, dy.dtype)
    _launch("average_pool_bwd", dx, (contiguous(dy),), (*shape[1:3], *dy.shape[1:3], size, stride))
    return dx


@pooling.max_pool_fwd.on("cupy")
def max_pool_fwd(x: Array, size: int, stride: int) -> tuple[Array, Array]:
    y = new(pooled_shape(x.shape, size, stride), x.dtype)
    where = new(y.shape, np.dtype(np.uint8))
    _launch("max_pool_fwd", y, (contiguous(x),), (*x.shape[1:3], *y.shape[1:3], size, stride), where)
    return y, where


@pooling.max_pool_bwd.on("cupy")
def max_pool_bwd(dy: Array, where: Array, shape: Shape, size: int, stride: int) -> Array:
    dx = new(shape, dy.dtype)
    _launch("max_pool_bwd", dx, (contiguous(dy), contiguous(where)), (*shape[1:3], *dy.shape[1:3], size, stride))
    return dx


@pooling.upsample_fwd.on("cupy")
def upsample_fwd(x: Array, factor: int) -> Array:
    batch, height, width, channels = x.shape
    y = new((batch, height * factor, width * factor, channels), x.dtype)
    _launch("upsample_fwd", y, (contiguous(x),), (height, width, factor))
    return y


@pooling.upsample_bwd.on("cupy")
def upsample_bwd(dy: Array, factor: int) -> Array:
    batch, height, width, channels = dy.shape
    dx = new((batch, height // factor, width // factor, channels), dy.dtype)
    _launch("upsample_bwd", dx, (contiguous(dy),), (height // factor, width // factor, factor))
    return dx
