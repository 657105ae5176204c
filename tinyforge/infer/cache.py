"""What a model keeps of the tokens that it has seen, so that each costs one pass."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

from tinyforge.backends import Backend
from tinyforge.kernel import Array


class Cache(Protocol):
    """What `model.hidden(ids, cache=cache)` reads of earlier positions, and where it leaves those of `ids`.

    length: positions that each of its rows holds. can_rewind: whether it can go back to fewer, as keys and values can;
    a recurrent state cannot.
    """

    @property
    def length(self) -> int: ...

    @property
    def can_rewind(self) -> bool: ...

    def rewind(self, length: int) -> None:
        """Drop the positions from `length` on. Nothing is copied."""

    def saved(self, start: int) -> Any:
        """A copy of what it holds of the positions from `start` to its length: arrays in tuples and lists. A state
        that is not kept by position is copied whole."""

    def restore(self, saved: Any) -> None:
        """Append what `saved` gave. Both caches must hold the same positions before it."""


class LayerCache(NamedTuple):
    """The part of a `KVCache` that one layer's attention reads and writes: (B, capacity, Hkv, D) each."""

    keys: Array
    values: Array
    length: int

    def append(self, k: Array, v: Array) -> tuple[Array, Array]:
        """k, v: (B, T, Hkv, D) of the next T positions; returns those of all S positions so far, (B, S, Hkv, D)."""
        end = self.length + k.shape[1]
        self.keys[:, self.length : end], self.values[:, self.length : end] = k, v
        return self.keys[:, :end], self.values[:, :end]


class KVCache:
    """Keys and values of all layers, (layers, B, capacity, Hkv, D) each.

        for i, block in enumerate(self.blocks):
            a = block.attention.forward(qkv, cache=cache.layer(i))
        cache.advance(qkv.shape[1])          # once a pass, after the last layer

    A pass that ends half-way has appended nothing: the length changes at its end.
    """

    can_rewind = True

    def __init__(
        self, backend: Backend, layers: int, batch: int, capacity: int, kv_heads: int, head_dim: int
    ) -> None:
        shape = (layers, batch, capacity, kv_heads, head_dim)
        self.keys, self.values = backend.empty(shape), backend.empty(shape)
        self.capacity = capacity
        self.length = 0

    def layer(self, layer: int) -> LayerCache:
        return LayerCache(self.keys[layer], self.values[layer], self.length)

    def advance(self, count: int) -> None:
        """`count` more positions have been appended in every layer."""
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
        here = slice(self.length, self.length + keys.shape[2])
        self.keys[:, :, here], self.values[:, :, here] = keys, values
        self.advance(keys.shape[2])


class StateCache:
    """The states of a recurrent model: arrays that its layers read and overwrite, of a size that does not grow.

    states: in the model's own form. The model adds what it has seen to `length`.
    """

    can_rewind = False

    def __init__(self, states: Any) -> None:
        self.states = states
        self.length = 0

    def rewind(self, length: int) -> None:
        if length != self.length:
            raise ValueError(f"StateCache: has seen {self.length} positions and forgets none, cannot go to {length}")

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
