"""Weights of four bits each in groups: int4, and NF4 for tuning.

int4 is GGUF's type q4_0, in groups of 32: W[o, i] ~ d[o, i / 32] (c[o, i] - 8).

c = 0 ... 15. d, rounded to float16, is an eighth of the number of largest size in its group with the sign reversed, so
that this number has the code 0. The error is at most |d| / 2; |d| where a number of the other sign is as large. Byte j
of a group's 16 has the codes of its numbers j, in the lower bits, and j + 16. Scales are kept in float32, which a CPU
reads in one instruction: a weight takes 5 bits. The fused kernel for a GPU has them in float16: 4.5 bits.

NF4, in groups of 64: W[o, i] ~ d[o, i / 64] n[c[o, i]], with d the largest size in the group, in float32, and n 16
numbers from -1 to 1 at the quantiles of a normal distribution, 0 among them. c is the nearest. Byte j of a group's 32
has the codes of its numbers 2j, in the upper bits, and 2j + 1, as in bitsandbytes. A weight takes 4.5 bits.

Double quantisation, as bitsandbytes has it, stores d in 8 bits: d[g] ~ m[e[g]] t[g / 256] + o, where the groups g of a
matrix are counted row by row, o is the mean of its d, t the largest |d - o| of 256 groups, and m 256 numbers from -1 to
1, each decade with half as many as the next. A weight takes 4.127 bits.

Sources: quantize_row_q4_0_ref of ggml-quants.c, the layout of a block and the choice of its scale; Dettmers et al.,
"QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E, for the numbers of NF4, and section 3; Dettmers,
"8-Bit Approximations for Parallelism in Deep Learning" (2015), for the numbers of 8 bits.
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel

GROUP = 32
NF4_GROUP = 64
TOP_GROUP = 256
"""Groups of NF4 whose scales have one scale of their own."""
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
"""The numbers of the codes, (16,)."""
NF4_PAIRS = np.stack([NF4.repeat(16), np.tile(NF4, 16)], axis=1).view(np.uint64)[:, 0]
"""Those of the two codes of a byte, two float32 as one item: (256,). Items are looked up 14 times as fast as rows."""


def _dynamic_numbers() -> np.ndarray:
    """bitsandbytes' create_dynamic_map: 2^k means of equal intervals of [0.1, 1], times 10^(k - 6), k = 0 ... 6, with
    both signs; and 0 and 1."""
    edges = (np.linspace(0.1, 1, 2**k + 1) * 10.0 ** (k - 6) for k in range(7))
    sizes = np.concatenate([(e[1:] + e[:-1]) / 2 for e in edges])
    return np.sort(np.concatenate([-sizes, sizes, [0.0, 1.0]])).astype(np.float32)


DYNAMIC = _dynamic_numbers()
"""The numbers of 8 bits, (256,)."""


def quantise_groups(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows: (N, I), finite, I a multiple of GROUP; returns codes (N, I / 2), uint8, and scales (N, I / GROUP),
    float32."""
    groups = rows.astype(np.float32, copy=False).reshape(-1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    scales = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.minimum(groups * inverse + np.float32(8.5), 15).astype(np.uint8)
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    return packed.reshape(len(rows), -1), scales.astype(np.float16).astype(np.float32).reshape(len(rows), -1)


@kernel
def dequantise_groups(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    """The numbers, (..., I) of `dtype`. codes: (..., I / 2); scales: (..., I / GROUP)."""
    packed = codes.reshape(*scales.shape, GROUP // 2)
    numbers = np.empty((*scales.shape, GROUP), dtype)
    factors = scales[..., None].astype(dtype)
    for half, part in ((packed & 15, slice(None, GROUP // 2)), (packed >> 4, slice(GROUP // 2, None))):
        np.multiply(half.view(np.int8) - np.int8(8), factors, out=numbers[..., part])
    return numbers.reshape(*scales.shape[:-1], -1)


dequantise_groups.on("meta")(lambda codes, dtype: empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype))


def quantise_nf4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows: (N, I), finite, I a multiple of NF4_GROUP; returns codes (N, I / 2), uint8, and scales (N, I / NF4_GROUP),
    float32."""
    groups = rows.astype(np.float32, copy=False).reshape(-1, NF4_GROUP)
    scales = np.abs(groups).max(axis=1)
    borders = (NF4[1:].astype(np.float64) + NF4[:-1]) / 2
    shares = groups / np.where(scales > 0, scales, 1)[:, None]
    codes = np.searchsorted(borders.astype(np.float32), shares).astype(np.uint8)
    packed = codes[:, ::2] << 4 | codes[:, 1::2]
    return packed.reshape(len(rows), rows.shape[1] // 2), scales.reshape(len(rows), rows.shape[1] // NF4_GROUP)


@kernel
def dequantise_nf4(codes: Array, scales: Array, dtype: np.dtype) -> Array:
    """The numbers, (..., I), rounded once to `dtype`. codes: (..., I / 2); scales: (..., I / NF4_GROUP)."""
    numbers = np.take(NF4_PAIRS, codes).view(np.float32).reshape(*scales.shape, NF4_GROUP)
    if dtype == np.float32:
        numbers *= scales[..., None]
    else:
        numbers = np.multiply(numbers, scales[..., None], dtype=wide(dtype)).astype(dtype, copy=False)
    return numbers.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


dequantise_nf4.on("meta")(lambda codes, dtype: empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype))


def quantise_scales(scales: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """scales: of a matrix's groups, float32; returns codes of that shape, uint8, tops (N / TOP_GROUP, rounded up) and
    the offset (1,), float32."""
    flat = scales.astype(np.float32, copy=False).reshape(-1)
    offset = np.array([flat.mean(dtype=np.float64) if flat.size else 0], np.float32)
    rest = np.zeros((-(-flat.size // TOP_GROUP), TOP_GROUP), np.float32)
    rest.reshape(-1)[: flat.size] = flat - offset
    tops = np.abs(rest).max(axis=1, initial=0)
    shares = rest / np.where(tops > 0, tops, 1)[:, None]
    codes = np.searchsorted((DYNAMIC[1:].astype(np.float64) + DYNAMIC[:-1]) / 2, shares).astype(np.uint8)
    return codes.reshape(-1)[: flat.size].reshape(scales.shape), tops, offset


def dequantise_scales(codes: Array, tops: Array, offset: Array, start: int) -> Array:
    """float32, of the shape of `codes`, the first of which is group `start` of its matrix."""
    groups = (start + np.arange(codes.size)) // TOP_GROUP
    return DYNAMIC[codes] * tops[groups].reshape(codes.shape) + offset


@kernel
def dequantise_nf4_double(
    codes: Array, scales: Array, tops: Array, offset: Array, start: int, dtype: np.dtype
) -> Array:
    """As `dequantise_nf4`, with scales (..., I / NF4_GROUP) in 8 bits, see `dequantise_scales`."""
    return dequantise_nf4(codes, dequantise_scales(scales, tops, offset, start), dtype)


dequantise_nf4_double.on("meta")(lambda codes, dtype: empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype))
