"""Launches the dequantisation of infer/decode.wgsl for int8 in rows of whole words; the rest runs on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge import quantised
from tinyforge.backends.webgpu_array import WebArray, contiguous, empty, groups, launch, told_on_host
from tinyforge.kernel import Array

on_host = told_on_host(quantised.dequantise.body)


@quantised.dequantise.on("webgpu")
def dequantise(codes: Any, scales: Array, dtype: np.dtype) -> Any:
    columns = codes.shape[-1]
    if codes.dtype != np.int8 or columns % 4:
        return on_host(codes, scales, dtype)
    codes, rows = contiguous(codes), codes.size // max(columns, 1)
    y = empty(codes.block.device, codes.shape, dtype)
    words = WebArray(codes.block, (codes.size // 4,), np.uint32, codes.at // 4)
    arrays = {"y": y, "words": words, "scales": contiguous(scales.astype(dtype, copy=False)), "ids": None}
    numbers = (0.0, 0, 0, columns, rows, 0, 0, 0, 0)
    launch("infer/decode.wgsl", "dequantise", groups(words.size, 64), arrays, numbers, aliases={"word": "u32"})
    return y
