"""Launches mixture.cu and the grouped products. Nothing waits for the device: sizes depend on shapes alone.

The products are in three files: grouped_hopper.cu for a Hopper and grouped_mma.cu for other GPUs, both for bf16 with
rows aligned to 16 bytes; grouped.cu for everything else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import blocks, contiguous, free_processors, has_wgmma, new, or_null, scalar, vector
from tinyforge.backends.tensor_map import tensor_map
from tinyforge.kernel import Array, pointer
from tinyforge.ops import mixture
from tinyforge.ops.mixture import INT

FILE, PLAIN, MMA, HOPPER = "ops/mixture.cu", "ops/grouped.cu", "ops/grouped_mma.cu", "ops/grouped_hopper.cu"
SLOTS, SIDE = constant(FILE, "SLOTS"), constant(PLAIN, "SIDE")
ROWS, COLUMNS, STAGES, FACTOR, THREADS = (constant(MMA, n) for n in ("ROWS", "COLUMNS", "STAGES", "FACTOR", "THREADS"))
SHARED = STAGES * 2 * FACTOR
WIDE_COLUMNS, WIDE_DEPTH, WIDE_THREADS = (constant(HOPPER, n) for n in ("COLUMNS", "DEPTH", "THREADS"))
WIDE_STAGE = constant(HOPPER, "LEFT") + constant(HOPPER, "RIGHT")
WIDE_SHARED = constant(HOPPER, "STAGES") * WIDE_STAGE + constant(HOPPER, "BARRIERS")
MOST_EXPERTS = 1024  # their counts, for each warp of a block, fit in the sort's shared memory


@mixture.sort_by_expert.on("cupy")
def sort_by_expert(chosen: Array, experts: int) -> tuple[Array, Array, Array, Array]:
    if experts > MOST_EXPERTS:
        raise ValueError(f"sort_by_expert: {experts} experts, the kernel takes {MOST_EXPERTS}; use --backend numpy")
    chosen, active = contiguous(chosen), chosen.shape[-1]
    rows = chosen.size
    slots, tokens, places = new((rows,), INT), new((rows,), INT), new((rows // active, active), INT)
    starts = new((experts + 1,), INT)
    if not rows:
        starts.fill(0)
        return slots, tokens, places, starts
    parts = blocks(rows, SLOTS)
    counts = new((experts, *parts), INT)
    sizes, by_expert, by_warp = (np.int32(rows), np.int32(experts)), 4 * experts, 4 * experts * (SLOTS // 32)
    count = load(FILE, "sort_count", by_expert, SCALAR="float", VEC=1)
    count(parts, (SLOTS,), (counts, chosen, *sizes), shared_mem=by_expert)
    scan = load(FILE, "sort_scan", SCALAR="float", VEC=1)
    scan((1,), (1024,), (counts, starts, np.int32(parts[0]), np.int32(experts)))
    place = load(FILE, "sort_place", by_warp, SCALAR="float", VEC=1)
    place(parts, (SLOTS,), (slots, tokens, places, counts, chosen, *sizes, np.int32(active)), shared_mem=by_warp)
    return slots, tokens, places, starts


def _file(outs: int, ins: int, *arrays: Array) -> str:
    """The file whose kernels compute the product. Tensor-core kernels need bf16 and rows aligned to 16 bytes."""
    if arrays[0].dtype.name != "bfloat16" or outs % 8 or ins % 8 or any(pointer(a) % 16 for a in arrays):
        return PLAIN
    return HOPPER if has_wgmma() else MMA


def _launch(file: str, entry: str, grid: tuple[int, ...], arguments: tuple[Any, ...], scalar: str) -> None:
    """Launch a product's kernel. grid: of tiles; the Hopper kernels are persistent and loop over them."""
    if file == HOPPER:
        grid = (min(free_processors(), math.prod(grid)),)
        load(file, entry, WIDE_SHARED, arch="sm_90a", SCALAR=scalar)(
            grid, (WIDE_THREADS,), arguments, shared_mem=WIDE_SHARED
        )
    elif file == MMA:
        load(file, entry, SHARED, SCALAR=scalar)(grid, (THREADS,), arguments, shared_mem=SHARED)
    else:
        load(file, entry, SCALAR=scalar)(grid, (SIDE * SIDE,), arguments)


def _tile(file: str) -> tuple[int, int]:
    """Rows and columns of a tile."""
    return {PLAIN: (SIDE, SIDE), MMA: (ROWS, COLUMNS), HOPPER: (ROWS, WIDE_COLUMNS)}[file]


def _rows_times(
    entry: str, columns: int, depth: int, x: Array, weight: Array, tokens: Array | None, starts: Array
) -> Array:
    """grouped_fwd or grouped_bwd_input: a row of `depth` numbers to one of `columns`."""
    x, experts = contiguous(x), len(weight)
    y = new((len(x) if tokens is None else len(tokens), columns), x.dtype)
    if y.size:
        file = _file(columns, depth, x, weight)
        down, across = _tile(file)
        # An upper bound on the tiles, however the rows are distributed: only each expert's last one may be partial.
        grid = (-(-columns // across), len(y) // down + experts)
        if file == HOPPER:  # boxes of 64 along the sum and a tile's columns, or of 64 columns
            along = entry == "grouped_fwd"
            weight = tensor_map(weight, (1, WIDE_COLUMNS if along else WIDE_DEPTH, WIDE_DEPTH))
        arguments = (y, x, weight, or_null(tokens), starts, *map(np.int32, (columns, depth, experts)))
        _launch(file, entry, grid, arguments, scalar(x.dtype))
    return y


@mixture.grouped_fwd.on("cupy")
def grouped_fwd(x: Array, weight: Array, tokens: Array | None, starts: Array) -> Array:
    return _rows_times("grouped_fwd", weight.shape[1], weight.shape[2], x, weight, tokens, starts)


@mixture.grouped_bwd_input.on("cupy")
def grouped_bwd_input(dy: Array, weight: Array, tokens: Array | None, starts: Array) -> Array:
    return _rows_times("grouped_bwd_input", weight.shape[2], weight.shape[1], dy, weight, tokens, starts)


@mixture.grouped_bwd_weight.on("cupy")
def grouped_bwd_weight(
    dweight: Array, dy: Array, x: Array, dy_tokens: Array | None, x_tokens: Array | None, starts: Array
) -> None:
    dy, x = contiguous(dy), contiguous(x)
    experts, outs, ins = dweight.shape
    if not (dy.size and x.size):
        return
    file = _file(outs, ins, dy, x, dweight)
    down, across = _tile(file)
    tokens, sizes = (or_null(dy_tokens), or_null(x_tokens), starts), (np.int32(outs), np.int32(ins))
    if file == HOPPER:
        maps = (tensor_map(a[None], (1, WIDE_DEPTH, WIDE_DEPTH)) for a in (dy, x))
        arguments: tuple[Any, ...] = (dweight, dy, x, *maps, *tokens, *sizes, np.int32(experts))
    else:
        arguments = (dweight, dy, x, *tokens, *sizes)
    _launch(file, "grouped_bwd_weight", (-(-ins // across), -(-outs // down), experts), arguments, scalar(dy.dtype))


@mixture.weighted_swiglu_fwd.on("cupy")
def weighted_swiglu_fwd(gu: Array, weights: Array, slots: Array) -> Array:
    gu, weights = contiguous(gu), contiguous(weights)
    rows, half = len(gu), gu.shape[1] // 2
    hidden = new((rows, half), gu.dtype)
    if rows:
        launch = load(FILE, "weighted_swiglu_fwd", SCALAR=scalar(gu.dtype), VEC=vector(half, gu, hidden))
        launch(blocks(rows, 8), (32, 8), (hidden, gu, weights, slots, np.int32(rows), np.int32(half)))
    return hidden


@mixture.weighted_swiglu_bwd.on("cupy")
def weighted_swiglu_bwd(dh: Array, gu: Array, weights: Array, slots: Array) -> tuple[Array, Array, Array]:
    dh, gu, weights = contiguous(dh), contiguous(gu), contiguous(weights)
    rows, half = dh.shape
    dgu, hidden, dweights = new(gu.shape, gu.dtype), new(dh.shape, gu.dtype), new(weights.shape, wide(gu.dtype))
    if rows:
        launch = load(FILE, "weighted_swiglu_bwd", SCALAR=scalar(gu.dtype), VEC=vector(half, dh, gu, dgu, hidden))
        arguments = (dgu, hidden, dweights, dh, gu, weights, slots, np.int32(rows), np.int32(half))
        launch(blocks(rows, 8), (32, 8), arguments)
    return dgu, hidden, dweights


@mixture.sum_of_rows.on("cupy")
def sum_of_rows(rows: Array, places: Array, more: Array | None) -> Array:
    rows = contiguous(rows)
    more = None if more is None else contiguous(more)
    (tokens, active), width = places.shape, rows.shape[1]
    y = new((tokens, width), rows.dtype)
    if tokens:
        vec = vector(width, rows, y, *(() if more is None else (more,)))
        launch = load(FILE, "sum_of_rows", SCALAR=scalar(rows.dtype), VEC=vec)
        sizes = map(np.int32, (tokens, width, active))
        launch(blocks(tokens, 8), (32, 8), (y, rows, places, or_null(more), *sizes))
    return y
