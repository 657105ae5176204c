"""Launches infer/cuda/dequantise_nf4.cu."""

from __future__ import annotations

import numpy as np

from tinyforge import quantised_groups
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar
from tinyforge.kernel import Array


@quantised_groups.dequantise_nf4.on("cupy")
def dequantise_nf4(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    codes, scales = contiguous(codes), contiguous(scales)
    to = new((*codes.shape[:-1], 2 * codes.shape[-1]), dtype)
    if to.size:
        launch = load("infer/cuda/dequantise_nf4.cu", "dequantise_nf4", SCALAR=scalar(dtype))
        launch(blocks(to.size // 8), (256,), (to, codes, scales, np.int64(to.size // 8)))
    return to
