"""Launches of SwiGLULinear: matrix products around swiglu.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import CupyBackend, contiguous, new
from tinyforge.backends.gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import swiglu_linear
from tinyforge.ops.linear_cuda import linear_fwd
from tinyforge.ops.swiglu_cuda import swiglu_bwd, swiglu_fwd


@swiglu_linear.swiglu_linear_fwd.on("cupy")
def swiglu_linear_fwd(gu: Array, weight: Array, *, backend: CupyBackend) -> Array:
    return linear_fwd(swiglu_fwd(gu), weight, None, backend=backend)


@swiglu_linear.swiglu_linear_bwd.on("cupy")
def swiglu_linear_bwd(
    dweight: Array | None, dy: Array, gu: Array, weight: Array, *, backend: CupyBackend
) -> Array:
    dy = contiguous(dy)
    rows = dy.size // dy.shape[-1]
    up = dy.reshape(rows, dy.shape[-1])
    hidden = None if dweight is None else new((rows, weight.shape[1]), gu.dtype)
    dgu = swiglu_bwd(hidden, gemm(up, weight, tf32=backend.tf32), gu)
    if dweight is not None:
        gemm(up, hidden, dweight, transpose_a=True, accumulate=True, tf32=backend.tf32)
    return dgu
