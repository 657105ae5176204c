"""FP8: rows and weights quantised for the products of --precision fp8.

Each row of an activation or gradient has its own scale, its largest magnitude over 448; a weight has one scale. Divided
by it, all numbers fit e4m3 (4 bits of exponent, 3 of mantissa, up to 448). Scales are computed from the numbers
themselves, not taken from earlier steps, so a checkpoint holds none, and the same numbers always give the same codes.

A weight's gradient is a sum over rows, so all rows share one scale there, the largest of theirs. The tensor cores read
both factors with consecutive steps of the sum adjacent in memory, so for this product the codes are stored transposed.
The gradient of gate|up is quantised by the kernel that computes it, before its largest magnitude is known: it uses the
scale of dy, from which it is computed, and e5m2 (5 bits of exponent, 2 of mantissa, up to 57,344).

RMSNorm and SwiGLU's backward quantise what they write, and return a `Scaled` or an `FP8Gradient`; anything else is
quantised by `quantise_rows`. On NumPy, --precision fp8 rounds in the same way and computes in float32. In any other
precision nothing is rounded and all scales are 1, so that the gradients of these ops can be checked in float64.

Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends import Backend, fp8_dtype
from tinyforge.backends.meta import empty, per_row
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Param
from tinyforge.ops.swiglu import swiglu_bwd

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
BYTE = np.dtype(np.uint8)
MULTIPLE = 16
"""The length of a sum in FP8 must be a multiple of this: rows begin at 16 bytes."""


class Scaled(NamedTuple):
    """x: (..., C), not rounded, for other ops. codes: (..., C), x / scale in e4m3. scale: (...), one for each row."""

    x: Array
    codes: Array
    scale: Array


class FP8Gradient(NamedTuple):
    """A gradient (..., C), divided by scale, in e5m2. codes: (..., C). transposed: (C, rows), padded as by
    `quantise_transposed`. scale: (1,)."""

    codes: Array | None
    transposed: Array
    scale: Array


class FP8Weight(NamedTuple):
    """A weight (O, I), divided by scale, in e4m3. codes: (O, I). transposed: (I, O). Either is None if nothing reads
    it. scale: (1,)."""

    codes: Any
    transposed: Any
    scale: Array


def rounded(x: Array, kind: str, backend: Backend) -> Array:
    """x rounded to the format `kind`, ties to even, saturating; x itself in any other precision than fp8."""
    if not backend.fp8:
        return x
    return np.clip(x, -LARGEST[kind], LARGEST[kind]).astype(fp8_dtype(kind))


def scale_of(most: Array, backend: Backend) -> Array:
    """The scale of numbers up to `most`; 1 for 0."""
    if not backend.fp8:
        return np.ones_like(most)
    return np.where(most > 0, most / most.dtype.type(LARGEST[E4M3]), most.dtype.type(1))


@kernel
def quantise_rows(x: Array, *, backend: Any = None) -> tuple[Array, Array]:
    """Codes in e4m3, (..., C), and the scale of each row, (...)."""
    scale = scale_of(np.abs(x).max(axis=-1, initial=0), backend)
    return rounded(x * (1 / scale[..., None]), E4M3, backend), scale


quantise_rows.on("meta")(lambda x: (empty(x.shape, BYTE), per_row(x)))


@kernel
def largest_scale(scale: Array) -> Array:
    """(1,): the largest of all rows' scales; 1 if there are no rows."""
    return scale.max(initial=0 if scale.size else 1, keepdims=True).reshape(1)


largest_scale.on("meta")(lambda scale: empty((1,), scale.dtype))


@kernel
def quantise_transposed(x: Array, scale: Array, e5m2: bool, *, backend: Any = None) -> tuple[Array | None, Array]:
    """(None, transposed): x / scale in e4m3, transposed to (C, rows), rows padded with zeros to a multiple of 16.

    With e5m2, (codes, transposed): both in e5m2, codes in the layout of x. scale: (1,)."""
    codes = rounded(x * (1 / scale), E5M2 if e5m2 else E4M3, backend)
    return codes if e5m2 else None, transposed_of(codes)


def transposed_of(codes: Array) -> Array:
    rows = codes.reshape(-1, codes.shape[-1])
    transposed = np.zeros(transposed_shape(codes.shape), codes.dtype)
    transposed[:, : len(rows)] = rows.T
    return transposed


def transposed_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[-1], -(-math.prod(shape[:-1]) // MULTIPLE) * MULTIPLE


@quantise_transposed.on("meta")
def quantise_transposed_memory(x: Array, e5m2: bool) -> tuple[Array | None, Array]:
    return empty(x.shape, BYTE) if e5m2 else None, empty(transposed_shape(x.shape), BYTE)


@kernel
def swiglu_bwd_fp8(
    hidden: Array | None, dy: Array, gu: Array, scale: Array, *, backend: Any = None
) -> tuple[Array, Array]:
    """`quantise_transposed` of swiglu_bwd(hidden, dy, gu), in e5m2."""
    codes = rounded(swiglu_bwd(hidden, dy, gu) * (1 / scale), E5M2, backend)
    return codes, transposed_of(codes)


swiglu_bwd_fp8.on("meta")(lambda gu: (empty(gu.shape, BYTE), empty(transposed_shape(gu.shape), BYTE)))


@kernel
def quantise_weights(outs: Sequence[FP8Weight], weights: Sequence[Array], *, backend: Any = None) -> None:
    """Quantise weights[i] into outs[i], for all i by one launch."""
    for out, weight in zip(outs, weights, strict=True):
        out.scale[...] = scale_of(np.abs(weight).max(initial=0), backend)
        codes = rounded(weight * (1 / out.scale), E4M3, backend)
        for place, value in ((out.codes, codes), (out.transposed, codes.T)):
            if place is not None:
                place[...] = value


def fp8_weight_of(param: Param, backend: Backend, *, codes: bool = False, transposed: bool = False) -> FP8Weight:
    """Memory for a weight's codes. Raises UserError for a shape that the kernels do not take."""
    kind = backend.dtype if not backend.fp8 else fp8_dtype(E4M3) if backend.name == "numpy" else BYTE

    def make(shape: tuple[int, ...]) -> Array:
        if backend.fp8 and (shape[1] % MULTIPLE or shape[0] % 8):
            raise UserError(
                f"--precision fp8: {param.name} is {param.shape}; products in FP8 sum over a multiple of "
                f"{MULTIPLE}, here {shape[1]}, into a multiple of 8, here {shape[0]}; use bf16 or fp32"
            )
        return backend.zeros(shape, kind)

    return FP8Weight(
        make(param.shape) if codes else None,
        make(param.shape[::-1]) if transposed else None,
        backend.zeros((1,), backend.master_dtype),
    )
