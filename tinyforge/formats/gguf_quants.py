"""ggml's types q4_K and q6_K, which the gguf package reads but does not write.

A super-block of 256 numbers has one float16 scale. q4_K: 8 blocks of 32, x = d s q - e m, with q of 4 bits, s and m of
6 bits, d and e of the super-block. q6_K: 16 blocks of 16, x = d s q, with q of 6 bits and s of 8.

As in ggml, scales are found by a search: the candidates are scales around the one that spans the block, each improved
by weighted least squares, and the one of least error is taken.

Source: quantize_row_q4_K_ref and quantize_row_q6_K_ref of ggml-quants.c.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TYPES = ("q4_K", "q6_K")
SUPER = 256
F = npt.NDArray[np.float32]
U = npt.NDArray[np.uint8]


def quantize(x: F, kind: str) -> U:
    """The bytes of rows of numbers; kind: q4_K or q6_K. Rows are whole super-blocks."""
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, SUPER)
    packed = (_q4_k if kind == "q4_K" else _q6_k)(blocks)
    return packed.reshape(*x.shape[:-1], -1)


def _half(x: F) -> U:
    """(N,) as the two bytes of a float16 each, (N, 2)."""
    return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def _nonzero(x: F) -> F:
    """x with 1 for 0, to be divided by."""
    return np.where(x == 0, np.float32(1), x)


def _fit_with_minimum(x: F) -> tuple[F, F]:
    """Scale s >= 0 and minimum m >= 0 of each block, (..., 1), such that s q - m is close to x for q = 0 .. 15."""
    total = np.sum
    w = np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + np.abs(x)
    low, high = np.minimum(x.min(-1, keepdims=True), 0), x.max(-1, keepdims=True)
    sum_w, sum_x = total(w, -1, keepdims=True), total(w * x, -1, keepdims=True)
    scale, least = (high - low) / 15, low
    q = np.clip(np.rint((x - low) / _nonzero(scale)), 0, 15)
    best = total(w * (scale * q + least - x) ** 2, -1, keepdims=True)
    for step in range(21):
        # From the best minimum so far, as in ggml.
        q = np.clip(np.rint((14 + np.float32(0.1) * step) / _nonzero(high - least) * (x - least)), 0, 15)
        sum_q, sum_qq = total(w * q, -1, keepdims=True), total(w * q * q, -1, keepdims=True)
        sum_xq = total(w * q * x, -1, keepdims=True)
        determinant = sum_w * sum_qq - sum_q * sum_q
        divisor = _nonzero(determinant)
        this, offset = (sum_w * sum_xq - sum_x * sum_q) / divisor, (sum_qq * sum_x - sum_q * sum_xq) / divisor
        this = np.where(offset > 0, sum_xq / _nonzero(sum_qq), this)
        offset = np.minimum(offset, 0)
        error = total(w * (this * q + offset - x) ** 2, -1, keepdims=True)
        better = (determinant > 0) & (error < best)
        best, scale, least = (np.where(better, *pair) for pair in ((error, best), (this, scale), (offset, least)))
    return scale, -least


def _q4_k(blocks: F) -> U:
    x = blocks.reshape(-1, 8, 32)
    scale, least = _fit_with_minimum(x)
    scale_of, least_of = scale.max(1, keepdims=True) / 63, least.max(1, keepdims=True) / 63
    s = np.clip(np.rint(scale / _nonzero(scale_of)), 0, 63)
    m = np.clip(np.rint(least / _nonzero(least_of)), 0, 63)
    d, e = _half(scale_of), _half(least_of)
    step = d.view("<f2").astype(np.float32)[:, None] * s
    q = np.clip(np.rint((x + e.view("<f2").astype(np.float32)[:, None] * m) / _nonzero(step)), 0, 15)
    q = np.where(step == 0, 0, q).astype(np.uint8).reshape(-1, 4, 2, 32)
    s, m = s[..., 0].astype(np.uint8), m[..., 0].astype(np.uint8)
    # 6 bits each: the first four of both whole, with the upper bits of the others on top.
    scales = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return np.concatenate([d, e, *scales, (q[:, :, 0] | q[:, :, 1] << 4).reshape(len(x), -1)], axis=1)


def _fit(x: F) -> F:
    """Scale s of each block, (..., 1), such that s q is close to x for q = -32 .. 31."""
    peak = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    divisor, w = _nonzero(peak), x * x
    scale = best = np.zeros_like(peak)
    for step in (0, *range(-9, 0), *range(1, 10)):
        q = np.clip(np.rint(-(32 + np.float32(0.1) * step) / divisor * x), -32, 31)
        sum_xq, sum_qq = np.sum(w * x * q, -1, keepdims=True), np.sum(w * q * q, -1, keepdims=True)
        better = (sum_qq > 0) & (sum_xq * sum_xq > best * sum_qq)
        this = sum_xq / _nonzero(sum_qq)
        scale, best = np.where(better, this, scale), np.where(better, this * sum_xq, best)
    return scale


def _q6_k(blocks: F) -> U:
    x = blocks.reshape(-1, 16, 16)
    scale = _fit(x)
    peak: F = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = _half((peak / -128).astype(np.float32))
    s = np.minimum(np.rint(-128 / _nonzero(peak) * scale), 127)
    step = d.view("<f2").astype(np.float32)[:, None] * s
    q = np.clip(np.rint(x / _nonzero(step)), -32, 31) + 32
    q = np.where(step == 0, 32, q).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = q & 15, q >> 4
    lower = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=-1)
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    flat = (len(x), -1)
    return np.concatenate([lower.reshape(flat), upper.reshape(flat), s.astype(np.int8).view(np.uint8)[..., 0], d], 1)
