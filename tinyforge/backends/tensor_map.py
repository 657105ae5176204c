"""Tensor maps: 128 bytes, encoded by the driver, that describe an array to a Hopper GPU's copy engine (TMA).

A kernel takes them by value, as `const __grid_constant__ TensorMap` (ops/hopper.cuh), and copies boxes of the array
into shared memory with one instruction each. Source: the CUDA driver's manual, "Tensor Map Object Management".
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np

from tinyforge.kernel import Array, pointer

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
_BFLOAT16, _SWIZZLE_128B, _L2_256B = 9, 3, 3
_WORDS, _ALIGNED = 16, 64
_MAP = np.dtype((np.void, 8 * _WORDS))


def tensor_map(x: Array, box: tuple[int, int, int]) -> np.ndarray:
    """The map of x, bf16 with three axes, for copies of boxes of this shape under the 128-byte swizzle.

    The last axis is contiguous; rows may be apart, and begin at multiples of 16 bytes. A box has at most 64 numbers in
    its last axis and 256 in the others. Elements of a box outside the array read as 0.
    """
    steps = distances(x.shape, x.strides, x.itemsize)
    if x.dtype.name != "bfloat16" or steps is None or pointer(x) % 16:
        raise ValueError(
            f"tensor_map: {x.dtype} of shape {x.shape}, strides {x.strides}, at {pointer(x):#x}; expected "
            "bfloat16, three axes, no gaps in the last, all else at multiples of 16 bytes"
        )
    return encoded(pointer(x), x.shape, steps, box)


def distances(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int] | None:
    """Bytes from one row to the next and from one matrix to the next, or None where TMA cannot take such an array."""
    if len(shape) != 3 or (shape[2] > 1 and strides[2] != itemsize):
        return None
    row = strides[1] if shape[1] > 1 else -(-shape[2] * itemsize // 16) * 16  # a single row has no next one
    plane = strides[0] if shape[0] > 1 else row * shape[1]
    return (row, plane) if row >= shape[2] * itemsize and row % 16 == 0 and plane % 16 == 0 else None


@lru_cache(4096)  # weights stay where they are: a map for each is made once
def encoded(address: int, shape: tuple[int, int, int], steps: tuple[int, int], box: tuple[int, int, int]) -> np.ndarray:
    """As tensor_map, for an array at `address` with these `distances`."""
    room = np.zeros(_WORDS + _ALIGNED // 8, np.uint64)
    skip = -room.ctypes.data % _ALIGNED // 8
    found = room[skip : skip + _WORDS].view(_MAP)  # of one element, as CuPy passes by value; keeps `room` alive
    sizes = (ctypes.c_uint64 * 3)(*shape[::-1])
    boxes, every = (ctypes.c_uint32 * 3)(*box[::-1]), (ctypes.c_uint32 * 3)(1, 1, 1)
    array = address, sizes, (ctypes.c_uint64 * 2)(*steps), boxes, every
    how = 0, _SWIZZLE_128B, _L2_256B, 0
    status = _driver().cuTensorMapEncodeTiled(found.ctypes.data, _BFLOAT16, 3, *array, *how)
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled: CUDA error {status} for shape {shape}, boxes of {box}")
    return found


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    driver.cuTensorMapEncodeTiled.argtypes = (pointer, integer, ctypes.c_uint32, *(pointer,) * 5, *(integer,) * 4)
    return driver
