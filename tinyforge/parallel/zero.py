"""AdamW whose state is shared out among the ranks (ZeRO, stages 1 and 2): each keeps and updates its part of every
bucket.

    gradients    summed by reduce-scatter: a rank gets the sums of its own parts
    update       of those parts: master weights and moments exist once in the group, not once a rank
    weights      gathered: each rank sends the parts that it has updated, rounded to what the ops read; where a group
                 works beside the device, under the next forward pass: `Param.arrive`

A step moves as many bytes as an all-reduce would, which is a reduce-scatter and an all-gather; in bf16 a quarter fewer.
The optimizer's pass over memory takes 1 / ranks of the time.

Stage 2 shares out the gradients too: a bucket has memory only while backward is in it, a **window**, and of its sums
each rank keeps its part. With several micro-batches every one of them is summed over the ranks.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.op import Param
from tinyforge.optim import AdamW, AdamWConfig
from tinyforge.parallel.buckets import UNIT, Buckets, Watched
from tinyforge.parallel.group import Group
from tinyforge.parallel.sums import add_
from tinyforge.params import ParamBuffer

IN_FLIGHT = 2  # windows whose sums are under way: with so many, whoever opens another waits for the oldest


def stage_of(zero: int, ranks: int, shards: int = 0, micro_batches: int = 1) -> int:
    """What of --zero saves memory here, and keeps its promises. A rank that adds up several shards of a step does so in
    whole gradients, and so do several micro-batches whose bits are promised: with --shards-per-step they stay whole."""
    if ranks == 1:
        return 0
    return 1 if zero == 2 and shards and (shards > ranks or micro_batches > 1) else zero


class ShardedAdamW(AdamW):
    """m, v and the master weights are flat arrays of this rank's parts, one behind the other.

    Takes the masters out of the buffer where they are an array of their own: `buffer.masters` is None from then on.
    With stage 2 the gradients too: backward then needs the stash of `windows`. shards: sum the squares of the
    gradient's norm in so many parts of each bucket, whatever the number of ranks.
    """

    def __init__(
        self, buffer: ParamBuffer, backend: Backend, config: AdamWConfig | None, group: Group, buckets: Buckets,
        shards: int = 0, stage: int = 1,
    ) -> None:  # fmt: skip
        self.group, self.buckets = group, buckets
        # (of the flat buffer, of the arrays here, decay). No bucket has both what is decayed and what is not.
        self.parts: list[tuple[slice, slice, bool]] = []
        self._size = 0
        for part in buckets.parts(group.rank, group.size):
            mine = slice(self._size, self._size + part.stop - part.start)
            self.parts.append((part, mine, part.start < buffer.decay_end))
            self._size = mine.stop
        self.own: Array | None = None
        if buffer.masters is not buffer.values:
            self.own = backend.zeros((self._size,), backend.master_dtype)
            for place, mine, _ in self.parts:
                self.own[mine] = buffer.masters[place]
            buffer.masters = None
        self.grads: Array | None = None
        if stage == 2:
            self.grads = backend.zeros((self._size,), backend.master_dtype)
            buffer.place_grads(None)
        count = shards or group.size
        pieces = pieces_of(buckets, count)
        first, last = count * group.rank // group.size, count * (group.rank + 1) // group.size
        # The others' are empty: their sums come from their ranks.
        own = [self._inside(n // count, piece) if first <= n % count < last else slice(0, 0)
               for n, piece in enumerate(pieces)]  # fmt: skip
        super().__init__(buffer, backend, config, own)
        self._tree = shards > 0
        # Windows that are being summed: until then their memory is nobody else's.
        self._leaving: deque[tuple[Any, Array]] = deque()

    @property
    def moment_sizes(self) -> tuple[int, int]:
        return self._size, self._size

    def windows(self, first: bool) -> Watched:
        """Of stage 2: the stash of a backward pass that leaves each rank its part of the sums. first: of the step; the
        others' are added."""
        windows = _Windows(self, first)
        return self.buckets.watched(None, windows.sum, windows.open)

    def _inside(self, number: int, part: slice) -> slice:
        """Where the sums of the gradient of a part of the rank's own lie. number: of its bucket."""
        if self.grads is None:
            return part
        place, mine, _ = self.parts[number]
        return slice(mine.start + part.start - place.start, mine.start + part.stop - place.start)

    @property
    def _grads(self) -> Array:
        return self.buffer.grads if self.grads is None else self.grads

    def _squares(self) -> Array:
        sums = super()._squares()
        self.group.all_reduce_(sums)  # with zeros: to gather them
        self.group.join()
        self._leaving.clear()
        return sums

    def apply(self, rates: Array, grad_scale: Any) -> None:
        """Update the rank's own parts, and begin to gather those of all."""
        buffer, (decayed, plain) = self.buffer, rates
        for number, (place, mine, decays) in enumerate(self.parts):
            values = buffer.values[place]
            masters = values if self.own is None else self.own[mine]
            if values.size:
                flat = (values, masters, self.m[mine], self.v[mine], self._grads[self._inside(number, place)])
                self.k.adamw_(*flat, decayed if decays else plain, grad_scale, self.config)
            self.group.all_gather_(buffer.values[self.buckets.slices[number]], UNIT)
            if self.group.overlaps:
                arrive = partial(self._arrive, number, self.group.mark())
                for p in self.buckets.params[number]:
                    p.arrive = arrive

    def _arrive(self, number: int, mark: Any) -> None:
        for p in self.buckets.params[number]:
            p.arrive = None
        self.group.join(mark)

    def settle(self) -> None:
        for p in self.buffer.params:
            p.arrive = None
        self.group.join()

    def owned(self, what: str = "masters") -> list[Param]:
        """Whole tensors, of about as many elements on every rank."""
        ranks, size = self.group.size, self.buffer.size
        return [p for p in self.buffer.params if self.buffer.place(p).start * ranks // size == self.group.rank]

    def tensors(self, what: str) -> Iterator[np.ndarray]:
        """As of `AdamW`. A rank gathers a bucket at a time, and keeps what it owns."""
        self.settle()
        if what == "masters" and self.own is None:  # the weights, which all have
            for p in self.owned():
                yield np.array(self.backend.to_numpy(p.value))
            return
        own, owned = self._flat(what), {id(p) for p in self.owned()}
        for bucket, params, (place, mine, _) in zip(self.buckets.slices, self.buckets.params, self.parts, strict=True):
            flat = self.backend.zeros((bucket.stop - bucket.start,), self.backend.master_dtype)
            flat[place.start - bucket.start : place.stop - bucket.start] = own[mine]
            self.group.all_gather_(flat, UNIT)
            self.group.join()
            for p in params:
                if id(p) in owned:
                    start = self.buffer.place(p).start - bucket.start
                    yield np.array(self.backend.to_numpy(flat[start : start + p.size])).reshape(p.shape)

    def take(self, what: str, param: Param, tensor: Array) -> None:
        whole, flat = self.buffer.place(param), tensor.reshape(-1)
        if what == "masters":
            self.buffer.values[whole] = flat
        own = self._flat(what)
        for place, mine, _ in self.parts:
            low, high = max(place.start, whole.start), min(place.stop, whole.stop)
            if low < high and own is not None:
                at = mine.start - place.start
                own[low + at : high + at] = flat[low - whole.start : high - whole.start]

    def _flat(self, what: str) -> Array:
        return self.own if what == "masters" else getattr(self, what)


class _Windows:
    """The memory of the buckets that backward is in."""

    def __init__(self, optimizer: ShardedAdamW, first: bool) -> None:
        self.optimizer, self.first = optimizer, first
        self._open: dict[int, Array] = {}
        self._add = add_.bind(optimizer.backend)

    def open(self, number: int) -> None:
        o = self.optimizer
        while len(o._leaving) >= IN_FLIGHT:
            o.group.join(o._leaving[0][0])
            o._leaving.popleft()
        bucket = o.buckets.slices[number]
        self._open[number] = window = o.backend.zeros((bucket.stop - bucket.start,), o.backend.master_dtype)
        for p in o.buckets.params[number]:
            start = o.buffer.place(p).start - bucket.start
            p.grad = window[start : start + p.size].reshape(p.shape)
            p.blank = p.by_product  # as it is where the whole gradient has a place: the same product, the same bits

    def sum(self, number: int) -> None:
        o = self.optimizer
        assert o.grads is not None
        for p in o.buckets.params[number]:
            p.settle()
            del p.grad
        window, bucket, (place, mine, _) = self._open.pop(number), o.buckets.slices[number], o.parts[number]
        o.group.reduce_scatter_(window, o._tree, UNIT)
        part, total = window[place.start - bucket.start : place.stop - bucket.start], o.grads[mine]
        o.group.after(partial(self._keep, total, part))
        o._leaving.append((o.group.mark(), window))

    def _keep(self, total: Array, part: Array) -> None:
        if self.first:
            total[...] = part
        else:
            self._add(total, part)


def pieces_of(buckets: Buckets, shards: int) -> list[slice]:
    """Parts of the flat gradient whose squares are summed one by one: in the order of the buckets, and within each of
    the shards."""
    everywhere = [buckets.parts(number, shards) for number in range(shards)]
    return [piece for of_bucket in zip(*everywhere, strict=True) for piece in of_bucket]
