"""The fused decoder for CPUs: `FusedWeights` laid out for few positions a pass, in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.decoder import Decoder

PREFILL_ROWS = 64
"""Positions of a prompt in one pass of `NumpyDecoder`: activations stay in a core's cache."""
MIN_ROWS = 4
"""`NumpyDecoder` gives BLAS no product of fewer rows. See `pack`."""
TILE = 16
"""`NumpyDecoder` scores keys and mixes values in multiples of this: BLAS's inner loop, with nothing left over."""
SMALL_PRODUCT = 1e6
"""Multiply-adds up to which OpenBLAS multiplies without copying its operands into packed blocks first."""


def pack(weight: np.ndarray) -> np.ndarray:
    """(..., O, I) to (..., O / b, I, b): x @ this is x W^T in blocks of b columns, each a small product for OpenBLAS.

    Why not a matrix-vector product for one token: with inputs down and outputs across, and MIN_ROWS rows, OpenBLAS's
    product of small matrices takes as long as its matrix-vector product (both wait for the weights), and it adds up
    every row in the same order. So four tokens cost as much as one, and give the same bits as one after the other.
    """
    *lead, rows, columns = weight.shape
    limit = int(SMALL_PRODUCT / (MIN_ROWS * columns))
    # Where one block is too large, 64 columns are fastest. Rows that no whole tiles divide stay one block, and slower.
    sizes = [64, *range(limit // TILE * TILE, 0, -TILE)]
    size = rows if rows <= limit else next((b for b in sizes if b <= limit and rows % b == 0), rows)
    blocks = weight.reshape(*lead, rows // size, size, columns)
    return np.ascontiguousarray(blocks.swapaxes(-1, -2))


def blocks_of(out: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """out: (..., rows, O) as the (..., O / b, rows, b) that a product with `packed` writes, a view."""
    return out.reshape(*out.shape[:-1], packed.shape[-3], packed.shape[-1]).swapaxes(-2, -3)


def grouped(x: np.ndarray, group: int, dims: int = 0) -> np.ndarray:
    """(..., rows, C) to (rows / group, ..., 1 x dims, group, C), a view: a product with it is one for each group."""
    *lead, rows, columns = x.shape
    return np.moveaxis(x.reshape(*lead, rows // group, *[1] * dims, group, columns), len(lead), 0)


class NumpyDecoder(Decoder):
    """A decoder of any number of rows for models with `fused_weights`; UserError for others, and for another backend.

    A pass is some 30 calls of NumPy a layer on arrays that exist already. B rows, n positions each, heads of size D:

    - Norms: the gain and sqrt(C) are in the rows of the weights that follow, so a norm is x / sqrt(x . x + C eps).
    - RoPE: the rows of q and k are reordered so that the two numbers of a pair are neighbours; a pair is one complex
      number, and turning it is one complex product. q . k does not change when both are reordered alike. The scores'
      1 / sqrt(D) is in the rows of q.
    - Cache: keys (layers, B, Hkv, D, positions), values (layers, B, Hkv, positions, D + 1 or more), contiguous for each
      head. The columns behind D are 1: one product gives the weighted sum and, in them, the softmax's divisor.
    - SwiGLU: the gate's rows are halved, and silu(2 a) = a (1 + tanh(a)), which does not overflow.
    - Products have at least MIN_ROWS rows. Those of `step` have exactly so many, one product after the other, and its
      attention is a product for each position: what a position gives depends, to the last bit, neither on how many
      others there are nor on what they hold. See `pack`.
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
        self.dtype = model.backend.dtype
        complex_dtype = np.result_type(self.dtype, np.complex64)
        root = c.dim**0.5
        gains = [gain * root for gain in c.gains]
        turned = (c.heads + c.kv_heads) * c.head_dim
        # Within a head: 0, D/2, 1, D/2 + 1, ...
        pairs = np.arange(turned).reshape(-1, 2, c.head_dim // 2).swapaxes(1, 2).reshape(-1)
        order = np.concatenate([pairs, np.arange(turned, turned + c.kv_heads * c.head_dim)])
        self.layers = []
        for i, layer in enumerate(c.layers):
            qkv = layer.qkv[order] * gains[2 * i]
            qkv[: c.heads * c.head_dim] *= c.head_dim**-0.5
            gate_up = layer.gate_up.reshape(2, c.hidden, c.dim) * gains[2 * i + 1]
            gate_up[0] *= 0.5
            self.layers.append([pack(w) for w in (qkv, layer.out, gate_up, layer.down)])
        self.lm_heads = pack(c.lm_heads * gains[-1])
        self.turns = (c.cos[: self.capacity] + 1j * c.sin[: self.capacity]).astype(complex_dtype)

        # Two tiles more than are used: rows of keys a power of two apart would share a few sets of the cache.
        self.positions = (-(-self.capacity // TILE) + 2) * TILE
        layers = len(c.layers)
        self.keys = np.zeros((layers, batch, c.kv_heads, c.head_dim, self.positions), self.dtype)
        self.value_width = -(-(c.head_dim + 1) // TILE) * TILE
        self.values = np.zeros((layers, batch, c.kv_heads, self.positions, self.value_width), self.dtype)
        self.with_ones = 0  # positions whose columns of ones are written: memory is taken as the texts grow
        # Row i: 0 up to column i, then -inf; every row a view of the same numbers.
        steps = np.zeros(2 * self.positions - 1, self.dtype)
        steps[self.positions :] = -np.inf
        self.masks = np.lib.stride_tricks.sliding_window_view(steps, self.positions)[::-1]
        self.norm_eps = self.dtype.type(c.dim * c.norm_eps)
        self.one = self.dtype.type(1)
        self._reserve(max(PREFILL_ROWS, batch * self.prediction_heads))

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        for start in range(0, len(tokens), PREFILL_ROWS):
            self._pass([tokens[start : start + PREFILL_ROWS]], [row], 0, together=True)

    def repeat(self, row: int, source: int) -> bool:
        length = self.lengths[row] = self.lengths[source]
        self.keys[:, row, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, row, :, :length] = self.values[:, source, :, :length]
        return True

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
        """Buffers for passes of up to `rows` positions in all. Zeros: rows that pad a product must be finite."""
        c = self.weights
        self.rows = rows = -(-rows // MIN_ROWS) * MIN_ROWS
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
        self._shapes: dict[tuple[int, int, bool], _Shape] = {}

    def _pass(self, tokens: Any, rows: Sequence[int], heads: int, together: bool = False) -> np.ndarray:
        """Rows take their next tokens, (len(rows), n); returns (len(rows), n, heads, V). together: all positions in one
        product, which is faster; what comes out depends on how many there are then, in the last bits."""
        c, n, batch = self.weights, len(tokens[0]), len(rows)
        s = self._shapes.get((batch, n, together))
        if s is None:
            s = self._shapes[batch, n, together] = _Shape(self, batch, n, together)
        lengths = [self.lengths[row] for row in rows]
        seen = s.seen(max(lengths) + n)
        if seen.keys > self.with_ones:
            self.values[..., self.with_ones : seen.keys, c.head_dim :] = 1
            self.with_ones = seen.keys
        s.ids[:] = tokens
        one_each = (np.array(rows), np.array(lengths)) if n == 1 and batch > MIN_ROWS else None
        if one_each is not None:  # one place in each row
            s.turn[:, 0, 0], s.mask[:, 0, : seen.keys] = self.turns[one_each[1]], self.masks[one_each[1], : seen.keys]
        else:
            for b, past in enumerate(lengths):
                s.turn[b, :, 0] = self.turns[past : past + n]
                s.mask[b, :, : seen.keys] = self.masks[past : past + n, : seen.keys]
        runs = self._runs(rows, lengths, n)

        matmul, add, multiply, subtract, divide = np.matmul, np.add, np.multiply, np.subtract, np.divide
        x, f = s.x, s.f
        s.x_padding.fill(0)  # else the rows that pad products would grow from pass to pass
        np.take(c.embedding, s.flat_ids, axis=0, out=s.x_new, mode="clip")
        for (w_qkv, w_out, w_gate_up, w_down), keys, values in zip(self.layers, self.keys, self.values, strict=True):
            self._norm(s)
            matmul(s.h_by_group, w_qkv, out=s.qkv)
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
            matmul(s.a, w_out, out=s.delta_blocks)
            add(x, s.delta, out=x)
            self._norm(s)
            matmul(s.h_by_part, w_gate_up, out=s.gate_up)
            np.tanh(s.gate, out=f)
            add(f, self.one, out=f)
            multiply(f, s.gate, out=f)
            multiply(f, s.up, out=f)
            matmul(s.f_padded, w_down, out=s.delta_from_hidden)
            add(x, s.delta, out=x)
        for row in rows:
            self.lengths[row] += n
        if heads:
            self._norm(s)
            matmul(s.h_by_part, self.lm_heads[:heads], out=s.logits_blocks[:, :heads])
        return s.logits[:, :, :heads]

    def _runs(self, rows: Sequence[int], lengths: Sequence[int], n: int) -> list[tuple[slice, slice, int]]:
        """Neighbours that see equally many tiles of keys, whose attention is one call: their places in the pass and in
        the cache, and the keys. A row's own length alone says how many keys it sees, so no other row shows in it."""
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


class _Seen(NamedTuple):
    """Views for a number of visible keys."""

    keys: int
    scores: np.ndarray  # (B, Hkv, G n, keys)
    products: np.ndarray  # the same as products write them: (B, Hkv, n, G, keys), or together (B, Hkv, 1, G n, keys)
    by_query: np.ndarray  # the same as (B, Hkv, G, n, keys)
    mask: np.ndarray  # (B, 1, 1, n, keys)


class _Shape:
    """Views of a `NumpyDecoder`'s buffers for passes of B rows with n positions each, made once for each such pair.

    together: products take all positions at once, else MIN_ROWS of them.
    """

    def __init__(self, d: NumpyDecoder, batch: int, n: int, together: bool) -> None:
        c, count = d.weights, batch * n
        group, turned = c.heads // c.kv_heads, c.heads + c.kv_heads
        rows = -(-count // MIN_ROWS) * MIN_ROWS
        at_once = rows if together else MIN_ROWS
        w_qkv, w_out, w_gate_up, w_down = d.layers[0]
        self.decoder, self.batch, self.n, self.together = d, batch, n, together

        def part(flat: np.ndarray, *shape: int) -> np.ndarray:
            return flat[: int(np.prod(shape))].reshape(shape)

        self.flat_ids = d.ids[:count]
        self.ids = self.flat_ids.reshape(batch, n)
        self.turn = part(d.turn, batch, n, 1, c.head_dim // 2)
        self.mask = part(d.mask, batch, n, d.positions)
        def by_group(x: np.ndarray, packed: np.ndarray) -> np.ndarray:
            return blocks_of(grouped(x, at_once), packed)

        self.x, self.h, self.delta = d.x[:rows], d.h[:rows], d.delta[:rows]
        self.h_by_group, self.h_by_part = grouped(self.h, at_once, 1), grouped(self.h, at_once, 2)
        self.a = grouped(d.attended[:rows], at_once, 1)
        self.x_new, self.x_padding = self.x[:count], self.x[count:]
        self.squares = d.squares[:rows]
        self.root = self.squares[:, None]
        self.qkv = by_group(d.qkv[:rows], w_qkv)
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
        self.delta_blocks = by_group(self.delta, w_out)
        self.delta_from_hidden = by_group(self.delta, w_down)
        gate_up = part(d.gate_up, 2, rows, c.hidden)
        self.gate_up = by_group(gate_up, w_gate_up)
        self.gate, self.up = gate_up[:, :count]
        self.f_padded, self.f = grouped(d.hidden[:rows], at_once, 1), d.hidden[:count]
        logits = part(d.logits, d.prediction_heads, rows, c.vocab)
        self.logits_blocks = by_group(logits, d.lm_heads)
        self.logits = logits[:, :count].reshape(-1, batch, n, c.vocab).transpose(1, 2, 0, 3)
        self._seen: dict[int, _Seen] = {}

    def seen(self, longest: int) -> _Seen:
        """The views for rows of up to `longest` positions, rounded up to whole tiles of keys."""
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
        """(B, Hkv, G n, ...) as attention's products take it: all of it together, or the G of each position."""
        if self.together:
            return x[:, :, None]
        return x.reshape(*x.shape[:2], -1, self.n, x.shape[-1]).swapaxes(2, 3)
