"""The NumPy backend: the reference that every other backend is compared with, and a fast one in its own right.

NumPy runs an elementwise function on one core and a large matrix product on all of them, and a training step spends
about as long in the first as in the second. So a batch is cut into one shard per core. Each shard runs the whole
forward and backward in a worker of its own (`workers.py`) with single-threaded BLAS, and the shards' gradients are
added in a fixed order. Kernels make few passes over memory, in blocks that fit a core's cache, and lay data out so that
reductions and broadcasts go along whole rows. docs/performance.md has the measurements.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.workers import cores, shared_zeros

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
KERNELS = "OPENBLAS_CORETYPE"
"""The environment variable that overrides OpenBLAS's choice of kernels."""


def _openblas(name: str) -> Any:
    """A function of the OpenBLAS that NumPy's wheel bundles; None if it bundles another BLAS."""
    library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]  # no public way to it
    symbols = (f"scipy_openblas_{name}64_", f"openblas_{name}64_", f"openblas_{name}")
    return next((found for symbol in symbols if (found := getattr(library, symbol, None)) is not None), None)


def pin_blas_to_one_thread() -> bool:
    """Make each BLAS call run on the calling thread; True if the bundled OpenBLAS could be told so."""
    function = _openblas("set_num_threads")
    if function is not None:
        function(1)
    return function is not None


def blas_kernels() -> str:
    """The CPU that OpenBLAS has chosen its kernels for, such as SkylakeX for all with AVX-512; "" for another BLAS."""
    function = _openblas("get_corename")
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return str(function().decode())


def keep_freed_memory() -> None:
    """Ask glibc to keep freed blocks: returning a page to the system and faulting it in again costs more than the
    arithmetic on it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def row_blocks(rows: int, row_bytes: int, budget: int = 1 << 20) -> Iterator[slice]:
    """Slices of range(rows) of about `budget` bytes: several passes over one block hit the core's cache, where passes
    over the whole array would each read memory."""
    step = max(1, budget // max(1, row_bytes))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class NumpyBackend(Backend):
    """NumPy arrays in memory; `workers` share a step (default: one per core). compiled: whether ops take the kernels
    that numba compiles, where there are some."""

    name = "numpy"
    xp = np
    compiled = False

    def __init__(self, precision: str = "fp32", workers: int | None = None) -> None:
        super().__init__(precision, workers or cores())
        if self.fp8:  # NumPy computes nothing in bf16
            self.dtype = self.master_dtype
        pin_blas_to_one_thread()
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(self.workers - 1) if self.workers > 1 else None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=partial(_without_pool, weakref.ref(self)))

    def describe(self) -> str:
        return super().describe() + ", kernels compiled by numba" * self.compiled

    def shared_zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> np.ndarray:
        return shared_zeros(shape, self.dtype if dtype is None else dtype)

    def to_numpy(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def map(self, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        if self._pool is None or len(items) < 2:
            return [function(item) for item in items]
        # The calling thread takes the first item itself: one thread fewer, and no idle wait.
        later = [self._pool.submit(function, item) for item in items[1:]]
        try:
            first = function(items[0])
        finally:
            wait(later)  # after Ctrl-C too: no thread still writes when the caller goes on
        return [first] + [future.result() for future in later]

    def matmul_peak(self, size: int = 512, rounds: int = 5) -> float:  # of that size, as fast as larger ones
        a = np.random.default_rng(0).normal(size=(size, size)).astype(self.dtype)
        outs = [np.empty_like(a) for _ in range(self.workers)]
        each = self.peak_of(lambda: self.map(lambda out: np.matmul(a, a, out=out), outs), size, rounds)
        return self.workers * each


def _without_pool(backend: weakref.ref[NumpyBackend]) -> None:
    """A forked child has its parent's backend but not its threads: it would wait for them forever."""
    if (here := backend()) is not None:
        here._pool = None
