"""The argument structs of both decoding kernels, as NumPy structured dtypes.

A kernel takes `struct Arguments` by value, and `packed` makes one. Fields have the names, the order and the alignment
of the struct; tests/backends/ compiles the kernels with a static_assert for the offset of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tinyforge.infer.sampling import Sampling
from tinyforge.rng import Stream

SAMPLER = np.dtype([("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<i4"), ("key", "<u4", 2)])
"""`Sampler` of sampler.cuh."""
POINTER = np.dtype(np.uintp)


def sampler(sampling: Sampling, key: tuple[int, int]) -> tuple[Any, ...]:
    """The fields of SAMPLER. key: of the row's random stream."""
    return sampling.temperature, sampling.top_p, sampling.min_p, min(sampling.top_k, 2**31 - 1), key


def samplers(samplings: Sequence[Sampling], streams: Sequence[Stream]) -> np.ndarray:
    """How the tokens of each row are sampled, (rows,) SAMPLER."""
    return np.array([sampler(s, stream.key) for s, stream in zip(samplings, streams, strict=True)], SAMPLER)


@cache
def single_arguments(wide: np.dtype) -> np.dtype:
    """`Arguments` of decode_single.cu. wide: the type that arithmetic is done in."""
    pointers = (
        "weights embedding gains cosines sines keys values tokens exchange lengths begin report scales given skipped"
    )
    numbers = "dealt stride layers heads capacity past passes sampled"
    return _struct(pointers, wide, numbers, ("draw", np.uint32), ("how", SAMPLER))


@cache
def batched_arguments(wide: np.dtype) -> np.dtype:
    """`Arguments` of decode_batched.cu. wide: as above."""
    pointers = (
        "weights embedding gains cosines sines keys values past given ids drawn memory counters logits lengths "
        "samplers first"
    )
    return _struct(pointers, wide, "stride layers heads batch capacity passes")


def _struct(pointers: str, wide: np.dtype, numbers: str, *more: tuple[str, Any]) -> np.dtype:
    of_type = ((pointers, POINTER), ("eps", wide), (numbers, np.dtype(np.int32)))
    return np.dtype([*((name, kind) for names, kind in of_type for name in names.split()), *more], align=True)


def packed(struct: np.dtype, **fields: Any) -> np.ndarray:
    """One `struct`, (1,), which CuPy passes by value. Arrays become their addresses, None a null pointer."""
    if fields.keys() != set(struct.names or ()):
        raise TypeError(f"arguments {sorted(fields)}, expected {sorted(struct.names or ())}")

    def value(name: str) -> Any:
        field = fields[name]
        if struct[name] != POINTER:
            return field
        return 0 if field is None else field.data.ptr

    one = np.zeros(1, struct)
    one[0] = tuple(value(name) for name in struct.names or ())
    return one
