"""Launches losses.cu."""

from __future__ import annotations

from functools import partial

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import losses

FILE = "ops/losses.cu"


def forward(entry: str, *arrays: Array) -> Array:
    x, target = map(contiguous, arrays)
    y = new(x.shape[:1], wide(x.dtype))
    if y.size:
        launch = load(FILE, entry, SCALAR=scalar(x.dtype))
        launch((len(x),), (256,), (y, x, target, np.int32(x.size // len(x))))
    return y


def backward(entry: str, *arrays: Array) -> tuple[Array, Array]:
    dy, x, target = map(contiguous, arrays)
    dx, dtarget = new(x.shape, x.dtype), new(x.shape, x.dtype)
    if x.size:
        launch = load(FILE, entry, SCALAR=scalar(x.dtype))
        launch(blocks(x.size), (256,), (dx, dtarget, dy, x, target, np.uint32(x.size), np.uint32(x.size // len(x))))
    return dx, dtarget


losses.mse_fwd.on("cupy")(partial(forward, "mse_fwd"))
losses.mse_bwd.on("cupy")(partial(backward, "mse_bwd"))
losses.binary_cross_entropy_fwd.on("cupy")(partial(forward, "binary_cross_entropy_fwd"))
losses.binary_cross_entropy_bwd.on("cupy")(partial(backward, "binary_cross_entropy_bwd"))
