"""The flat gradient in slices, each summed over the ranks as soon as backward has finished with it.

All gradients lie in one buffer in the order of forward, so backward fills it from the end, and a bucket is a slice. The
stash tells how far backward has come: when an op takes its record, the op before it is done, and with it the gradients
of its parameters. The buckets are the same on every rank and in every step, and so is the order in which they are
summed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tinyforge.op import Op, Param, Stash
from tinyforge.parallel.group import part_of
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

BUCKET = 8 << 20  # elements: 32 MB of float32, which NCCL sums at nearly its full speed
LEAST = 1 << 20  # elements of a bucket however little is still to come
UNIT = 32  # elements: a rank's part of a bucket is a multiple, so that its kernels read whole vectors


class Buckets:
    """slices: of the flat buffer, in its order. Each holds whole parameters, `params`: those of more than `elements`
    have one to themselves, and so have those that are not decayed, which are little and known last.

    A bucket holds no more than what lies before it, whose gradients are still to come: the last ones are small, because
    nothing is left to hide their sums under.
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
        # Which buckets an op's parameters lie in.
        self.of_op = {
            id(op): sorted({number_of[id(p)] for p in op.params() if id(p) in number_of}) for op in ops
        }  # fmt: skip

    def parts(self, rank: int, size: int) -> list[slice]:
        """What of each bucket is rank's."""
        found = []
        for bucket in self.slices:
            part = part_of(rank, size, bucket.stop - bucket.start, UNIT)
            found.append(slice(bucket.start + part.start, bucket.start + part.stop))
        return found

    def watched(
        self, noise: Stream | None, begin: Callable[[int], Any], enter: Callable[[int], Any] = lambda number: None
    ) -> Watched:
        """A stash that calls begin(number) during backward when a bucket's gradients are known, and for the rest in
        `finish`. enter(number): called before the first of them is written."""
        return Watched(self, noise, begin, enter)


class Watched(Stash):
    """See `Buckets.watched`. begun: buckets."""

    def __init__(
        self, buckets: Buckets, noise: Stream | None, begin: Callable[[int], Any], enter: Callable[[int], Any]
    ) -> None:
        super().__init__(noise)
        self._of_op, self._begin, self._enter = buckets.of_op, begin, enter
        # The ops that have not yet added to a bucket's gradients.
        self._missing: list[set[int]] = [set() for _ in buckets.slices]
        for op, numbers in buckets.of_op.items():
            for number in numbers:
                self._missing[number].add(op)
        self._records_of: Counter[int] = Counter()
        self.begun, self._entered = set[int](), set[int]()
        self._last: int | None = None

    def push(self, owner: Op, *saved: Any) -> None:
        self._records_of[id(owner)] += 1
        super().push(owner, *saved)

    def drop(self, length: int) -> None:
        for owner, _ in self._records[length:]:  # they come again
            self._records_of[id(owner)] -= 1
        super().drop(length)

    def pop(self, owner: Op) -> tuple[Any, ...]:
        if self._last is None:  # what has no record has no gradient
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
