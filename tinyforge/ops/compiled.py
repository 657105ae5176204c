"""Kernels whose passes over memory are compiled by numba, for a NumPy backend that is `compiled`.

The bodies are the reference: these take the same arguments, and the matrix products are NumPy's as well. numba makes
one pass of what takes NumPy several, and with no temporary arrays. What is written only for the usual case (no dropout
within attention, say) calls the body in the others. The kernels are in compiled_numba.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tinyforge.backends.machine_code import PANEL_BYTES, Library
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops.add_rmsnorm import add_rmsnorm_fwd
from tinyforge.ops.attention import LSE_ERROR, attention_bwd, attention_fwd, attention_rope_bwd, scaling, split
from tinyforge.ops.cross_entropy import chunks, linear_cross_entropy_frozen_fwd, linear_cross_entropy_fwd
from tinyforge.ops.embedding import Order, embedding_bwd
from tinyforge.ops.linear import add_product, linear_fwd
from tinyforge.ops.rmsnorm import gain_of, rmsnorm_bwd, rmsnorm_fwd
from tinyforge.ops.rope import linear_rope_fwd, rope
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.ops.swiglu_linear import linear_swiglu_fwd, swiglu_linear_bwd, swiglu_linear_fwd

library = Library(f"{__name__}_numba")
LANES = 256
flat = np.ascontiguousarray


@swiglu_fwd.on("numba")
def swiglu(gu: Array) -> Array:
    y = np.empty((*gu.shape[:-1], gu.shape[-1] // 2), gu.dtype)
    library.swiglu_fwd(y, flat(gu), y.size // max(1, y.shape[-1]), y.shape[-1])
    return y


@swiglu_bwd.on("numba")
def swiglu_backward(hidden: Array | None, dy: Array, gu: Array) -> Array:
    dgu, y = np.empty(gu.shape, gu.dtype), dy.copy() if hidden is not dy else dy
    library.swiglu_bwd(dgu, y, flat(gu), dy.size // max(1, dy.shape[-1]), dy.shape[-1])
    if hidden is not None and hidden is not dy:
        hidden[...] = y
    return dgu


@linear_swiglu_fwd.on("numba")
def linear_swiglu(x: Array, weight: Array) -> tuple[Array, Array]:
    gu = linear_fwd(x, weight, None)
    return gu, swiglu(gu)


@swiglu_linear_fwd.on("numba")
def swiglu_linear(gu: Array, hidden: Array | None, weight: Array, add: Array | None) -> Array:
    return swiglu_linear_fwd(gu, swiglu(gu) if hidden is None else hidden, weight, add)


@swiglu_linear_bwd.on("numba")
def swiglu_linear_backward(
    dweight: Array | None, dy: Array, gu: Array, weight: Array, accumulate: bool = True
) -> Array:
    rows = dy.reshape(-1, dy.shape[-1])
    hidden = rows @ weight  # dh, later overwritten by h
    dgu = swiglu_backward(hidden, hidden, gu)
    if dweight is not None:
        add_product(dweight, rows.T, hidden, accumulate)
    return dgu


@rmsnorm_fwd.on("numba")
def rmsnorm(x: Array, weight: Array, eps: float, plus_one: bool = False) -> tuple[Array, Array]:
    y, rstd, width = np.empty(x.shape, x.dtype), np.empty(x.shape[:-1], x.dtype), x.shape[-1]
    library.rmsnorm_fwd(y, rstd, flat(x), gain_of(weight, plus_one), rstd.size, width, float(eps))
    return y, rstd


@add_rmsnorm_fwd.on("numba")
def add_rmsnorm(
    residual: Array, delta: Array, weight: Array, eps: float, plus_one: bool = False
) -> tuple[Array, Array, Array]:
    x = residual + delta
    return x, *rmsnorm(x, weight, eps, plus_one)


@rmsnorm_bwd.on("numba")
def rmsnorm_backward(
    dweight: Array | None,
    dy: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    residual: Array | None,
    plus_one: bool = False,
) -> Array:
    gain, width = gain_of(weight, plus_one), y.shape[-1]
    dx, sums = np.empty(y.shape, y.dtype), np.zeros((8, width), y.dtype)
    adds = int(residual is not None)
    more = dy if residual is None else residual
    read = (flat(dy), gain, 1 / gain, flat(y), flat(rstd), flat(more), adds)
    library.rmsnorm_bwd(dx, sums, *read, rstd.size, width)
    if dweight is not None:
        dweight += sums.sum(axis=0) / gain
    return dx


@rope.on("numba")
def rotate(out: Array | None, x: Array, cos: Array, sin: Array, rotated: int) -> Array:
    y = x.copy() if out is None else out
    if y is not x:
        y[...] = x
    batch, times, heads, dim = x.shape
    library.rope(y, flat(cos), flat(sin), batch * times, times, heads, rotated, dim // 2)
    return y


@linear_rope_fwd.on("numba")
def linear_rope(x: Array, weight: Array, cos: Array, sin: Array, rotated: int) -> Array:
    y = linear_fwd(x, weight, None).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return rotate(y, y, cos, sin, rotated)


def softmax_residual_(logits: Array, targets: Array) -> Array:
    """As that of cross_entropy.py, without a cap."""
    (heads, vocab, n), nll = logits.shape, np.empty(targets.shape, logits.dtype)
    room = np.empty((2, LANES), logits.dtype)
    library.softmax_residual(logits, nll, flat(targets, np.int32), heads, vocab, n, room[0], room[1])
    return nll


@linear_cross_entropy_fwd.on("numba")
def linear_cross_entropy(h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0) -> tuple[Array, Any]:
    if cap:
        return linear_cross_entropy_fwd(h, weight, targets, keep, cap)
    (heads, vocab, dim), residual, nll = weight.shape, [], np.empty(targets.shape, h.dtype)
    for part in chunks(len(h), weight):
        logits = (weight.reshape(-1, dim) @ h[part].T).reshape(heads, vocab, -1)
        nll[part] = softmax_residual_(logits, targets[part])
        if keep:
            residual.append(logits)
    return nll, residual if keep else None


@linear_cross_entropy_frozen_fwd.on("numba")
def linear_cross_entropy_frozen(
    h: Array, weight: Array, targets: Array, keep: bool, cap: float = 0.0
) -> tuple[Array, Array | None]:
    if cap:
        return linear_cross_entropy_frozen_fwd(h, weight, targets, keep, cap)
    (heads, vocab, dim), nll = weight.shape, np.empty(targets.shape, h.dtype)
    dh = np.empty((len(h), heads, dim), h.dtype) if keep else None
    for part in chunks(len(h), weight):
        logits = (weight.reshape(-1, dim) @ h[part].T).reshape(heads, vocab, -1)
        nll[part] = softmax_residual_(logits, targets[part])
        if dh is not None:
            dh[part] = (logits.transpose(0, 2, 1) @ weight).swapaxes(0, 1)
    return nll, dh


@embedding_bwd.on("numba")
def embedding_backward(dweight: Array, dy: Array, ids: Array, order: Order | None = None) -> None:
    library.embedding_bwd(dweight, flat(dy), flat(ids, np.int32), ids.size, dweight.shape[1])


@lru_cache(64)
def seen_keys(queries: int, keys: int, causal: bool, window: int | None) -> tuple[Array, Array]:
    """The first key that each query sees, and the end of those: (1, queries)."""
    places = np.arange(keys - queries, keys)[None]
    return np.maximum(places - (window or keys) + 1, 0), places + 1 if causal else np.full_like(places, keys)


class Panels:
    """What both kernels of attention take: the panels of queries, with what each query sees."""

    def __init__(self, q: Array, k: Array, views: tuple[Array, ...], coarse: bool, *seen: Any) -> None:
        (batch, queries, heads, dim), (keys, kv_heads), (lengths, starts, *how) = q.shape, k.shape[1:3], seen
        self.panel = PANEL_BYTES // q.itemsize
        low, high = seen_keys(queries, keys, *how)
        if starts is not None:
            low = np.maximum(low, starts)
        if lengths is not None:
            high = np.minimum(high, lengths[:, None])
        panels = -(-queries // self.panel)
        # The last panel's queries that do not exist see what the last one sees.
        padded = np.minimum(np.arange(panels * self.panel), queries - 1)
        self.low, self.high = (flat(bound[:, padded], q.dtype) for bound in (low, high))
        each = [len(bound) > 1 for bound in (low, high)]
        strides = [stride // q.itemsize for x in views for stride in x.strides[:3]]
        self.sizes = np.array([batch, queries, heads, kv_heads, dim, panels, coarse, *each, *strides], np.intp)


def rows_apart(x: Array) -> Array:
    """x, or a copy, with contiguous heads."""
    return x if x.strides[-1] == x.itemsize else x.copy()


@attention_fwd.on("numba")
def attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    if key is not None or softcap or not q.size:
        return attention_fwd(q, k, v, lengths, starts, causal, window, key, rate, scale, softcap)
    q, k, v = map(rows_apart, (q, k, v))
    p, (batch, queries, heads, dim) = Panels(q, k, (q, k, v), False, lengths, starts, causal, window), q.shape
    out, lse = np.empty(q.shape, q.dtype), np.empty((batch, heads, queries), q.dtype)
    room = np.empty((2 + dim + k.shape[1]) * p.panel, q.dtype)
    library.attention_fwd(out, lse, q, k, v, p.low, p.high, p.sizes, room, scaling(dim, scale))
    return out, lse


@attention_bwd.on("numba")
def attention_backward(
    dq: Array,
    dk: Array,
    dv: Array,
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    scale: float | None = None,
    softcap: float = 0.0,
) -> None:
    how: Any = (causal, window, key, rate, scale, softcap)
    if key is not None or softcap or not q.size:
        return attention_bwd(dq, dk, dv, dy, q, k, v, lengths, starts, out, lse, *how)
    q, k, v = map(rows_apart, (q, k, v))
    coarse = np.abs(lse).max() * np.finfo(q.dtype).eps > LSE_ERROR
    p, dim = Panels(q, k, (q, k, v, dq, dk, dv), coarse, lengths, starts, causal, window), q.shape[-1]
    wide, queries = -(-dim // p.panel) * p.panel, q.shape[1]
    room = np.empty((4 + 3 * dim + 2 * wide + 2 * queries) * p.panel + 2 * wide * queries, q.dtype)
    read = (flat(dy), q, k, v, flat(out), flat(lse), p.low, p.high, p.sizes, room, scaling(dim, scale))
    library.attention_bwd(dq, dk, dv, *read)
    return None


@attention_rope_bwd.on("numba")
def attention_rope_backward(
    dqkv: Array,
    dy: Array,
    qkv: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    cos: Array,
    sin: Array,
    rotated: int,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    scale: float | None = None,
    softcap: float = 0.0,
) -> None:
    heads = dy.shape[2]
    how: Any = (causal, window, key, rate, scale, softcap)
    attention_backward(*split(dqkv, heads), dy, *split(qkv, heads), lengths, starts, out, lse, *how)
    rotate(dqkv, dqkv, cos, sin, rotated)
