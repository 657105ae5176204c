"""The linear map on the GPU: matrix products by cuBLAS, with the leading axes folded into one."""

from __future__ import annotations

from tinyforge.backends.cublas import gemm
from tinyforge.backends.cupy_backend import contiguous, cupy_kernel
from tinyforge.op import Array


@cupy_kernel
def linear_fwd(x: Array, weight: Array) -> Array:
    x = contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    return gemm(x.reshape(rows, width), weight, transpose_b=True).reshape(*x.shape[:-1], weight.shape[0])


@cupy_kernel
def linear_bwd(dy: Array, x: Array, weight: Array, dweight: Array) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    rows = x.size // x.shape[-1]
    up = dy.reshape(rows, dy.shape[-1])
    gemm(up, x.reshape(rows, x.shape[-1]), dweight, transpose_a=True, accumulate=True)
    return gemm(up, weight).reshape(x.shape)
