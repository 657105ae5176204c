"""Weights of four bits each in groups of 32, as in GGUF's type q4_0: W[o, i] ~ d[o, i / 32] (c[o, i] - 8).

c = 0 ... 15. d, rounded to float16, is an eighth of the number of largest size in its group with the sign reversed, so
that this number has the code 0. The error is at most |d| / 2; |d| where a number of the other sign is as large. Byte j
of a group's 16 has the codes of its numbers j, in the lower bits, and j + 16. Scales are kept in float32, which a
kernel reads in one instruction: a weight takes 5 bits.

Source: quantize_row_q4_0_ref of ggml-quants.c, the layout of a block and the choice of its scale.
"""

from __future__ import annotations

import numpy as np

GROUP = 32


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


def dequantise_groups(codes: np.ndarray, scales: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The numbers, (..., I) of `dtype`. codes: (..., I / 2); scales: (..., I / GROUP)."""
    packed = codes.reshape(*scales.shape, GROUP // 2)
    numbers = np.empty((*scales.shape, GROUP), dtype)
    factors = scales[..., None].astype(dtype)
    for half, part in ((packed & 15, slice(None, GROUP // 2)), (packed >> 4, slice(GROUP // 2, None))):
        np.multiply(half.view(np.int8) - np.int8(8), factors, out=numbers[..., part])
    return numbers.reshape(*scales.shape[:-1], -1)
