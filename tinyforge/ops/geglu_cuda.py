"""Launches geglu.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import geglu
from tinyforge.ops.rows_cuda import launch_vectors

FILE = "ops/geglu.cu"


@geglu.geglu_fwd.on("cupy")
def geglu_fwd(gu: Array, approximate: str) -> Array:
    gu = contiguous(gu)
    half = gu.shape[-1] // 2
    y = new((*gu.shape[:-1], half), gu.dtype)
    launch_vectors(FILE, "geglu_fwd", y.size, half, (y, gu), EXACT=int(approximate == "erf"))
    return y


@geglu.geglu_bwd.on("cupy")
def geglu_bwd(dy: Array, gu: Array, approximate: str) -> Array:
    dy, gu = contiguous(dy), contiguous(gu)
    dgu = new(gu.shape, gu.dtype)
    exact = int(approximate == "erf")
    launch_vectors(FILE, "geglu_bwd", dy.size, gu.shape[-1] // 2, (dgu, dy, gu), EXACT=exact)
    return dgu
