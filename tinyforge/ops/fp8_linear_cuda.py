"""Launches of products in FP8, always by gemm_hopper.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import CupyBackend, contiguous
from tinyforge.backends.gemm import gemm, gemm_fp8
from tinyforge.kernel import Array
from tinyforge.ops import fp8_linear


def flat(x: Array) -> Array:
    return x.reshape(x.size // x.shape[-1], x.shape[-1])


def shaped(y: Array, like: Array) -> Array:
    """y with the leading axes of `like`."""
    return y.reshape(*like.shape[:-1], y.shape[-1])


@fp8_linear.fp8_product.on("cupy")
def fp8_product(
    codes: Array, scale: Array, weight: Array, weight_scale: Array, e5m2: bool, *, backend: CupyBackend
) -> Array:
    y, _ = gemm_fp8("FP8_E5M2" if e5m2 else "FP8", flat(codes), weight, scale, weight_scale, backend.dtype)
    return shaped(y, codes)


@fp8_linear.fp8_product_swiglu.on("cupy")
def fp8_product_swiglu(
    codes: Array, scale: Array, weight: Array, weight_scale: Array, *, backend: CupyBackend
) -> tuple[Array, Array]:
    gu, hidden = gemm_fp8("FP8_SWIGLU", flat(codes), weight, scale, weight_scale, backend.dtype)
    assert hidden is not None
    return shaped(gu, codes), shaped(hidden, codes)


@fp8_linear.fp8_weight_gradient.on("cupy")
def fp8_weight_gradient(
    dweight: Array, transposed: Array, scale: Array, x_transposed: Array, x_scale: Array, accumulate: bool = True
) -> None:
    if transposed.size:
        gemm_fp8("FP8_WEIGHT", transposed, x_transposed, scale, x_scale, dweight, accumulate=accumulate)
    elif not accumulate:
        dweight.fill(0)


@fp8_linear.weight_gradient.on("cupy")
def weight_gradient(dweight: Array, dy: Array, x: Array, accumulate: bool = True) -> None:
    gemm(flat(contiguous(dy)), flat(contiguous(x)), dweight, transpose_a=True, accumulate=accumulate)
