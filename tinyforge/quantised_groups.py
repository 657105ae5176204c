"""Weights of four bits each in groups: int4, and NF4 for tuning.

int4 is GGUF's type q4_0, in groups of 32: W[o, i] ~ d[o, i / 32] (c[o, i] - 8).

c = 0 ... 15. d, rounded to float16, is an eighth of the number of largest size in its group with the sign reversed, so
that this number has the code 0. The error is at most |d| / 2; |d| where a number of the other sign is as large. Byte j
of a group's 16 has the codes of its numbers j, in the lower bits, and j + 16. Scales are kept in float32, which a CPU
reads in one instruction: a weight takes 5 bits. The fused kernel for a GPU has them in float16: 4.5 bits.

NF4, in groups of 64: W[o, i] ~ d[o, i / 64] n[c[o, i]], with d the largest size in the group, in float32, and n 16
numbers from -1 to 1 at the quantiles of a normal distribution, 0 among them. c is the nearest. Byte j of a group's 32
has the codes of its numbers 2j, in the upper bits, and 2j + 1, as in bitsandbytes. A weight takes 4.5 bits.

Sources: quantize_row_q4_0_ref of ggml-quants.c, the layout of a block and the choice of its scale; Dettmers et al.,
"QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E, for the numbers of NF4.
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel

GROUP = 32
NF4_GROUP = 64
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
    return numbers.reshape(*codes.shape[:-1], -1)


dequantise_nf4.on("meta")(lambda codes, dtype: empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype))
