"""Launches infer/cuda/dequantise.cu."""

from __future__ import annotations

import numpy as np

from tinyforge import quantised
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array, pointer


@quantised.dequantise.on("cupy")
def dequantise(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    codes, scales = contiguous(codes), contiguous(scales)
    to = new(codes.shape, dtype)
    if to.size:
        code = next(f.scalar for f in quantised.FORMATS.values() if f.dtype == codes.dtype)
        width = codes.shape[-1]
        vec = vector(width, to) if pointer(codes) % 16 == 0 else 1
        launch = load("infer/cuda/dequantise.cu", "dequantise", SCALAR=scalar(dtype), CODE=code, VEC=vec)
        launch(blocks(to.size // vec), (256,), (to, codes, scales, np.int64(to.size // vec), np.int32(width // vec)))
    return to
