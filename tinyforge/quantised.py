"""Weights of one byte each: int8 and FP8, with a float32 scale for each row of a matrix.

int4 and nf4 have four bits each: see `quantised_groups`.

    W[o, i] ~ s[o] c[o, i],    s[o] = max over i of |W[o, i]| / top,    c = W / s to the nearest code, ties to even

    int8    c = -127 ... 127, top = 127                              |W - s c| <= s / 2
    fp8     c = +-(1 + m / 8) 2^e, e = -6 ... 8, top = 448 (e4m3)    |W - s c| <= 2^-4 |W|, s 2^-10 where |W| < s 2^-6

e4m3 has a sign, four bits of exponent and three of mantissa. Below 2^-6 its numbers are the multiples of 2^-9. It has
no infinity; the two codes with all seven lower bits set are NaN. fp8 codes are stored as uint8.

    codes, scales = quantise(matrix, "int8")
    matrix = dequantise(codes, scales, matrix.dtype)

Sources: Dettmers et al., "LLM.int8()" (2022), section 2, for symmetric codes with a scale for each row; Frantar et al.,
"GPTQ" (2022), for rounding to nearest without calibration data (RTN); Micikevicius et al., "FP8 Formats for Deep
Learning" (2022), and the OCP "8-bit Floating Point Specification" (2023) for e4m3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.quantised_groups import (
    GROUP,
    NF4_GROUP,
    TOP_GROUP,
    dequantise_groups,
    dequantise_nf4,
    dequantise_nf4_double,
    dequantise_scales,
    quantise_groups,
    quantise_nf4,
    quantise_scales,
)


class Format(NamedTuple):
    """top: the largest number. dtype: of the stored byte. scalar: the type's name in CUDA."""

    top: float
    dtype: np.dtype
    scalar: str


AT_ONCE = 1 << 20
"""Numbers that `quantise` processes at a time: this bounds its temporary memory."""
FOUR_BITS = "int4"
"""Codes of four bits, of groups: see `quantised_groups`. For matrices whose rows are whole groups."""
DOUBLE = "nf4-double"
"""NF4 with its scales in 8 bits."""
GROUPS = {FOUR_BITS: GROUP, "nf4": NF4_GROUP, DOUBLE: NF4_GROUP}
"""The formats of four bits with the numbers of their groups."""
PACK = {FOUR_BITS: quantise_groups, "nf4": quantise_nf4, DOUBLE: quantise_nf4}
TILE = 1 << 20
"""Numbers that a product on a CPU dequantises at a time."""
FORMATS = {"int8": Format(127, np.dtype(np.int8), "int8"), "fp8": Format(448, np.dtype(np.uint8), "e4m3")}


def _e4m3_numbers() -> np.ndarray:
    codes = np.arange(256)
    sign, exponent, mantissa = np.where(codes & 128, -1, 1), codes >> 3 & 15, codes & 7
    numbers = sign * np.where(exponent, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9))
    return np.where(codes & 127 == 127, np.nan, numbers).astype(np.float32)


E4M3 = _e4m3_numbers()
"""The number of each code, (256,)."""


KINDS = (*FORMATS, FOUR_BITS)
"""What `--weights` may be for inference."""
FOR_TUNING = ("nf4", DOUBLE, *FORMATS)
"""What the frozen base of adapters may be in."""


def check_format(kind: str, kinds: tuple[str, ...] = (*KINDS, "nf4", DOUBLE)) -> None:
    if kind not in kinds:
        raise UserError(f"--weights {kind!r} is not a format; use one of: {', '.join(kinds)}")


def quantise(matrix: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """matrix: (..., O, I) float32 or float64; returns codes of that shape, int8 or uint8, and scales (..., O) float32.
    For four bits they have the shapes of `quantise_groups` and `quantise_nf4`; the scales of `DOUBLE` are those of nf4.

    A row of zeros has the scale 0. Raises UserError for a number that is not finite.
    """
    check_format(kind)
    columns = matrix.shape[-1]
    rows = matrix.reshape(math.prod(matrix.shape[:-1]), columns)
    parts, step = [], max(1, AT_ONCE // max(1, columns))
    for start in range(0, max(len(rows), 1), step):
        part = rows[start : start + step]
        if not np.isfinite(part).all():
            raise UserError(f"a weight is not finite, and {kind} cannot represent it; leave out --weights or --dtype")
        parts.append(PACK[kind](part) if kind in PACK else _quantise_rows(part, kind))
    codes, scales = (np.concatenate(found) for found in zip(*parts, strict=True))
    lead = matrix.shape[:-1]
    return codes.reshape(*lead, codes.shape[-1]), scales.reshape(*lead, *scales.shape[1:])


def _quantise_rows(rows: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    top, dtype, _ = FORMATS[kind]
    scales = (np.abs(rows).max(axis=-1, initial=0) / top).astype(np.float32)
    numbers = np.clip(rows / np.where(scales > 0, scales, np.inf)[:, None], -top, top)  # a scale may be rounded down
    return (np.rint(numbers).astype(dtype) if kind == "int8" else to_e4m3(numbers)), scales


def to_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Round numbers of at most 448 in size to the nearest e4m3, ties to even; returns the codes, uint8.

    Without the sign bit, codes are consecutive: 8 for each power of 2, so rounding up carries into the exponent.
    """
    size = np.abs(numbers)
    exponent = np.frexp(np.maximum(size, 2.0**-6))[1] - 1  # below 2^-6 the step stays 2^-9
    steps = np.rint(np.ldexp(size, 3 - exponent)).astype(np.int32)
    return (8 * (exponent + 6) + steps + 128 * np.signbit(numbers)).astype(np.uint8)


@kernel
def dequantise(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    """s c, rounded once. codes: (..., I), int8 or e4m3 as uint8; scales: (...); returns (..., I) of `dtype`."""
    numbers = E4M3[codes] if codes.dtype == np.uint8 else codes
    return np.multiply(numbers, scales[..., None], dtype=wide(dtype)).astype(dtype, copy=False)


dequantise.on("meta")(lambda codes, dtype: empty(codes.shape, dtype))


class Quantised:
    """A matrix, or several in one array, of one byte per number or less.

    kind: one of `KINDS` or `FOR_TUNING`. shape: (..., O, I). codes, scales: as `quantise` returns them. dtype: of
    `values()`, the backend's. second: of `DOUBLE`, tops and offset of the scales, and the number of the first group.
    Its scales wait in float32, in host memory, until the first use after the rows are set, since groups of scales do
    not end with a row.
    """

    def __init__(
        self, kind: str, codes: Array, scales: Array, backend: Backend, second: tuple[Array, Array, int] | None = None
    ) -> None:
        self.kind, self.codes, self.scales, self.second = kind, codes, scales, second
        self.dtype, self._backend = backend.dtype, backend
        self._waiting: np.ndarray | None = None
        self._settled = False

    @classmethod
    def zeros(cls, kind: str, shape: tuple[int, ...], backend: Backend) -> Quantised:
        check_format(kind)
        *lead, columns = shape
        if kind in GROUPS:
            codes = backend.zeros((*lead, columns // 2), np.dtype(np.uint8))
            count = columns // GROUPS[kind]
            scales = backend.zeros((*lead, count), np.dtype(np.uint8 if kind == DOUBLE else np.float32))
            if kind == DOUBLE:
                both = backend.zeros((-(-scales.size // TOP_GROUP) + 1,), np.dtype(np.float32))
                return cls(kind, codes, scales, backend, (both[:-1], both[-1:], 0))
        else:
            codes, scales = backend.zeros(shape, FORMATS[kind].dtype), backend.zeros(shape[:-1], np.dtype(np.float32))
        return cls(kind, codes, scales, backend)

    def __getitem__(self, rows: Any) -> Quantised:
        """A view of some rows; the last axis must stay whole. Of `DOUBLE`, by a number or a slice."""
        second = self.second
        self.settle()
        if second is not None:
            first = range(len(self))[rows]
            first = first.start if isinstance(first, range) else first
            second = (*second[:2], second[2] + first * math.prod(self.scales.shape[1:]))
        return Quantised(self.kind, self.codes[rows], self.scales[rows], self._backend, second)

    def __setitem__(self, rows: Any, value: np.ndarray) -> None:
        """Quantise `value`, rows in host memory, into these rows."""
        codes, scales = quantise(value, self.kind)
        self.codes[rows] = self._backend.asarray(codes, codes.dtype)
        if self.second is not None:
            if self._waiting is None:
                self._waiting = np.zeros(self.scales.shape, np.float32)
                if self._settled:
                    held, tops, offset = map(self._backend.to_numpy, (self.scales, *self.second[:2]))
                    self._waiting[...] = dequantise_scales(held, tops, offset, self.second[2])
            self._waiting[rows] = scales
            return
        self.scales[rows] = self._backend.asarray(scales, scales.dtype)

    def settle(self) -> None:
        """Quantise the scales that wait for it."""
        if self._waiting is not None and self.second is not None:
            for array, value in zip((self.scales, *self.second[:2]), quantise_scales(self._waiting), strict=True):
                array[...] = self._backend.asarray(value, value.dtype)
            self._waiting, self._settled = None, True

    def values(self) -> Array:
        """The dequantised numbers, a new array."""
        self.settle()
        if self.second is not None:
            return dequantise_nf4_double.bind(self._backend)(self.codes, self.scales, *self.second, self.dtype)
        if self.kind == FOUR_BITS:
            return dequantise_groups.bind(self._backend)(self.codes, self.scales, self.dtype)
        if self.kind in GROUPS:
            return dequantise_nf4.bind(self._backend)(self.codes, self.scales, self.dtype)
        return dequantise.bind(self._backend)(self.codes, self.scales, self.dtype)

    def reshape(self, *shape: int) -> Quantised:
        """A view of another shape; the last axis must stay."""
        self.settle()
        lead = shape[:-1]
        codes, scales = self.codes.reshape(*lead, self.codes.shape[-1]), self.scales
        scales = scales.reshape(*lead, scales.shape[-1]) if self.kind in GROUPS else scales.reshape(lead)
        return Quantised(self.kind, codes, scales, self._backend, self.second)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, columns = self.codes.shape
        return (*lead, 2 * columns if self.kind in GROUPS else columns)

    @property
    def nbytes(self) -> int:
        return int(sum(x.nbytes for x in (self.codes, self.scales, *(self.second or ())[:2])))


def tiles(matrix: Any) -> Iterator[tuple[slice, Array]]:
    """The rows of a matrix in host memory in parts, dequantised if they are codes: a few megabytes at a time. An array
    is one part."""
    step = max(1, TILE // max(1, matrix.shape[-1])) if isinstance(matrix, Quantised) else max(1, len(matrix))
    for start in range(0, len(matrix), step):
        rows = slice(start, min(start + step, len(matrix)))
        yield rows, plain(matrix[rows])


def plain(matrix: Any) -> Array:
    """The matrix, computed if it is stored in another form: `Quantised`, or as a decoder packs it."""
    return matrix.values() if hasattr(matrix, "values") else matrix
