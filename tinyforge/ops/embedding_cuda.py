"""Launches embedding.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, cupy_kernel, new, scalar, vector
from tinyforge.op import Array

FILE = "ops/embedding.cu"


@cupy_kernel
def embedding_fwd(ids: Array, weight: Array) -> Array:
    ids, width = contiguous(ids), weight.shape[-1]
    y = new((*ids.shape, width), weight.dtype)
    if y.size:
        vec = vector(width, weight, y)
        launch = load(FILE, "embedding_fwd", SCALAR=scalar(weight.dtype), VEC=vec)
        launch(blocks(y.size // vec), (256,), (ids, weight, y, np.uint32(y.size // vec), np.uint32(width // vec)))
    return y


@cupy_kernel
def embedding_bwd(dy: Array, ids: Array, dweight: Array) -> None:
    dy, ids = contiguous(dy), contiguous(ids)
    rows, width = dweight.shape
    if dy.size:
        if ids.data.ptr % 16:
            ids = ids.copy()  # ids are read four at a time
        launch = load(FILE, "embedding_bwd", SCALAR=scalar(dy.dtype), VEC=vector(width, dy))
        launch((rows,), (32, 8), (dy, ids, dweight, np.int32(ids.size), np.int32(width)))
