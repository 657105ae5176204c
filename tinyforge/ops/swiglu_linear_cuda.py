"""Launches of SwiGLU with the linear maps around it: one kernel each way where backends/gemm.py has one for the
shape, else matrix products around swiglu.cu."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.cupy_backend import CupyBackend, contiguous
from tinyforge.backends.gemm import gemm, gemm_swiglu, gemm_swiglu_backward
from tinyforge.kernel import Array
from tinyforge.ops import swiglu_linear
from tinyforge.ops.linear_cuda import linear_add_fwd, linear_fwd
from tinyforge.ops.swiglu_cuda import swiglu_bwd, swiglu_fwd


@swiglu_linear.linear_swiglu_fwd.on("cupy")
def linear_swiglu_fwd(x: Array, weight: Array, *, backend: CupyBackend) -> tuple[Array, Array]:
    x = contiguous(x)
    made = gemm_swiglu(x.reshape(x.size // x.shape[-1], x.shape[-1]), weight)
    if made is None:
        gu = linear_fwd(x, weight, None, backend=backend)
        return gu, swiglu_fwd(gu)
    gu, hidden = made
    return gu.reshape(*x.shape[:-1], -1), hidden.reshape(*x.shape[:-1], -1)


@swiglu_linear.swiglu_linear_fwd.on("cupy")
def swiglu_linear_fwd(
    gu: Array, hidden: Array | None, weight: Array, add: Array | None, *, backend: CupyBackend
) -> Array:
    hidden = swiglu_fwd(gu) if hidden is None else hidden
    if add is None:
        return linear_fwd(hidden, weight, None, backend=backend)
    return linear_add_fwd(hidden, weight, None, add, backend=backend)


@swiglu_linear.swiglu_linear_bwd.on("cupy")
def swiglu_linear_bwd(
    dweight: Array | None, dy: Array, gu: Array, weight: Array, accumulate: bool = True, *, backend: CupyBackend
) -> Array:
    dy, gu = contiguous(dy), contiguous(gu)
    rows = dy.size // dy.shape[-1]
    up = dy.reshape(rows, dy.shape[-1])
    hidden: Any
    made = gemm_swiglu_backward(up, weight, gu.reshape(rows, gu.shape[-1]), again=dweight is not None)
    if made is None:
        hidden = gemm(up, weight, tf32=backend.tf32)  # dh, later overwritten by h
        dgu = swiglu_bwd(None if dweight is None else hidden, hidden, gu)
    else:
        dgu, hidden = made
    if dweight is not None:
        gemm(up, hidden, dweight, transpose_a=True, accumulate=accumulate, tf32=backend.tf32)
    return dgu.reshape(gu.shape)
