"""Caches: what a model keeps of earlier positions, so that it computes each one only once."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

import numpy as np

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

    def append(self, k: Array, v: Array, window: int | None) -> tuple[Array, Array, None]:
        """Append k, v of the next T positions, (B, T, Hkv, D); returns those of all S positions, (B, S, Hkv, D)."""
        start, end = self.length, self.length + k.shape[1]
        self.cache.make_room(end)
        keys, values = self.cache.keys[self.layer], self.cache.values[self.layer]
        keys[:, start:end], values[:, start:end] = k, v
        return keys[:, :end], values[:, :end], None


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
        # Zeros: where rows have unequal lengths, attention multiplies what is after a row's end by 0.
        self._zeros = lambda name, room: backend.zeros((shapes[name][0], batch, room, *shapes[name][1]))
        room = min(capacity, FIRST_POSITIONS)
        self.keys, self.values = self._zeros("keys", room), self._zeros("values", room)
        if width:
            self.inputs = self._zeros("inputs", room)
        self.backend, self.batch, self.capacity = backend, batch, capacity
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
        room = min(self.capacity, max(positions, 2 * self.keys.shape[2]))
        larger = {name: self._zeros(name, room) for name in self._names}
        for name, new in larger.items():
            old = getattr(self, name)
            new[:, :, : old.shape[2]] = old
        vars(self).update(larger)  # all or none, should memory run out or Ctrl-C come

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


class RowView(KVCache):
    """A row of a `KVCache` of several, with a length of its own. It leaves the last place free, see `step_numbers`."""

    def __init__(self, cache: KVCache, row: int) -> None:
        self.whole, self.row, self.capacity, self.length = cache, row, cache.capacity - 1, 0
        self._names = cache._names

    def __getattr__(self, name: str) -> Array:
        """keys, values and inputs."""
        return getattr(self.whole, name)[:, self.row : self.row + 1]

    def make_room(self, positions: int) -> None:
        self.whole.make_room(positions)


class BatchedStep:
    """A pass over the next token of each row of a `KVCache`, as if they were a text of B tokens: ids (1, B).

    The difference shows only where the tokens of a text meet: in attention, and in what reads the token before.
    numbers: of `step_numbers`, on the device. most: at least the positions that each token sees. length: the tokens'
    positions, (B,).
    """

    def __init__(self, cache: KVCache, numbers: Array, most: int) -> None:
        self.cache, self.most = cache, most
        self.ids, (self.length, self.places, self.ends) = numbers[:1], numbers[1:]
        self._seen = dict[int, tuple[Array, Array]]()

    def layer(self, layer: int) -> BatchedStepLayer:
        return BatchedStepLayer(self, layer)

    def seen(self, window: int | None) -> tuple[Array | None, Array]:
        """The places of the positions that each row's token may see, (B, S), or None for the first `most` of its row;
        and how many of them it sees, (B,)."""
        if window is None or window >= self.most:
            return None, self.ends
        if window not in self._seen:
            arange, room = self.cache.backend.xp.arange, self.cache.keys.shape[2]
            firsts = arange(0, room * len(self.ends), room) + (self.ends - window).clip(0, None)
            self._seen[window] = firsts[:, None] + arange(window), self.ends.clip(None, window)
        return self._seen[window]

    def previous(self, x: Array) -> Array:
        """As of `KVCache`: x, (1, B, width); returns (B, width), zeros at the beginning of a row."""
        rows, new = by_place(self.cache.inputs[0]), bits(x[0])
        rows[self.places] = new
        found = rows[self.places - 1] * (self.length > 0)[:, None].astype(new.dtype)
        return found.view(x.dtype)

    def advance(self, count: int) -> None:
        """The caller counts: it knows which rows took part."""


def step_numbers(tokens: np.ndarray, lengths: np.ndarray, takes_part: np.ndarray, room: int) -> np.ndarray:
    """What `BatchedStep` reads, (4, B) int32: tokens, their positions, their places among all rows' positions, and how
    many positions each sees.

    tokens: (B,). lengths: the positions that each row holds, fewer than `room`. takes_part: (B,). A row that does not
    take part is computed all the same, and written after the positions of its row: so a row has the same place in every
    pass, and on a GPU its bits do not depend on the other rows.
    """
    used, first = np.where(takes_part, lengths, 0), np.arange(len(tokens)) * room
    places = first + np.where(takes_part, lengths, room - 1)
    return np.stack([tokens, used, places, used + 1]).astype(np.int32)


class BatchedStepLayer(NamedTuple):
    """The part of a `BatchedStep` that one layer's attention reads and writes."""

    step: BatchedStep
    layer: int

    def append(self, k: Array, v: Array, window: int | None) -> tuple[Array, Array, Array]:
        """Append k, v of each row's next position, (1, B, Hkv, D). Returns those that its query may see, (B, S, Hkv,
        D), and how many of them it sees, (B,)."""
        (places, ends), cache, found = self.step.seen(window), self.step.cache, list[Array]()
        for held, new in ((cache.keys[self.layer], k), (cache.values[self.layer], v)):
            rows = by_place(held)
            rows[self.step.places] = bits(new[0])
            found.append(held[:, : self.step.most] if places is None else rows[places].view(k.dtype))
        return found[0], found[1], ends


def bits(x: Array) -> Array:
    """x as integers, which CuPy copies by index in every precision."""
    return x.view(f"u{x.itemsize}")


def by_place(held: Array) -> Array:
    """(B, room, ...) to (B room, ...), the bits of each row's positions one after the other."""
    return bits(held).reshape(-1, *held.shape[2:])


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
