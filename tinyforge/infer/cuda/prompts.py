"""Prefill for the fused decoders: the model's own ops, from the third time on as a CUDA graph.

A pass over a prompt takes some 150 launches for a model of 16 layers, each of which costs Python 10 to 25 us. The GPU
computes 512 tokens in less time than that. So a prompt is padded to one of a few lengths, which does not change its own
tokens, as none of them sees the padding after it. There is a graph for each length and starting position:

    first time     run without a graph; kernels are compiled
    second time    the same in the graphs' memory
    third time     captured, and the graph launched
    from then on   one upload of the ids, one launch; where a decoder has several rows, two copies of keys and values

Weights must not change while a decoder lives, as it holds a copy of them; so a graph can rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tinyforge.backends import Backend
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.kernel import Array, kernel

if TYPE_CHECKING:
    from tinyforge.backends.graphs import Graphs

LONGEST = 4096
"""The last position that a graph computes: beyond it the GPU takes longer than the launches."""
STARTS = 256
"""Graphs begin at multiples of so many positions, as a scheduler's pieces of prompts do."""
MOST = 16
"""Graphs per decoder; further lengths run without one."""


@kernel
def append(keys: Array, values: Array, k: Array, v: Array, past: int) -> None:
    """k, v: (1, T, Hkv, D), into positions past .. past + T - 1 of keys, values: (Hkv, capacity, D)."""
    for held, new in ((keys, k), (values, v)):
        held[:, past : past + k.shape[1]] = new[0].swapaxes(0, 1)


class _LayerCache(NamedTuple):
    """A layer of a `RowCache`: keys and values, (kv_heads, capacity, head_dim). put: the kernel `append`."""

    keys: Array
    values: Array
    length: int
    put: Callable[[Array, Array, Array, Array, int], None]

    def append(self, k: Array, v: Array, window: int | None) -> tuple[Array, Array, None]:
        self.put(self.keys, self.values, k, v, self.length)
        end = self.length + k.shape[1]
        if not self.length:  # nothing cached: as in training, attention reads k and v next to the queries
            return k, v, None
        keys, values = (held[:, :end].swapaxes(0, 1)[None].copy() for held in (self.keys, self.values))
        return keys, values, None


class RowCache:
    """A row of a decoder's keys and values, (layers, kv_heads, capacity, head_dim), in the role of a `KVCache`."""

    def __init__(self, backend: Backend, keys: Array, values: Array, length: int) -> None:
        self.keys, self.values, self.length = keys, values, length
        self._put = append.bind(backend)

    def layer(self, layer: int) -> _LayerCache:
        return _LayerCache(self.keys[layer], self.values[layer], self.length, self._put)

    def advance(self, count: int) -> None:
        self.length += count


def padded_length(tokens: int) -> int:
    """The length to which a prompt is padded: a multiple of 64 up to 512, of 128 up to 1024, and so on."""
    step = max(64, 1 << max(0, (tokens - 1).bit_length() - 3))
    return -(-tokens // step) * step


class Prompts:
    """Prefills a model's prompts for a decoder with `capacity` positions per row.

    in_place: whether all prompts go into the same row, so that graphs can work on the row itself; else they work on one
    of their own.
    """

    def __init__(self, model: CausalLM, capacity: int, *, in_place: bool = False) -> None:
        self.backend, self.capacity, self.in_place = model.backend, capacity, in_place
        self.model, self.fill = model, getattr(model, "fill", None)
        self.stream: Array | None = None  # always the same array
        self.graphs: Graphs | None = None
        self._times: dict[tuple[int, int], int] = {}
        self._launch: dict[tuple[int, int], Callable[[], None]] = {}

    def append(self, tokens: Sequence[int], keys: Array, values: Array, past: int) -> Array | None:
        """Append the keys and values of tokens after `past` positions of a row. keys, values: the row's, (layers,
        kv_heads, capacity, head_dim); positions after the new ones may be overwritten. Waits for the device only the
        second and third time.

        Returns the residual stream of the last token that the last layer reads, (C,), valid until the next call, or
        None for a model without `fill`.
        """
        count = len(tokens)
        size = min(padded_length(count), self.capacity - past)
        kind = past, size
        known = kind in self._times or len(self._times) < MOST
        by_graph = not past % STARTS and past + size <= LONGEST and known
        told = np.zeros(1 + (size if by_graph else count), np.int32)
        told[0], told[1 : 1 + count] = count - 1, tokens
        times = 0
        if by_graph:
            times = self._times[kind] = self._times.get(kind, 0) + 1
        if times < 2:
            self._fill(self.backend.asarray(told), keys, values, past)
            return self.stream
        if self.graphs is None:
            self._make(keys)
        assert self.graphs is not None
        # Ids after the prompt's own are left from earlier prompts, so they are valid.
        self.backend.put(self.told[: 1 + count], told[: 1 + count])
        own = (keys, values) if self.in_place else (self.keys, self.values)
        if not self.in_place:
            for mine, row in zip(own, (keys, values), strict=True):
                mine[:, :, :past] = row[:, :, :past]

        def work() -> None:
            self._fill(self.told[: 1 + size], own[0], own[1], past)

        if times == 2:
            self.graphs.run(work)
        else:
            if times == 3:
                self._launch[kind] = self.graphs.capture(work)
            self._launch[kind]()
        if not self.in_place:
            here = slice(past, past + count)
            for mine, row in zip(own, (keys, values), strict=True):
                row[:, :, here] = mine[:, :, here]
        return self.stream

    def _fill(self, told: Array, keys: Array, values: Array, past: int) -> None:
        """told: the index of the last token, then the ids, which may go on after it, (1 + T,)."""
        ids, cache = told[None, 1:], RowCache(self.backend, keys, values, past)
        if self.fill is None:
            self.model.hidden(ids, cache=cache)
            return
        stream = self.fill(ids, cache)[0][told[:1]][0]
        if self.stream is None:
            self.stream = stream
        else:
            self.stream[...] = stream

    def _make(self, keys: Array) -> None:
        """Allocate what all graphs share."""
        self.graphs = self.backend.graphs()
        layers, kv_heads, capacity, head_dim = keys.shape
        self.told = self.backend.zeros((1 + LONGEST,), np.dtype(np.int32))
        if not self.in_place:
            shape = (layers, kv_heads, min(capacity, LONGEST), head_dim)
            self.keys, self.values = (self.backend.zeros(shape, keys.dtype) for _ in range(2))
