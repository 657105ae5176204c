"""Weights of four bits each in groups: int4, and NF4 for tuning.

int4 is GGUF's type q4_0, in groups of 32: W[o, i] ~ d[o, i / 32] (c[o, i] - 8).

c = 0 ... 15. d, rounded to float16, is an eighth of the number of largest size in its group with the sign reversed, so
that this number has the code 0. The error is at most |d| / 2; |d| where a number of the other sign is as large. Numbers
that some d represents without error, as those of a file of this type, keep their values. Byte j of a group's 16 has the
codes of its numbers j, in the lower bits, and j + 16. Scales are kept in float32, which a CPU reads in one instruction:
a weight takes 5 bits. The fused kernel for a GPU has them in float16: 4.5 bits.

With the second moments of a matrix's inputs, H = E[x x^T] (I, I), the error of its outputs is least, not that of its
weights. With H = R R^T, R upper triangular, and errors e[i] = W[o, i] - d q[i], it is

    E[(e x)^2] = e H e^T = sum over i of R[i, i]^2 (W[o, i] + sum over j < i of e[j] R[j, i] / R[i, i] - d q[i])^2

So numbers are rounded from left to right, each with the weighted errors of those before it added: error feedback, which
is GPTQ without an inverse of H. A group's d is found by a search. For each s of STARTS the number of largest size gets
the code nearest to s and the others theirs, q = c - 8. With w = R[i, i]^2, the d of least squares is sum(w x q) /
sum(w q^2), which lowers the error by sum(w x q)^2 / sum(w q^2): the largest such gain wins.

NF4, in groups of 64: W[o, i] ~ d[o, i / 64] n[c[o, i]], with d the largest size in the group, in float32, and n 16
numbers from -1 to 1 at the quantiles of a normal distribution, 0 among them. c is the nearest. Byte j of a group's 32
has the codes of its numbers 2j, in the upper bits, and 2j + 1, as in bitsandbytes. A weight takes 4.5 bits.

Double quantisation, as bitsandbytes has it, stores d in 8 bits: d[g] ~ m[e[g]] t[g / 256] + o, where the groups g of a
matrix are counted row by row, o is the mean of its d, t the largest |d - o| of 256 groups, and m 256 numbers from -1 to
1, each decade with half as many as the next. A weight takes 4.127 bits.

Sources: quantize_row_q4_0_ref and make_qx_quants of ggml-quants.c, for a block, its scale, and the search; Frantar et
al., "GPTQ" (2022), and Chee et al., "QuIP" (2023), theorem 6, for error feedback by a factor of H; Dettmers et al.,
"QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E, for the numbers of NF4, and section 3; Dettmers,
"8-Bit Approximations for Parallelism in Deep Learning" (2015), for the numbers of 8 bits.
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel

GROUP = 32
STARTS = (-8.0, -9.0, 7.0)
"""What a group's number of largest size is divided by, at the start of the search for its scale."""
SHRINKAGE, DAMPING = 0.6, 1e-6
"""Share by which correlations of inputs are lowered: those of a short text are partly chance, and full feedback costs
more than none on other text. And what is added to H's diagonal, in units of its mean, for inputs that are always 0."""
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
    groups = np.ascontiguousarray(rows, np.float32).reshape(-1, GROUP)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    scales = largest / np.float32(-8)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    codes = np.minimum(groups * inverse + np.float32(8.5), 15).astype(np.uint8)
    scales = scales.astype(np.float16).astype(np.float32)
    # d q has at most 14 significant bits, which few groups of 32 numbers have but those that were rounded before.
    coarse = np.flatnonzero(~(np.bitwise_or.reduce(groups.view(np.uint32), axis=1) & 0x3FF).astype(bool))
    peaks, four = largest[coarse, 0], np.ascontiguousarray(groups[coarse, :4].T)
    for code in range(1, 8) if len(coarse) else ():  # of the largest number
        with np.errstate(over="ignore", invalid="ignore"):  # a scale beyond float16 represents nothing
            scale = (peaks / np.float32(code)).astype(np.float16).astype(np.float32)
            some = np.flatnonzero(_are_multiples(four, scale))
        some = some[_are_multiples(groups[coarse[some]].T, scale[some])]
        codes[coarse[some]] = _rounded(groups[coarse[some]], scale[some, None]) + np.float32(8)
        scales[coarse[some], 0] = scale[some]
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    return packed.reshape(len(rows), rows.shape[1] // 2), scales.reshape(len(rows), rows.shape[1] // GROUP)


def _are_multiples(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return (_rounded(groups, scales) * scales == groups).all(axis=0)


def round_with_feedback(rows: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """The numbers that int4 has for rows whose inputs have these second moments, (N, I) float32, which
    `quantise_groups` keeps. rows: (N, I), finite, I a multiple of GROUP; moments: (I, I), symmetric, not negative."""
    shrunk, squares = moments.astype(np.float64) * (1 - SHRINKAGE), moments.diagonal().astype(np.float64)
    shrunk[np.diag_indices_from(shrunk)] = squares + (DAMPING * squares.mean() or 1.0)
    factor = np.linalg.cholesky(shrunk[::-1, ::-1])[::-1, ::-1]
    diagonal = factor.diagonal()
    feedback = np.ascontiguousarray((factor / diagonal).T, np.float32)
    weights = (diagonal**2 / diagonal.max() ** 2).astype(np.float32)[:, None]
    columns = np.ascontiguousarray(rows.T, np.float32)
    found, errors = np.zeros_like(columns), np.zeros_like(columns)
    for start in range(0, len(columns), GROUP):
        end = start + GROUP
        corrected = columns[start:end] + feedback[start:end, :start] @ errors[:start]
        scales = _scales(corrected, weights[start:end])
        for i in range(start, end):
            np.multiply(_rounded(corrected[i - start], scales), scales, out=found[i])
            np.subtract(columns[i], found[i], out=errors[i])
            corrected[i - start + 1 :] += feedback[i + 1 : end, i, None] * errors[i]
    return found.T


def _rounded(x: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """x / d to the nearest of -8 ... 7, 0 where d is 0; float32. The shapes are those of a product."""
    q = x * np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    np.rint(q, out=q)
    np.maximum(q, np.float32(-8), out=q)
    return np.minimum(q, np.float32(7), out=q)


def _scales(groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The scales of least weighted squared error that the search finds, (N,), float16 as float32. groups: (GROUP, N);
    weights: (GROUP, 1)."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(axis=0)[None], axis=0)[0]
    scales = best = np.zeros_like(peak)
    for start in STARTS:
        q = _rounded(groups, peak / np.float32(start))
        weighted = weights * q
        q *= weighted
        weighted *= groups
        norm, product = q.sum(axis=0), weighted.sum(axis=0)
        scale = np.divide(product, norm, out=np.zeros_like(peak), where=norm > 0)
        gain = scale * product
        better = gain > best
        scales, best = np.where(better, scale, scales), np.where(better, gain, best)
    return scales.astype(np.float16).astype(np.float32)


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
