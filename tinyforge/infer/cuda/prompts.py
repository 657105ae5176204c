"""Prefill for the fused decoders: the model's own ops, from the third time on as a CUDA graph.

A pass over a prompt takes some 130 launches for a model of 16 layers, each of which costs Python 10 to 25 us. The GPU
computes 512 tokens in less time than that. So a prompt is padded to one of a few lengths, which does not change its own
tokens, as none of them sees the padding after it. There is a graph for each length and starting position:

    first time     run without a graph; kernels are compiled
    second time    the same in the graphs' memory
    third time     captured, and the graph launched
    from then on   one upload of the ids, one launch, two copies of keys and values

Weights must not change while a decoder lives, as it holds a copy of them; so a graph can rely on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from tinyforge.infer.causal_lm import CausalLM
from tinyforge.kernel import Array

if TYPE_CHECKING:
    from tinyforge.backends.graphs import Graphs

LONGEST = 4096
"""The last position that a graph computes: beyond it the GPU takes longer than the launches."""
STARTS = 256
"""Graphs begin at multiples of so many positions, as a scheduler's pieces of prompts do."""
MOST = 16
"""Graphs per decoder; further lengths run without one."""


class _LayerCache(NamedTuple):
    """A layer of a `RowCache`: keys and values, (kv_heads, capacity, head_dim)."""

    keys: Array
    values: Array
    length: int

    def append(self, k: Array, v: Array) -> tuple[Array, Array]:
        end = self.length + k.shape[1]
        for held, new in ((self.keys, k), (self.values, v)):
            held[:, self.length : end] = new[0].swapaxes(0, 1)
        if not self.length:  # nothing cached: as in training, attention reads k and v next to the queries
            return k, v
        keys, values = (held[:, :end].swapaxes(0, 1)[None].copy() for held in (self.keys, self.values))
        return keys, values


class RowCache:
    """A row of a decoder's keys and values, (layers, kv_heads, capacity, head_dim), in the role of a `KVCache`."""

    def __init__(self, keys: Array, values: Array, length: int) -> None:
        self.keys, self.values, self.length = keys, values, length

    def layer(self, layer: int) -> _LayerCache:
        return _LayerCache(self.keys[layer], self.values[layer], self.length)

    def advance(self, count: int) -> None:
        self.length += count


def padded_length(tokens: int) -> int:
    """The length to which a prompt is padded: a multiple of 64 up to 512, of 128 up to 1024, and so on."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


class Prompts:
    """Prefills a model's prompts for a decoder with `capacity` positions per row."""

    def __init__(self, model: CausalLM, capacity: int) -> None:
        self.backend, self.capacity = model.backend, capacity
        self.fill = getattr(model, "fill", None) or (lambda ids, cache: model.hidden(ids, cache=cache))
        self.graphs: Graphs | None = None
        self._times: dict[tuple[int, int], int] = {}
        self._launch: dict[tuple[int, int], Callable[[], None]] = {}

    def append(self, ids: Array, keys: Array, values: Array, past: int) -> None:
        """Append the keys and values of ids, (1, T), after `past` positions of a row. keys, values: the row's, (layers,
        kv_heads, capacity, head_dim); positions after the new ones may be overwritten. Waits for the device only the
        second and third time.
        """
        tokens = ids.shape[1]
        size = min(padded_length(tokens), self.capacity - past)
        kind = past, size
        known = kind in self._times or len(self._times) < MOST
        if past % STARTS or past + size > LONGEST or not known:
            self.fill(ids, RowCache(keys, values, past))
            return
        times = self._times[kind] = self._times.get(kind, 0) + 1
        if times == 1:
            whole = self.backend.zeros((1, size), ids.dtype)
            whole[:, :tokens] = ids
            self.fill(whole, RowCache(keys, values, past))
            return
        if self.graphs is None:
            self._make(keys, ids)
        assert self.graphs is not None
        self.ids[:tokens] = ids[0]
        own = self.keys, self.values
        for mine, row in zip(own, (keys, values), strict=True):
            mine[:, :, :past] = row[:, :, :past]

        def work() -> None:
            self.fill(self.ids[None, :size], RowCache(*own, past))

        if times == 2:
            self.graphs.run(work)
        else:
            if times == 3:
                self._launch[kind] = self.graphs.capture(work)
            self._launch[kind]()
        here = slice(past, past + tokens)
        for mine, row in zip(own, (keys, values), strict=True):
            row[:, :, here] = mine[:, :, here]

    def _make(self, keys: Array, ids: Array) -> None:
        """Allocate what all graphs share. Ids after a prompt's own are left from earlier prompts, so they are valid."""
        self.graphs = self.backend.graphs()
        layers, kv_heads, capacity, head_dim = keys.shape
        shape = (layers, kv_heads, min(capacity, LONGEST), head_dim)
        self.ids = self.backend.zeros((LONGEST,), ids.dtype)
        self.keys, self.values = (self.backend.zeros(shape, keys.dtype) for _ in range(2))
