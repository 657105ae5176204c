"""Numbers of 8 bits: rounding rows and weights to them, for the products of --precision fp8.

A row of activations or of their gradient has a scale of its own, its largest magnitude over 448; so has a weight. What
is scaled so fits e4m3, 4 bits of exponent and 3 of mantissa, up to 448. There is no history of scales, and so nothing
that a checkpoint would have to hold: the same numbers give the same bits. A gradient whose row was not seen as a whole
before it is rounded takes the scale of another, and e5m2, up to 57,344.

Where numbers are rounded: by the kernel that makes them (RMSNorm, SwiGLU's backward), which hands on a `Scaled`; else
by `quantise_rows`. On NumPy --precision fp8 rounds in the same way, and computes in float32. In any other precision
nothing is rounded, and all scales are 1: so the gradients of the ops that use this are checked in float64.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends import Backend, fp8_dtype, wide
from tinyforge.backends.phantom import empty
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Param

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BYTE = np.dtype(np.uint8)
MULTIPLE = 16
"""Of which the steps of a sum in FP8 must be a multiple: rows begin at 16 bytes."""


class Scaled(NamedTuple):
    """x: (..., C), as other ops read it. bits: (..., C), x / scale in 8 bits. scale: (...). coarse: the bits are e5m2,
    else e4m3."""

    x: Array
    bits: Array
    scale: Array
    coarse: bool = False


class Weight8(NamedTuple):
    """A weight W (O, I) / scale in e4m3. straight: (O, I), and turned: (I, O), or None where it is not needed; scale:
    (1,)."""

    straight: Array
    turned: Array
    scale: Array


def rounded(x: Array, kind: str, backend: Backend) -> Array:
    """x in that format of 8 bits, ties to even, what is too large as the largest; x itself where nothing is rounded."""
    if not backend.fp8:
        return x
    return np.clip(x, -LARGEST[kind], LARGEST[kind]).astype(fp8_dtype(kind))


def scale_of(most: Array, backend: Backend) -> Array:
    """What numbers up to `most` are divided by; 1 for 0."""
    if not backend.fp8:
        return np.ones_like(most)
    return np.where(most > 0, most / most.dtype.type(LARGEST[E4M3]), most.dtype.type(1))


@kernel
def quantise_rows(x: Array, *, backend: Any) -> tuple[Array, Array]:
    """bits in e4m3 and scale of each row."""
    scale = scale_of(np.abs(x).max(axis=-1, initial=0), backend)
    return rounded(x * (1 / scale[..., None]), E4M3, backend), scale


@quantise_rows.on("phantom")
def quantise_rows_memory(x: Array) -> tuple[Array, Array]:
    return empty(x.shape, BYTE), empty(x.shape[:-1], wide(x.dtype))


@kernel
def quantise_weights(outs: Sequence[Weight8], weights: Sequence[Array], *, backend: Any) -> None:
    """Round each of the weights to the one of `outs` in its place, straight and turned."""
    for out, weight in zip(outs, weights, strict=True):
        out.scale[...] = scale_of(np.abs(weight).max(initial=0), backend)
        bits = rounded(weight * (1 / out.scale), E4M3, backend)
        for place, value in ((out.straight, bits), (out.turned, bits.T)):
            if place is not None:
                place[...] = value


@quantise_weights.on("phantom")
def quantise_weights_memory(outs: Sequence[Weight8], weights: Sequence[Array]) -> None:
    pass


def weight8(param: Param, backend: Backend, *, straight: bool = False, turned: bool = False) -> Weight8:
    """Memory for a weight in 8 bits. Raises UserError for sizes that the GPU's kernels do not take."""
    kind = backend.dtype if not backend.fp8 else fp8_dtype(E4M3) if backend.name == "numpy" else BYTE

    def make(shape: tuple[int, ...]) -> Array:
        if backend.fp8 and (shape[1] % MULTIPLE or shape[0] % 8):
            raise UserError(f"--precision fp8: {param.name} is {param.shape}, and products in FP8 want multiples of "
                            f"{MULTIPLE} in their sum, here {shape[1]}, and of 8 in their result, here {shape[0]}; use "
                            "--precision bf16")  # fmt: skip
        return backend.zeros(shape, kind)

    return Weight8(make(param.shape) if straight else None, make(param.shape[::-1]) if turned else None,
                   backend.zeros((1,), backend.master_dtype))  # fmt: skip


def product(a: Array, scale: Array, b: Array, weight_scale: Array) -> Array:
    """a b^T of rows and a weight in 8 bits, times both scales. a: (..., K); b: (N, K); the result: (..., N)."""
    kind = scale.dtype
    y = a.reshape(-1, a.shape[-1]).astype(kind, copy=False) @ b.astype(kind, copy=False).T
    y *= scale.reshape(-1, 1) * weight_scale
    return y.reshape(*a.shape[:-1], len(b))
