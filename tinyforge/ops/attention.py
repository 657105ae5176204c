"""Causal grouped-query attention, tiled: no T x T matrix is ever kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import numpy_kernel
from tinyforge.op import Array, Op, Stash

TILE = 128
"""Rows and columns of scores in memory at once (NumPy): the largest temporary is (heads, TILE, TILE)."""


class Attention(Op):
    """o[t] = sum over s <= t of softmax_s(q[t] . k[s] / sqrt(D)) v[s], per head

    qkv: (B, T, Hq + 2 Hkv, D), heads in the order q, k, v; o: (B, T, Hq, D). Query head h reads key and value head
    h // (Hq / Hkv). Saves qkv, o and the log-sum-exp of each row of scores, (B, Hq, T): memory linear in T. Backward
    recomputes the probabilities of one tile at a time from it:

        P = exp(q k^T / sqrt(D) - lse)      dV = P^T dO          dP = dO V^T
        dS = P * (dP - rowsum(dO * O))      dQ = dS K / sqrt(D)  dK = dS^T Q / sqrt(D)

    Sources: Vaswani et al. (2017); Ainslie et al., "GQA" (2023); the online softmax of Milakov and Gimelshein (2018)
    as tiled by Dao et al., "FlashAttention" (2022).
    """

    kernels = ("attention_fwd", "attention_bwd")

    def __init__(self, heads: int, kv_heads: int, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        if heads % kv_heads:
            raise ValueError(f"Attention: {heads} query heads do not divide among {kv_heads} key/value heads")
        self.heads = heads
        self.kv_heads = kv_heads

    def forward(self, qkv: Array, stash: Stash | None = None) -> Array:
        out, lse = self.k.attention_fwd(*self._split(qkv))
        if stash is not None:
            stash.push(self, qkv, out, lse)
        return out

    def backward(self, dy: Array, stash: Stash) -> Array:
        qkv, out, lse = stash.pop(self)
        dqkv = self.backend.empty(qkv.shape)
        self.k.attention_bwd(dy, *self._split(qkv), out, lse, *self._split(dqkv))
        return dqkv

    def decode(self, q: Array, k: Array, v: Array) -> Array:
        """Inference with a cache: q: (B, T, Hq, D) are the last T of the S positions in k, v: (B, S, Hkv, D)."""
        return self.k.attention_fwd(q, k, v)[0]

    def _split(self, qkv: Array) -> tuple[Array, Array, Array]:
        kv = self.heads + self.kv_heads
        return qkv[:, :, : self.heads], qkv[:, :, self.heads : kv], qkv[:, :, kv:]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        shapes = ((2, 7, 4, 2, 4), (1, 1, 1, 1, 2), (2, 5, 3, 1, 6), (1, TILE + 3, 2, 1, 4), (2, 0, 2, 2, 4))
        for b, t, heads, kv_heads, d in shapes:
            yield cls(heads, kv_heads, backend), (backend.asarray(rng.normal(size=(b, t, heads + 2 * kv_heads, d))),)


@lru_cache(maxsize=64)
def causal_mask(rows: int, columns: int, shift: int, dtype: Any) -> Array | None:
    """(rows, columns) of 0 and -inf: row i sees columns up to i + shift. None when it hides nothing."""
    hidden = np.arange(columns) > np.arange(rows)[:, None] + shift
    return np.where(hidden, -np.inf, 0.0).astype(dtype) if hidden.any() else None


def tiles(queries: int, keys: int) -> Iterator[tuple[slice, list[tuple[slice, int]]]]:
    """Row tiles, and for each the column tiles that it sees with the diagonal's shift inside the tile."""
    ahead = keys - queries  # cached positions before the first query
    for i in range(0, queries, TILE):
        stop = min(i + TILE, queries)
        seen = [(slice(j, min(j + TILE, stop + ahead)), i + ahead - j) for j in range(0, stop + ahead, TILE)]
        yield slice(i, stop), seen


def scores(q: Array, k: Array, shift: int, group: int) -> Array:
    """q k^T with the future at -inf. q: (Hkv, G * rows, D), already scaled; k: (Hkv, columns, D)."""
    s = q @ k.transpose(0, 2, 1)
    rows = q.shape[1] // group
    mask = causal_mask(rows, k.shape[1], shift, s.dtype)
    if mask is not None:
        s.reshape(-1, rows, k.shape[1])[...] += mask
    return s


def stack_group(x: Array, kv_heads: int, scale: float = 1.0) -> Array:
    """(rows, Hq, D) to (Hkv, G * rows, D): the query heads of one kv head as one tall matrix for one product."""
    rows, heads, dim = x.shape
    grouped = x.transpose(1, 0, 2)
    stacked = grouped * x.dtype.type(scale) if scale != 1.0 else np.ascontiguousarray(grouped)
    return stacked.reshape(kv_heads, heads // kv_heads * rows, dim)


@numpy_kernel
def attention_fwd(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """q: (B, T, Hq, D); k, v: (B, S, Hkv, D), S >= T; returns o: (B, T, Hq, D), lse: (B, Hq, T)."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    out = np.empty((batch, queries, heads, dim), q.dtype)
    lse = np.empty((batch, heads, queries), q.dtype)
    for b in range(batch):  # one sequence at a time: its tile of scores stays in cache
        kb, vb = k[b].transpose(1, 0, 2), v[b].transpose(1, 0, 2)
        for rows, seen in tiles(queries, keys):
            qi = stack_group(q[b, rows], kv_heads, dim**-0.5)
            top: Array = None
            total: Array = None
            acc: Array = None
            for columns, shift in seen:
                s = scores(qi, kb[:, columns], shift, group)
                new_top = s.max(axis=-1, keepdims=True)
                if top is not None:
                    np.maximum(new_top, top, out=new_top)
                s -= new_top
                np.exp(s, out=s)
                # A row sum as a product with ones takes BLAS a quarter of the time that NumPy's reduction takes.
                tile_sum, tile_out = s @ np.ones((s.shape[-1], 1), s.dtype), s @ vb[:, columns]
                if top is not None:
                    # What was summed under the old maximum shrinks by exp(old - new).
                    shrink = np.exp(top - new_top)
                    tile_sum += total * shrink
                    tile_out += acc * shrink
                top, total, acc = new_top, tile_sum, tile_out
            acc /= total
            out[b, rows] = acc.reshape(heads, -1, dim).transpose(1, 0, 2)
            lse[b, :, rows] = (np.log(total) + top).reshape(heads, -1)
    return out, lse


@numpy_kernel
def attention_bwd(
    dy: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dq: Array, dk: Array, dv: Array
) -> None:
    """Writes dq, dk, dv (views of a packed dqkv, shapes of q, k, v)."""
    batch, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    scale = dim**-0.5
    for b in range(batch):
        kb, vb = k[b].transpose(1, 0, 2), v[b].transpose(1, 0, 2)
        dkb, dvb = np.zeros(kb.shape, q.dtype), np.zeros(vb.shape, q.dtype)
        for rows, seen in tiles(queries, queries):
            qi, doi = stack_group(q[b, rows], kv_heads, scale), stack_group(dy[b, rows], kv_heads)
            delta = np.vecdot(doi, stack_group(out[b, rows], kv_heads))[..., None]
            lsei = lse[b, :, rows].reshape(kv_heads, -1, 1)
            dqi = np.zeros(qi.shape, q.dtype)
            for columns, shift in seen:
                p = scores(qi, kb[:, columns], shift, group)
                p -= lsei
                np.exp(p, out=p)
                dvb[:, columns] += p.transpose(0, 2, 1) @ doi
                ds = doi @ vb[:, columns].transpose(0, 2, 1)
                ds -= delta
                ds *= p
                dqi += ds @ kb[:, columns]
                dkb[:, columns] += ds.transpose(0, 2, 1) @ qi  # qi carries the scale
            dqi *= q.dtype.type(scale)
            dq[b, rows] = dqi.reshape(heads, -1, dim).transpose(1, 0, 2)
        dk[b], dv[b] = dkb.transpose(1, 0, 2), dvb.transpose(1, 0, 2)
