"""Launches of GELULinear: matrix products around gelu.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import CupyBackend, contiguous, new
from tinyforge.backends.gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import gelu_linear
from tinyforge.ops.gelu_cuda import gelu_bwd, gelu_fwd
from tinyforge.ops.linear_cuda import linear_add_fwd, linear_bwd_bias, linear_fwd


@gelu_linear.gelu_linear_fwd.on("cupy")
def gelu_linear_fwd(
    u: Array,
    weight: Array,
    bias: Array | None,
    input_bias: Array | None,
    add: Array | None,
    approximate: str,
    *,
    backend: CupyBackend,
) -> Array:
    hidden = gelu_fwd(u, input_bias, approximate)
    if add is None:
        return linear_fwd(hidden, weight, bias, backend=backend)
    return linear_add_fwd(hidden, weight, bias, add, backend=backend)


@gelu_linear.gelu_linear_bwd.on("cupy")
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
    *,
    backend: CupyBackend,
) -> Array:
    dy, u = contiguous(dy), contiguous(u)
    rows = dy.size // dy.shape[-1]
    up = dy.reshape(rows, dy.shape[-1])
    hidden = None if dweight is None else new((rows, weight.shape[1]), u.dtype)
    dhidden = gemm(up, weight, tf32=backend.tf32)
    du = gelu_bwd(hidden, dinput_bias, dhidden, u.reshape(dhidden.shape), input_bias, approximate)
    if hidden is not None:
        gemm(up, hidden, dweight, transpose_a=True, accumulate=accumulate, tf32=backend.tf32)
    if dbias is not None:
        linear_bwd_bias(dbias, up)
    return du.reshape(u.shape)
