"""Memory that makes NCCL's collectives faster.

The ranks register it together, as a *window*. NCCL's kernels then read and write the other GPUs' memory in place, with
no buffer in between: each block moves several times as much. If the communicator's policy is "zero CTA"
(NCCL_CTA_POLICY=2), an all-gather is made of copies by the GPU's copy engines and occupies no multiprocessor. CuPy does
not wrap windows, so this module calls the library that CuPy has loaded.

All ranks make a window together, in the same order, and it stays until the process ends: if one rank alone freed and
reallocated memory, the ranks' windows would no longer match.

Source: the NCCL user guide, "Window Registration" and "Zero-CTA Optimization"; names and
numbers as in nccl.h, from 2.28 on.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import cupy
import numpy as np

from tinyforge.backends.cupy_backend import other_pools
from tinyforge.errors import UserError
from tinyforge.kernel import Array

_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
_GRANULE = 2 << 20  # bytes; what the driver maps at a time


@cache
def _library() -> Any:
    library = ctypes.CDLL("libnccl.so.2")  # already loaded by CuPy's module: found by its name
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclMemAlloc.argtypes = (pointer, size)
    library.ncclCommWindowRegister.argtypes = (pointer, pointer, size, pointer, integer)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = (pointer,)
    return library


class Windows:
    """The windows of one communicator, given by its address. Counts as a pool: see `cupy_backend.pools`."""

    def __init__(self, communicator: int) -> None:
        self._communicator = communicator
        self._ranges: list[tuple[int, int]] = []
        other_pools.append(self)

    def zeros(self, count: int, dtype: Any) -> Array:
        """A flat array of zeros in a window of its own. All ranks call it. Raises UserError if NCCL fails."""
        size = -(-count * np.dtype(dtype).itemsize // _GRANULE) * _GRANULE
        address, window = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("ncclMemAlloc", ctypes.byref(address), size)
        self._call("ncclCommWindowRegister", self._communicator, address, size, ctypes.byref(window), _SYMMETRIC)
        assert address.value is not None
        self._ranges.append((address.value, address.value + size))
        memory = cupy.cuda.UnownedMemory(address.value, size, self)
        array = cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))
        array.fill(0)
        cupy.cuda.get_current_stream().synchronize()  # before another rank writes there
        return array

    def used_bytes(self) -> int:
        return sum(stop - start for start, stop in self._ranges)

    total_bytes = used_bytes

    def _call(self, name: str, *arguments: Any) -> None:
        library = _library()
        if status := getattr(library, name)(*arguments):
            why = library.ncclGetLastError(self._communicator) or library.ncclGetErrorString(status)
            raise UserError(f"{name} failed: {why.decode(errors='replace').strip()}; set NCCL_WIN_ENABLE=0")
