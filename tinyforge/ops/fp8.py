"""Numbers of 8 bits: rounding rows and weights to them, for the products of --precision fp8.

A row of activations or of their gradient has a scale of its own, its largest magnitude over 448; so has a weight. What
is scaled so fits e4m3, 4 bits of exponent and 3 of mantissa, up to 448. There is no history of scales, and so nothing
that a checkpoint would have to hold: the same numbers give the same bits.

A weight's gradient is a sum over rows, which then need one scale: the largest of theirs. The tensor cores take both
factors with steps of the sum next to each other, so that rows are turned on the way. The gradient of gate|up is rounded
where it is made, before anybody has seen the whole of it: it takes the scale of dy, of which it comes, and e5m2, which
reaches up to 57,344 and as far down.

Where numbers are rounded: by the kernel that makes them (RMSNorm, SwiGLU's backward), which hands on a `Scaled`; else
by `quantise_rows`. On NumPy --precision fp8 rounds in the same way, and computes in float32. In any other precision
nothing is rounded, and all scales are 1: so the gradients of the ops that use this are checked in float64.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends import Backend, fp8_dtype, wide
from tinyforge.backends.phantom import empty
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Param
from tinyforge.ops.swiglu import swiglu_bwd

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BYTE = np.dtype(np.uint8)
MULTIPLE = 16
"""Of which the steps of a sum in FP8 must be a multiple: rows begin at 16 bytes."""


class Scaled(NamedTuple):
    """x: (..., C), as other ops read it. bits: (..., C), x / scale in e4m3. scale: (...)."""

    x: Array
    bits: Array
    scale: Array


class Gradient8(NamedTuple):
    """A gradient (..., C) over `scale`, (1,), in e5m2. bits: (..., C); turned: (C, rows), see `turn_rows`."""

    bits: Array
    turned: Array
    scale: Array


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
def largest_scale(scale: Array) -> Array:
    """(1,): of the scales of all rows; 1 of none."""
    return scale.max(initial=0 if scale.size else 1, keepdims=True).reshape(1)


@largest_scale.on("phantom")
def largest_scale_memory(scale: Array) -> Array:
    return empty((1,), scale.dtype)


@kernel
def turn_rows(x: Array, scale: Array, coarse: bool, *, backend: Any) -> tuple[Array | None, Array]:
    """x / scale, (1,), in e4m3, with an axis of its rows last: (C, rows), and zeros up to a multiple of 16. coarse: in
    e5m2, and the bits as they lie in x as well."""
    bits = rounded(x * (1 / scale), E5M2 if coarse else E4M3, backend)
    return bits if coarse else None, turned_of(bits)


def turned_of(bits: Array) -> Array:
    rows = bits.reshape(-1, bits.shape[-1])
    turned = np.zeros(turned_shape(bits.shape), bits.dtype)
    turned[:, : len(rows)] = rows.T
    return turned


def turned_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[-1], -(-math.prod(shape[:-1]) // MULTIPLE) * MULTIPLE


@turn_rows.on("phantom")
def turn_rows_memory(x: Array, scale: Array, coarse: bool) -> tuple[Array | None, Array]:
    return empty(x.shape, BYTE) if coarse else None, empty(turned_shape(x.shape), BYTE)


@kernel
def swiglu_bwd_turned(
    hidden: Array | None, dy: Array, gu: Array, scale: Array, *, backend: Any
) -> tuple[Array, Array]:
    """turn_rows of swiglu_bwd(hidden, dy, gu), coarse."""
    bits = rounded(swiglu_bwd(hidden, dy, gu) * (1 / scale), E5M2, backend)
    return bits, turned_of(bits)


@swiglu_bwd_turned.on("phantom")
def swiglu_bwd_turned_memory(hidden: Array | None, dy: Array, gu: Array, scale: Array) -> tuple[Array, Array]:
    return empty(gu.shape, BYTE), empty(turned_shape(gu.shape), BYTE)


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
