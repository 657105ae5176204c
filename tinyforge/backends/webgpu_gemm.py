"""Launches ops/gemm.wgsl."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, launch, new
from tinyforge.kernel import Array

SMALL = {"TILE": 64, "PER": 4, "FOURS": 1, "DEPTH": 16}
LARGE = {"TILE": 128, "PER": 8, "FOURS": 2, "DEPTH": 8}
ENOUGH = 64
"""Large tiles from which on they are used: half the reads of memory, but a group for each of fewer tiles."""


def gemm(
    a: Array,
    b: Array,
    out: Array | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = False,
    bias: Array | None = None,
    add: Array | None = None,
) -> Array:
    """a b (+ bias + add), or out += a b; a and b are matrices, with the axes swapped where transposed."""
    a, b = contiguous(a), contiguous(b)
    rows, depth = a.shape[::-1] if transpose_a else a.shape
    columns = b.shape[0] if transpose_b else b.shape[1]
    out = new(a, (rows, columns)) if out is None else out
    shape = LARGE if rows * columns >= ENOUGH * LARGE["TILE"] ** 2 else SMALL
    across = -(-columns // shape["TILE"])
    count = -(-rows // shape["TILE"]) * across
    wide = min(count, 32768)
    launch(
        "ops/gemm.wgsl",
        "gemm",
        (wide, -(-count // wide)) if count else (0,),
        {"c": out, "a": a, "b": b, "bias": bias, "add": None if add is None else contiguous(add)},
        (rows, columns, depth, across),
        {
            "TRANSPOSE_A": transpose_a,
            "TRANSPOSE_B": transpose_b,
            "ACCUMULATE": accumulate,
            "BIAS": bias is not None,
            "ADD": add is not None,
        },
        constants=shape,
    )
    return out
