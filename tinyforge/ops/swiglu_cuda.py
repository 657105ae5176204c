"""Launches swiglu.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import swiglu
from tinyforge.ops.rows_cuda import launch_vectors

FILE = "ops/swiglu.cu"


@swiglu.swiglu_fwd.on("cupy")
def swiglu_fwd(gu: Array) -> Array:
    gu = contiguous(gu)
    half = gu.shape[-1] // 2
    y = new((*gu.shape[:-1], half), gu.dtype)
    return launch_vectors(FILE, "swiglu_fwd", y.size, half, (y, gu))


@swiglu.swiglu_bwd.on("cupy")
def swiglu_bwd(hidden: Array | None, dy: Array, gu: Array) -> Array:
    dy, gu = contiguous(dy), contiguous(gu)
    dgu = new(gu.shape, gu.dtype)
    return launch_vectors(FILE, "swiglu_bwd", dy.size, gu.shape[-1] // 2, (dgu, hidden, dy, gu))
