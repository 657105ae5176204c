"""Arrays without memory: what a training step will need, found by running it on shapes alone.

A meta array has a shape, a dtype and an owner that counts its bytes while anything refers to it. The model, its
backward and the optimizer run on meta arrays as they do on arrays; Python frees a meta array when it would free the array, so
the peak of the count is the peak of the real step. Each kernel has a memory shape function beside its body,
`@....on("meta")`, which allocates what the CUDA launcher does and computes nothing. Scratch whose size depends on
the number of multiprocessors is left out: a megabyte or two. No GPU is needed, and `base` takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinyforge.backends import PRECISIONS, Backend
from tinyforge.errors import UserError

GRANULE = 512
"""CuPy's memory pool allocates multiples of this many bytes."""


class Meter:
    """Bytes that meta arrays hold now, and their peak."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


METER = Meter()


class _Block:
    """The memory of one allocation; views of a meta array share it."""

    def __init__(self, count: int) -> None:
        self.count = -(-count // GRANULE) * GRANULE
        METER.add(self.count)

    def __del__(self) -> None:
        METER.add(-self.count)


class MetaArray(np.ndarray):
    """An array whose elements are all the same zero. Reads give 0, writes do nothing, arithmetic gives meta arrays."""

    owner: _Block | None

    def __array_finalize__(self, source: Any) -> None:
        self.owner = getattr(source, "owner", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"{ufunc.__name__}.{method} is not among what a meta array can do")
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        dtype = next(x.dtype for x in inputs if isinstance(x, MetaArray))
        return out[0] if out else empty(shape, dtype)

    def __setitem__(self, where: Any, value: Any) -> None:
        pass

    def fill(self, value: Any) -> None:
        pass

    def copy(self, order: Any = "C") -> MetaArray:
        return empty(self.shape, self.dtype)


def empty(shape: tuple[int, ...], dtype: Any) -> MetaArray:
    meta = np.broadcast_to(np.zeros((), dtype), shape).view(MetaArray)
    meta.owner = _Block(meta.size * meta.dtype.itemsize)
    return meta


class MetaBackend(Backend):
    """Stands for the CuPy backend of the same precision."""

    name = "meta"
    xp = np

    def __init__(self, precision: str) -> None:
        policy = PRECISIONS.get(precision)
        if policy is None or "cupy" not in policy.backends:
            raise UserError(f"precision {precision!r} is not one of: {', '.join(PRECISIONS)}")
        self.precision, self.workers = policy, 1
        # float16 is as large as bfloat16, and needs no package of its own.
        self.dtype = np.dtype(np.float16 if policy.storage == "bfloat16" else policy.storage)
        self.master_dtype = np.dtype(policy.master)

    def empty(self, shape: tuple[int, ...]) -> MetaArray:
        return empty(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> MetaArray:
        return empty(shape, dtype or self.dtype)

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> MetaArray:
        array = np.asarray(array)
        return empty(array.shape, dtype or (self.dtype if array.dtype.kind == "f" else np.dtype(np.int32)))

    def table(self, shape: tuple[int, ...], make: Callable[[], np.ndarray]) -> MetaArray:
        return empty(shape, self.master_dtype)

    def map(self, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        return [function(item) for item in items]
