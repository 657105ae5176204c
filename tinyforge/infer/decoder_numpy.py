"""The fused decoder for CPUs, in NumPy: `FusedWeights` laid out for passes of few positions."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends.numpy_backend import blas_kernels
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.decoder_cpu import TILE, CPUDecoder
from tinyforge.op import Param
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
SMALL_PRODUCT = 1e6
"""Multiply-adds up to which that kernel is used. Larger products pack their operands first."""


def product_rows() -> int:
    """Rows of a product of `step` with the BLAS that NumPy uses here."""
    return SMALL_ROWS if blas_kernels() in SMALL_KERNELS else 1


def in_blocks(weight: np.ndarray) -> np.ndarray:
    """A view of (..., O, I) as (..., O / b, 1, I, b): x @ this is x W^T in blocks of b columns. The 1 is for groups of
    rows.

    Every product of `step` has the same number of rows, so that a row is bitwise equal alone and among others. With
    AVX-512 that is SMALL_ROWS: for blocks of this size OpenBLAS has a kernel that is as fast as a matrix times a
    vector, since both wait for the weights, so four tokens cost as much as one. Without it a product of few rows packs
    the weights first, and takes twice as long as a matrix times a vector.
    """
    *lead, rows, columns = weight.shape
    limit = int(SMALL_PRODUCT / (SMALL_ROWS * columns))
    # If one block is too large, 64 columns are fastest. Rows that no multiple of TILE divides stay one, slower, block.
    sizes = [64, *range(limit // TILE * TILE, 0, -TILE)]
    size = rows if rows <= limit else next((b for b in sizes if b <= limit and rows % b == 0), rows)
    return weight.reshape(*lead, rows // size, 1, size, columns).swapaxes(-1, -2)


def pack(weight: np.ndarray, gains: Any = None) -> np.ndarray:
    """`in_blocks` of W diag(gains), contiguous."""
    blocks = in_blocks(weight)
    packed = np.empty(blocks.shape, weight.dtype)
    if gains is None:
        packed[...] = blocks
    else:  # straight into its place: memory of a layer's size that comes and goes would stay with the process
        np.multiply(blocks, gains[:, None], out=packed)
    return packed


def unpack(packed: np.ndarray) -> np.ndarray:
    """The matrix that was packed, (..., O, I), a new array."""
    *lead, blocks, _, columns, size = packed.shape
    found: np.ndarray = np.empty((*lead, blocks * size, columns), packed.dtype)
    found.reshape(*lead, blocks, 1, size, columns)[...] = packed.swapaxes(-1, -2)
    return found


class Packed:
    """A parameter of a model whose only memory is the decoder's: read back on every use, equal up to rounding."""

    def __init__(self, packed: np.ndarray, restore: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]) -> None:
        self._packed, self._restore, self._shape, self.nbytes = packed, restore, shape, packed.nbytes

    def values(self) -> np.ndarray:
        return self._restore(unpack(self._packed)).reshape(self._shape)

    def reshape(self, *shape: int) -> Packed:
        return Packed(self._packed, self._restore, shape)


def release(array: Any) -> None:
    """Give an array's pages back to the system, where it lies in shared memory (`backend.shared_zeros`): it then reads
    as zeros."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    base = base.obj if isinstance(base, memoryview) else base
    if not isinstance(base, mmap.mmap) or not hasattr(mmap, "MADV_REMOVE"):
        return
    start = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first, last = -(-start // mmap.PAGESIZE), (start + array.nbytes) // mmap.PAGESIZE
    if last > first:
        with suppress(OSError):  # a kernel that cannot
            base.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)


def _owners(model: Any) -> dict[int, Param]:
    """A model's frozen parameters by the address of their memory."""
    buffer = getattr(model, "buffer", None)
    arrays = {p: p.stored for p in (buffer.frozen if buffer is not None else ())}
    return {array.ctypes.data: p for p, array in arrays.items() if isinstance(array, np.ndarray)}


def _give_up(own: Mapping[int, Param], array: Any, packed: np.ndarray, restore: Callable[..., np.ndarray]) -> None:
    """Let the parameter that owns `array` read `packed`, and release its memory."""
    if isinstance(array, np.ndarray) and (param := own.get(array.ctypes.data)) is not None:
        param.weights, param.value = "packed", Packed(packed, restore, param.shape)
        release(array)


def _undone(matrix: np.ndarray, gain: np.ndarray, scales: Any) -> np.ndarray:
    """matrix / (scales gain), in place; what a gain of 0 has erased stays 0."""
    matrix /= scales
    matrix /= np.where(gain == 0, 1, gain)
    return matrix


def blocks_of(out: np.ndarray, packed: np.ndarray, group: int) -> np.ndarray:
    """A view of out, (..., R, O), as the (..., O / b, R / group, group, b) that products of `group` rows with `packed`
    write."""
    *lead, rows, _ = out.shape
    blocks = out.reshape(*lead, rows // group, group, packed.shape[-4], packed.shape[-1])
    return np.moveaxis(blocks, -2, -4)


# In C order all groups of rows are multiplied with a block while it is in the cache.
multiply_packed = partial(np.matmul, order="C")


class NumpyDecoder(CPUDecoder):
    """The decoder that needs NumPy alone.

    A pass is some 30 NumPy calls per layer on preallocated arrays. With B rows, n positions each, heads of size D:

    - Norms: the gain and sqrt(C) are folded into the next weights, so that a norm is x / sqrt(x . x + C eps).
    - RoPE: the rows of q and k are reordered so that the two numbers of a pair are neighbours. A pair is then one
      complex number, and its rotation one complex product. q . k does not change when both are reordered alike. The
      scores' 1 / sqrt(D) is folded into the rows of q.
    - Cache: the columns of values after D are 1: one product gives the weighted sum and, in them, the softmax's
      denominator.
    - SwiGLU: the gate's rows are halved, and silu(2 a) = a (1 + tanh(a)), which does not overflow.
    - Products in `step` all have the same number of rows, and its attention is one product per position: a position's
      result depends, to the last bit, neither on the number of other positions nor on their values. See `pack`.

    consume: the memory of the model's own matrices is given back as they are copied. The model then reads them from
    here (`Packed`): its own passes take longer, and their results are equal up to rounding.
    """

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None, consume: bool = False) -> None:
        super().__init__(model, batch, capacity)
        c = self.weights = replace(self.weights, embedding=plain(self.weights.embedding))
        # A tied head is the embedding itself, read as it lies; a copy of it would be a large part of a small model.
        self.shared_head = consume and np.may_share_memory(plain(c.lm_heads), c.embedding)
        self.group = product_rows()
        # Up to here a pass over all positions reads the weights once, in less time than `prefill` and a pass do.
        self.together = self.piece if self.group > 1 else SMALL_ROWS
        own = _owners(model) if consume else {}
        gains = [gain * c.dim**0.5 for gain in c.gains]
        queries, turned = c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim
        # Within a head: 0, D/2, 1, D/2 + 1, ...
        pairs = np.arange(turned).reshape(-1, 2, c.head_dim // 2).swapaxes(1, 2).reshape(-1)
        order = np.concatenate([pairs, np.arange(turned, turned + c.kv_heads * c.head_dim)])
        scales = np.ones((len(order), 1), self.dtype)
        scales[:queries] = c.head_dim**-0.5
        halves = np.array([0.5, 1], self.dtype)[:, None, None]

        def restore_qkv(qkv: np.ndarray, gain: np.ndarray) -> np.ndarray:
            found = np.empty_like(qkv)
            found[order] = _undone(qkv, gain, scales)
            return found

        self.layers = []
        for i, layer in enumerate(c.layers):
            w_qkv, w_out, w_gate_up, w_down = map(plain, layer)
            qkv = w_qkv[order]
            qkv *= gains[2 * i]
            qkv *= scales
            gate_up = pack(w_gate_up.reshape(2, c.hidden, c.dim), gains[2 * i + 1])
            gate_up[0] *= 0.5
            packed = [pack(qkv), pack(w_out), gate_up, pack(w_down)]
            self.layers.append(packed)
            restore: Sequence[Callable[..., np.ndarray]] = (
                partial(restore_qkv, gain=gains[2 * i]),
                np.asarray,
                partial(_undone, gain=gains[2 * i + 1], scales=halves),
                np.asarray,
            )
            for array, blocks, back in zip(layer, packed, restore, strict=True):
                _give_up(own, array, blocks, back)
        heads = plain(c.lm_heads)
        self.last_gain = gains[-1]
        self.lm_heads = in_blocks(heads) if self.shared_head else pack(heads, self.last_gain)
        if not (self.shared_head or np.may_share_memory(heads, c.embedding)):
            _give_up(own, c.lm_heads, self.lm_heads, partial(_undone, gain=self.last_gain, scales=self.dtype.type(1)))
        self.value_width = -(-(c.head_dim + 1) // TILE) * TILE
        self.norm_eps = self.dtype.type(c.dim * c.norm_eps)
        self.one = self.dtype.type(1)
        self.map, self.workers = model.backend.map, model.backend.workers
        self._open()

    def _open(self) -> None:
        self.with_ones = [0] * self.batch  # positions of a row whose columns of ones are written
        super()._open()

    def _make_room(self, positions: int) -> None:
        super()._make_room(positions)
        c = self.weights
        self.with_ones = [min(pair) for pair in zip(self.with_ones, self.lengths, strict=True)]
        complex_dtype = np.result_type(self.dtype, np.complex64)
        self.turns = (c.cos[: self.room] + 1j * c.sin[: self.room]).astype(complex_dtype)
        # Row i is 0 up to column i, then -inf; all rows are views of the same numbers.
        steps = np.zeros(2 * self.positions - 1, self.dtype)
        steps[self.positions :] = -np.inf
        self.masks = np.lib.stride_tricks.sliding_window_view(steps, self.positions)[::-1]

    def states(self, tokens: Sequence[int]) -> np.ndarray:
        self._check_room([0], len(tokens))
        prompt = _Prompt(self, 0, tokens)
        prompt.run()
        self.lengths[0] += len(tokens)
        return prompt.states()

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        if len(tokens):
            _Prompt(self, row, tokens).run()
            self.lengths[row] += len(tokens)

    def first(self, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        if len(tokens) == 1:
            return self.step([tokens], heads)
        self._check_room([0], len(tokens))
        prompt = _Prompt(self, 0, tokens)
        prompt.run()
        self.lengths[0] += len(tokens) - 1
        return self._pass([tokens[-1:]], [0], heads, prompt.x[len(tokens) - 1])

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        self._check_pass(rows, len(tokens[0]))
        return self._pass(tokens, rows, heads)

    def last_logits(self, row: int, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        if len(tokens) > self.together:
            return super().last_logits(row, tokens, heads)
        self._check_pass([row], len(tokens))
        return self._pass([tokens], [row], heads, only_last=True)

    def _check_pass(self, rows: Sequence[int], n: int) -> None:
        """Room for n positions of each row, in the cache and in the buffers."""
        self._check_room(rows, n)
        if len(rows) * n > self.buffers.rows:
            self._reserve(len(rows) * n)

    def _reserve(self, rows: int) -> None:
        super()._reserve(rows)
        self.buffers = _Buffers(self, -(-rows // self.group) * self.group)
        self._views: dict[tuple[int, int], _Views] = {}

    def _put_ones(self, row: int, positions: int) -> None:
        """Write the columns of ones after a row's values, for as many positions in complete tiles, and some to come."""
        if positions > (done := self.with_ones[row]):
            end = self.with_ones[row] = min((-(-positions // TILE) + 3) * TILE, self.positions)
            self.values[:, row, :, done:end, self.weights.head_dim :] = 1

    def _pass(
        self, tokens: Any, rows: Sequence[int], heads: int, given: np.ndarray | None = None, only_last: bool = False
    ) -> np.ndarray:
        """Rows take their next tokens, (len(rows), n); returns (len(rows), n, heads, V).

        only_last: of a single row the logits of its last position only, (1, 1, heads, V).
        given: the stream that the last layer reads, (C,), of a single token that the layers before it have computed.
        """
        n, batch = len(tokens[0]), len(rows)
        v = self._views.get((batch, n))
        if v is None:
            v = self._views[batch, n] = _Views(self, batch, n)
        places = _Places(rows, [self.lengths[row] for row in rows], n)
        scores = v.scores(max(places.lengths) + n)
        for row, length in zip(rows, places.lengths, strict=True):
            self._put_ones(row, -(-(length + n) // TILE) * TILE)
        places.gather(self.turns, out=v.turn[:, :, 0])
        places.gather(self.masks[:, : scores.keys], out=v.mask[..., : scores.keys])
        v.ids[:] = tokens
        v.x.padding.fill(0)  # else the padding rows would grow from pass to pass
        x, left = v.x.all, slice(None)
        if given is None:
            np.take(self.weights.embedding, v.flat_ids, axis=0, out=v.x.new, mode="clip")
        else:
            v.x.new[...], left = given, slice(-1, None)
        layers = zip(self.layers[left], self.keys[left], self.values[left], strict=True)
        for (w_qkv, w_out, w_gate_up, w_down), keys, values in layers:
            self._norm(v)
            multiply_packed(v.h.groups, w_qkv, out=v.qkv_blocks)
            self._attend(v, scores, places, keys, values)
            multiply_packed(v.attended_groups, w_out, out=v.delta_blocks)
            np.add(x, v.delta, out=x)
            self._norm(v)
            multiply_packed(v.h.groups, w_gate_up, out=v.gate_up_blocks)
            self._swiglu(v)
            multiply_packed(v.hidden.groups, w_down, out=v.delta_from_hidden)
            np.add(x, v.delta, out=x)
        for row in rows:
            self.lengths[row] += n
        self._norm(v)
        if self.shared_head:
            np.multiply(v.h.all, self.last_gain, out=v.h.all)
        here = slice((n - 1) // self.group, None) if only_last else slice(None)
        multiply_packed(v.h.groups[here], self.lm_heads[:heads], out=v.logits_blocks[:heads, :, here])
        return v.logits[:, n - 1 if only_last else 0 :, :heads]

    def _norm(self, v: _Views) -> None:
        """h = x / sqrt(x . x + C eps)."""
        x, squares = v.x.all, v.squares
        np.vecdot(x, x, out=squares)
        np.add(squares, self.norm_eps, out=squares)
        np.sqrt(squares, out=squares)
        np.divide(x, v.root, out=v.h.all)

    def _attend(self, v: _Views, scores: _Scores, places: _Places, keys: np.ndarray, values: np.ndarray) -> None:
        """Rotate q and k, append k and v to the layer's cache, and attend to it."""
        np.multiply(v.qk, v.turn, out=v.turned)
        places.append(v.k, v.v, keys, values)
        s, products = scores.all, scores.products
        for here, held, own in places.runs:
            np.matmul(v.queries[here], keys[held, :, None, :, :own], out=products[here, ..., :own])
        np.add(scores.by_query, scores.mask, out=scores.by_query)
        np.maximum.reduce(s, axis=-1, keepdims=True, out=v.top)
        np.subtract(s, v.top, out=s)
        np.exp(s, out=s)
        for here, held, own in places.runs:
            np.matmul(products[here, ..., :own], values[held, :, None, :own], out=v.mixtures[here])
        np.divide(v.sums, v.divisors, out=v.attended)

    def _swiglu(self, v: _Views) -> None:
        """hidden = up silu(2 gate), where silu(2 a) = a (1 + tanh(a))."""
        hidden, gate = v.hidden.new, v.gate
        np.tanh(gate, out=hidden)
        np.add(hidden, self.one, out=hidden)
        np.multiply(hidden, gate, out=hidden)
        np.multiply(hidden, v.up, out=hidden)


class _Places:
    """Where a pass over n positions of each of `rows` lies in the cache: after the first `lengths` positions."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], n: int) -> None:
        self.rows, self.lengths, self.n = rows, lengths, n
        self.runs = self._runs()
        # One position in each of many rows: fancy indexing instead of a loop.
        self.one_each = (np.array(rows), np.array(lengths)) if n == 1 and len(rows) > SMALL_ROWS else None

    def gather(self, table: np.ndarray, out: np.ndarray) -> None:
        """out, (B, n, ...) = the rows of `table`, (positions, ...), at the new positions."""
        if self.one_each is not None:
            out[:, 0] = table[self.one_each[1]]
        else:
            for b, past in enumerate(self.lengths):
                out[b] = table[past : past + self.n]

    def append(self, k: np.ndarray, v: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Write k, (B, Hkv, D, n), and v, (B, Hkv, n, D), into a layer's cache."""
        n, head_dim = self.n, v.shape[-1]
        if self.one_each is not None:
            rows, lengths = self.one_each
            keys[rows, :, :, lengths] = k[..., 0]
            values[rows, :, lengths, :head_dim] = v[:, :, 0]
        else:
            for b, (row, past) in enumerate(zip(self.rows, self.lengths, strict=True)):
                keys[row, :, :, past : past + n] = k[b]
                values[row, :, past : past + n, :head_dim] = v[b]

    def _runs(self) -> list[tuple[slice, slice, int]]:
        """Runs of neighbouring rows that see equally many tiles of keys, so that one call computes their attention:
        their slices of the pass and of the cache, and the number of keys. That number depends only on a row's own
        length, so that no other row changes its bits."""
        rows, runs = self.rows, []
        first, row, own = 0, rows[0], -1
        for b, (r, length) in enumerate(zip(rows, self.lengths, strict=True)):
            keys = -(-(length + self.n) // TILE) * TILE
            if own < 0:
                own = keys
            elif keys != own or r != row + b - first:
                runs.append((slice(first, b), slice(row, row + b - first), own))
                first, row, own = b, r, keys
        return [*runs, (slice(first, len(rows)), slice(row, row + len(rows) - first), own)]


class _Prompt:
    """Prefill of one row, layer by layer: a layer's weights are read once, and all cores share its blocks of positions.
    Within a layer a block needs only the keys and values of the others:

        attention and MLP of layer i - 1, then q, k and v of layer i, block by block; then the next i

    The blocks, and so the results to the last bit, do not depend on the number of threads. Of the last layer only
    keys and values are computed; `x` is then the stream that it reads.
    """

    def __init__(self, decoder: NumpyDecoder, row: int, tokens: Sequence[int]) -> None:
        c = self.weights = decoder.weights
        self.decoder, self.row, self.past, self.count = decoder, row, decoder.lengths[row], len(tokens)
        decoder._put_ones(row, self.past + self.count)
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

    def states(self) -> np.ndarray:
        """After `run`: the final hidden states, (n, C)."""
        self.decoder.map(partial(self._share, len(self.decoder.layers)), self.shares)
        h = self._normed(slice(self.count), np.empty((self.count, self.weights.dim), self.x.dtype))
        h *= self.decoder.last_gain
        return h

    def _share(self, layer: int, blocks: Sequence[slice]) -> None:
        """One thread's blocks of a layer; the one after the last has no keys."""
        c, most = self.weights, max(rows.stop - rows.start for rows in blocks)
        scratch = np.empty(most * max(3 * c.hidden, c.dim + (c.heads + 2 * c.kv_heads) * c.head_dim), self.x.dtype)
        scores = np.empty(c.heads * min(QUERY_TILE, most) * (self.past + self.count), self.x.dtype)
        for rows in blocks:
            if layer:
                self._attend(layer - 1, rows, scratch, scores)
                self._feed(layer - 1, rows, scratch)
            if layer < len(self.decoder.layers):
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


class _Buffers:
    """The arrays of passes of up to `rows` positions in all. Zeros: the rows that pad a product must be finite."""

    def __init__(self, d: NumpyDecoder, rows: int) -> None:
        c = d.weights
        wide = (c.heads + 2 * c.kv_heads) * c.head_dim

        def zeros(*shape: int) -> np.ndarray:
            return np.zeros(shape, d.dtype)

        self.rows = rows
        self.x, self.h, self.delta = (zeros(rows, c.dim) for _ in range(3))
        self.squares, self.attended = zeros(rows), zeros(rows, c.heads * c.head_dim)
        self.qkv, self.turned = zeros(rows, wide), zeros(rows * wide)
        self.gate_up, self.hidden = zeros(2 * rows * c.hidden), zeros(rows, c.hidden)
        self.scores, self.mask = zeros(rows * c.heads * d.positions), zeros(rows * d.positions)
        self.top, self.mixed = zeros(rows * c.heads), zeros(rows * c.heads * d.value_width)
        self.logits = zeros(d.prediction_heads * rows * c.vocab)
        self.turn = np.zeros(rows * c.head_dim // 2, d.turns.dtype)
        self.ids = np.zeros(rows, np.intp)


class _Rows:
    """An activation of a pass, four views of the same numbers. Products take rows in whole groups, so the rows of `new`
    positions are padded."""

    def __init__(self, buffer: np.ndarray, new: int, group: int) -> None:
        self.all = buffer[: -(-new // group) * group]  # (R, width)
        self.groups = self.all.reshape(-1, group, buffer.shape[-1])
        self.new, self.padding = self.all[:new], self.all[new:]


class _Scores(NamedTuple):
    """Views of the scores for passes over a given number of keys."""

    keys: int
    all: np.ndarray  # (B, Hkv, G n, keys)
    products: np.ndarray  # the same, as the products write them: (B, Hkv, n, G, keys)
    by_query: np.ndarray  # the same, as (B, Hkv, G, n, keys)
    mask: np.ndarray  # (B, 1, 1, n, keys)


class _Views:
    """Views of a `NumpyDecoder`'s buffers for passes of B rows with n positions each, made once per (B, n).

    `..._blocks`: an array as the product with packed weights writes it, see `blocks_of`. R: B n rounded up to groups.
    """

    def __init__(self, d: NumpyDecoder, batch: int, n: int) -> None:
        self.decoder, self.batch, self.n = d, batch, n
        buffers, c, count = d.buffers, d.weights, batch * n
        self.flat_ids = buffers.ids[:count]
        self.ids = self.flat_ids.reshape(batch, n)
        self.x, self.h, self.hidden = (
            _Rows(buffer, count, d.group) for buffer in (buffers.x, buffers.h, buffers.hidden)
        )
        rows = len(self.x.all)
        self.squares, self.delta = buffers.squares[:rows], buffers.delta[:rows]  # (R,), (R, C)
        self.root = self.squares[:, None]
        _, w_out, w_gate_up, w_down = d.layers[0]
        self.delta_blocks = blocks_of(self.delta, w_out, d.group)
        self.delta_from_hidden = blocks_of(self.delta, w_down, d.group)
        self._attention(rows)
        (gate_up,) = _parts(buffers.gate_up, (2, rows, c.hidden))
        self.gate_up_blocks = blocks_of(gate_up, w_gate_up, d.group)
        self.gate, self.up = gate_up[:, :count]
        (logits,) = _parts(buffers.logits, (d.prediction_heads, rows, c.vocab))
        self.logits_blocks = blocks_of(logits, d.lm_heads, d.group)
        self.logits = logits[:, :count].reshape(-1, batch, n, c.vocab).transpose(1, 2, 0, 3)
        self._scores: dict[int, _Scores] = {}

    def _attention(self, rows: int) -> None:
        d, buffers, batch, n = self.decoder, self.decoder.buffers, self.batch, self.n
        c, count = d.weights, batch * n
        group, turned, head_dim = c.heads // c.kv_heads, c.heads + c.kv_heads, c.head_dim
        self.qkv_blocks = blocks_of(buffers.qkv[:rows], d.layers[0][0], d.group)
        heads = buffers.qkv[:count].reshape(batch, n, -1, head_dim)
        # Pairs of numbers as complex ones: (B, n, H + Hkv, D / 2), before and after the rotation.
        self.qk = heads[:, :, :turned].view(d.turns.dtype)
        (qk,) = _parts(buffers.turned, (batch, turned, n, head_dim))
        self.turned = qk.view(d.turns.dtype).swapaxes(1, 2)
        (self.turn,) = _parts(buffers.turn, (batch, n, 1, head_dim // 2))
        (self.mask,) = _parts(buffers.mask, (batch, n, d.positions))
        # As the cache has them: (B, Hkv, D, n) and (B, Hkv, n, D).
        self.k = qk[:, c.heads :].swapaxes(-1, -2)
        self.v = heads[:, :, turned:].swapaxes(1, 2)
        (self.top,) = _parts(buffers.top, (batch, c.kv_heads, group * n, 1))
        (mixed,) = _parts(buffers.mixed, (batch, c.kv_heads, group * n, d.value_width))
        self.queries = self._by_position(qk[:, : c.heads].reshape(batch, c.kv_heads, group * n, head_dim))
        self.mixtures = self._by_position(mixed)
        by_query = mixed.reshape(batch, c.kv_heads, group, n, -1)
        self.sums, self.divisors = by_query[..., :head_dim], by_query[..., -1:]
        attended = _Rows(buffers.attended, count, d.group)
        self.attended_groups = attended.groups
        self.attended = attended.new.reshape(batch, n, c.kv_heads, group, -1).transpose(0, 2, 3, 1, 4)

    def scores(self, longest: int) -> _Scores:
        """The views for rows of up to `longest` positions, rounded up to whole tiles."""
        keys = -(-longest // TILE) * TILE
        found = self._scores.get(keys)
        if found is None:
            c, batch, n = self.decoder.weights, self.batch, self.n
            group = c.heads // c.kv_heads
            (scores,) = _parts(self.decoder.buffers.scores, (batch, c.kv_heads, group * n, keys))
            by_query = scores.reshape(batch, c.kv_heads, group, n, keys)
            mask = self.mask[:, None, None, :, :keys]
            found = self._scores[keys] = _Scores(keys, scores, self._by_position(scores), by_query, mask)
        return found

    def _by_position(self, x: np.ndarray) -> np.ndarray:
        """(B, Hkv, G n, ...) as attention's products take it, (B, Hkv, n, G, ...)."""
        return x.reshape(*x.shape[:2], -1, self.n, x.shape[-1]).swapaxes(2, 3)
