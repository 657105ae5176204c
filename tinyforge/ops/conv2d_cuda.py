"""Convolution on the GPU: conv2d_mma.cu in bf16, else matrix products with conv2d.cu's windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import (
    CupyBackend,
    add_columns,
    blocks,
    contiguous,
    new,
    or_null,
    processors,
    scalar,
)
from tinyforge.backends.gemm import gemm
from tinyforge.kernel import Array, pointer
from tinyforge.ops import conv2d
from tinyforge.ops.conv2d import Shape, chunk_rows, output_shape
from tinyforge.ops.linear_cuda import linear_bwd_bias

FILE, MMA = "ops/conv2d.cu", "ops/conv2d_mma.cu"
DEPTH, THREADS, PIECE = (constant(MMA, name) for name in ("DEPTH", "THREADS", "PIECE"))
ROWS, STAGES = 128, 3
GATHER, WEIGHT = 0, 1
MOST_ROWS = 2**31 - 1024  # positions, which kernels count in 32 bits


@dataclass(frozen=True)
class Windows:
    """Windows of images x, (B, H, W, I), for output positions (B, down, across), as the kernels take them."""

    x: Array
    down: int
    across: int
    height: int
    width: int
    stride: int
    above: int
    before: int
    spread: int = 1

    @property
    def rows(self) -> int:
        return len(self.x) * self.down * self.across

    @property
    def depth(self) -> int:
        return self.height * self.width * int(self.x.shape[-1])

    def numbers(self) -> tuple[np.int32, ...]:
        places = (self.down, self.across, self.height, self.width, self.stride, self.above, self.before, self.spread)
        return tuple(map(np.int32, (*self.x.shape[1:], *places)))

    def arguments(self) -> tuple[Any, ...]:
        """SIZES of conv2d_mma.cu."""
        if self.rows > MOST_ROWS:
            raise ValueError(f"{self.rows:,} positions in one convolution, at most {MOST_ROWS:,}; use a smaller batch")
        return (self.x, *self.numbers(), *divisor(self.down * self.across), *divisor(self.across))

    def parts(self) -> Iterator[tuple[slice, Array]]:
        """The matrix of windows, some rows at a time: which, and the part."""
        most = min(self.rows, chunk_rows(self.depth, self.x.dtype.itemsize))
        room = new((most, self.depth), self.x.dtype)
        launch = load(FILE, "conv2d_windows", SCALAR=scalar(self.x.dtype))
        for first in range(0, self.rows, most):
            seen = room[: min(most, self.rows - first)]
            launch(blocks(seen.size), (256,), (seen, self.x, np.int64(first), np.uint32(seen.size), *self.numbers()))
            yield slice(first, first + len(seen)), seen


def divisor(d: int) -> tuple[np.uint32, np.uint32]:
    """The numbers by which a kernel divides by d, see Divisor in conv2d_mma.cu."""
    shift = (d - 1).bit_length()
    return np.uint32(((1 << 32) * ((1 << shift) - d)) // d + 1), np.uint32(shift)


def padded(x: Array) -> Array:
    """x, its last axis extended with zeros to a multiple of 8: kernels copy 16 bytes."""
    width = x.shape[-1]
    more = -(-width // PIECE) * PIECE
    if more == width and pointer(x) % 16 == 0:
        return x
    out = new((*x.shape[:-1], more), x.dtype)
    launch = load(FILE, "conv2d_pad", SCALAR=scalar(x.dtype))
    launch(blocks(out.size), (256,), (out, x, np.uint32(out.size), np.int32(width), np.int32(more)))
    return out


def tile(part: int, rows: int, columns: int, spread: int = 1) -> tuple[int, dict[str, int]]:
    """Bytes of shared memory and the macros of a kernel of conv2d_mma.cu."""
    macros = {"PART": part, "ROWS": rows, "COLUMNS": columns, "STAGES": STAGES, "SPREAD": int(spread > 1)}
    return STAGES * (rows + columns) * DEPTH * 2, macros


def convolved(
    seen: Windows, weight: Array, bias: Array | None, add: Array | None, y: Array, backend: CupyBackend
) -> Array:
    """y = windows times weight, (O, h, w, I), plus bias and add."""
    outs, rows = len(weight), seen.rows
    if not y.size:
        return y
    if y.dtype.itemsize == 2:
        seen, weight = replace(seen, x=padded(seen.x)), padded(weight)
        columns = 64 if outs <= 64 else 128
        shared, macros = tile(GATHER, ROWS, columns, seen.spread)
        launch = load(MMA, "conv2d_gather", shared, **macros)
        arrays = (y, weight, or_null(bias), or_null(add))
        launch(
            (-(-rows // ROWS), -(-outs // columns)),
            (THREADS,),
            (*arrays, np.int32(rows), np.int32(outs), *seen.arguments()),
            shared_mem=shared,
        )
        return y
    flat, result, ready = weight.reshape(outs, -1), y.reshape(rows, outs), bias is not None or add is not None
    if ready:  # and the product is added to it
        result[...] = 0 if add is None else add.reshape(rows, outs)
        if bias is not None:
            result += bias
    for part, matrix in seen.parts():
        gemm(matrix, flat, result[part], transpose_b=True, accumulate=ready, tf32=backend.tf32)
    return y


@conv2d.conv2d_fwd.on("cupy")
def conv2d_fwd(
    x: Array, weight: Array, bias: Array | None, add: Array | None, stride: int, padding: int, *, backend: CupyBackend
) -> Array:
    x, add = contiguous(x), None if add is None else contiguous(add)
    y = new(output_shape(x.shape, weight.shape, stride, padding), x.dtype)
    seen = Windows(x, y.shape[1], y.shape[2], weight.shape[1], weight.shape[2], stride, padding, padding)
    return convolved(seen, weight, bias, add, y, backend)


@conv2d.conv2d_bwd_input.on("cupy")
def conv2d_bwd_input(
    dy: Array, weight: Array, shape: Shape, stride: int, padding: int, *, backend: CupyBackend
) -> Array:
    dy, dx = contiguous(dy), new(shape, dy.dtype)
    if not dx.size:
        return dx
    outs, height, width, channels = weight.shape
    flipped = new((channels, height, width, outs), dy.dtype)
    launch = load(FILE, "conv2d_flip", SCALAR=scalar(dy.dtype))
    sizes = map(np.int32, (outs, height * width, channels))
    launch(blocks(flipped.size), (256,), (flipped, weight, np.uint32(flipped.size), *sizes))
    seen = Windows(dy, shape[1], shape[2], height, width, 1, height - 1 - padding, width - 1 - padding, stride)
    return convolved(seen, flipped, None, None, dx, backend)


@conv2d.conv2d_bwd_weight.on("cupy")
def conv2d_bwd_weight(
    dweight: Array | None,
    dbias: Array | None,
    dy: Array,
    x: Array | None,
    stride: int,
    padding: int,
    *,
    backend: CupyBackend,
) -> None:
    dy = contiguous(dy)
    outs = dy.shape[-1]
    fused = dweight is not None and x is not None and dy.dtype.itemsize == 2 and dy.size > 0
    if dbias is not None and not fused:
        linear_bwd_bias(dbias, dy)
    if dweight is None or x is None or not dy.size:
        return
    x = contiguous(x)
    seen = Windows(x, dy.shape[1], dy.shape[2], dweight.shape[1], dweight.shape[2], stride, padding, padding)
    if dy.dtype.itemsize != 2:
        up, flat = dy.reshape(-1, outs), dweight.reshape(outs, -1)
        for part, matrix in seen.parts():
            gemm(up[part], matrix, flat, transpose_a=True, accumulate=True, tf32=backend.tf32)
        return
    seen, up = replace(seen, x=padded(x)), padded(dy)
    rows, columns = 64 if outs <= 64 else 128, 128
    shared, macros = tile(WEIGHT, rows, columns)
    grid = (-(-seen.depth // columns), -(-outs // rows))
    # Two blocks run on a multiprocessor at a time; a part has at least four steps.
    parts = max(1, min(2 * processors() // (grid[0] * grid[1]), seen.rows // (4 * DEPTH)))
    partial = new((parts, dweight.size + (0 if dbias is None else outs)), dweight.dtype)
    launch = load(MMA, "conv2d_weight", shared, **macros)
    sizes = map(np.int32, (outs, up.shape[-1], x.shape[-1], dbias is not None))
    launch((*grid, parts), (THREADS,), (partial, up, np.int32(seen.rows), *sizes, *seen.arguments()), shared_mem=shared)
    add_columns(dweight, dbias, partial)
