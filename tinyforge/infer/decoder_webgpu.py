"""The fused decoder for WebGPU: launches decode.wgsl, five times a layer, and reads back the logits alone.

The browser's page launches the same kernels (web/page/gpu.js).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.backends.webgpu_array import WebArray, empty, groups, nothing
from tinyforge.backends.webgpu_device import REAL, Block, Pipeline, pipeline_of
from tinyforge.errors import UserError
from tinyforge.infer.cache import FIRST_POSITIONS
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.decoder import Decoder
from tinyforge.quantised import Quantised

FILE = "infer/decode.wgsl"
AT_ONCE = 64
"""Positions of a row in one pass."""
LARGEST_HEAD = 256
"""Numbers of a head: the threads of a group of `attend`."""
MOST_GROUPS = 65535
"""Groups in a dimension of a launch, on every device."""
READ_BYTES = 64 << 20
"""Bytes of logits that are read together, unless a row's alone take more."""


class Launch(NamedTuple):
    """A launch of every pass: all but the positions before it (start) and the first row of x (skip)."""

    pipeline: Pipeline
    arrays: tuple[tuple[Block, int, int], ...]
    widths: tuple[int, ...]
    groups: int


class WebGPUDecoder(Decoder):
    """A decoder of any number of rows for models with `fused_weights` on WebGPU; UserError for others, for weights that
    are neither numbers nor int8, and for shapes that the kernels do not take.

    It reads the model's own arrays. Each row has a cache of its own, (kv_heads, positions, head_dim) a layer, which
    grows; a row's passes are its own too, so its bits do not depend on the other rows.
    """

    can_save = True

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None) -> None:
        super().__init__(model, batch, capacity)
        if model.backend.name != "webgpu":
            raise UserError(f"WebGPUDecoder: the model is on {model.backend.name}, not webgpu; use make_decoder")
        if (c := model.fused_weights()) is None:
            raise UserError(f"WebGPUDecoder: {type(model).__name__} has no fused weights; use make_decoder")
        matrices = [matrix for layer in c.layers for matrix in layer] + [c.lm_heads, c.embedding]
        if kinds := {m.kind for m in matrices if isinstance(m, Quantised)} - {"int8"}:
            raise UserError(f"WebGPUDecoder: weights in {', '.join(kinds)}, expected numbers or int8; use make_decoder")
        if any(width % 4 for width in (c.dim, c.hidden, c.heads * c.head_dim)) or c.head_dim > LARGEST_HEAD:
            raise UserError(
                f"WebGPUDecoder: widths {c.dim}, {c.hidden}, heads of {c.head_dim}; the kernels take multiples of 4, "
                f"and heads of at most {LARGEST_HEAD}; use make_decoder"
            )
        if max(len(c.lm_heads) * c.vocab, 2 * c.hidden) > 8 * MOST_GROUPS:
            raise UserError(f"WebGPUDecoder: {len(c.lm_heads)} x {c.vocab} logits are too many; use make_decoder")
        backend: Any = model.backend
        self.weights, self.dtype, self.device = c, backend.dtype, backend.device
        self._real = REAL[self.dtype.name]
        self._x, self._q, self._mixed, self._hidden = (
            empty(self.device, (AT_ONCE, width), self.dtype)
            for width in (c.dim, c.heads * c.head_dim, c.heads * c.head_dim, c.hidden)
        )
        self._ids = empty(self.device, (AT_ONCE,), np.int32)
        angles = np.stack([backend.to_numpy(c.cos), backend.to_numpy(c.sin)], axis=-1)
        self._turns = backend.asarray(angles)
        self._gains = [self._placed(gain) for gain in c.gains]
        self._matrices = [{name: self._words(m) for name, m in layer._asdict().items()} for layer in c.layers]
        self._heads, self._table = self._words(c.lm_heads), self._words(c.embedding)
        self._embed = self._launch(
            "dequantise", {"y": self._x, **self._table, "ids": self._ids}, (c.dim, 0), 0, GATHER=True
        )
        self._room = [0] * batch
        self._keys: list[list[WebArray]] = [[] for _ in range(batch)]
        self._values: list[list[WebArray]] = [[] for _ in range(batch)]
        self._passes: list[list[Launch]] = [[] for _ in range(batch)]
        self._logits = empty(self.device, (0,), self.dtype)

    # what is bound

    def _placed(self, array: Any) -> WebArray:
        """In the decoder's dtype, at a place that can be bound: the array itself, where it can be."""
        found: WebArray = array.astype(self.dtype, copy=False)
        return found if found.at * found.itemsize % self.device.alignment == 0 else found.copy()

    def _words(self, matrix: Any) -> dict[str, WebArray | None]:
        """The arrays that a product with the matrix, (..., O, I), binds."""
        if not isinstance(matrix, Quantised):
            return {"words": self._placed(matrix), "scales": None}
        codes: Any = matrix.codes
        if codes.at % self.device.alignment:
            codes = codes.copy()
        shape = (codes.size // codes.shape[-1], codes.shape[-1] // 4)
        words = WebArray(codes.block, shape, np.uint32, codes.at // 4)
        return {"words": words, "scales": self._placed(matrix.scales)}

    def _launch(
        self, entry: str, arrays: dict[str, Any], widths: tuple[int, int], groups: int, context: int = 0, **flags: bool
    ) -> Launch:
        c = self.weights
        scaled = arrays.get("scales") is not None
        if "words" in arrays:
            flags["SCALED"] = scaled
        given = {
            name: nothing(self.device, number) if array is None else array
            for number, (name, array) in enumerate(arrays.items())
        }
        macros = f"alias real = {self._real};", f"alias word = {'u32' if scaled else 'vec4<real>'};"
        pipeline = pipeline_of(self.device, FILE, entry, tuple(given), macros, tuple(sorted(flags.items())))
        bound = tuple((array.block, array.at * array.itemsize, array.nbytes) for array in given.values())
        return Launch(pipeline, bound, (*widths, c.heads, c.kv_heads, c.head_dim, context), groups)

    def _run(self, launch: Launch, grid: tuple[int, int], start: int, skip: int, outer: int | None = None) -> None:
        inner, given, *rest = launch.widths
        sizes = (self.weights.norm_eps, start, skip, inner, given if outer is None else outer, *rest)
        numbers = struct.pack("<d8I" if self._real == "f64" else "<f8I", *sizes)
        self.device.launch(launch.pipeline, launch.arrays, numbers, (*grid, 1))

    def _make_room(self, row: int, positions: int) -> None:
        """Make a row's cache large enough, at least twice as large as before, and what launches its passes."""
        if positions <= self._room[row]:
            return
        c, used = self.weights, self.lengths[row]
        room = min(self.capacity, max(positions, 2 * self._room[row], FIRST_POSITIONS))
        for caches in (self._keys, self._values):
            larger = [empty(self.device, (c.kv_heads, room, c.head_dim), self.dtype) for _ in c.layers]
            for new, old in zip(larger, caches[row], strict=False):
                new[:, :used] = old[:, :used]
            caches[row] = larger
        self._room[row], self._passes[row] = room, []
        wide, narrow = (c.heads + 2 * c.kv_heads) * c.head_dim, c.heads * c.head_dim
        normed = zip(self._gains[:-1:2], self._gains[1::2], strict=True)
        every = zip(self._matrices, normed, self._keys[row], self._values[row], strict=True)
        for matrices, (gain1, gain2), keys, values in every:
            cache = {"keys": keys, "values": values}
            x, q, mixed, hidden = self._x, self._q, self._mixed, self._hidden
            of_qkv = {"y": q, "x": x, "gain": gain1, **matrices["qkv"], "turns": self._turns, **cache}
            of_gate = {"y": hidden, "x": x, "gain": gain2, **matrices["gate_up"]}
            self._passes[row] += [
                self._launch("qkv", of_qkv, (c.dim, 0), -(-wide // 16), room, NORM=True),
                self._launch("attend", {"y": mixed, **cache, "q": q}, (0, 0), c.heads, room),
                self._add(matrices["out"], mixed, (narrow, c.dim)),
                self._launch("gate_up", of_gate, (c.dim, c.hidden), -(-c.hidden // 8), NORM=True),
                self._add(matrices["down"], hidden, (c.hidden, c.dim)),
            ]

    def _add(self, matrix: dict[str, Any], x: WebArray, widths: tuple[int, int]) -> Launch:
        """x + W of something; the gain is not read."""
        arrays = {"y": self._x, "x": x, "gain": self._gains[-1], **matrix}
        return self._launch("project", arrays, widths, -(-widths[1] // 16), ADD=True)

    # passes

    def _pass(self, row: int, tokens: Sequence[int]) -> None:
        """Append up to AT_ONCE tokens to a row, without waiting; `_x` then has the stream of each."""
        count, start = len(tokens), self.lengths[row]
        self.device.write(self._ids.block, 0, np.asarray(tokens, np.int32))
        self._run(self._embed, groups(count * self.weights.dim // 4, 64), 0, 0, count)
        for launch in self._passes[row]:
            self._run(launch, (launch.groups, count), start, 0)
        self.lengths[row] += count

    def _append(self, row: int, tokens: Sequence[int]) -> int:
        """Append any number of tokens to a row; returns how many the last pass had."""
        self._make_room(row, self.lengths[row] + len(tokens))
        for first in range(0, len(tokens), AT_ONCE):
            self._pass(row, tokens[first : first + AT_ONCE])
        return (len(tokens) - 1) % AT_ONCE + 1

    def _answer(self, place: int, pitch: int, heads: int, skip: int, count: int) -> None:
        """The logits of `count` positions of the last pass, from `skip` on, into place number `place`."""
        c = self.weights
        y = WebArray(self._logits.block, (pitch,), self.dtype, place * pitch)
        arrays = {"y": y, "x": self._x, "gain": self._gains[-1], **self._heads}
        launch = self._launch("project", arrays, (c.dim, heads * c.vocab), -(-heads * c.vocab // 16), NORM=True)
        self._run(launch, (launch.groups, count), 0, skip)

    def _room_for_logits(self, places: int, count: int) -> int:
        """Numbers from one place to the next, whose beginnings can be bound."""
        step = max(self.device.alignment // self.dtype.itemsize, 1)
        pitch = -(-count // step) * step
        if places * pitch > self._logits.size:
            self._logits = empty(self.device, (places * pitch,), self.dtype)
        return pitch

    def _read(self, places: int, pitch: int, shape: tuple[int, ...]) -> np.ndarray:
        numbers = self.device.read(self._logits.block, 0, places * pitch * self.dtype.itemsize)
        rows = np.frombuffer(numbers, self.dtype).reshape(places, pitch)
        return rows[:, : int(np.prod(shape))].reshape(places, *shape)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        self._append(row, tokens)

    def last_logits(self, row: int, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        self._check_room([row], len(tokens))
        pitch = self._room_for_logits(1, heads * self.weights.vocab)
        self._answer(0, pitch, heads, self._append(row, tokens) - 1, 1)
        return self._read(1, pitch, (1, heads, self.weights.vocab))

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        tokens = np.asarray(tokens)
        self._check_room(rows, tokens.shape[1])
        for row in rows:
            self._make_room(row, self.lengths[row] + tokens.shape[1])
        vocab = self.weights.vocab
        found = []
        for first in range(0, tokens.shape[1], AT_ONCE):
            part = tokens[:, first : first + AT_ONCE]
            count = part.shape[1]
            most = max(1, READ_BYTES // (count * heads * vocab * self.dtype.itemsize))
            parts = []
            for begin in range(0, len(rows), most):
                here = rows[begin : begin + most]
                pitch = self._room_for_logits(len(here), count * heads * vocab)
                for place, row in enumerate(here):
                    self._pass(row, part[begin + place])
                    self._answer(place, pitch, heads, 0, count)
                parts.append(self._read(len(here), pitch, (count, heads, vocab)))
            found.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return np.concatenate(found, axis=1) if len(found) > 1 else found[0]

    # rows

    def repeat(self, row: int, source: int) -> bool:
        self.lengths[row] = 0
        self.restore(row, self.saved(source, 0), self.lengths[source])
        return True

    def saved(self, row: int, start: int) -> tuple[list[WebArray], list[WebArray]]:
        end = self.lengths[row]
        keys, values = ([array[:, start:end].copy() for array in held[row]] for held in (self._keys, self._values))
        return keys, values

    def restore(self, row: int, saved: tuple[list[WebArray], list[WebArray]], length: int) -> None:
        self._make_room(row, length)
        here = slice(self.lengths[row], length)
        for held, parts in zip((self._keys, self._values), saved, strict=True):
            for array, part in zip(held[row], parts, strict=True):
                array[:, here] = part
        self.lengths[row] = length
