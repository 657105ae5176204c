"""Arrays without memory: what a training step will need, found by running it on shapes alone.

A meta array has a shape, a dtype and an owner that counts its bytes while anything refers to it. The model, its
backward and the optimizer run on meta arrays as they do on arrays; Python frees one when it would free the array, so
the peak of the count is the peak of the real step. Where a kernel's results are like its first array,
nothing describes its memory (`derived`); other kernels have a memory function next to the body, `....on("meta")`, which
allocates what the CUDA launcher does and computes nothing. Scratch whose size depends on the number of multiprocessors
is left out: a megabyte or two. No GPU is needed, and `base` takes a tenth of a second.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from tinyforge.backends import PRECISIONS, Backend, wide
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
            raise TypeError(f"{ufunc.__name__}.{method} is not among what a meta array array can do")
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
    array = np.broadcast_to(np.zeros((), dtype), shape).view(MetaArray)
    array.owner = _Block(array.size * array.dtype.itemsize)
    return array


def like(x: Any) -> MetaArray:
    return empty(x.shape, x.dtype)


def per_row(x: Any) -> MetaArray:
    """One number for each row of x, in the precision of sums."""
    return empty(x.shape[:-1], wide(x.dtype))


@lru_cache(1024)
def derived(body: Callable[..., Any]) -> Callable[..., Any] | None:
    """The memory function of a kernel that has none of its own, from the annotations of its body: a kernel that returns
    None allocates nothing; otherwise every result is like the first argument annotated `Array`, or like the first one
    if nothing is annotated. None if the kernel returns something else than arrays, or takes none."""
    signature = inspect.signature(body)
    result, *annotations = (
        "Array" if kind in (inspect.Parameter.empty, Any) else str(kind).replace("typing.Any", "Array")
        for kind in (signature.return_annotation, *(p.annotation for p in signature.parameters.values()))
    )
    if result == "None":
        return lambda *args, **named: None
    if "Array" not in annotations or not re.fullmatch(r"Array|tuple\[Array(, Array)*\]", result):
        return None
    name = list(signature.parameters)[annotations.index("Array")]

    def allocate(*args: Any, **named: Any) -> Any:
        first = signature.bind_partial(*args, **named).arguments[name]
        return like(first) if result == "Array" else tuple(like(first) for _ in result.split(","))

    return allocate


class MetaBackend(Backend):
    """Stands for the CuPy backend of the same precision."""

    name = "meta"
    xp = np
    derived = staticmethod(derived)

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
