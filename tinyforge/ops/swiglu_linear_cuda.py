"""Launches of SwiGLULinear: matrix products around swiglu.cu."""

from __future__ import annotations

from tinyforge.backends.cublas import gemm
from tinyforge.backends.cupy_backend import contiguous, cupy_kernel, new
from tinyforge.op import Array
from tinyforge.ops.linear_cuda import linear_fwd
from tinyforge.ops.swiglu_cuda import swiglu_bwd, swiglu_fwd


@cupy_kernel
def swiglu_linear_fwd(gu: Array, weight: Array) -> Array:
    return linear_fwd(swiglu_fwd(gu), weight)


@cupy_kernel
def swiglu_linear_bwd(dy: Array, gu: Array, weight: Array, dweight: Array) -> Array:
    dy = contiguous(dy)
    rows = dy.size // dy.shape[-1]
    up = dy.reshape(rows, dy.shape[-1])
    hidden = new((rows, weight.shape[1]), gu.dtype)
    dgu = swiglu_bwd(gemm(up, weight), gu, hidden)
    gemm(up, hidden, dweight, transpose_a=True, accumulate=True)
    return dgu
