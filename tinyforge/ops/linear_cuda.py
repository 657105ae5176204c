"""The linear map on the GPU: matrix products by cuBLAS, with the leading axes folded into one."""

from __future__ import annotations

from tinyforge.backends.cublas import gemm
from tinyforge.backends.cupy_backend import CupyBackend, contiguous
from tinyforge.kernel import Array
from tinyforge.ops import linear


@linear.linear_fwd.on("cupy")
def linear_fwd(x: Array, weight: Array, *, backend: CupyBackend) -> Array:
    x = contiguous(x)
    rows, width = x.size // x.shape[-1], x.shape[-1]
    y = gemm(x.reshape(rows, width), weight, transpose_b=True, tf32=backend.tf32)
    return y.reshape(*x.shape[:-1], weight.shape[0])


@linear.linear_bwd.on("cupy")
def linear_bwd(dweight: Array, dy: Array, x: Array, weight: Array, *, backend: CupyBackend) -> Array:
    dy, x = contiguous(dy), contiguous(x)
    rows = x.size // x.shape[-1]
    up = dy.reshape(rows, dy.shape[-1])
    gemm(up, x.reshape(rows, x.shape[-1]), dweight, transpose_a=True, accumulate=True, tf32=backend.tf32)
    return gemm(up, weight, tf32=backend.tf32).reshape(x.shape)
