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

from tinyforge.op import Op, Stash
from tinyforge.parallel.group import part_of
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream

BUCKET = 8 << 20  # elements: 32 MB of float32, which NCCL sums at nearly its full speed
UNIT = 32  # elements: a rank's part of a bucket is a multiple, so that its kernels read whole vectors
_ROUND = 64 * UNIT  # of a bucket's bounds: every usual number of ranks divides it


class Buckets:
    """slices: of the flat buffer, in its order."""

    def __init__(self, buffer: ParamBuffer, ops: Sequence[Op], elements: int = BUCKET) -> None:
        self.slices = cut(buffer.decay_end, buffer.values.size, elements)
        self._owners: list[set[int]] = [set() for _ in self.slices]
        learned = {id(p) for p in buffer.params}
        for op in ops:
            for p in op.params():
                if id(p) in learned:
                    place = buffer.place(p)
                    for number, bucket in enumerate(self.slices):
                        if bucket.start < place.stop and place.start < bucket.stop:
                            self._owners[number].add(id(op))

    def parts(self, rank: int, size: int) -> list[slice]:
        """What of each bucket is rank's."""
        found = []
        for bucket in self.slices:
            part = part_of(rank, size, bucket.stop - bucket.start, UNIT)
            found.append(slice(bucket.start + part.start, bucket.start + part.stop))
        return found

    def watched(self, noise: Stream | None, begin: Callable[[slice], Any]) -> Watched:
        """A stash that calls begin(bucket) during backward, and for the rest in `finish`."""
        return Watched(self, noise, begin)


class Watched(Stash):
    """See `Buckets.watched`."""

    def __init__(self, buckets: Buckets, noise: Stream | None, begin: Callable[[slice], Any]) -> None:
        super().__init__(noise)
        self._slices, self._begin = buckets.slices, begin
        self._missing = [set(owners) for owners in buckets._owners]
        self._records_of: Counter[int] = Counter()
        self._begun: set[int] = set()
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
        return super().pop(owner)

    def finish(self) -> None:
        """Backward is over."""
        for number in reversed(range(len(self._slices))):
            self._sum(number)

    def _done(self, owner: int) -> None:
        self._records_of[owner] -= 1
        if self._records_of[owner]:
            return
        for number, missing in reversed(list(enumerate(self._missing))):
            if owner in missing:
                missing.remove(owner)
                if not missing:
                    self._sum(number)

    def _sum(self, number: int) -> None:
        if number not in self._begun:
            self._begun.add(number)
            self._begin(self._slices[number])


def cut(decay_end: int, size: int, elements: int) -> list[slice]:
    """Slices of about so many elements; the last one has all that is not decayed, which is little and known last."""
    whole = decay_end // _ROUND * _ROUND
    count = max(1, -(-whole // elements))
    step = -(-whole // count // _ROUND) * _ROUND if whole else size
    bounds = [*range(0, whole, step), whole, size]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]
