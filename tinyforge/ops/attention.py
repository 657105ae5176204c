"""Grouped-query attention, tiled: no T x T matrix is ever kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty
from tinyforge.backends.numpy_backend import row_blocks
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Key, Op, Stash, WithKeywords
from tinyforge.ops.rope import RoPE, rope
from tinyforge.rng import philox

QUERY_TILE, TILE = 64, 128
"""Queries and keys of a tile of scores (NumPy). There are fewer queries, to compute less above the diagonal."""

HIDDEN = -1e30
"""Added to the score of a key that a query does not see; its exp is 0 in any sum. Not -inf: with a window a
query may see nothing in the first tile that its neighbours need, and -inf - -inf is NaN. What such a tile adds is
multiplied by exp(HIDDEN - maximum) = 0 when the first visible key comes."""
LSE_ERROR = 1e-3
"""Relative error of the probabilities, from rounding log-sum-exp, above which backward makes another pass for their
sums."""


@lru_cache(maxsize=64)
def mask_of(columns: int, rows: int, shift: int, group: int, dtype: Any, past: bool = False) -> Array:
    """(columns, group * rows) of 0 and HIDDEN: row i sees columns up to i + shift, or with `past` those after it."""
    later = np.arange(columns)[:, None] > np.arange(rows) + shift
    return np.tile(np.where(later != past, HIDDEN, 0.0).astype(dtype), (1, group))


def tiles(
    queries: int, keys: int, causal: bool, window: int | None, starts: Array | None
) -> Iterator[tuple[slice, list[tuple[slice, int]]]]:
    """Row tiles, and for each the column tiles that it sees, with the diagonal's shift inside the tile.

    starts: (n, queries), for the sequences that share the tiles.
    """
    ahead = keys - queries  # cached positions before the first query
    for i in range(0, queries, QUERY_TILE):
        stop = min(i + QUERY_TILE, queries)
        end = stop + ahead if causal else keys
        low = 0 if window is None else max(0, i + ahead - window + 1)  # what the first row sees
        if starts is not None:
            low = max(low, int(starts[:, i].min()))
        first = low // TILE * TILE
        yield slice(i, stop), [(slice(j, min(j + TILE, end)), i + ahead - j) for j in range(first, end, TILE)]


def hide_padding_(s: Array, lengths: Array | None, first: int) -> None:
    """Set the scores of padding to HIDDEN.

    s: (n, Hkv, columns, G * rows), its columns from `first` on; lengths: (n,).
    """
    columns = s.shape[-2]
    if lengths is not None and lengths.min(initial=first + columns) < first + columns:
        hidden = np.arange(first, first + columns) >= lengths[:, None]
        s += np.where(hidden, HIDDEN, 0.0).astype(s.dtype)[:, None, :, None]


def hide_(s: Array, shift: int, group: int, causal: bool, window: int | None, starts: Array | None) -> None:
    """Set the scores of keys that a query does not see to HIDDEN.

    s: (n, Hkv, columns, G * rows); starts: (n, rows), the first column that each row sees.
    """
    if not causal:
        return
    columns, rows = s.shape[-2], s.shape[-1] // group
    if columns > shift + 1:  # else the first row sees all of them
        first = max(shift + 1, 0)
        s[:, :, first:] += mask_of(columns, rows, shift, group, s.dtype)[first:]
    if window is not None and rows + shift > window:  # else the last row sees all of them
        last = min(columns, rows + shift - window)
        s[:, :, :last] += mask_of(columns, rows, shift - window, group, s.dtype, past=True)[:last]
    if starts is not None and (last := min(columns, int(starts.max()))) > 0:  # else no document begins in this tile
        mask = (np.arange(last, dtype=starts.dtype)[:, None] < starts[:, None]).astype(s.dtype)  # (n, last, rows)
        mask *= s.dtype.type(HIDDEN)
        s[:, :, :last] += np.tile(mask, (1, 1, group))[:, None]


def by_head(x: Array) -> Array:
    """(n, rows, H, D) to (n, H, rows, D), a view."""
    return x.transpose(0, 2, 1, 3)


def stack_group(x: Array, kv_heads: int, scale: float = 1.0) -> Array:
    """(n, rows, Hq, D) to (n, Hkv, G * rows, D), scaled: the query heads of one kv head as one tall matrix."""
    n, rows, heads, dim = x.shape
    stacked = np.multiply(by_head(x), x.dtype.type(scale), order="C")
    return stacked.reshape(n, kv_heads, heads // kv_heads * rows, dim)


def as_columns(x: Array, last: Array | None = None) -> Array:
    """(n, H, rows, D) to (n, H, D, rows): for such narrow matrices BLAS is twice as fast as on a transposed view.

    `last`, (n, H, rows), becomes one more row. The product of `with_ones(k)` and this is then k x^T + last: BLAS adds
    one number per query, where NumPy would make another pass over the whole tile.
    """
    n, heads, rows, dim = x.shape
    columns = np.empty((n, heads, dim + (last is not None), rows), x.dtype)
    columns[:, :, :dim] = x.swapaxes(-1, -2)
    if last is not None:
        columns[:, :, dim] = last
    return columns


def with_ones(x: Array) -> Array:
    """(n, H, rows, D) with a column of ones appended."""
    return np.concatenate([x, np.ones((*x.shape[:-1], 1), x.dtype)], axis=-1)


def some_sequences(batch: int, heads: int, itemsize: int) -> Iterator[slice]:
    """Slices of a batch whose tiles of scores fill about half of a core's cache."""
    return row_blocks(batch, heads * QUERY_TILE * TILE * itemsize, 1 << 20)


def dropout_mask(
    part: slice, rows: slice, columns: slice, heads: int, kv_heads: int, key: tuple[int, int], rate: float, dtype: Any
) -> Array:
    """(n, Hkv, columns, G * rows) of 0 and 1 / (1 - rate), for a tile that begins at multiples of 16.

    In a square of 16 x 16 scores, one block of Philox gives the words for queries t and t + 8 and keys s and s + 8. A
    thread of the tensor-core kernels holds all four, whether its rows are queries or keys. The block's counter is
    (s, t, head, sequence), where s and t skip the second 8 of every 16.
    """
    n, keys, queries = part.stop - part.start, columns.stop - columns.start, rows.stop - rows.start
    s, t = (np.arange(x.start // 2, x.start // 2 + -(-(x.stop - x.start) // 16) * 8) for x in (columns, rows))
    sequence, head, s, t = np.ix_(np.arange(part.start, part.stop), np.arange(heads), s, t)
    counter = np.stack(np.broadcast_arrays(s, t, head, sequence), axis=-1).astype(np.uint32)
    words = philox(counter.reshape(-1, 4), key).reshape(n, heads, s.size // 8, 8, t.size // 8, 8, 2, 2)
    words = words.transpose(0, 1, 2, 7, 3, 4, 6, 5).reshape(n, kv_heads, -1, 2 * s.size, 2 * t.size)
    kept = words[..., :keys, :queries].swapaxes(2, 3) >= np.uint32(rate * 2**32)
    return kept.reshape(n, kv_heads, keys, -1) * dtype.type(1.0 / (1.0 - rate))


def scaling(dim: int, scale: float | None) -> float:
    """The factor of the scores."""
    return dim**-0.5 if scale is None else scale


def cap_(s: Array, cap: float) -> Array:
    """s = cap tanh(s / cap), in place; returns the derivative, 1 - tanh^2."""
    s *= s.dtype.type(1 / cap)
    np.tanh(s, out=s)
    slope = 1 - s * s
    s *= s.dtype.type(cap)
    return slope


@kernel
def attention_fwd(
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
    """q: (B, T, Hq, D), the last T of S positions; k, v: (B, S, Hkv, D); returns o: (B, T, Hq, D), lse: (B, Hq, T).

    lengths: (B,) int32, 1 to S; keys from there on are padding, which no query sees. starts: (B, T) int32, the first
    key that each query sees; needs S = T. With a key, each probability is dropped at `rate`. scale: of the scores, None
    for 1 / sqrt(D). softcap: c, if not 0 the scores s are c tanh(s / c).
    """
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    out = np.empty((batch, queries, heads, dim), q.dtype)
    lse = np.empty((batch, heads, queries), q.dtype)
    for part in some_sequences(batch, heads, q.itemsize):
        kb, vb, ends = by_head(k[part]), by_head(v[part]), None if lengths is None else lengths[part]
        begins = None if starts is None else starts[part]
        for rows, seen in tiles(queries, keys, causal, window, begins):
            qi = as_columns(stack_group(q[part, rows], kv_heads, scaling(dim, scale)))
            top: Any = None
            total: Any = None
            acc: Any = None
            for columns, shift in seen:
                # Keys run down and queries across, so that per-query numbers (the maximum, the log-sum-exp) are a row:
                # NumPy takes maxima down the columns of a tile five times as fast as along its rows.
                s = kb[:, :, columns] @ qi
                if softcap:
                    cap_(s, softcap)
                hide_(s, shift, group, causal, window, None if begins is None else begins[:, rows] - columns.start)
                hide_padding_(s, ends, columns.start)
                new_top = s.max(axis=-2, keepdims=True)
                if top is not None:
                    np.maximum(new_top, top, out=new_top)
                s -= new_top
                np.exp(s, out=s)
                # A sum as a product with ones: BLAS takes half the time of NumPy's reduction.
                tile_sum = np.ones((1, s.shape[-2]), s.dtype) @ s
                if key is not None:
                    s *= dropout_mask(part, rows, columns, heads, kv_heads, key, rate, s.dtype)
                tile_out = s.swapaxes(-1, -2) @ vb[:, :, columns]
                if top is not None:
                    # Rescale the sums under the old maximum by exp(old - new).
                    shrink = np.exp(top - new_top)
                    tile_sum += total * shrink
                    tile_out += acc * shrink.swapaxes(-1, -2)
                top, total, acc = new_top, tile_sum, tile_out
            acc /= total.swapaxes(-1, -2)
            by_head(out[part, rows])[...] = acc.reshape(len(acc), heads, -1, dim)
            lse[part, :, rows] = (np.log(total) + top).reshape(len(acc), heads, -1)
    return out, lse


@attention_fwd.on("meta")
def attention_fwd_memory(q: Array, starts: Array | None, window: int | None) -> tuple[Array, Array]:
    batch, queries, heads, _ = q.shape
    if starts is not None and window is not None:
        _bounds = empty((2, *starts.shape), starts.dtype)  # what each query sees, and what sees each key
    return empty(q.shape, q.dtype), empty((batch, heads, queries), wide(q.dtype))


def _probabilities(
    kb: Array,
    q_columns: Array,
    group: int,
    causal: bool,
    window: int | None,
    softcap: float,
    ends: Array | None,
    begins: Array | None,
    columns: slice,
    shift: int,
) -> tuple[Array, Array | None]:
    """exp(s - lse) of a tile, s = k q^T, capped if softcap is not 0; and the derivative of the cap. q_columns: from
    `as_columns`, with -lse; begins: (n, rows), as `starts`."""
    slope = None
    if softcap:
        dim = q_columns.shape[2] - 1
        p = kb[:, :, columns, :dim] @ q_columns[:, :, :dim]
        slope = cap_(p, softcap)
        p += q_columns[:, :, dim:]  # - lse
    else:
        p = kb[:, :, columns] @ q_columns  # k q^T - lse
    hide_(p, shift, group, causal, window, None if begins is None else begins - columns.start)
    hide_padding_(p, ends, columns.start)
    return np.exp(p, out=p), slope


@kernel
def attention_bwd(
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
    """Writes dq, dk, dv (views of a packed dqkv, shapes of q, k, v)."""
    batch, queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    scale = scaling(dim, scale)
    for part in some_sequences(batch, heads, q.itemsize):
        kb, vb = with_ones(by_head(k[part])), with_ones(by_head(v[part]))
        ends = None if lengths is None else lengths[part]
        dkb, dvb = np.zeros(by_head(k[part]).shape, q.dtype), np.zeros(by_head(v[part]).shape, q.dtype)
        begins = None if starts is None else starts[part]
        for rows, seen in tiles(queries, queries, causal, window, begins):
            qi, doi = stack_group(q[part, rows], kv_heads, scale), stack_group(dy[part, rows], kv_heads)
            delta = np.vecdot(dy[part, rows], out[part, rows]).swapaxes(1, 2).reshape(qi.shape[:-1])
            q_columns = as_columns(qi, -lse[part, :, rows].reshape(delta.shape))
            do_columns = as_columns(doi, -delta)
            dqi = np.zeros(qi.shape, q.dtype)
            first = None if begins is None else begins[:, rows]
            probabilities = partial(_probabilities, kb, q_columns, group, causal, window, softcap, ends, first)
            # Rounding lse costs P up to |lse| eps; where that is much, P is divided by its own sums.
            coarse = np.abs(q_columns[:, :, dim]).max() * np.finfo(q.dtype).eps > LSE_ERROR
            sums = sum(probabilities(*tile)[0].sum(axis=-2, keepdims=True) for tile in seen) if coarse else None
            for columns, shift in seen:
                p, slope = probabilities(columns, shift)
                if sums is not None:
                    p /= sums
                ds = vb[:, :, columns] @ do_columns  # v dO^T - delta
                if key is None:
                    dvb[:, :, columns] += p @ doi
                else:
                    mask = dropout_mask(part, rows, columns, heads, kv_heads, key, rate, p.dtype)
                    dvb[:, :, columns] += (p * mask) @ doi
                    ds = (ds + delta[:, :, None]) * mask - delta[:, :, None]
                ds *= p
                if slope is not None:
                    ds *= slope
                dqi += ds.swapaxes(-1, -2) @ kb[:, :, columns, :dim]
                dkb[:, :, columns] += ds @ qi  # qi carries the scale
            dqi *= q.dtype.type(scale)
            by_head(dq[part, rows])[...] = dqi.reshape(len(dqi), heads, -1, dim)
        by_head(dk[part])[...], by_head(dv[part])[...] = dkb, dvb


@attention_bwd.on("meta")
def attention_bwd_memory(starts: Array | None, lse: Array) -> None:
    _stats = empty((*lse.shape, 2), lse.dtype)  # a row's log-sum-exp and its sum of dO O
    if starts is not None:
        _bounds = empty((2, *starts.shape), starts.dtype)


@kernel
def attention_rope_bwd(
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
    """attention_bwd into a packed dqkv, (B, T, Hq + 2 Hkv, D), and RoPE's backward on its first `rotated` heads."""
    heads = dy.shape[2]
    how: Any = (causal, window, key, rate, scale, softcap)
    attention_bwd(*split(dqkv, heads), dy, *split(qkv, heads), lengths, starts, out, lse, *how)
    rope(dqkv, dqkv, cos, sin, rotated)


attention_rope_bwd.on("meta")(attention_bwd_memory)


def split(qkv: Array, heads: int) -> tuple[Array, Array, Array]:
    """q, k and v of a packed qkv, (B, T, Hq + 2 Hkv, D), where q has `heads` heads."""
    kv = heads + (qkv.shape[2] - heads) // 2
    return qkv[:, :, :heads], qkv[:, :, heads:kv], qkv[:, :, kv:]


@dataclass(frozen=True)
class Documents:
    """The documents of packed rows, an input of a model's forward.

    starts: (B, T) int32, where in its row each token's document begins; on the host or on a device. restart: positions
    count from there instead of from the beginning of the row; attention is the same.
    """

    starts: Array
    restart: bool = False

    def __getitem__(self, rows: slice) -> Documents:
        return Documents(self.starts[rows], self.restart)

    def on(self, backend: Backend) -> Documents:
        return Documents(backend.asarray(self.starts), self.restart)


class LayerCache(Protocol):
    """The keys and values of one layer's earlier positions; see tinyforge/infer/cache.py."""

    def append(self, k: Array, v: Array, window: int | None) -> tuple[Array, Array, Array | None]:
        """k, v: (B, T, Hkv, D) of the next T positions; window: the op's. Returns those of all S positions so far,
        (B, S, Hkv, D), and None. Or, if the T positions are of as many texts, those that each text's query may see, (T,
        S, Hkv, D), and how many it sees, (T,)."""


class Attention(Op):
    """o[t] = sum over the visible s of softmax_s(q[t] . k[s] / sqrt(D)) v[s], per head

    qkv: (B, T, Hq + 2 Hkv, D), heads in the order q, k, v; o: (B, T, Hq, D). Query head h reads key and value head
    h // (Hq / Hkv). All s <= t are visible; with `window`, only those with s > t - window; with causal=False, all s.
    lengths: (B,) int32, 1 to T, for sequences of unequal lengths in one array, with causal=False: the positions after
    are padding, which no query sees. The outputs of padding are meaningless, and the gradient of its k and v is 0.
    starts: (B, T) int32, for rows that hold several documents: where t's document begins, with starts[b, t] <= t and
    ascending in t. Then only s >= starts[b, t] are visible. Saved by reference.
    Saves qkv, o and the log-sum-exp of each row of scores, (B, Hq, T): memory linear in T. Backward recomputes the
    probabilities from it, one tile at a time:

        P = exp(q k^T / sqrt(D) - lse)      dV = P^T dO          dP = dO V^T
        dS = P * (dP - rowsum(dO * O))      dQ = dS K / sqrt(D)  dK = dS^T Q / sqrt(D)

    dropout: rate p at which each probability is dropped in training. With m[t, s] = 1 at probability 1 - p, else 0,
    independently for each sequence and query head, and M = m / (1 - p):

        o[t] = sum_s M[t, s] P[t, s] v[s]   dV = (P * M)^T dO    dP = (dO V^T) * M

    m is a pure function of the stash's noise and the op's name, as in Dropout: only the stream's key is saved, and
    tiles of the mask are recomputed where they are needed. Without a stash, or without noise on it, nothing is dropped.

    scale: of the scores in place of 1 / sqrt(D). softcap: c, which bounds them: s becomes c tanh(s / c), and then
    dS = P * (dP - rowsum(dO * O)) * (1 - tanh(s / c)^2), as in Gemma 2.

    With a cache (inference only), the T positions are the last of S: their keys and values are appended to it, and q
    attends to all S. Or they are the last of T texts of unequal lengths, see `LayerCache`.

    Sources: Vaswani et al. (2017); Ainslie et al., "GQA" (2023); the online softmax of Milakov and Gimelshein (2018)
    as tiled by Dao et al., "FlashAttention" (2022); the sliding window as in Jiang et al.,
    "Mistral 7B" (2023); dropout of probabilities as in Vaswani et al. and GPT-2.
    """

    fwd = attention_fwd
    bwd = attention_bwd
    rope_bwd = attention_rope_bwd

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        backend: Backend,
        name: str = "",
        *,
        causal: bool = True,
        window: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(backend, name)
        if heads % kv_heads:
            raise ValueError(f"Attention: {heads} query heads do not divide among {kv_heads} key/value heads")
        if window is not None and (window < 1 or not causal):
            raise ValueError(
                f"Attention: window is {window}, causal is {causal}; expected a causal window of 1 or more"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"Attention: dropout is {dropout}, expected 0 <= dropout < 1")
        if softcap < 0.0:
            raise ValueError(f"Attention: softcap is {softcap}, expected a number above 0, or 0 for none")
        self.heads = heads
        self.kv_heads = kv_heads
        self.scale, self.softcap = scale, softcap
        self.causal = causal
        self.window = window
        self.dropout = dropout

    def forward(
        self,
        qkv: Array,
        stash: Stash | None = None,
        *,
        cache: LayerCache | None = None,
        lengths: Array | None = None,
        starts: Array | None = None,
    ) -> Array:
        self.expect(qkv)
        q, k, v = split(qkv, self.heads)
        if lengths is not None and self.causal:
            raise ValueError(f"{self.name}: lengths with causal attention, where no query sees what comes after it")
        if starts is not None and (cache is not None or not self.causal):
            raise ValueError(f"{self.name}: starts of documents go with causal attention, and with no cache; drop one")
        causal, window, shape = self.causal, self.window, q.shape
        if cache is not None:
            if stash is not None:
                raise ValueError(f"{self.name}: a cache and a stash; a pass with a cache has no backward, drop one")
            k, v, lengths = cache.append(k, v, window)
            if lengths is not None:  # each text's last position sees all its keys that were returned
                causal, window, q = False, None, q.reshape(-1, 1, *q.shape[2:])
        key = stash.key(self, self.dropout) if stash is not None else None
        how = (causal, window, key, self.dropout, self.scale, self.softcap)
        out, lse = self.fwd(q, k, v, lengths, starts, *how)
        self.finish(out, lse)
        self.save(stash, qkv, lengths, starts, out, lse, key)
        return out.reshape(shape)

    def finish(self, out: Array, lse: Array) -> None:
        """What else forward does to its results, in place: see `SinkAttention`."""

    def learn(self, dy: Array, out: Array, lse: Array) -> None:
        """The gradients of parameters."""

    def backward(self, dy: Array, stash: Stash, *, rope: RoPE | None = None) -> Array:
        """rope: the op before this one; if given, its backward is done here too, on the gradients of q and k."""
        qkv, lengths, starts, out, lse, key = stash.pop(self)
        self.learn(dy, out, lse)
        dqkv = self.backend.empty(qkv.shape)
        how = (self.causal, self.window, key, self.dropout, self.scale, self.softcap)
        if rope is not None:
            cos, sin, rotated = rope.turn_back(stash)
            self.rope_bwd(dqkv, dy, qkv, lengths, starts, out, lse, cos, sin, rotated, *how)
        else:
            (q, k, v), (dq, dk, dv) = split(qkv, self.heads), split(dqkv, self.heads)
            self.bwd(dq, dk, dv, dy, q, k, v, lengths, starts, out, lse, *how)
        return dqkv

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        shapes = ((2, 7, 4, 2, 4), (1, 1, 1, 1, 2), (2, 5, 3, 1, 6), (1, TILE + 3, 2, 1, 4), (2, 0, 2, 2, 4))
        for b, t, heads, kv_heads, d in shapes:
            yield cls(heads, kv_heads, backend), (backend.asarray(rng.normal(size=(b, t, heads + 2 * kv_heads, d))),)
        # Windows within a tile, across the border of one, and wider than the sequence.
        for t, window in ((7, 1), (7, 3), (TILE + 3, 40), (5, 9)):
            op = cls(2, 1, backend, window=window)
            yield op, (backend.asarray(rng.normal(size=(1, t, 4, 4))),)
        for t in (7, TILE + 3):
            yield cls(2, 1, backend, causal=False), (backend.asarray(rng.normal(size=(1, t, 4, 4))),)
        # Dropout within a tile, across tiles with a group of heads, and with a window.
        for t, width in ((7, None), (TILE + 3, None), (TILE + 3, 40)):
            op = cls(4, 2, backend, window=width, dropout=0.4)
            yield op, (backend.asarray(rng.normal(size=(2, t, 8, 4))),)
        # Scaled and capped scores, alone, across tiles, and with a window, a group and dropout.
        for t, width, rate, scale, cap in (
            (7, None, 0.0, 0.3, 0.0),
            (TILE + 3, None, 0.0, None, 2.0),
            (9, 4, 0.4, 1.0, 1.5),
        ):
            op = cls(2, 1, backend, window=width, dropout=rate, scale=scale, softcap=cap)
            yield op, (backend.asarray(rng.normal(size=(1, t, 4, 4))),)
        # Padding within a tile, of whole tiles, and with dropout.
        for t, ends, rate in ((7, (3, 7, 1), 0.0), (2 * TILE + 3, (TILE + 1, 5), 0.0), (TILE + 3, (TILE - 1,), 0.4)):
            padded = WithKeywords(cls(4, 2, backend, causal=False, dropout=rate), lengths=lambda given: given)
            qkv = backend.asarray(rng.normal(size=(len(ends), t, 8, 4)))
            yield padded, (qkv, backend.asarray(np.array(ends)))
        # Documents: within a tile, some of one token; across tiles, one of them beginning with a tile, and one that no
        # later query sees; with a window, with dropout.
        for begins, t, width, rate in (
            (((0, 3, 4), (0, 6)), 7, None, 0.0),
            (((0, 64, TILE, 200),), 2 * TILE + 3, None, 0.0),
            (((0, 40, 131), (0, 1)), TILE + 4, 30, 0.0),
            (((0, 50, 129), (0,)), TILE + 3, None, 0.4),
        ):
            first = np.zeros((len(begins), t), np.int32)
            for row, places in zip(first, begins, strict=True):
                row[list(places)] = places
            packed = WithKeywords(cls(4, 2, backend, window=width, dropout=rate), starts=lambda given: given)
            starts = backend.asarray(np.maximum.accumulate(first, axis=1))
            yield packed, (backend.asarray(rng.normal(size=(len(begins), t, 8, 4))), starts)
        # Scores of 30,000, of two equal keys; on a GPU the rounding of their lse stays.
        if backend.name not in ("cupy", "webgpu") or (backend.name == "webgpu" and backend.dtype == np.float64):
            far, each = rng.normal(size=(1, 4, 4, 4)), np.arange(4)
            far[0, each, :2, each // 3] += 250
            far[0, each, 2, each // 2] += 250
            far[0, 1::2, 2] = far[0, ::2, 2]
            yield cls(2, 1, backend), (backend.asarray(far),)
