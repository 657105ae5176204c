"""AdamW whose state is shared out among the ranks (ZeRO, stage 1): each keeps and updates its part of every bucket.

    gradients    summed by reduce-scatter: a rank gets the sums of its own parts
    update       of those parts: master weights and moments exist once in the group, not once a rank
    weights      gathered: each rank sends the parts that it has updated, rounded to what the ops read

A step moves as many bytes as an all-reduce would, which is a reduce-scatter and an all-gather; in bf16 a quarter fewer.
The optimizer's pass over memory takes 1 / ranks of the time.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from typing import Any

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.optim import AdamW, AdamWConfig
from tinyforge.parallel.buckets import UNIT, Buckets
from tinyforge.parallel.group import Group
from tinyforge.params import ParamBuffer


class ShardedAdamW(AdamW):
    """m, v and the master weights are flat arrays of this rank's parts, one behind the other.

    Takes the masters out of the buffer where they are an array of their own: `buffer.masters` is None from then on.
    shards: sum the squares of the gradient's norm in so many parts of each bucket, whatever the number of ranks.
    """

    def __init__(
        self, buffer: ParamBuffer, backend: Backend, config: AdamWConfig | None, group: Group, buckets: Buckets,
        shards: int = 0,
    ) -> None:  # fmt: skip
        self.group, self.buckets = group, buckets
        parts = [part for part in buckets.parts(group.rank, group.size) if part.stop > part.start]
        # (of the flat buffer, of the arrays here, decay), cut where what is decayed ends.
        self.parts: list[tuple[slice, slice, bool]] = []
        at = 0
        for part in parts:
            end = min(max(part.start, buffer.decay_end), part.stop)
            for low, high, decays in ((part.start, end, True), (end, part.stop, False)):
                if low < high:
                    self.parts.append((slice(low, high), slice(at, at + high - low), decays))
                    at += high - low
        self._size = at
        self.own: Array | None = None
        if buffer.masters is not buffer.values:
            self.own = backend.zeros((at,), backend.master_dtype)
            for place, mine, _ in self.parts:
                self.own[mine] = buffer.masters[place]
            buffer.masters = None
        count = shards or group.size
        pieces = pieces_of(buckets, count)
        super().__init__(buffer, backend, config, pieces)
        first, last = count * group.rank // group.size, count * (group.rank + 1) // group.size
        self._mine = [n for n in range(len(pieces)) if first <= n % count < last]

    @property
    def size(self) -> int:
        return self._size

    def _sum_squares(self, sums: Array) -> None:
        sums.fill(0)
        for number in self._mine:
            self.k.square_sums(sums[number], self.buffer.grads[self._pieces[number]])
        self.group.all_reduce_(sums)  # with zeros: to gather them
        self.group.join()

    def step(self, lr: float, grad_scale: Any = 1.0) -> None:
        """Update the rank's own parts, and gather those of all."""
        buffer, (decayed, plain) = self.buffer, self.next_rates(lr)
        waiting = list(self.buckets.slices)
        for place, mine, decays in self.parts:
            while waiting and waiting[0].stop <= place.start:
                self.group.all_gather_(buffer.values[waiting.pop(0)], UNIT)
            masters = buffer.values[place] if self.own is None else self.own[mine]
            flat = (buffer.values[place], masters, self.m[mine], self.v[mine], buffer.grads[place])
            self.k.adamw_(*flat, decayed if decays else plain, grad_scale, self.config)
        for bucket in waiting:
            self.group.all_gather_(buffer.values[bucket], UNIT)
        self.group.join()

    def full(self, what: str) -> Array:
        """As of AdamW; every rank calls it, and gets a new array."""
        if what == "masters" and self.own is None:
            return self.buffer.values
        own: Array = self.own if what == "masters" else getattr(self, what)
        flat = self.backend.zeros(self.buffer.grads.shape, self.backend.master_dtype)
        for place, mine, _ in self.parts:
            flat[place] = own[mine]
        for bucket in self.buckets.slices:
            self.group.all_gather_(flat[bucket], UNIT)
        self.group.join()
        return flat

    def take(self, what: str, flat: Array) -> None:
        if what == "masters":
            self.buffer.values[...] = flat
            if self.own is None:
                return
        own: Array = self.own if what == "masters" else getattr(self, what)
        for place, mine, _ in self.parts:
            own[mine] = flat[place]


def pieces_of(buckets: Buckets, shards: int) -> list[slice]:
    """Parts of the flat gradient whose squares are summed one by one: in the order of the buckets, and within each of
    the shards."""
    everywhere = [buckets.parts(number, shards) for number in range(shards)]
    return [piece for of_bucket in zip(*everywhere, strict=True) for piece in of_bucket]
