"""SwiGLU's pass and the products around it, one after the other."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import new
from tinyforge.backends.webgpu_gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import swiglu_linear
from tinyforge.ops.linear_webgpu import linear_add_fwd, linear_fwd, rows_of
from tinyforge.ops.swiglu_webgpu import swiglu_bwd, swiglu_fwd


@swiglu_linear.linear_swiglu_fwd.on("webgpu")
def linear_swiglu_fwd(x: Array, weight: Array) -> tuple[Array, Array]:
    gu = linear_fwd(x, weight, None)
    return gu, swiglu_fwd(gu)


@swiglu_linear.swiglu_linear_fwd.on("webgpu")
def swiglu_linear_fwd(gu: Array, hidden: Array | None, weight: Array, add: Array | None) -> Array:
    hidden = swiglu_fwd(gu) if hidden is None else hidden
    return linear_fwd(hidden, weight, None) if add is None else linear_add_fwd(hidden, weight, None, add)


@swiglu_linear.swiglu_linear_bwd.on("webgpu")
def swiglu_linear_bwd(dweight: Array | None, dy: Array, gu: Array, weight: Array, accumulate: bool = True) -> Array:
    rows = rows_of(dy)
    dhidden = gemm(rows, weight)
    hidden = None if dweight is None else new(dy, dhidden.shape)
    dgu = swiglu_bwd(hidden, dhidden, gu)
    if dweight is not None and hidden is not None:
        gemm(rows, hidden, dweight, transpose_a=True, accumulate=accumulate)
    return dgu
