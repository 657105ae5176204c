"""Launches that several ops share: with a thread for each vector, and over rows.cuh with a warp for each row."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import (
    add_columns,
    blocks,
    contiguous,
    free_processors,
    new,
    or_null,
    scalar,
    vector,
)
from tinyforge.backends.variants import smallest
from tinyforge.kernel import Array

HEADER = "ops/rows.cuh"
STAGES, BLOCKS = constant(HEADER, "STAGES"), constant(HEADER, "BLOCKS")
WARPS = 8  # per block, each with a row at a time


def launch_vectors(
    file: str, entry: str, total: int, width: int, arrays: tuple[Array | None, ...], *counts: int, **macros: Any
) -> Array:
    """One thread for each vector of elements, `total` elements in rows of `width`; returns the first array. The
    kernel's arguments: arrays, None for a null pointer, the first of the storage type; the number of vectors; counts;
    the vectors in a row."""
    first: Any = arrays[0]
    if total:
        kind = first.dtype
        vec = vector(width, *[a for a in arrays if a is not None and a.dtype == kind])
        launch = load(file, entry, SCALAR=scalar(kind), VEC=vec, **macros)
        numbers = map(np.uint32, (total // vec, *counts, width // vec))
        launch(blocks(total // vec), (256,), (*map(or_null, arrays), *numbers))
    return first


def launch_elements(file: str, entry: str, out: Array, *arrays: Array | None, **macros: int) -> Array:
    """One thread for each vector of elements; returns `out`. out, arrays: the kernel's, of one size and storage type,
    in its order, None for a null pointer."""
    if out.size:
        vec = vector(out.size, out, *(a for a in arrays if a is not None))
        launch = load(file, entry, SCALAR=scalar(out.dtype), VEC=vec, **macros)
        launch(blocks(out.size // vec), (256,), (out, *map(or_null, arrays), np.uint32(out.size // vec)))
    return out


def vectors_a_lane(file: str, width: int, vec: int, dtype: np.dtype) -> int:
    """The macro PER for a warp that takes rows of `width`: vectors in a lane's registers, 0 if they are too many."""
    return smallest(file, "PER", -(-width // (32 * vec)), SCALAR=scalar(dtype), VEC=vec)


def warps_of(per: int) -> int:
    """The warps of a backward kernel's block, as in rows.cuh."""
    return WARPS if per <= 4 else WARPS // 2


def rows_and_width(x: Array) -> tuple[int, int]:
    return x.size // x.shape[-1], x.shape[-1]


def launch_rows(
    file: str, entry: str, arrays: tuple[Array | None, ...], *scalars: Any, like: Array | None = None, **macros: Any
) -> None:
    """One warp for each row. arrays: the kernel's, in its order, None for a null pointer. like: the array with the
    shape and the storage type, by default the first. macros: further ones, and `arch`."""
    shaped: Any = arrays[0] if like is None else like
    rows, width = rows_and_width(shaped)
    if rows:
        vec, dtype = vector(width, shaped, *(a for a in arrays if a is not None)), shaped.dtype
        per = vectors_a_lane(file, width, vec, dtype)
        launch = load(file, entry, **macros, SCALAR=scalar(dtype), VEC=vec, PER=per)
        launch(blocks(rows, WARPS), (32, WARPS), (*map(or_null, arrays), np.int32(rows), np.int32(width), *scalars))


def norm_backward(
    sums: tuple[Array | None, ...],
    file: str,
    entry: str,
    dy: Array,
    weight: Array,
    x: Array,
    stats: tuple[Array, ...],
    sums_alone: tuple[str, tuple[Array, ...]],
    residual: Array | None = None,
    further: tuple[Array, ...] = (),
    **macros: Any,
) -> Array:
    """Returns dx; the gradients of gain and bias are added to `sums`, all None if both are frozen. x: the saved input,
    or for RMSNorm y. stats: arrays with one number per row. With a residual, which is added to dx, the kernel is the
    one whose name begins with "add_".

    further: the kernel's outputs, after dx. macros: as above.
    sums_alone: the kernel, with its inputs, that computes the partial sums if a row does not fit in registers.
    """
    rows, width = rows_and_width(x)
    dx = new(x.shape, x.dtype)
    if not rows:
        return dx
    extra = () if residual is None else (contiguous(residual),)
    entry = f"add_{entry}" if extra else entry
    vec = vector(width, dx, dy, weight, x, *extra)
    per = vectors_a_lane(file, width, vec, dx.dtype)
    warps = warps_of(per)
    shared = STAGES * (2 + len(extra)) * per * warps * 32 * 16
    launch = load(file, entry, shared, **macros, SCALAR=scalar(dx.dtype), VEC=vec, PER=per)
    partial = new((min(*blocks(rows, warps), BLOCKS * free_processors()), len(sums) * width), stats[0].dtype)
    sizes = (np.int32(rows), np.int32(width))
    # With the sums in registers each warp takes many rows, otherwise one row.
    grid = (len(partial),) if per else blocks(rows, warps)
    launch(grid, (32, warps), (dx, *further, partial, dy, weight, x, *stats, *extra, *sizes), shared_mem=shared)
    if sums[0] is None:
        return dx
    if not per:
        name, inputs = sums_alone
        gain = {macro: value for macro, value in macros.items() if macro == "PLUS_ONE"}
        alone = load(file, name, SCALAR=scalar(dx.dtype), VEC=1, PER=0, **gain)
        alone((*blocks(width, 32), len(partial)), (32, 8), (partial, *inputs, *sizes))
    add_columns(sums[0], sums[1] if len(sums) > 1 else None, partial)
    return dx
