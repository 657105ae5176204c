"""Launches of products in FP8, always by gemm_hopper.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import CupyBackend, contiguous
from tinyforge.backends.gemm import gemm, gemm_of_8_bits
from tinyforge.kernel import Array
from tinyforge.ops import fp8_linear


def flat(x: Array) -> Array:
    return x.reshape(x.size // x.shape[-1], x.shape[-1])


def shaped(y: Array, like: Array) -> Array:
    """The rows of y as those of `like` lie."""
    return y.reshape(*like.shape[:-1], y.shape[-1])


@fp8_linear.fp8_product.on("cupy")
def fp8_product(
    bits: Array, scale: Array, weight: Array, weight_scale: Array, coarse: bool, *, backend: CupyBackend
) -> Array:
    y, _ = gemm_of_8_bits("FP8_COARSE" if coarse else "FP8", flat(bits), weight, scale, weight_scale, backend.dtype)
    return shaped(y, bits)


@fp8_linear.fp8_product_swiglu.on("cupy")
def fp8_product_swiglu(
    bits: Array, scale: Array, weight: Array, weight_scale: Array, *, backend: CupyBackend
) -> tuple[Array, Array]:
    gu, hidden = gemm_of_8_bits("FP8_SWIGLU", flat(bits), weight, scale, weight_scale, backend.dtype)
    assert hidden is not None
    return shaped(gu, bits), shaped(hidden, bits)


@fp8_linear.fp8_weight_gradient.on("cupy")
def fp8_weight_gradient(
    dweight: Array, turned: Array, scale: Array, x_turned: Array, x_scale: Array, accumulate: bool = True
) -> None:
    if turned.size:
        gemm_of_8_bits("FP8_WEIGHT", turned, x_turned, scale, x_scale, dweight, accumulate=accumulate)
    elif not accumulate:
        dweight.fill(0)


@fp8_linear.weight_gradient.on("cupy")
def weight_gradient(dweight: Array, dy: Array, x: Array, accumulate: bool = True) -> None:
    gemm(flat(contiguous(dy)), flat(contiguous(x)), dweight, transpose_a=True, accumulate=accumulate)
