"""Caches: what a model keeps of earlier positions, so that it computes each one only once."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

from tinyforge.backends import Backend
from tinyforge.kernel import Array

FIRST_POSITIONS = 512
"""Positions that a new `KVCache` has room for."""


class Cache(Protocol):
    """What `model.hidden(ids, cache=cache)` reads of earlier positions, and where it stores those of `ids`.

    length: positions that each row holds. can_rewind: whether positions can be dropped again: keys and values can, a
    recurrent state cannot.
    """

    @property
    def length(self) -> int: ...

    @property
    def can_rewind(self) -> bool: ...

    def rewind(self, length: int) -> None:
        """Drop the positions from `length` on. Nothing is copied."""

    def saved(self, start: int) -> Any:
        """A copy of the positions from `start` on: arrays in tuples and lists. A recurrent state is copied whole."""

    def restore(self, saved: Any) -> None:
        """Append what `saved` returned. Both caches must hold the same positions before it."""


class LayerCache(NamedTuple):
    """The part of a `KVCache` that one layer's attention reads and writes."""

    cache: KVCache
    layer: int

    @property
    def length(self) -> int:
        return self.cache.length

    def append(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Append k, v of the next T positions, (B, T, Hkv, D); returns those of all S positions, (B, S, Hkv, D)."""
        start, end = self.length, self.length + k.shape[1]
        self.cache.make_room(end)
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[:, start:end], values[:, start:end] = k, v
        return keys[:, :end], values[:, :end]


class KVCache:
    """Keys and values of all layers, (layers, B, room, Hkv, D) each, where the room grows up to the capacity.

        for i, block in enumerate(self.blocks):
            a = block.attention.forward(qkv, cache=cache.layer(i))
        cache.advance(qkv.shape[1])          # once per pass, after the last layer

    An interrupted pass appends nothing: the length changes only at its end.
    """

    can_rewind = True

    def __init__(self, backend: Backend, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int) -> None:
        self._empty = lambda room: backend.empty((layers, batch, room, kv_heads, head_dim))
        room = min(capacity, FIRST_POSITIONS)
        self.keys, self.values = self._empty(room), self._empty(room)
        self.capacity = capacity
        self.length = 0

    def layer(self, layer: int) -> LayerCache:
        return LayerCache(self, layer)

    def make_room(self, positions: int) -> None:
        """Make room for so many positions: a long context costs what is used of it. The room at least doubles."""
        if positions <= self.keys.shape[2] or positions > self.capacity:
            return
        room, here = min(self.capacity, max(positions, 2 * self.keys.shape[2])), slice(0, self.length)
        for name in ("keys", "values"):
            larger, old = self._empty(room), getattr(self, name)
            larger[:, :, here] = old[:, :, here]
            setattr(self, name, larger)

    def advance(self, count: int) -> None:
        """Count `count` positions that have been appended in every layer."""
        if self.length + count > self.capacity:
            raise ValueError(f"KVCache: holds {self.length} of {self.capacity} positions, no room for {count} more")
        self.length += count

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"KVCache: holds {self.length} positions, cannot go to {length}")
        self.length = length

    def saved(self, start: int) -> tuple[Array, Array]:
        here = slice(start, self.length)
        return self.keys[:, :, here].copy(), self.values[:, :, here].copy()

    def restore(self, saved: tuple[Array, Array]) -> None:
        keys, values = saved
        self.make_room(self.length + keys.shape[2])
        here = slice(self.length, self.length + keys.shape[2])
        self.keys[:, :, here], self.values[:, :, here] = keys, values
        self.advance(keys.shape[2])


class StateCache:
    """The states of a recurrent model: arrays of fixed size that its layers read and overwrite.

    states: in the model's own form. The model adds the positions of each pass to `length`.
    """

    can_rewind = False

    def __init__(self, states: Any) -> None:
        self.states = states
        self.length = 0

    def rewind(self, length: int) -> None:
        if length != self.length:
            raise ValueError(f"StateCache: holds {self.length} positions and cannot drop any, asked to keep {length}")

    def saved(self, start: int) -> tuple[Any, int]:
        return copy.deepcopy(self.states), self.length

    def restore(self, saved: tuple[Any, int]) -> None:
        states, self.length = saved
        self.states = copy.deepcopy(states)


def array_bytes(value: Any) -> int:
    """Bytes of all arrays in nested dicts, tuples and lists."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return sum(map(array_bytes, value))
    return int(getattr(value, "nbytes", 0))
