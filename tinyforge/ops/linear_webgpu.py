"""The linear map on WebGPU: gemm.wgsl, with the leading axes folded into one."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, launch
from tinyforge.backends.webgpu_gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import linear


def rows_of(x: Array) -> Array:
    """x as a matrix."""
    return contiguous(x).reshape(x.size // max(x.shape[-1], 1), x.shape[-1])


@linear.linear_fwd.on("webgpu")
def linear_fwd(x: Array, weight: Array, bias: Array | None) -> Array:
    return gemm(rows_of(x), weight, transpose_b=True, bias=bias).reshape(*x.shape[:-1], len(weight))


@linear.linear_add_fwd.on("webgpu")
def linear_add_fwd(x: Array, weight: Array, bias: Array | None, add: Array) -> Array:
    return gemm(rows_of(x), weight, transpose_b=True, bias=bias, add=rows_of(add)).reshape(add.shape)


@linear.linear_bwd_bias.on("webgpu")
def linear_bwd_bias(dbias: Array, dy: Array) -> None:
    rows = rows_of(dy)
    launch("ops/columns.wgsl", "add_columns", (-(-rows.shape[1] // 32),), {"out": dbias, "x": rows}, rows.shape)


@linear.linear_bwd.on("webgpu")
def linear_bwd(
    dweight: Array | None, dbias: Array | None, dy: Array, x: Array | None, weight: Array, accumulate: bool = True
) -> Array:
    up = rows_of(dy)
    if dweight is not None and x is not None:
        gemm(up, rows_of(x), dweight, transpose_a=True, accumulate=accumulate)
    if dbias is not None:
        linear_bwd_bias(dbias, up)
    return gemm(up, weight).reshape(*dy.shape[:-1], weight.shape[1])
