"""AdamW with its state sharded over the ranks (ZeRO, stages 1 and 2): each keeps and updates its part of every bucket.

    gradients    summed by reduce-scatter: a rank gets the sums of its own parts
    update       of those parts: master weights and moments exist once in the group, not once per rank
    weights      all-gathered: each rank sends the parts that it has updated, rounded to the ops' precision; if the
                 group's collectives overlap, this happens under the next forward pass: `Param.arrive`

A step moves as many bytes as an all-reduce, which is a reduce-scatter and an all-gather; in bf16 a quarter less. The
optimizer's pass over memory takes 1 / ranks of the time.

Stage 2 shards the gradients too: a bucket has memory, a **window**, only while backward is in it, and each rank keeps
its part of the sums. With several micro-batches each of them is summed over the ranks.

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

IN_FLIGHT = 2  # windows whose sums are in flight; opening another one waits for the oldest


def stage_of(zero: int, ranks: int, shards: int = 0, micro_batches: int = 1) -> int:
    """The stage of --zero that is used. With --reduction-shards gradients stay whole, stage 1, where a rank adds up
    several shards, or where several micro-batches must give the same bits on any number of ranks."""
    if ranks == 1:
        return 0
    return 1 if zero == 2 and shards and (shards > ranks or micro_batches > 1) else zero


class ShardedAdamW(AdamW):
    """m, v and the master weights are flat arrays of this rank's parts, concatenated.

    If the masters are an array of their own, they are removed from the buffer: `buffer.masters` is None from then on.
    So are the gradients in stage 2: backward then needs the stash of `windows`. shards: sum the squares for the norm in
    `shards` parts of each bucket, whatever the number of ranks.
    """

    def __init__(
        self,
        buffer: ParamBuffer,
        backend: Backend,
        config: AdamWConfig | None,
        group: Group,
        buckets: Buckets,
        shards: int = 0,
        stage: int = 1,
    ) -> None:
        self.group, self.buckets = group, buckets
        # (slice of the flat buffer, slice of the arrays here, decay). All parameters of a bucket have the same decay.
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
        # Other ranks' pieces are empty here: those ranks sum them.
        own = [
            self._inside(n // count, piece) if first <= n % count < last else slice(0, 0)
            for n, piece in enumerate(pieces)
        ]
        super().__init__(buffer, backend, config, own)
        # Of each part, what is updated at one rate: slices as in `parts`, and the row of the rates.
        self._alike = [
            [
                (slice(low, high), slice(mine.start + low - place.start, mine.start + high - place.start), row)
                for start, end, row in self._plain
                if (low := max(start, place.start)) < (high := min(end, place.stop))
            ]
            for place, mine, _ in self.parts
        ]
        self._tree = shards > 0
        # Windows whose sums are in flight: their memory must not be reused yet.
        self._leaving: deque[tuple[Any, Array]] = deque()

    @property
    def moment_sizes(self) -> tuple[int, int]:
        return self._size, self._size

    def windows(self, first: bool) -> Watched:
        """For stage 2: the stash of a backward pass that leaves each rank its part of the sums. first: whether it is
        the step's first pass; the sums of later ones are added."""
        windows = _Windows(self, first)
        return self.buckets.watched(None, windows.sum, windows.open)

    def _inside(self, number: int, part: slice) -> slice:
        """Where the summed gradient of `part`, in the rank's own part of bucket `number`, lies."""
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
        """Update the rank's own parts, and start to gather all parts."""
        buffer = self.buffer
        for number, alike in enumerate(self._alike):
            for place, mine, row in alike:
                values = buffer.values[place]
                masters = values if self.own is None else self.own[mine]
                flat = (values, masters, self.m[mine], self.v[mine], self._grads[self._inside(number, place)])
                self.update(*flat, rates[row], grad_scale, self.config)
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
        """Whole tensors, with about the same number of elements on every rank."""
        ranks, size = self.group.size, self.buffer.size
        return [p for p in self.buffer.params if self.buffer.place(p).start * ranks // size == self.group.rank]

    def tensors(self, what: str) -> Iterator[np.ndarray]:
        """See `AdamW.tensors`. The ranks gather a bucket at a time, and each keeps what it owns."""
        self.settle()
        if what == "masters" and self.own is None:  # the masters are the weights, which every rank has
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

    def _flat(self, what: str) -> Any:
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
            p.grad_is_zero = p.overwrite_grad  # as in `clear_grads`: the same products, the same bits

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
    """Parts of the flat gradient whose squares are summed one by one: bucket by bucket, and within each by shard."""
    everywhere = [buckets.parts(number, shards) for number in range(shards)]
    return [piece for of_bucket in zip(*everywhere, strict=True) for piece in of_bucket]
