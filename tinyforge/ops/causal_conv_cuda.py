"""Launches causal_conv.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, or_null, scalar
from tinyforge.kernel import Array, pointer
from tinyforge.ops import causal_conv

FILE = "ops/causal_conv.cu"
STRIP = constant(FILE, "STRIP")


def with_pitch(x: Array) -> tuple[Array, int]:
    """x: (B, T, C), or a copy unless its rows of C are equally spaced; and the distance between rows, in elements."""
    step, size = x.strides[1], x.itemsize
    if x.strides[2] == size and step >= x.shape[2] * size and x.strides[0] == step * x.shape[1]:
        return x, step // size
    return contiguous(x), x.shape[2]


def sums_or_scratch(grad: Array | None, value: Array) -> Array:
    """The gradient to add to; for a frozen parameter, scratch memory."""
    return new(value.shape, wide(value.dtype)) if grad is None else grad


def _vector(channels: int, pitches: tuple[int, ...], *arrays: Array) -> int:
    """Elements of an access of 8 bytes, or 1 if sizes and addresses do not allow it."""
    count = max(1, 8 // arrays[0].itemsize)
    fits = all(n % count == 0 for n in (channels, *pitches)) and all(pointer(a) % 8 == 0 for a in arrays)
    return count if fits else 1


@causal_conv.causal_conv_fwd.on("cupy")
def causal_conv_fwd(tail: Array | None, x: Array, weight: Array, bias: Array) -> Array:
    (batch, length, channels), taps = x.shape, weight.shape[-1]
    x, pitch = with_pitch(x)
    y = new(x.shape, x.dtype)
    if y.size:
        vec = _vector(channels, (pitch,), x, y, bias, *(() if tail is None else (tail,)))
        launch = load(FILE, "causal_conv_fwd", SCALAR=scalar(x.dtype), VEC=vec, TAPS=taps)
        sizes = map(np.int32, (batch, length, channels, pitch))
        grid = blocks(batch * -(-length // STRIP) * (channels // vec), 128)
        launch(grid, (128,), (y, or_null(tail), x, weight, bias, *sizes))
    if tail is not None and taps > 1 and length:
        kept = max(0, taps - 1 - length)  # of the tail itself, where x is shorter
        if kept:
            tail[:, :kept] = tail[:, taps - 1 - kept :].copy()
        tail[:, kept:] = x[:, length - (taps - 1 - kept) :]
    return y


@causal_conv.causal_conv_bwd.on("cupy")
def causal_conv_bwd(
    dx: Array | None, dweight: Array | None, dbias: Array | None, dy: Array, x: Array, weight: Array, bias: Array
) -> Array:
    (batch, length, channels), taps = x.shape, weight.shape[-1]
    x, pitch = with_pitch(x)
    dy = contiguous(dy)
    if not dy.size:
        return new(x.shape, x.dtype) if dx is None else dx
    out = new(x.shape, x.dtype) if dx is None else dx
    written, out_pitch = with_pitch(out)
    vec = _vector(channels, (pitch, out_pitch), x, written, dy, bias)
    strips = batch * -(-length // STRIP)
    partial = new((strips, channels * (taps + 1)), wide(x.dtype))
    launch = load(FILE, "causal_conv_bwd", SCALAR=scalar(x.dtype), VEC=vec, TAPS=taps)
    sizes = map(np.int32, (batch, length, channels, out_pitch, pitch))
    launch(blocks(strips * (channels // vec), 128), (128,), (written, partial, dy, x, weight, bias, *sizes))
    add_columns(sums_or_scratch(dweight, weight), sums_or_scratch(dbias, bias), partial)
    if written is not out:
        out[...] = written
    return out
