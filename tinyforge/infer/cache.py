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

    An interrupted pass appends nothing: the length changes only at its end. width: of the rows that the first layer
    reads, (1, B, room, width), if the model needs the one before: see `previous`.
    """

    can_rewind = True

    def __init__(
        self, backend: Backend, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int, width: int = 0
    ) -> None:
        shapes: dict[str, tuple[int, tuple[int, ...]]]
        shapes = {"keys": (layers, (kv_heads, head_dim)), "values": (layers, (kv_heads, head_dim))}
        shapes |= {"inputs": (1, (width,))} if width else {}
        self._names = tuple(shapes)
        self._empty = lambda name, room: backend.empty((shapes[name][0], batch, room, *shapes[name][1]))
        room = min(capacity, FIRST_POSITIONS)
        self.keys, self.values = self._empty("keys", room), self._empty("values", room)
        if width:
            self.inputs = self._empty("inputs", room)
        self.capacity = capacity
        self.length = 0

    def layer(self, layer: int) -> LayerCache:
        return LayerCache(self, layer)

    def previous(self, x: Array) -> Array | None:
        """Append x of the next T positions, (B, T, width); returns that of the position before them, (B, width), None
        at the beginning."""
        start, end = self.length, self.length + x.shape[1]
        self.make_room(end)
        self.inputs[0, :, start:end] = x
        return self.inputs[0, :, start - 1] if start else None

    def make_room(self, positions: int) -> None:
        """Make room for so many positions: a long context costs what is used of it. The room at least doubles."""
        if positions <= self.keys.shape[2] or positions > self.capacity:
            return
        room, here = min(self.capacity, max(positions, 2 * self.keys.shape[2])), slice(0, self.length)
        for name in self._names:
            larger, old = self._empty(name, room), getattr(self, name)
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

    def saved(self, start: int) -> tuple[Array, ...]:
        here = slice(start, self.length)
        return tuple(getattr(self, name)[:, :, here].copy() for name in self._names)

    def restore(self, saved: tuple[Array, ...]) -> None:
        count = saved[0].shape[2]
        self.make_room(self.length + count)
        here = slice(self.length, self.length + count)
        for name, rows in zip(self._names, saved, strict=True):
            getattr(self, name)[:, :, here] = rows
        self.advance(count)


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
