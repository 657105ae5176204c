"""The fused decoder for CPUs, in NumPy: `FusedWeights` laid out for passes of few positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends.numpy_backend import blas_kernels
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.decoder import Decoder
from tinyforge.quantised import plain

PREFILL_ROWS, QUERY_TILE, KEY_TILE = 256, 64, 256
"""Prefill: positions per product; queries per tile of attention, fewer, to compute less above the diagonal; and keys
per tile."""
SAFE_SCORE = 60.0
"""Prefill skips the softmax's shift where no score can exceed this: exp cannot overflow."""
SMALL_ROWS = 4
"""Rows of a product of `step`, where OpenBLAS has a kernel for small products; elsewhere one row. See `pack`."""
SMALL_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""OpenBLAS's kernels, by name, with one for small products: those for AVX-512."""
TILE = 16
"""Keys and values are taken in multiples of this: BLAS's inner loop, without a remainder."""
SMALL_PRODUCT = 1e6
"""Multiply-adds up to which that kernel is used. Larger products pack their operands first."""


def product_rows() -> int:
    """Rows of a product of `step` with the BLAS that NumPy uses here."""
    return SMALL_ROWS if blas_kernels() in SMALL_KERNELS else 1


def pack(weight: np.ndarray) -> np.ndarray:
    """(..., O, I) to (..., O / b, 1, I, b): x @ this is x W^T in blocks of b columns. The 1 is for groups of rows.

    Every product of `step` has the same number of rows, so that a row has the same bits alone and among others. With
    AVX-512 that is SMALL_ROWS: for blocks of this size OpenBLAS has a kernel that is as fast as a matrix times a
    vector, since both wait for the weights, so four tokens cost as much as one. Without it a product of few rows packs
    the weights first, and takes twice as long as a matrix times a vector.
    """
    *lead, rows, columns = weight.shape
    limit = int(SMALL_PRODUCT / (SMALL_ROWS * columns))
    # If one block is too large, 64 columns are fastest. Rows that no multiple of TILE divides stay one, slower, block.
    sizes = [64, *range(limit // TILE * TILE, 0, -TILE)]
    size = rows if rows <= limit else next((b for b in sizes if b <= limit and rows % b == 0), rows)
    blocks = weight.reshape(*lead, rows // size, 1, size, columns)
    return np.ascontiguousarray(blocks.swapaxes(-1, -2))


def blocks_of(out: np.ndarray, packed: np.ndarray, group: int) -> np.ndarray:
    """A view of out, (..., R, O), as the (..., O / b, R / group, group, b) that products of `group` rows with `packed`
    write."""
    *lead, rows, _ = out.shape
    blocks = out.reshape(*lead, rows // group, group, packed.shape[-4], packed.shape[-1])
    return np.moveaxis(blocks, -2, -4)


# In C order all groups of rows are multiplied with a block while it is in the cache.
multiply_packed = partial(np.matmul, order="C")


class NumpyDecoder(Decoder):
    """A decoder of any number of rows for models with `fused_weights`; UserError for others, and for another backend.

    A pass is some 30 NumPy calls per layer on preallocated arrays. With B rows, n positions each, heads of size D:

    - Norms: the gain and sqrt(C) are folded into the next weights, so that a norm is x / sqrt(x . x + C eps).
    - RoPE: the rows of q and k are reordered so that the two numbers of a pair are neighbours. A pair is then one
      complex number, and its rotation one complex product. q . k does not change when both are reordered alike. The
      scores' 1 / sqrt(D) is folded into the rows of q.
    - Cache: keys (layers, B, Hkv, D, positions), values (layers, B, Hkv, positions, D + 1 or more), contiguous for each
      head. The columns after D are 1: one product gives the weighted sum and, in them, the softmax's denominator.
    - SwiGLU: the gate's rows are halved, and silu(2 a) = a (1 + tanh(a)), which does not overflow.
    - Products in `step` all have the same number of rows, and its attention is one product per position: a position's
      result depends, to the last bit, neither on the number of other positions nor on their values. See `pack`.
    """

    can_save = True

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None) -> None:
        super().__init__(model, batch, capacity)
        if model.backend.name != "numpy":
            raise UserError(f"NumpyDecoder: the model is on backend {model.backend.name}, not numpy; use make_decoder")
        weights = model.fused_weights()
        if weights is None:
            raise UserError(f"NumpyDecoder: {type(model).__name__} has no fused weights; use make_decoder")
        c = self.weights = weights
        self.dtype, self.group = model.backend.dtype, product_rows()
        complex_dtype = np.result_type(self.dtype, np.complex64)
        root = c.dim**0.5
        gains = [gain * root for gain in c.gains]
        turned = (c.heads + c.kv_heads) * c.head_dim
        # Within a head: 0, D/2, 1, D/2 + 1, ...
        pairs = np.arange(turned).reshape(-1, 2, c.head_dim // 2).swapaxes(1, 2).reshape(-1)
        order = np.concatenate([pairs, np.arange(turned, turned + c.kv_heads * c.head_dim)])
        self.layers = []
        for i, layer in enumerate(c.layers):
            w_qkv, w_out, w_gate_up, w_down = map(plain, layer)
            qkv = w_qkv[order] * gains[2 * i]
            qkv[: c.heads * c.head_dim] *= c.head_dim**-0.5
            gate_up = w_gate_up.reshape(2, c.hidden, c.dim) * gains[2 * i + 1]
            gate_up[0] *= 0.5
            self.layers.append([pack(w) for w in (qkv, w_out, gate_up, w_down)])
        self.lm_heads = pack(plain(c.lm_heads) * gains[-1])
        self.turns = (c.cos[: self.capacity] + 1j * c.sin[: self.capacity]).astype(complex_dtype)

        # Two tiles of padding: rows of keys a power of two apart would compete for a few cache sets.
        self.positions = (-(-self.capacity // TILE) + 2) * TILE
        layers = len(c.layers)
        self.keys = np.zeros((layers, batch, c.kv_heads, c.head_dim, self.positions), self.dtype)
        self.value_width = -(-(c.head_dim + 1) // TILE) * TILE
        self.values = np.zeros((layers, batch, c.kv_heads, self.positions, self.value_width), self.dtype)
        self.with_ones = 0  # positions whose columns of ones are written: memory is touched only as the texts grow
        # Row i is 0 up to column i, then -inf; all rows are views of the same numbers.
        steps = np.zeros(2 * self.positions - 1, self.dtype)
        steps[self.positions :] = -np.inf
        self.masks = np.lib.stride_tricks.sliding_window_view(steps, self.positions)[::-1]
        self.norm_eps = self.dtype.type(c.dim * c.norm_eps)
        self.one = self.dtype.type(1)
        self.map, self.workers = model.backend.map, model.backend.workers
        self._reserve(batch * self.prediction_heads)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        if len(tokens):
            _Prompt(self, row, tokens).run()
            self.lengths[row] += len(tokens)

    def repeat(self, row: int, source: int) -> bool:
        length = self.lengths[row] = self.lengths[source]
        self.keys[:, row, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, row, :, :length] = self.values[:, source, :, :length]
        return True

    def first(self, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        if len(tokens) == 1:
            return self.step([tokens], heads)
        self._check_room([0], len(tokens))
        prompt = _Prompt(self, 0, tokens)
        prompt.run()
        self.lengths[0] += len(tokens) - 1
        return self._pass([tokens[-1:]], [0], heads, prompt.x[len(tokens) - 1])

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        return self.step_rows(range(self.batch), tokens, heads)

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        n = len(tokens[0])
        self._check_room(rows, n)
        if len(rows) * n > self.rows:
            self._reserve(len(rows) * n)
        return self._pass(tokens, rows, heads)

    def saved(self, row: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        here = slice(start, self.lengths[row])
        return self.keys[:, row, :, :, here].copy(), self.values[:, row, :, here, : self.weights.head_dim].copy()

    def restore(self, row: int, saved: tuple[np.ndarray, np.ndarray], length: int) -> None:
        here = slice(self.lengths[row], length)
        self.keys[:, row, :, :, here], self.values[:, row, :, here, : self.weights.head_dim] = saved
        self.lengths[row] = length

    def _reserve(self, rows: int) -> None:
        """Allocate buffers for passes of up to `rows` positions in all. Zeros: padding rows must be finite."""
        c = self.weights
        self.rows = rows = -(-rows // self.group) * self.group
        wide = (c.heads + 2 * c.kv_heads) * c.head_dim

        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, self.dtype)

        self.x, self.h, self.delta = (zeros(rows, c.dim) for _ in range(3))
        self.attended = zeros(rows, c.heads * c.head_dim)
        self.squares, self.qkv, self.qk = zeros(rows), zeros(rows, wide), zeros(rows * wide)
        self.gate_up, self.hidden = zeros(2 * rows * c.hidden), zeros(rows, c.hidden)
        self.scores, self.mask = zeros(rows * c.heads * self.positions), zeros(rows * self.positions)
        self.top, self.mixed = zeros(rows * c.heads), zeros(rows * c.heads * self.value_width)
        self.logits = zeros(self.prediction_heads * rows * c.vocab)
        self.turn = np.zeros(rows * c.head_dim // 2, self.turns.dtype)
        self.ids = np.zeros(rows, np.intp)
        self._shapes: dict[tuple[int, int], _Shape] = {}

    def _put_ones(self, positions: int) -> None:
        """Write the columns of ones after the values, for as many positions."""
        if positions > self.with_ones:
            self.values[..., self.with_ones : positions, self.weights.head_dim :] = 1
            self.with_ones = positions

    def _pass(self, tokens: Any, rows: Sequence[int], heads: int, given: np.ndarray | None = None) -> np.ndarray:
        """Rows take their next tokens, (len(rows), n); returns (len(rows), n, heads, V).

        given: the stream that the last layer reads, (C,), of a single token that the layers before it have computed.
        """
        c, n, batch = self.weights, len(tokens[0]), len(rows)
        s = self._shapes.get((batch, n))
        if s is None:
            s = self._shapes[batch, n] = _Shape(self, batch, n)
        lengths = [self.lengths[row] for row in rows]
        seen = s.seen(max(lengths) + n)
        self._put_ones(seen.keys)
        s.ids[:] = tokens
        one_each = (np.array(rows), np.array(lengths)) if n == 1 and batch > SMALL_ROWS else None
        if one_each is not None:  # one position in each row: fancy indexing instead of a loop
            s.turn[:, 0, 0], s.mask[:, 0, : seen.keys] = self.turns[one_each[1]], self.masks[one_each[1], : seen.keys]
        else:
            for b, past in enumerate(lengths):
                s.turn[b, :, 0] = self.turns[past : past + n]
                s.mask[b, :, : seen.keys] = self.masks[past : past + n, : seen.keys]
        runs = self._runs(rows, lengths, n)

        matmul, add, multiply, subtract, divide = np.matmul, np.add, np.multiply, np.subtract, np.divide
        project = multiply_packed
        x, f = s.x, s.f
        s.x_padding.fill(0)  # else the padding rows would grow from pass to pass
        left = slice(None)
        if given is None:
            np.take(c.embedding, s.flat_ids, axis=0, out=s.x_new, mode="clip")
        else:
            s.x_new[...], left = given, slice(-1, None)
        layers = zip(self.layers[left], self.keys[left], self.values[left], strict=True)
        for (w_qkv, w_out, w_gate_up, w_down), keys, values in layers:
            self._norm(s)
            project(s.h_by_group, w_qkv, out=s.qkv)
            multiply(s.qk_flat, s.turn, out=s.qk_turned)
            if one_each is not None:
                keys[one_each[0], :, :, one_each[1]] = s.k[..., 0]
                values[one_each[0], :, one_each[1], : c.head_dim] = s.v[:, :, 0]
            else:
                for b, (row, past) in enumerate(zip(rows, lengths, strict=True)):
                    keys[row, :, :, past : past + n] = s.k[b]
                    values[row, :, past : past + n, : c.head_dim] = s.v[b]
            for here, held, own in runs:
                matmul(s.queries[here], keys[held, :, None, :, :own], out=seen.products[here, ..., :own])
            add(seen.by_query, seen.mask, out=seen.by_query)
            np.maximum.reduce(seen.scores, axis=-1, keepdims=True, out=s.top)
            subtract(seen.scores, s.top, out=seen.scores)
            np.exp(seen.scores, out=seen.scores)
            for here, held, own in runs:
                matmul(seen.products[here, ..., :own], values[held, :, None, :own], out=s.mixtures[here])
            divide(s.sums, s.divisors, out=s.attended)
            project(s.a, w_out, out=s.delta_blocks)
            add(x, s.delta, out=x)
            self._norm(s)
            project(s.h_by_group, w_gate_up, out=s.gate_up)
            np.tanh(s.gate, out=f)
            add(f, self.one, out=f)
            multiply(f, s.gate, out=f)
            multiply(f, s.up, out=f)
            project(s.f_by_group, w_down, out=s.delta_from_hidden)
            add(x, s.delta, out=x)
        for row in rows:
            self.lengths[row] += n
        self._norm(s)
        project(s.h_by_group, self.lm_heads[:heads], out=s.logits_blocks[:heads])
        return s.logits[:, :, :heads]

    def _runs(self, rows: Sequence[int], lengths: Sequence[int], n: int) -> list[tuple[slice, slice, int]]:
        """Runs of neighbouring rows that see equally many tiles of keys, so that one call computes their attention:
        their slices of the pass and of the cache, and the number of keys. That number depends only on a row's own
        length, so that no other row changes its bits."""
        runs: list[tuple[slice, slice, int]] = []
        first, row, own = 0, rows[0], -1
        for b, (r, length) in enumerate(zip(rows, lengths, strict=True)):
            keys = -(-(length + n) // TILE) * TILE
            if own < 0:
                own = keys
            elif keys != own or r != row + b - first:
                runs.append((slice(first, b), slice(row, row + b - first), own))
                first, row, own = b, r, keys
        return [*runs, (slice(first, len(rows)), slice(row, row + len(rows) - first), own)]

    def _norm(self, s: _Shape) -> None:
        np.vecdot(s.x, s.x, out=s.squares)
        np.add(s.squares, self.norm_eps, out=s.squares)
        np.sqrt(s.squares, out=s.squares)
        np.divide(s.x, s.root, out=s.h)


class _Prompt:
    """Prefill of one row, layer by layer: a layer's weights are read once, and all cores share its blocks of positions.
    Within a layer a block needs only the keys and values of the others:

        attention and MLP of layer i - 1, then q, k and v of layer i, block by block; then the next i

    The blocks, and so the bits, do not depend on the number of threads. Of the last layer only keys and values are
    computed; `x` is then the stream that it reads.
    """

    def __init__(self, decoder: NumpyDecoder, row: int, tokens: Sequence[int]) -> None:
        c = self.weights = decoder.weights
        self.decoder, self.row, self.past, self.count = decoder, row, decoder.lengths[row], len(tokens)
        decoder._put_ones(self.past + self.count)
        rows = -(-self.count // SMALL_ROWS) * SMALL_ROWS
        self.x = np.zeros((rows, c.dim), decoder.dtype)  # rows that pad a product are 0
        np.take(c.embedding, tokens, axis=0, out=self.x[: self.count], mode="clip")
        self.queries = np.empty((c.heads * c.head_dim) * self.count, decoder.dtype)
        blocks = [slice(start, min(start + PREFILL_ROWS, rows)) for start in range(0, rows, PREFILL_ROWS)]
        shares = min(decoder.workers, len(blocks))
        # Back and forth: later blocks see more keys, so every thread gets early and late ones.
        self.shares = [blocks[i :: 2 * shares] + blocks[2 * shares - 1 - i :: 2 * shares] for i in range(shares)]

    def run(self) -> None:
        for layer in range(len(self.decoder.layers)):
            self.decoder.map(partial(self._share, layer), self.shares)

    def _share(self, layer: int, blocks: Sequence[slice]) -> None:
        """One thread's blocks of a layer."""
        c, most = self.weights, max(rows.stop - rows.start for rows in blocks)
        scratch = np.empty(most * max(3 * c.hidden, c.dim + (c.heads + 2 * c.kv_heads) * c.head_dim), self.x.dtype)
        scores = np.empty(c.heads * min(QUERY_TILE, most) * (self.past + self.count), self.x.dtype)
        for rows in blocks:
            if layer:
                self._attend(layer - 1, rows, scratch, scores)
                self._feed(layer - 1, rows, scratch)
            self._keys(layer, rows, scratch)

    def _normed(self, rows: slice, out: np.ndarray) -> np.ndarray:
        x = self.x[rows]
        root = np.vecdot(x, x)
        root += self.decoder.norm_eps
        np.sqrt(root, out=root)
        return np.divide(x, root[:, None], out=out)

    def _times(self, x: np.ndarray, packed: np.ndarray, out: np.ndarray) -> np.ndarray:
        """x: (rows, I) times each part of packed, (..., O / b, 1, I, b), into out, (..., rows, O)."""
        np.matmul(x, packed, out=blocks_of(out, packed, len(x)))
        return out

    def _part(self, rows: slice) -> tuple[int, int]:
        """The first token of a block, and the number of its tokens without padding."""
        return rows.start, min(rows.stop, self.count) - rows.start

    def _queries_of(self, start: int, n: int) -> np.ndarray:
        """The queries of the block at `start`, (heads, n, D)."""
        c = self.weights
        wide = c.heads * c.head_dim
        return self.queries[start * wide : (start + n) * wide].reshape(c.heads, n, c.head_dim)

    def _keys(self, layer: int, rows: slice, scratch: np.ndarray) -> None:
        """Compute queries, kept for `_attend`, and keys and values, in the cache."""
        c, d = self.weights, self.decoder
        start, n = self._part(rows)
        size, turned, first = rows.stop - rows.start, c.heads + c.kv_heads, self.past + start
        h, qkv = _parts(scratch, (size, c.dim), (size, (turned + c.kv_heads) * c.head_dim))
        self._times(self._normed(rows, h), d.layers[layer][0], qkv)
        heads = qkv[:n].reshape(n, -1, c.head_dim)
        pairs = heads[:, :turned].view(d.turns.dtype)
        pairs *= d.turns[first : first + n, None]
        self._queries_of(start, n)[...] = heads[:, : c.heads].swapaxes(0, 1)
        d.keys[layer, self.row, :, :, first : first + n] = heads[:, c.heads : turned].transpose(1, 2, 0)
        d.values[layer, self.row, :, first : first + n, : c.head_dim] = heads[:, turned:].swapaxes(0, 1)

    def _attend(self, layer: int, rows: slice, scratch: np.ndarray, scores: np.ndarray) -> None:
        c, d = self.weights, self.decoder
        start, n = self._part(rows)
        group, end = c.heads // c.kv_heads, self.past + start + n
        keys, values = d.keys[layer, self.row], d.values[layer, self.row]
        q = self._queries_of(start, n).reshape(c.kv_heads, group, n, c.head_dim)
        size = rows.stop - rows.start
        attended, delta = _parts(scratch, (size, c.heads * c.head_dim), (size, c.dim))
        attended[n:] = 0
        by_head = attended[:n].reshape(n, c.kv_heads, group, c.head_dim).transpose(1, 2, 0, 3)
        # |q . k| <= |q| |k|, below 40 in most layers of trained models: cheaper than a maximum over the scores.
        k = keys[..., :end].swapaxes(-1, -2)
        largest = np.vecdot(q, q).max() * np.vecdot(k, k).max()
        safe = bool(largest <= SAFE_SCORE**2)
        for i in range(0, n, QUERY_TILE):
            queries = q[:, :, i : i + QUERY_TILE]
            tile = queries.shape[2]
            before = self.past + start + i
            seen = before + tile
            mixed: np.ndarray | None = None
            # Without a shift the sums over tiles of keys simply add up, and a tile of scores stays in the CPU's cache.
            step = KEY_TILE if safe else seen
            for first in range(0, seen, step):
                last = min(first + step, seen)
                s = _parts(scores, (c.kv_heads, group, tile, last - first))[0]
                np.matmul(queries, keys[:, None, :, first:last], out=s)
                if last > before:
                    ahead = max(first, before)
                    s[..., ahead - first :] += d.masks[:tile, ahead - before : last - before]
                if not safe:
                    s -= s.max(axis=-1, keepdims=True)
                np.exp(s, out=s)
                part = np.matmul(s, values[:, None, first:last])
                mixed = part if mixed is None else np.add(mixed, part, out=mixed)
            assert mixed is not None
            np.divide(mixed[..., : c.head_dim], mixed[..., -1:], out=by_head[:, :, i : i + tile])
        self.x[rows] += self._times(attended, d.layers[layer][1], delta)

    def _feed(self, layer: int, rows: slice, scratch: np.ndarray) -> None:
        c, d = self.weights, self.decoder
        size = rows.stop - rows.start
        gate_up, f = _parts(scratch, (2, size, c.hidden), (size, c.hidden))
        h = self._normed(rows, np.empty((size, c.dim), self.x.dtype))
        gate, up = self._times(h, d.layers[layer][2], gate_up)
        np.tanh(gate, out=f)
        f += d.one
        f *= gate
        f *= up
        self.x[rows] += self._times(f, d.layers[layer][3], h)


def _parts(flat: np.ndarray, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Arrays of these shapes, one after the other in `flat`."""
    found, first = [], 0
    for shape in shapes:
        size = math.prod(shape)
        found.append(flat[first : first + size].reshape(shape))
        first += size
    return found


class _Seen(NamedTuple):
    """Views for passes over a given number of keys."""

    keys: int
    scores: np.ndarray  # (B, Hkv, G n, keys)
    products: np.ndarray  # the same, as the products write them: (B, Hkv, n, G, keys)
    by_query: np.ndarray  # the same, as (B, Hkv, G, n, keys)
    mask: np.ndarray  # (B, 1, 1, n, keys)


class _Shape:
    """Views of a `NumpyDecoder`'s buffers for passes of B rows with n positions each, made once per (B, n)."""

    def __init__(self, d: NumpyDecoder, batch: int, n: int) -> None:
        c, count = d.weights, batch * n
        group, turned = c.heads // c.kv_heads, c.heads + c.kv_heads
        rows = -(-count // d.group) * d.group
        w_qkv, w_out, w_gate_up, w_down = d.layers[0]
        self.decoder, self.batch, self.n = d, batch, n

        def part(flat: np.ndarray, *shape: int) -> np.ndarray:
            return flat[: math.prod(shape)].reshape(shape)

        def by_group(x: np.ndarray) -> np.ndarray:
            return x.reshape(-1, d.group, x.shape[-1])

        self.flat_ids = d.ids[:count]
        self.ids = self.flat_ids.reshape(batch, n)
        self.turn = part(d.turn, batch, n, 1, c.head_dim // 2)
        self.mask = part(d.mask, batch, n, d.positions)
        self.x, self.h, self.delta = d.x[:rows], d.h[:rows], d.delta[:rows]
        self.h_by_group, self.a = by_group(self.h), by_group(d.attended[:rows])
        self.x_new, self.x_padding = self.x[:count], self.x[count:]
        self.squares = d.squares[:rows]
        self.root = self.squares[:, None]
        self.qkv = blocks_of(d.qkv[:rows], w_qkv, d.group)
        heads = d.qkv[:count].reshape(batch, n, -1, c.head_dim)
        self.qk_flat = heads[:, :, :turned].view(d.turn.dtype)
        qk = part(d.qk, batch, turned, n, c.head_dim)
        self.qk_turned = qk.view(d.turn.dtype).swapaxes(1, 2)
        self.q = qk[:, : c.heads].reshape(batch, c.kv_heads, group * n, c.head_dim)
        self.k = qk[:, c.heads :].swapaxes(-1, -2)
        self.v = heads[:, :, turned:].swapaxes(1, 2)
        self.top = part(d.top, batch, c.kv_heads, group * n, 1)
        self.mixed = part(d.mixed, batch, c.kv_heads, group * n, d.value_width)
        self.queries, self.mixtures = self.by_product(self.q), self.by_product(self.mixed)
        by_query = self.mixed.reshape(batch, c.kv_heads, group, n, -1)
        self.sums, self.divisors = by_query[..., : c.head_dim], by_query[..., -1:]
        self.attended = d.attended[:count].reshape(batch, n, c.kv_heads, group, -1).transpose(0, 2, 3, 1, 4)
        self.delta_blocks = blocks_of(self.delta, w_out, d.group)
        self.delta_from_hidden = blocks_of(self.delta, w_down, d.group)
        gate_up = part(d.gate_up, 2, rows, c.hidden)
        self.gate_up = blocks_of(gate_up, w_gate_up, d.group)
        self.gate, self.up = gate_up[:, :count]
        self.f_by_group, self.f = by_group(d.hidden[:rows]), d.hidden[:count]
        logits = part(d.logits, d.prediction_heads, rows, c.vocab)
        self.logits_blocks = blocks_of(logits, d.lm_heads, d.group)
        self.logits = logits[:, :count].reshape(-1, batch, n, c.vocab).transpose(1, 2, 0, 3)
        self._seen: dict[int, _Seen] = {}

    def seen(self, longest: int) -> _Seen:
        """The views for rows of up to `longest` positions, rounded up to whole tiles."""
        keys = -(-longest // TILE) * TILE
        found = self._seen.get(keys)
        if found is None:
            c, batch, n = self.decoder.weights, self.batch, self.n
            group = c.heads // c.kv_heads
            scores = self.decoder.scores[: batch * c.heads * n * keys].reshape(batch, c.kv_heads, group * n, keys)
            by_query = scores.reshape(batch, c.kv_heads, group, n, keys)
            mask = self.mask[:, None, None, :, :keys]
            found = self._seen[keys] = _Seen(keys, scores, self.by_product(scores), by_query, mask)
        return found

    def by_product(self, x: np.ndarray) -> np.ndarray:
        """(B, Hkv, G n, ...) as attention's products take it, (B, Hkv, n, G, ...)."""
        return x.reshape(*x.shape[:2], -1, self.n, x.shape[-1]).swapaxes(2, 3)
