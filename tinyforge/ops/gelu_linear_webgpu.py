"""GELU's pass and the products around it, one after the other."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import new
from tinyforge.backends.webgpu_gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import gelu_linear
from tinyforge.ops.gelu_webgpu import gelu_bwd, gelu_fwd
from tinyforge.ops.linear_webgpu import linear_add_fwd, linear_bwd_bias, linear_fwd, rows_of


@gelu_linear.gelu_linear_fwd.on("webgpu")
def gelu_linear_fwd(
    u: Array, weight: Array, bias: Array | None, input_bias: Array | None, add: Array | None, approximate: str
) -> Array:
    hidden = gelu_fwd(u, input_bias, approximate)
    return linear_fwd(hidden, weight, bias) if add is None else linear_add_fwd(hidden, weight, bias, add)


@gelu_linear.gelu_linear_bwd.on("webgpu")
def gelu_linear_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dinput_bias: Array | None,
    dy: Array,
    u: Array,
    weight: Array,
    input_bias: Array | None,
    approximate: str,
    accumulate: bool = True,
) -> Array:
    rows = rows_of(dy)
    hidden = None if dweight is None else new(u, u.shape)
    du = gelu_bwd(hidden, dinput_bias, gemm(rows, weight).reshape(u.shape), u, input_bias, approximate)
    if dweight is not None and hidden is not None:
        gemm(rows, rows_of(hidden), dweight, transpose_a=True, accumulate=accumulate)
    if dbias is not None:
        linear_bwd_bias(dbias, rows)
    return du
