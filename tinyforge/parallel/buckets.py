"""Buckets: slices of the flat gradient, each summed over the ranks as soon as backward has finished with it.

All gradients lie in one buffer in the order of forward, so backward fills it from the end, and a bucket is a slice. The
stash shows how far backward has come: when an op pops its record, the op before it is done, and its parameters'
gradients are final. The buckets, and the order in which they are summed, are the same on every rank and in every step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tinyforge.op import Op, Owner, Param, Stash
from tinyforge.parallel.group import part_of
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

BUCKET = 8 << 20  # elements: 32 MB of float32, which NCCL sums at nearly its full speed
LEAST = 1 << 20  # elements that a bucket may have even if fewer come before it
UNIT = 32  # elements: a rank's part of a bucket is a multiple, so that kernels read whole vectors


class Buckets:
    """slices: of the flat buffer, in its order. Each holds whole parameters, `params`: one of more than `elements` has
    a bucket to itself, and so have those without decay, which are small and final last.

    A bucket is no larger than everything before it, whose gradients are still to come: the buckets that are summed last
    are small, because nothing is left to hide their sums.
    """

    def __init__(self, buffer: ParamBuffer, ops: Sequence[Op], elements: int = BUCKET) -> None:
        bounds, self.params = [0], list[list[Param]]()
        for p in buffer.params:
            place, most = buffer.place(p), min(elements, max(LEAST, bounds[-1]))
            if not self.params or place.start == buffer.decay_end or place.stop - bounds[-1] > most:
                if self.params:
                    bounds.append(place.start)
                self.params.append([])
            self.params[-1].append(p)
        bounds.append(buffer.size)
        self.slices = [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)] if self.params else []
        number_of = {id(p): number for number, params in enumerate(self.params) for p in params}
        # The buckets that an op's parameters lie in.
        self.of_op = {id(op): sorted({number_of[id(p)] for p in op.params() if id(p) in number_of}) for op in ops}

    def parts(self, rank: int, size: int) -> list[slice]:
        """The rank's part of each bucket."""
        found = []
        for bucket in self.slices:
            part = part_of(rank, size, bucket.stop - bucket.start, UNIT)
            found.append(slice(bucket.start + part.start, bucket.start + part.stop))
        return found

    def watched(
        self, noise: Stream | None, begin: Callable[[int], Any], enter: Callable[[int], Any] = lambda number: None
    ) -> Watched:
        """A stash that calls begin(number) during backward when a bucket's gradients are final, and for the other
        buckets in `finish`. enter(number): called before the first of a bucket's gradients is written."""
        return Watched(self, noise, begin, enter)


class Watched(Stash):
    """See `Buckets.watched`. begun: the buckets for which `begin` was called."""

    def __init__(
        self, buckets: Buckets, noise: Stream | None, begin: Callable[[int], Any], enter: Callable[[int], Any]
    ) -> None:
        super().__init__(noise)
        self._of_op, self._begin, self._enter = buckets.of_op, begin, enter
        # For each bucket, the ops that have not yet added to its gradients.
        self._missing: list[set[int]] = [set() for _ in buckets.slices]
        for op, numbers in buckets.of_op.items():
            for number in numbers:
                self._missing[number].add(op)
        self._records_of: Counter[int] = Counter()
        self.begun, self._entered = set[int](), set[int]()
        self._last: int | None = None

    def push(self, owner: Owner, *saved: Any) -> None:
        self._records_of[id(owner)] += 1
        super().push(owner, *saved)

    def drop(self, length: int) -> None:
        for owner, _ in self._records[length:]:  # they will be pushed again
            self._records_of[id(owner)] -= 1
        super().drop(length)

    def pop(self, owner: Owner) -> tuple[Any, ...]:
        if self._last is None:  # an op without a record adds no gradient
            for missing in self._missing:
                missing &= set(self._records_of)
        else:
            self._done(self._last)
        self._last = id(owner)
        for number in self._of_op.get(id(owner), ()):
            self._open(number)
        return super().pop(owner)

    def finish(self) -> None:
        """Backward is over."""
        for number in reversed(range(len(self._missing))):
            self._sum(number)

    def _done(self, owner: int) -> None:
        self._records_of[owner] -= 1
        if self._records_of[owner]:
            return
        for number in reversed(self._of_op.get(owner, ())):
            missing = self._missing[number]
            missing.discard(owner)
            if not missing:
                self._sum(number)

    def _open(self, number: int) -> None:
        if number not in self._entered:
            self._entered.add(number)
            self._enter(number)

    def _sum(self, number: int) -> None:
        if number not in self.begun:
            self.begun.add(number)
            self._open(number)
            self._begin(number)
