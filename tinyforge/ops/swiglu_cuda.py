"""Launches swiglu.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import swiglu

FILE = "ops/swiglu.cu"


@swiglu.swiglu_fwd.on("cupy")
def swiglu_fwd(gu: Array) -> Array:
    gu = contiguous(gu)
    half = gu.shape[-1] // 2
    y = new((*gu.shape[:-1], half), gu.dtype)
    if y.size:
        vec = vector(half, gu, y)
        launch = load(FILE, "swiglu_fwd", SCALAR=scalar(gu.dtype), VEC=vec)
        launch(blocks(y.size // vec), (256,), (y, gu, np.uint32(y.size // vec), np.uint32(half // vec)))
    return y


@swiglu.swiglu_bwd.on("cupy")
def swiglu_bwd(hidden: Array | None, dy: Array, gu: Array) -> Array:
    dy, gu = contiguous(dy), contiguous(gu)
    half = gu.shape[-1] // 2
    dgu = new(gu.shape, gu.dtype)
    if dy.size:
        vec = vector(half, gu, dy, dgu, *(() if hidden is None else (hidden,)))
        launch = load(FILE, "swiglu_bwd", SCALAR=scalar(gu.dtype), VEC=vec)
        counts = (np.uint32(dy.size // vec), np.uint32(half // vec))
        launch(blocks(dy.size // vec), (256,), (dgu, or_null(hidden), dy, gu, *counts))
    return dgu
