"""Launches of GELU with the linear maps around it: by one kernel each way where the table of backends/gemm.py has one
for the shape and the formula is the one by tanh, else matrix products around gelu.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import CupyBackend, add_columns, contiguous
from tinyforge.backends.gemm import gemm, gemm_gelu, gemm_gelu_backward
from tinyforge.kernel import Array
from tinyforge.ops import gelu_linear
from tinyforge.ops.gelu_cuda import gelu_bwd, gelu_fwd
from tinyforge.ops.linear_cuda import linear_add_fwd, linear_bwd_bias, linear_fwd


@gelu_linear.linear_gelu_fwd.on("cupy")
def linear_gelu_fwd(
    x: Array, weight: Array, input_bias: Array | None, approximate: str, *, backend: CupyBackend
) -> tuple[Array, Array]:
    x, made = contiguous(x), None
    if input_bias is not None and approximate == "tanh":
        made = gemm_gelu(x.reshape(x.size // x.shape[-1], x.shape[-1]), weight, input_bias)
    if made is None:
        u = linear_fwd(x, weight, None, backend=backend)
        return u, gelu_fwd(u, input_bias, approximate)
    u, hidden = made
    return u.reshape(*x.shape[:-1], -1), hidden.reshape(*x.shape[:-1], -1)


@gelu_linear.gelu_linear_fwd.on("cupy")
def gelu_linear_fwd(
    u: Array, hidden: Array | None, weight: Array, bias: Array | None, input_bias: Array | None, add: Array | None,
    approximate: str, *, backend: CupyBackend,
) -> Array:  # fmt: skip
    hidden = gelu_fwd(u, input_bias, approximate) if hidden is None else hidden
    if add is None:
        return linear_fwd(hidden, weight, bias, backend=backend)
    return linear_add_fwd(hidden, weight, bias, add, backend=backend)


@gelu_linear.gelu_linear_bwd.on("cupy")
def gelu_linear_bwd(
    dweight: Array | None, dbias: Array | None, dinput_bias: Array | None, dy: Array, u: Array, weight: Array,
    input_bias: Array | None, approximate: str, accumulate: bool = True, *, backend: CupyBackend,
) -> Array:  # fmt: skip
    dy, u = contiguous(dy), contiguous(u)
    rows, made = dy.size // dy.shape[-1], None
    up, flat = dy.reshape(rows, dy.shape[-1]), u.reshape(rows, u.shape[-1])
    if input_bias is not None and approximate == "tanh":
        made = gemm_gelu_backward(up, weight, flat, input_bias, again=dweight is not None)
    if made is None:
        hidden = gemm(up, weight, tf32=backend.tf32)  # dh, in whose place h comes
        du = gelu_bwd(None if dweight is None else hidden, dinput_bias, hidden, flat, input_bias, approximate)
    else:
        du, hidden, partial = made
        if dinput_bias is not None:
            add_columns(dinput_bias, None, partial)
    if dweight is not None:
        gemm(up, hidden, dweight, transpose_a=True, accumulate=accumulate, tf32=backend.tf32)
    if dbias is not None:
        linear_bwd_bias(dbias, up)
    return du.reshape(u.shape)
