"""Launches of products in FP8, always by gemm_hopper.cu; those of bf16 beside them are as in linear_cuda.py."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.cupy_backend import CupyBackend, contiguous
from tinyforge.backends.gemm import gemm, gemm_of_8_bits
from tinyforge.kernel import Array
from tinyforge.ops import fp8_linear
from tinyforge.ops.fp8 import Weight8


def flat(x: Array) -> Array:
    return x.reshape(x.size // x.shape[-1], x.shape[-1])


def shaped(y: Array, like: Array) -> Array:
    """The rows of y as those of `like` lie."""
    return y.reshape(*like.shape[:-1], y.shape[-1])


@fp8_linear.fp8_linear_fwd.on("cupy")
def fp8_linear_fwd(bits: Array, scale: Array, weight: Weight8, *, backend: CupyBackend) -> Array:
    y, _, _ = gemm_of_8_bits("FP8", flat(bits), weight.straight, scale, weight.scale, backend.dtype)
    return shaped(y, bits)


@fp8_linear.fp8_linear_swiglu_fwd.on("cupy")
def fp8_linear_swiglu_fwd(
    bits: Array, scale: Array, weight: Weight8, *, backend: CupyBackend
) -> tuple[Array, Array]:
    gu, hidden, _ = gemm_of_8_bits("FP8_SWIGLU", flat(bits), weight.straight, scale, weight.scale, backend.dtype)
    assert hidden is not None
    return shaped(gu, bits), shaped(hidden, bits)


@fp8_linear.fp8_linear_bwd.on("cupy")
def fp8_linear_bwd(
    dweight: Array | None, dy: Array, bits: Array, scale: Array, coarse: bool, x: Array | None, weight: Weight8, *,
    backend: CupyBackend,
) -> Array:  # fmt: skip
    if dweight is not None:
        gemm(flat(contiguous(dy)), flat(contiguous(x)), dweight, transpose_a=True, accumulate=True)
    kind = "FP8_COARSE" if coarse else "FP8"
    dx, _, _ = gemm_of_8_bits(kind, flat(bits), weight.turned, scale, weight.scale, backend.dtype)
    return shaped(dx, dy)


@fp8_linear.fp8_swiglu_linear_bwd.on("cupy")
def fp8_swiglu_linear_bwd(
    dweight: Array | None, dy: Array, bits: Array, scale: Array, gu: Array, weight: Weight8, *, backend: Any
) -> tuple[Array, Array]:
    gu = contiguous(gu)
    dgu, hidden, rounded = gemm_of_8_bits(
        "FP8_SWIGLU_BACKWARD", flat(bits), weight.turned, scale, weight.scale, backend.dtype, gu=gu,
        again=dweight is not None,
    )  # fmt: skip
    if dweight is not None:
        gemm(flat(contiguous(dy)), hidden, dweight, transpose_a=True, accumulate=True)
    assert rounded is not None
    return dgu.reshape(gu.shape), rounded.reshape(gu.shape)
