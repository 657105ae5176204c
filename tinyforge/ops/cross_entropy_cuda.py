"""Launches cross_entropy.cu, and the matrix products of the fused loss around it."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import FLOAT64, CupyBackend, blocks, contiguous, new, scalar, shared_limit, vector
from tinyforge.backends.gemm import gemm
from tinyforge.backends.variants import smallest
from tinyforge.kernel import Array
from tinyforge.ops import cross_entropy
from tinyforge.ops.cross_entropy import CHUNK, row_pitch
from tinyforge.ops.mixture_cuda import sum_of_rows

FILE = "ops/cross_entropy.cu"
HELD_THREADS = constant(FILE, "HELD_THREADS")
BESIDE = 512
"""Bytes of shared memory that softmax_residual uses in addition to a row."""


def softmax_residual_(nll: Array, logits: Array, targets: Array, write: bool, vocab: int, cap: float = 0.0) -> None:
    """Turn rows of logits, (..., V or more), into residuals (with `write`); nll: one number per row."""
    pitch = logits.shape[-1]
    vec = vector(pitch, logits)
    vectors, variant, shared = pitch // vec, {"EDGE": 1} if pitch > vocab else {}, 0
    threads = min(256, -(-vectors // 32) * 32)
    per = smallest(FILE, "PER", -(-vectors // threads), SCALAR=scalar(logits.dtype), VEC=vec, **variant)
    if vec > 1 and not per and pitch * logits.itemsize + BESIDE <= shared_limit():
        variant, shared = {"HELD": 1}, pitch * logits.itemsize
        threads = min(HELD_THREADS, -(-vectors // 32) * 32)
    more = (nll.dtype.type(cap),) if cap else ()
    variant |= {"CAP": 1} if cap else {}
    launch = load(FILE, "softmax_residual", shared, SCALAR=scalar(logits.dtype), VEC=vec, PER=per, **variant)
    numbers = map(np.int32, (vocab, pitch, write))
    launch((targets.size,), (threads,), (nll, logits, targets, *numbers, *more), shared_mem=shared)


def soft_residual_(nll: Array, logits: Array, teacher: Array, targets: Array, share: float, vocab: int) -> None:
    """Turn rows of logits, (..., V or more), into softmax - q; nll: the cross-entropy with q, one number per row.
    teacher: its logits, of the same shape."""
    pitch = logits.shape[-1]
    vec = vector(pitch, logits, teacher)
    threads = min(256, -(-pitch // vec // 32) * 32)
    launch = load(FILE, "soft_residual", SCALAR=scalar(logits.dtype), VEC=vec, PER=0)
    numbers = nll.dtype.type(share), np.int32(vocab), np.int32(pitch)
    launch((targets.size,), (threads,), (nll, logits, teacher, targets, *numbers))


def scale_heads(x: Array, scale: Array, part: int, y: Array | None = None) -> Array:
    """scale[k] x for the numbers of head k: `part` at a time, head after head. Written into y, which may be x, or into
    a new array."""
    if y is None:
        y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(part, x, y)
        launch = load(FILE, "scale_heads", SCALAR=scalar(x.dtype), VEC=vec, PER=0)
        counts = (x.size // vec, part // vec, len(scale))
        launch(blocks(x.size // vec), (256,), (y, x, scale.astype(wide(x.dtype), copy=False), *map(np.uint32, counts)))
    return y


def add_scaled_heads(y: Array, x: Array, scale: Array) -> None:
    """y[k] += scale[k] x[k]; x and y in the precision of sums."""
    part = x[0].size
    vec = vector(part, x, y)
    launch = load(FILE, "add_scaled_heads", SCALAR=scalar(x.dtype), VEC=vec, PER=0)
    counts = (x.size // vec, part // vec, len(scale))
    launch(blocks(x.size // vec), (256,), (y, x, scale.astype(x.dtype, copy=False), *map(np.uint32, counts)))


def padded_rows(weight: Array, count: int) -> Array:
    """The weights as one matrix of `count` rows: (K V, C), or if these are fewer, a copy padded with rows of 0."""
    flat = weight.reshape(-1, weight.shape[-1])
    if len(flat) == count:
        return flat
    padded = new((count, flat.shape[1]), flat.dtype)
    padded[: len(flat)] = flat
    padded[len(flat) :].fill(0)
    return padded


@cross_entropy.sum_tokens.on("cupy")
def sum_tokens(nll: Array) -> Array:
    nll = contiguous(nll)
    heads = nll.shape[-1]
    out = new((heads,), FLOAT64)
    launch = load(FILE, "sum_heads", SCALAR=scalar(nll.dtype), VEC=1, PER=0)
    launch((heads,), (1024,), (out, nll, np.int32(nll.size // heads), np.int32(heads)))
    return out


@cross_entropy.cross_entropy_fwd.on("cupy")
def cross_entropy_fwd(logits: Array, targets: Array) -> tuple[Array, Array]:
    residual, targets = logits.copy(order="C"), contiguous(targets)
    nll = new(targets.shape, wide(logits.dtype))
    if targets.size:
        softmax_residual_(nll, residual, targets, True, logits.shape[-1])
    return nll, residual


@cross_entropy.cross_entropy_bwd.on("cupy")
def cross_entropy_bwd(dnll: Array, residual: Array) -> Array:
    # One upstream number for each head, or one for each token and head: residual is (n, K, V).
    return scale_heads(residual, contiguous(dnll).reshape(-1), residual.shape[-1])


@cross_entropy.linear_cross_entropy_fwd.on("cupy")
def linear_cross_entropy_fwd(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0, *, backend: CupyBackend
) -> tuple[Array, Any]:
    h, targets = contiguous(h), contiguous(targets)
    heads, vocab, dim = weight.shape
    tokens = len(h)
    nll, pitch = new((tokens, heads), wide(h.dtype)), row_pitch(heads, vocab, h.itemsize)
    rows = padded_rows(weight, pitch)
    # The same chunks with and without a stash: cuBLAS may sum in another order for another number of rows.
    residual = new((tokens if keep else min(tokens, CHUNK), pitch), h.dtype)
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        logits = residual[part] if keep else residual[: part.stop - start]
        gemm(h[part], rows, logits, transpose_b=True, tf32=backend.tf32)
        softmax_residual_(nll[part], logits.reshape(-1, pitch // heads), targets[part], keep, vocab, cap)
    return nll, residual if keep else None


@cross_entropy.linear_soft_cross_entropy_fwd.on("cupy")
def linear_soft_cross_entropy_fwd(
    h: Array,
    weight: Array,
    targets: Array,
    teacher_h: Array,
    teacher_weight: Array,
    keep: bool,
    share: float,
    *,
    backend: CupyBackend,
) -> tuple[Array, Any]:
    h, targets, teacher_h = contiguous(h), contiguous(targets), contiguous(teacher_h)
    heads, vocab, _ = weight.shape
    tokens = len(h)
    nll, pitch = new((tokens, heads), wide(h.dtype)), row_pitch(heads, vocab, h.itemsize)
    rows, teacher_rows = padded_rows(weight, pitch), padded_rows(teacher_weight, pitch)
    residual = new((tokens if keep else min(tokens, CHUNK), pitch), h.dtype)
    beside = new((min(tokens, CHUNK), pitch), h.dtype)
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        logits = residual[part] if keep else residual[: part.stop - start]
        gemm(h[part], rows, logits, transpose_b=True, tf32=backend.tf32)
        of_rows, stop = (-1, pitch // heads), max(start, min(part.stop, len(teacher_h)))
        soft, hard, taught = slice(start, stop), slice(stop, part.stop), logits[: stop - start].reshape(of_rows)
        if stop > start:
            teacher = beside[: stop - start]
            gemm(teacher_h[soft], teacher_rows, teacher, transpose_b=True, tf32=backend.tf32)
            soft_residual_(nll[soft], taught, teacher.reshape(of_rows), targets[soft], share, vocab)
        if stop < part.stop:
            softmax_residual_(nll[hard], logits[stop - start :].reshape(of_rows), targets[hard], keep, vocab)
    return nll, residual if keep else None


@cross_entropy.linear_cross_entropy_bwd.on("cupy")
def linear_cross_entropy_bwd(
    dweight: Array | None,
    dnll: Array,
    h: Array,
    residual: Any,
    weight: Array,
    accumulate: bool = True,
    *,
    backend: CupyBackend,
) -> Array:
    h = contiguous(h)
    heads, vocab, dim = weight.shape
    rows, pitch = heads * vocab, residual.shape[1]
    if dnll.ndim > 1:
        scale_heads(residual, contiguous(dnll).reshape(-1), pitch // heads, residual)
        if dweight is not None:
            flat = dweight.reshape(rows, dim)
            gemm(residual[:, :rows], h, flat, transpose_a=True, accumulate=accumulate, tf32=backend.tf32)
        return gemm(residual, padded_rows(weight, pitch), tf32=backend.tf32)
    # dnll scales the small matrices, W and dW: the large residual is read twice and never written.
    if dweight is not None:
        unscaled = gemm(residual, h, new((pitch, dim), dweight.dtype), transpose_a=True, tf32=backend.tf32)[:rows]
        if accumulate and len(h):
            add_scaled_heads(dweight, unscaled.reshape(weight.shape), dnll)
        elif not accumulate:
            scale_heads(unscaled.reshape(weight.shape), dnll, vocab * dim, dweight)
        del unscaled
    scaled = new((pitch, dim), weight.dtype)
    if pitch > rows:
        scaled[rows:].fill(0)
    scale_heads(weight, dnll, vocab * dim, scaled[:rows].reshape(weight.shape))
    return gemm(residual, scaled, tf32=backend.tf32)


@cross_entropy.linear_cross_entropy_frozen_fwd.on("cupy")
def linear_cross_entropy_frozen_fwd(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0, *, backend: CupyBackend
) -> tuple[Array, Array | None]:
    h, targets = contiguous(h), contiguous(targets)
    heads, vocab, dim = weight.shape
    tokens = len(h)
    nll, pitch = new((tokens, heads), wide(h.dtype)), row_pitch(heads, vocab, h.itemsize)
    rows = padded_rows(weight, pitch)
    dh: Array | None = new((tokens, heads, dim), h.dtype) if keep else None
    most, width = cross_entropy.chunk_rows(pitch), pitch // heads
    room = new((min(tokens, most), pitch), h.dtype)
    for start in range(0, tokens, most):
        part = slice(start, min(start + most, tokens))
        logits = room[: part.stop - start]
        gemm(h[part], rows, logits, transpose_b=True, tf32=backend.tf32)
        softmax_residual_(nll[part], logits.reshape(-1, width), targets[part], keep, vocab, cap)
        if dh is None:
            continue
        for k in range(heads):
            of_head = slice(k * width, (k + 1) * width)
            gemm(logits[:, of_head], rows[of_head], dh[part, k], tf32=backend.tf32)
    return nll, dh


@cross_entropy.linear_cross_entropy_frozen_bwd.on("cupy")
def linear_cross_entropy_frozen_bwd(dnll: Array, dh: Array) -> Array:
    rows, heads, dim = dh.shape
    scaled = scale_heads(dh, contiguous(dnll).reshape(-1), dim)
    if heads == 1:
        return scaled.reshape(rows, dim)
    return sum_of_rows(scaled.reshape(-1, dim), cupy.arange(rows * heads, dtype=np.int32).reshape(rows, heads), None)
