"""The fused decoder for CPUs, compiled: one call a pass, on the model's own weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tinyforge.backends.machine_code import PANEL_BYTES
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.cpu_code import KEYS_AT_ONCE, load
from tinyforge.infer.decoder_cpu import CPUDecoder
from tinyforge.quantised import FOUR_BITS, Quantised, dequantise

AT_ONCE = 256
"""Positions of a prompt in one pass."""
LOGITS = 14
"""Index of the logits among the addresses of `cpu_kernels.forward`."""


class CompiledDecoder(CPUDecoder):
    """The decoder for machines with numba; UserError for weights of several formats. Other errors are numba's own.

    The weights are the model's arrays, or their codes: nothing is copied. A position's bits depend neither on the
    number of other positions of a pass nor on their values. Parts of a prompt of more than `together` positions are
    computed in another way, faster, whose bits do not depend on where the prompt is cut: see cpu_prompts.py.
    """

    together = CPUDecoder.piece
    any_cut = True

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None) -> None:
        super().__init__(model, batch, capacity)
        c = self.weights
        matrices = [matrix for layer in c.layers for matrix in layer] + [c.lm_heads]
        codes = [m.codes if isinstance(m, Quantised) else m for m in matrices]
        *kinds, heads = (m.kind if isinstance(m, Quantised) else getattr(m, "dtype", None) for m in matrices)
        of_heads = "int8" if kinds[0] == FOUR_BITS else kinds[0]
        if {*kinds} != {kinds[0]} or heads != of_heads or not all(isinstance(array, np.ndarray) for array in codes):
            raise UserError(f"CompiledDecoder: weights of several formats: { ({*kinds, heads}) }; use make_decoder")
        none = np.ones(0, np.float32)
        scales = [m.scales if isinstance(m, Quantised) else none for m in matrices]
        self._run = load(FOUR_BITS if kinds[0] == FOUR_BITS else codes[0].dtype.name, self.dtype.name)
        # All that the addresses below point to must live as long as they do.
        self._matrices = [np.ascontiguousarray(a) for pair in zip(codes, scales, strict=True) for a in pair]
        self._gains = [np.ascontiguousarray(gain) for gain in c.gains]
        self._eps = np.array([c.norm_eps], self.dtype)
        self._lists = [_addresses(self._matrices), _addresses(self._gains)]
        self._open()

    def _reserve(self, rows: int) -> None:
        c, panel = self.weights, PANEL_BYTES // self.dtype.itemsize
        panels = -(-rows // panel) if rows > self.together else 0
        rows = max(rows, panels * panel)
        super()._reserve(rows)
        wide = (c.heads + 2 * c.kv_heads) * c.head_dim, max(2 * c.hidden, c.heads * c.head_dim)
        self._x, *scratch = (np.zeros((rows, width), self.dtype) for width in (c.dim, c.dim, *wide))
        # Of prompts only: the stream in panels, and room for a tile's weights, attention's scores and the angles.
        room = 8 * (max(c.dim, *wide) + 16) + panel * (KEYS_AT_ONCE + 16 + panels * c.head_dim)
        self._panels = [np.zeros(size if panels else 0, self.dtype) for size in (panels * panel * c.dim, room)]
        self._scratch = [*scratch, np.zeros(self.positions, self.dtype), np.zeros(64, self.dtype)]
        self._places, self._ends = np.zeros(rows, np.intp), np.zeros(rows, np.intp)
        self._logits = np.zeros(self.batch * self.prediction_heads * c.vocab, self.dtype)
        sizes = c.dim, c.hidden, c.heads, c.kv_heads, c.head_dim, len(c.layers), c.vocab
        self._sizes = np.array([0, *sizes, self.batch, self.positions, self.value_width, 0, 0, 0], np.intp)
        self._turns = [np.ascontiguousarray(table[: self.room], self.dtype) for table in (c.cos, c.sin)]
        cache = self.keys, self.values, *self._turns, self._places, self._ends
        self._addresses = _addresses(
            [*self._lists, self._x, *self._scratch, *cache, self._logits, self._eps, *self._panels]
        )

    def states(self, tokens: Sequence[int]) -> np.ndarray:
        passes = self._prompt(0, tokens, answers=AT_ONCE)
        return np.concatenate([self._scratch[0][: found.shape[1]].copy() for found in passes])

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        for _ in self._prompt(row, tokens):
            pass

    def last_logits(self, row: int, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        *_, found = self._prompt(row, tokens, 1, heads)
        return found

    def _prompt(self, row: int, tokens: Sequence[int], answers: int = 0, heads: int = 0) -> Iterator[np.ndarray]:
        """Passes over a row's next tokens, each with what `_pass` returns: for its last `answers` positions, if there
        are that many; a single one's only in the last pass."""
        self._check_room([row], len(tokens))
        for start in range(0, len(tokens), AT_ONCE):
            part = tokens[start : start + AT_ONCE]
            wish = 0 if answers == 1 and start + AT_ONCE < len(tokens) else min(answers, len(part))
            yield self._pass([row], [part], wish, heads if wish else 0, len(part) > self.together)

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        n = len(tokens[0])
        self._check_room(rows, n)
        return self._pass(rows, tokens, n, heads)

    def _pass(self, rows: Sequence[int], tokens: Any, answers: int, heads: int, of_prompt: bool = False) -> np.ndarray:
        """Rows take their next tokens, (len(rows), n); returns the logits after each row's last `answers`, of which
        there is 0, all n, or of a single row any number: (len(rows), answers, heads, V). of_prompt: of a single row,
        compute panels of positions."""
        n, batch, c = len(tokens[0]), len(rows), self.weights
        count, size = batch * n, heads * batch * answers * c.vocab
        if count > self.reserved:
            self._reserve(count)
        if size > self._logits.size:
            self._logits = np.zeros(size, self.dtype)
            self._addresses[LOGITS] = self._logits.ctypes.data
        self._places[:count].reshape(batch, n)[...] = np.reshape(rows, (-1, 1))
        np.add.outer([self.lengths[row] for row in rows], range(n), out=self._ends[:count].reshape(batch, n))
        self._embed(np.reshape(tokens, -1), self._x[:count])
        self._sizes[[0, 11, 12, 13]] = count, batch * answers, heads, of_prompt
        self._run(self._sizes.ctypes.data, self._addresses.ctypes.data)
        for row in rows:
            self.lengths[row] += n
        return self._logits[:size].reshape(heads, batch, answers, c.vocab).transpose(1, 2, 0, 3)

    def _embed(self, ids: np.ndarray, out: np.ndarray) -> None:
        table = self.weights.embedding
        if isinstance(table, Quantised):
            out[...] = dequantise(table.codes[ids], table.scales[ids], self.dtype)
        else:
            np.take(table, ids, axis=0, out=out, mode="clip")


def _addresses(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.intp)
