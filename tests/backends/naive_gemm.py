"""Matrix products by the naive kernel of ops/gemm.cu: what the kernels of gemm_hopper.cu are compared with on a GPU."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cublas import FLOAT32, leading
from tinyforge.backends.cupy_backend import blocks, new, scalar
from tinyforge.backends.gemm import BAND, DEPTH, PLAIN
from tinyforge.kernel import Array

SIDE = constant(PLAIN, "SIDE")
MOST_BLOCKS = 1024


def gemm_naive(a: Array, b: Array, out: Array, product: str, *, accumulate: bool = False, splits: int = 1) -> Array:
    """The result of `hopper`, computed with one thread per number, for any precision, shape and row stride."""
    across_a, across_b = product == "WEIGHT", product != "FORWARD"
    (rows, depth), columns = a.shape[::-1] if across_a else a.shape, b.shape[1 if across_b else 0]
    splits = min(splits, -(-depth // DEPTH))
    sums = np.dtype(np.float64) if out.dtype == np.float64 else FLOAT32
    parts = new((splits, rows, columns) if splits > 1 else (1,), sums)
    macros: dict[str, int | str] = {"SCALAR": scalar(a.dtype), "RESULT": scalar(out.dtype), "VEC": 1}
    ways = [(1, leading(x)) if across else (leading(x), 1) for x, across in ((a, across_a), (b, across_b))]
    sizes = map(np.int32, (rows, columns, depth, leading(out), BAND, splits, DEPTH, accumulate))
    tiles = -(-rows // SIDE) * -(-columns // SIDE) * splits
    launch = load(PLAIN, "gemm_naive", **macros)
    launch((min(tiles, MOST_BLOCKS),), (SIDE * SIDE,), (out, parts, a, b, *ways[0], *ways[1], *sizes))
    if splits > 1:
        launch = load(PLAIN, "gemm_sum", **macros)
        counts = map(np.uint32, (rows * columns, columns, leading(out)))
        launch(blocks(rows * columns), (256,), (out, parts, *counts, np.int32(splits), np.int32(accumulate)))
    return out
