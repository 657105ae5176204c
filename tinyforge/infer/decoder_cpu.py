"""What the fused decoders for CPUs share: the cache of keys and values, which grows, and the rows in it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.decoder import Decoder

TILE = 16
"""Keys and values are taken in multiples of this: BLAS's inner loop, without a remainder."""
FIRST_POSITIONS = 128
"""Positions of the first cache: the key of one position touches all its pages."""


class CPUDecoder(Decoder):
    """A decoder of any number of rows for models with `fused_weights`; UserError for others, and for another backend.

    Cache: keys (layers, B, Hkv, D, positions), values (layers, B, Hkv, positions, width), contiguous for each head.
    """

    can_save = True

    def __init__(self, model: CausalLM, batch: int, capacity: int | None) -> None:
        super().__init__(model, batch, capacity)
        name = type(self).__name__
        if model.backend.name != "numpy":
            raise UserError(f"{name}: the model is on backend {model.backend.name}, not numpy; use make_decoder")
        weights = model.fused_weights()
        if weights is None:
            raise UserError(f"{name}: {type(model).__name__} has no fused weights; use make_decoder")
        self.weights, self.dtype, self.room = weights, model.backend.dtype, 0
        self.value_width = weights.head_dim

    @abstractmethod
    def states(self, tokens: Sequence[int]) -> np.ndarray:
        """Append to the only row; returns the final hidden states of the new positions, (n, C)."""

    @abstractmethod
    def _reserve(self, rows: int) -> None:
        """Allocate buffers for passes of up to `rows` positions in all, over the positions that there is room for."""
        self.reserved = rows

    def _make_room(self, positions: int) -> None:
        """Make the cache large enough for that many positions of each row, at least twice as large as before: a long
        context costs what is used of it."""
        c = self.weights
        self.room = min(self.capacity, max(positions, 2 * self.room))
        # Two tiles of padding: rows of keys a power of two apart would compete for a few cache sets.
        self.positions = (-(-self.room // TILE) + 2) * TILE
        lead = len(c.layers), self.batch, c.kv_heads
        keys: np.ndarray = np.zeros((*lead, c.head_dim, self.positions), self.dtype)
        values: np.ndarray = np.zeros((*lead, self.positions, self.value_width), self.dtype)
        for row, used in enumerate(self.lengths):  # memory of rows that hold nothing is not touched
            if used:
                keys[:, row, ..., :used] = self.keys[:, row, ..., :used]
                values[:, row, :, :used] = self.values[:, row, :, :used]
        self.keys: np.ndarray = keys
        self.values: np.ndarray = values

    def _grow(self, positions: int) -> None:
        self._make_room(positions)
        self._reserve(self.reserved)

    def _check_room(self, rows: Iterable[int], count: int) -> None:
        rows = list(rows)
        super()._check_room(rows, count)
        needed = max((self.lengths[row] for row in rows), default=0) + count
        if needed > self.room:
            self._grow(needed)

    def alone(self, capacity: int) -> Self:
        """A decoder of one row, with a cache of its own and this one's weights."""
        other = copy.copy(self)
        other.batch, other.capacity, other.lengths = 1, capacity, [0]
        other._open()
        return other

    def _open(self) -> None:
        """Make the first cache, and buffers for passes of a token in every row, or one row with all drafts."""
        self.room = 0
        self._make_room(min(self.capacity, FIRST_POSITIONS))
        self._reserve(self.batch * self.prediction_heads)

    def repeat(self, row: int, source: int) -> bool:
        length = self.lengths[row] = self.lengths[source]
        self.keys[:, row, ..., :length] = self.keys[:, source, ..., :length]
        self.values[:, row, :, :length] = self.values[:, source, :, :length]
        return True

    def saved(self, row: int, start: int) -> tuple[np.ndarray, np.ndarray]:
        here = slice(start, self.lengths[row])
        return self.keys[:, row, :, :, here].copy(), self.values[:, row, :, here, : self.weights.head_dim].copy()

    def restore(self, row: int, saved: tuple[np.ndarray, np.ndarray], length: int) -> None:
        if length > self.room:
            self._grow(length)
        here = slice(self.lengths[row], length)
        self.keys[:, row, :, :, here], self.values[:, row, :, here, : self.weights.head_dim] = saved
        self.lengths[row] = length
