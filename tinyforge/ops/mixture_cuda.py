"""Launches mixture.cu, grouped.cu and grouped_mma.cu. Nothing waits for the device: sizes depend on shapes alone."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import mixture
from tinyforge.ops.mixture import INT

FILE, PLAIN, MMA = "ops/mixture.cu", "ops/grouped.cu", "ops/grouped_mma.cu"
SLOTS, SIDE = constant(FILE, "SLOTS"), constant(PLAIN, "SIDE")
ROWS, COLUMNS, STAGES, FACTOR, THREADS = (constant(MMA, n) for n in ("ROWS", "COLUMNS", "STAGES", "FACTOR", "THREADS"))
SHARED = STAGES * 2 * FACTOR
MOST_EXPERTS = 1024  # whose counts, for each warp of a block of the sort, fit into its shared memory


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


def _on_tensor_cores(outs: int, ins: int, *arrays: Array) -> bool:
    """Whether grouped_mma.cu takes the product: bf16, and every row begins at a multiple of 16 bytes."""
    return arrays[0].dtype.name == "bfloat16" and outs % 8 == ins % 8 == 0 and all(a.data.ptr % 16 == 0 for a in arrays)


def _rows_times(
    entry: str, columns: int, depth: int, x: Array, weight: Array, tokens: Array | None, starts: Array
) -> Array:
    """grouped_fwd or grouped_bwd_input: a row of `depth` numbers to one of `columns`."""
    x, experts = contiguous(x), len(weight)
    y = new((len(x) if tokens is None else len(tokens), columns), x.dtype)
    if y.size:
        fast = _on_tensor_cores(columns, depth, x, weight)
        side, across = (ROWS, COLUMNS) if fast else (SIDE, SIDE)
        # No more tiles than this, however the rows are spread: each expert's last one is all that may be short.
        grid = (-(-columns // across), len(y) // side + experts)
        arguments = (y, x, weight, or_null(tokens), starts, *map(np.int32, (columns, depth, experts)))
        if fast:
            load(MMA, entry, SHARED, SCALAR="bf16")(grid, (THREADS,), arguments, shared_mem=SHARED)
        else:
            load(PLAIN, entry, SCALAR=scalar(x.dtype))(grid, (SIDE * SIDE,), arguments)
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
    arguments = (dweight, dy, x, or_null(dy_tokens), or_null(x_tokens), starts, np.int32(outs), np.int32(ins))
    if _on_tensor_cores(outs, ins, dy, x, dweight):
        grid = (-(-ins // COLUMNS), -(-outs // ROWS), experts)
        load(MMA, "grouped_bwd_weight", SHARED, SCALAR="bf16")(grid, (THREADS,), arguments, shared_mem=SHARED)
    else:
        grid = (-(-ins // SIDE), -(-outs // SIDE), experts)
        load(PLAIN, "grouped_bwd_weight", SCALAR=scalar(dy.dtype))(grid, (SIDE * SIDE,), arguments)


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
