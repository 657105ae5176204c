"""Launches patches.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import patches

FILE = "ops/patches.cu"


@patches.patches_fwd.on("cupy")
def patches_fwd(images: Array, size: int, scale: float, shift: float, dtype: Any) -> Array:
    images = contiguous(images)
    batch, channels, height, width = images.shape
    y = new((batch, (height // size) * (width // size), channels * size * size), dtype)
    if y.size:
        given = "int" if images.dtype.kind == "i" else scalar(images.dtype)
        launch = load(FILE, "patches_fwd", SCALAR=scalar(dtype), IN=given)
        sizes = map(np.int32, (channels, height, width, size))
        numbers = map(wide(dtype).type, (scale, shift))
        launch(blocks(y.size), (256,), (y, images, np.uint32(y.size), *sizes, *numbers))
    return y


@patches.patches_bwd.on("cupy")
def patches_bwd(dy: Array, shape: tuple[int, ...], size: int, scale: float) -> Array:
    dy = contiguous(dy)
    dx = new(shape, dy.dtype)
    if dy.size:
        launch = load(FILE, "patches_bwd", SCALAR=scalar(dy.dtype), IN="int")
        sizes = map(np.int32, (*shape[1:], size))
        launch(blocks(dy.size), (256,), (dx, dy, np.uint32(dy.size), *sizes, wide(dy.dtype).type(scale)))
    return dx
