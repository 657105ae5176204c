"""Kernels compiled by numba, for a NumPy backend that is `compiled`.

The bodies are the reference: these take the same arguments. One pass over memory replaces several of NumPy's, with no
temporary arrays, and where the weight of a linear map is small (`fits`), its product is compiled along with what comes
before or after it. A case that is not compiled, such as dropout within attention, calls the body. The code itself is in
compiled_numba.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tinyforge.backends.machine_code import PANEL_BYTES, Library
from tinyforge.kernel import Array
from tinyforge.ops.attention import LSE_ERROR, attention_bwd, attention_fwd, attention_rope_bwd, scaling, split
from tinyforge.ops.cross_entropy import chunks, linear_cross_entropy_bwd, linear_cross_entropy_fwd, per_row
from tinyforge.ops.embedding import Order, embedding_bwd
from tinyforge.ops.linear import add_product, linear_add_fwd, linear_bwd, linear_bwd_bias, linear_fwd
from tinyforge.ops.rmsnorm import gain_of, rmsnorm_bwd, rmsnorm_fwd
from tinyforge.ops.rope import linear_rope_fwd, rope
from tinyforge.ops.swiglu import swiglu_fwd
from tinyforge.ops.swiglu_linear import linear_swiglu_fwd, swiglu_linear_bwd, swiglu_linear_fwd

library = Library(f"{__name__}_numba")
BLOCK, LANES = 128, 256  # as in compiled_numba.py
flat = np.ascontiguousarray
LEAST, LARGEST = 64, 1 << 19
"""Fewest rows, and most bytes, of a weight whose product is compiled too: with 768 x 768, 2 MB, OpenBLAS takes a fifth
less time."""


def fits(weight: Array) -> bool:
    """Whether a product with the weight is compiled."""
    return len(weight) >= LEAST and weight.nbytes <= LARGEST


@swiglu_fwd.on("numba")
def swiglu(gu: Array) -> Array:
    y = np.empty((*gu.shape[:-1], gu.shape[-1] // 2), gu.dtype)
    library.swiglu_fwd(y, flat(gu), y.size // max(1, y.shape[-1]), y.shape[-1])
    return y


def room_for(x: Array, *shapes: tuple[int, int]) -> Array:
    """Memory for arrays of these shapes whose second axis is filled up to whole panels, and for a tile."""
    panel = PANEL_BYTES // x.itemsize
    return np.empty(sum(rows * -(-columns // panel) * panel for rows, columns in shapes) + 16 * panel, x.dtype)


@linear_fwd.on("numba")
def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    return linear_add(x, weight, bias, None) if fits(weight) else linear_fwd(x, weight, bias)


@linear_add_fwd.on("numba")
def linear_add(x: Array, weight: Array, bias: Array | None, add: Array | None) -> Array:
    """add: None for none."""
    if not fits(weight):
        return linear_fwd(x, weight, bias) if add is None else linear_add_fwd(x, weight, bias, add)
    (outputs, inputs), x = weight.shape, flat(x)
    y, tokens = np.empty((*x.shape[:-1], outputs), x.dtype), x.size // inputs
    addend = x if add is None else flat(add)
    sizes = int(add is not None), tokens, inputs, outputs
    library.linear_fwd(y, x, flat(weight), addend, *sizes, room_for(x, (inputs, outputs)))
    if bias is not None:
        y += bias
    return y


@linear_bwd.on("numba")
def linear_backward(
    dweight: Array | None, dbias: Array | None, dy: Array, x: Array | None, weight: Array, accumulate: bool = True
) -> Array:
    if not fits(weight):
        return linear_bwd(dweight, dbias, dy, x, weight, accumulate)
    dx = np.empty((*dy.shape[:-1], weight.shape[1]), dy.dtype)
    if dweight is not None and not accumulate:
        dweight.fill(0)
    linear_gradients(dx, dweight if x is not None else None, dy, x, weight)
    if dbias is not None:
        linear_bwd_bias(dbias, dy)
    return dx


def linear_gradients(
    dx: Array, dweight: Array | None, dy: Array, x: Array | None, weight: Array, add: bool = False
) -> None:
    """dx = dy W, or that is added to it; dW += dy^T x."""
    (outputs, inputs), dy = weight.shape, flat(dy)
    into, read, learns = (dx, dy, 0) if dweight is None else (dweight, flat(x), 1)
    room = room_for(dy, (outputs, inputs), (BLOCK, inputs))
    sizes = int(add), learns, dy.size // outputs, inputs, outputs
    library.linear_bwd(dx, into, dy, read, flat(weight), *sizes, room)


@linear_swiglu_fwd.on("numba")
def linear_swiglu(x: Array, weight: Array) -> tuple[Array, Array]:
    if not fits(weight):
        gu = linear_fwd(x, weight, None)
        return gu, swiglu(gu)
    (outputs, inputs), x = weight.shape, flat(x)
    gu, y = (np.empty((*x.shape[:-1], width), x.dtype) for width in (outputs, outputs // 2))
    room = room_for(x, (inputs, outputs))
    library.linear_swiglu_fwd(gu, y, x, flat(weight), x.size // inputs, inputs, outputs // 2, room)
    return gu, y


@swiglu_linear_fwd.on("numba")
def swiglu_linear(gu: Array, hidden: Array | None, weight: Array, add: Array | None) -> Array:
    return linear_add(swiglu(gu) if hidden is None else hidden, weight, None, add)


@swiglu_linear_bwd.on("numba")
def swiglu_linear_backward(
    dweight: Array | None, dy: Array, gu: Array, weight: Array, accumulate: bool = True
) -> Array:
    if not fits(weight):
        return larger_swiglu_linear_backward(dweight, dy, gu, weight, accumulate)
    (outputs, half), dy = weight.shape, flat(dy)
    dgu = np.empty(gu.shape, gu.dtype)
    if dweight is not None and not accumulate:
        dweight.fill(0)
    into, learns = (dgu, 0) if dweight is None else (dweight, 1)
    room = room_for(dy, (outputs, half), (BLOCK, half), (BLOCK, half))
    library.swiglu_linear_bwd(dgu, into, dy, flat(gu), flat(weight), learns, dy.size // outputs, half, outputs, room)
    return dgu


def larger_swiglu_linear_backward(
    dweight: Array | None, dy: Array, gu: Array, weight: Array, accumulate: bool
) -> Array:
    rows, dgu = dy.reshape(-1, dy.shape[-1]), np.empty(gu.shape, gu.dtype)
    hidden = rows @ weight  # dh, later overwritten by h
    library.swiglu_bwd(dgu, hidden, flat(gu), *hidden.shape)
    if dweight is not None:
        add_product(dweight, rows.T, hidden, accumulate)
    return dgu


@rmsnorm_fwd.on("numba")
def rmsnorm(x: Array, weight: Array, eps: float, plus_one: bool = False) -> tuple[Array, Array]:
    y, rstd, width = np.empty(x.shape, x.dtype), np.empty(x.shape[:-1], x.dtype), x.shape[-1]
    library.rmsnorm_fwd(y, rstd, flat(x), gain_of(weight, plus_one), rstd.size, width, float(eps))
    return y, rstd


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
    if out is not None and not out.flags.c_contiguous:
        out[...] = rotate(None, x, cos, sin, rotated)
        return out
    y = x.copy() if out is None else out
    if y is not x:
        y[...] = x
    batch, times, heads, dim = x.shape
    library.rope(y, flat(cos), flat(sin), 0, batch * times, times, heads, rotated, dim // 2)
    return y


@linear_rope_fwd.on("numba")
def linear_rope(x: Array, weight: Array, cos: Array, sin: Array, rotated: int) -> Array:
    if not fits(weight):
        y = linear_fwd(x, weight, None).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
        return rotate(y, y, cos, sin, rotated)
    (outputs, inputs), (times, half), x = weight.shape, cos.shape, flat(x)
    y, room = np.empty((*x.shape[:2], outputs // (2 * half), 2 * half), x.dtype), room_for(x, (inputs, outputs))
    sizes = x.size // inputs, inputs, times, y.shape[2], rotated, half
    library.linear_rope_fwd(y, x, flat(weight), flat(cos), flat(sin), *sizes, room)
    return y


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
    h, weight = flat(h), flat(weight)
    residual, nll = [], np.empty(targets.shape, h.dtype)
    for part in chunks(len(h), weight):
        logits = linear(weight, h[part], None)
        nll[part] = softmax_residual_(logits, targets[part])
        if keep:
            residual.append(logits)
    return nll, residual if keep else None


@linear_cross_entropy_bwd.on("numba")
def linear_cross_entropy_backward(
    dweight: Array | None, dnll: Array, h: Array, residual: Any, weight: Array, accumulate: bool = True
) -> Array:
    if dnll.ndim > 1 or not residual or not fits(h[: residual[0].shape[-1]]):
        return linear_cross_entropy_bwd(dweight, dnll, h, residual, weight, accumulate)
    # As in the body, W and dW are scaled instead of the residual. A chunk is a linear map from W to its logits.
    scale, dh, gradient = per_row(dnll, h.dtype), np.zeros(h.shape, h.dtype), np.zeros(weight.shape, h.dtype)
    for part, logits in zip(chunks(len(h), weight), residual, strict=True):
        linear_gradients(gradient, dh[part], logits, weight * scale, h[part], add=True)
    if dweight is not None:
        gradient *= scale
        np.add(gradient, dweight if accumulate else 0, out=dweight)
    return dh


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
def attention(*arrays: Any) -> tuple[Array, Array]:
    q, k, v, *seen, key, _, scale, softcap = arrays
    if key is not None or softcap or not q.size:
        return attention_fwd(*arrays)
    q, k, v = map(rows_apart, (q, k, v))
    p, (batch, queries, heads, dim) = Panels(q, k, (q, k, v), False, *seen), q.shape
    out, lse = np.empty(q.shape, q.dtype), np.empty((batch, heads, queries), q.dtype)
    room = np.empty((2 + dim + k.shape[1]) * p.panel, q.dtype)
    library.attention_fwd(out, lse, q, k, v, p.low, p.high, p.sizes, room, scaling(dim, scale))
    return out, lse


@attention_bwd.on("numba")
def attention_backward(*arrays: Any) -> None:
    dq, dk, dv, dy, q, k, v, lengths, starts, out, lse, causal, window, key, _, scale, softcap = arrays
    if key is not None or softcap or not q.size:
        return attention_bwd(*arrays)
    q, k, v = map(rows_apart, (q, k, v))
    coarse = np.abs(lse).max() * np.finfo(q.dtype).eps > LSE_ERROR
    p, dim = Panels(q, k, (q, k, v, dq, dk, dv), coarse, lengths, starts, causal, window), q.shape[-1]
    wide, queries = -(-dim // p.panel) * p.panel, q.shape[1]
    room = np.empty((4 + 3 * dim + 2 * wide + 2 * queries) * p.panel + 2 * wide * queries, q.dtype)
    read = (flat(dy), q, k, v, flat(out), flat(lse), p.low, p.high, p.sizes, room, scaling(dim, scale))
    return library.attention_bwd(dq, dk, dv, *read)


@attention_rope_bwd.on("numba")
def attention_rope_backward(*arrays: Any) -> None:
    dqkv, dy, qkv, lengths, starts, out, lse, cos, sin, rotated, *how = arrays
    heads = dy.shape[2]
    attention_backward(*split(dqkv, heads), dy, *split(qkv, heads), lengths, starts, out, lse, *how)
    rotate(dqkv, dqkv, cos, sin, rotated)
