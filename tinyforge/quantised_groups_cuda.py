"""Launches infer/cuda/dequantise_int4.cu and dequantise_nf4.cu."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np

from tinyforge import quantised_groups
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar
from tinyforge.kernel import Array


def _launch(name: str, codes: Array, scales: Array, dtype: np.dtype, *more: Any, **macros: Any) -> Array:
    codes, scales = contiguous(codes), contiguous(scales)
    to = new((*codes.shape[:-1], 2 * codes.shape[-1]), dtype)
    if to.size:
        launch = load(f"infer/cuda/{name}.cu", name, SCALAR=scalar(dtype), **macros)
        launch(blocks(to.size // 8), (256,), (to, codes, scales, np.int64(to.size // 8), *more))
    return to


@quantised_groups.dequantise_groups.on("cupy")
def dequantise_groups(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    return _launch("dequantise_int4", codes, scales, dtype)


@quantised_groups.dequantise_nf4.on("cupy")
def dequantise_nf4(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    return _launch("dequantise_nf4", codes, scales, dtype, scales, scales, scales, np.int64(0), DOUBLE=0)


@quantised_groups.dequantise_nf4_double.on("cupy")
def dequantise_nf4_double(
    codes: Array, scales: Array, tops: Array, offset: Array, start: int, dtype: np.dtype
) -> Array:
    more = _numbers(cupy.cuda.runtime.getDevice()), tops, offset, np.int64(start)
    return _launch("dequantise_nf4", codes, scales, dtype, *more, DOUBLE=1)


@cache
def _numbers(device: int) -> Array:
    """Those of 8 bits, on a device."""
    return cupy.asarray(quantised_groups.DYNAMIC)
