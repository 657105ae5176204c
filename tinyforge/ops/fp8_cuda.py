"""Launches fp8.cu."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import cupy
import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cublas import FLOAT32
from tinyforge.backends.cupy_backend import contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import fp8
from tinyforge.ops.rows_cuda import launch_rows

FILE = "ops/fp8.cu"
PARTS, SIDE = (constant(FILE, name) for name in ("PARTS", "SIDE"))


@fp8.quantise_rows.on("cupy")
def quantise_rows(x: Array) -> tuple[Array, Array]:
    x = contiguous(x)
    bits, scale = new(x.shape, fp8.BYTE), new(x.shape[:-1], wide(x.dtype))
    launch_rows(FILE, "quantise_rows", (bits, scale, x), like=x, arch="sm_90a")
    return bits, scale


@fp8.quantise_weights.on("cupy")
def quantise_weights(outs: Sequence[fp8.Weight8], weights: Sequence[Array]) -> None:
    places = tuple(
        (*(0 if x is None else x.data.ptr for x in (weight, *out)), *weight.shape)
        for out, weight in zip(outs, weights, strict=True)
    )
    if any(place % 16 for _, *row in places for place in row[:3]) or any(first % 16 for first, *_ in places):
        raise ValueError("quantise_weights: a weight or its bits do not begin at a multiple of 16 bytes")
    listed, tiles = _listed(places)
    partial = new((len(weights), PARTS), FLOAT32)
    macros: dict[str, Any] = {"arch": "sm_90a", "SCALAR": scalar(weights[0].dtype), "VEC": 8, "PER": 0}
    load(FILE, "largest_of_weights", **macros)((PARTS, len(weights)), (256,), (partial, listed))
    load(FILE, "quantise_weights", **macros)((tiles, len(weights)), (256,), (partial, listed))


@lru_cache(64)  # weights stay where they are
def _listed(places: tuple[tuple[int, ...], ...]) -> tuple[Array, int]:
    """The kernels' list, in the device's memory, and the tiles of the largest weight."""
    tiles = max(-(-rows // SIDE) * -(-columns // SIDE) for *_, rows, columns in places)
    return cupy.asarray(np.array(places, np.int64)), tiles
