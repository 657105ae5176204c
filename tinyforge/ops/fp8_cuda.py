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
from tinyforge.backends.cupy_backend import contiguous, new, or_null
from tinyforge.kernel import Array, pointer
from tinyforge.ops import fp8
from tinyforge.ops.rows_cuda import launch_rows

FILE = "ops/fp8.cu"
PARTS, DOWN, ACROSS = (constant(FILE, name) for name in ("PARTS", "DOWN", "ACROSS"))
MACROS: dict[str, Any] = {"arch": "sm_90a", "SCALAR": "bf16", "VEC": 8, "PER": 0}


@fp8.quantise_rows.on("cupy")
def quantise_rows(x: Array) -> tuple[Array, Array]:
    x = contiguous(x)
    codes, scale = new(x.shape, fp8.BYTE), new(x.shape[:-1], wide(x.dtype))
    launch_rows(FILE, "quantise_rows", (codes, scale, x), like=x, arch="sm_90a")
    return codes, scale


@fp8.largest_scale.on("cupy")
def largest_scale(scale: Array) -> Array:
    found = new((1,), scale.dtype)
    load(FILE, "largest_scale", **MACROS)((1,), (1024,), (found, scale, np.int32(scale.size)))
    return found


@fp8.quantise_transposed.on("cupy")
def quantise_transposed(x: Array, scale: Array, e5m2: bool) -> tuple[Array | None, Array]:
    x = contiguous(x)
    codes, transposed = new(x.shape, fp8.BYTE) if e5m2 else None, new(fp8.transposed_shape(x.shape), fp8.BYTE)
    grid, sizes = _tiles(transposed, x.shape[-1], x)
    if transposed.size:
        entry = "quantise_transposed_e5m2" if e5m2 else "quantise_transposed"
        load(FILE, entry, **MACROS)(grid, (256,), (or_null(codes), transposed, x, scale, *sizes))
    return codes, transposed


@fp8.swiglu_bwd_fp8.on("cupy")
def swiglu_bwd_fp8(hidden: Array | None, dy: Array, gu: Array, scale: Array) -> tuple[Array, Array]:
    dy, gu = contiguous(dy), contiguous(gu)
    codes, transposed = new(gu.shape, fp8.BYTE), new(fp8.transposed_shape(gu.shape), fp8.BYTE)
    grid, sizes = _tiles(transposed, gu.shape[-1] // 2, gu)
    if transposed.size:
        arguments = (codes, transposed, or_null(hidden), dy, gu, scale, *sizes)
        load(FILE, "swiglu_bwd_fp8", **MACROS)(grid, (256,), arguments)
    return codes, transposed


def _tiles(transposed: Array, width: int, x: Array) -> tuple[tuple[int, int], tuple[np.int32, ...]]:
    """The grid of tiles over `width` columns of x, and the kernels' rows, columns and pitch."""
    if width % 8 or any(pointer(a) % 16 for a in (x, transposed)):
        raise ValueError(f"transposing {x.shape}: expects a multiple of 8 columns, got {width}, aligned to 16 bytes")
    rows, pitch = x.size // x.shape[-1], transposed.shape[1]
    return (-(-width // ACROSS), -(-pitch // DOWN)), tuple(map(np.int32, (rows, width, pitch)))


@fp8.quantise_weights.on("cupy")
def quantise_weights(outs: Sequence[fp8.FP8Weight], weights: Sequence[Array]) -> None:
    places = tuple(
        (*(0 if x is None else pointer(x) for x in (weight, *out)), *weight.shape)
        for out, weight in zip(outs, weights, strict=True)
    )
    if any(place % 16 for _, *row in places for place in row[:3]) or any(first % 16 for first, *_ in places):
        raise ValueError("quantise_weights: a weight or its codes are not aligned to 16 bytes")
    listed, tiles = _listed(places)
    partial = new((len(weights), PARTS), FLOAT32)
    load(FILE, "largest_of_weights", **MACROS)((PARTS, len(weights)), (256,), (partial, listed))
    load(FILE, "quantise_weights", **MACROS)((tiles, len(weights)), (256,), (partial, listed))


@lru_cache(64)  # weights keep their addresses
def _listed(places: tuple[tuple[int, ...], ...]) -> tuple[Array, int]:
    """The kernels' list, in device memory, and the number of tiles of the largest weight."""
    tiles = max(-(-rows // DOWN) * -(-columns // ACROSS) for *_, rows, columns in places)
    return cupy.asarray(np.array(places, np.int64)), tiles
