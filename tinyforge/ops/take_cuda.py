"""Launches take.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import take
from tinyforge.ops.rows_cuda import launch_vectors

FILE = "ops/take.cu"


@take.take_fwd.on("cupy")
def take_fwd(x: Array, where: Array) -> Array:
    x, where = contiguous(x), contiguous(where)
    y = new((*where.shape, x.shape[-1]), x.dtype)
    return launch_vectors(FILE, "take_fwd", y.size, x.shape[-1], (y, x, where), where.shape[1], x.shape[1])


@take.take_bwd.on("cupy")
def take_bwd(dy: Array, where: Array, length: int) -> Array:
    dy, where = contiguous(dy), contiguous(where)
    dx = new((len(dy), length, dy.shape[-1]), dy.dtype)
    dx.fill(0)
    return launch_vectors(FILE, "take_bwd", dy.size, dy.shape[-1], (dx, dy, where), where.shape[1], length)
