"""CUDA graphs: a function's launches, recorded once and replayed as a whole.

A launch costs Python 10 to 25 us, a node of a graph about 1 us. A node keeps the addresses and numbers of its launch.
So whatever changes from one replay to the next must lie in arrays at fixed addresses, and the backend refuses uploads
during capture (`CupyBackend.repeats`). The memory that the function allocates comes from a pool of the graphs' own.
The pool reuses an array's memory as soon as Python frees it, as always: the nodes run in the order of capture.

Source: the CUDA programming guide, "CUDA Graphs"; the CuPy manual, `Stream.begin_capture`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import finalize

import cupy

from tinyforge.backends.cublas import Products
from tinyforge.backends.cupy_backend import CupyBackend, other_pools
from tinyforge.errors import UserError


class Graphs:
    """The stream and the memory pool that all graphs share; they run one after the other.

    products: matrix products that can be captured; use them outside of graphs too where the bits must be the same.
    """

    def __init__(self, backend: CupyBackend) -> None:
        self.backend = backend
        # Non-blocking: work that others put on the default stream does not end a capture on this one.
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.MemoryPool()
        other_pools.append(self.pool)
        finalize(self, other_pools.remove, self.pool)
        self.products = Products()

    def run(self, work: Callable[[], None]) -> None:
        """Run work() now, as `capture` will see it: this compiles its kernels and fills the memory pool."""
        self.backend.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()  # left by steps without a graph
        with self._inside():
            work()
        self.backend.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work(), which computes nothing now. Returns a function that replays it on the current stream."""
        self.backend.synchronize()
        try:
            with self._inside():
                graph = self._captured(work)
        except RuntimeError as error:  # CUDA's, and CuPy's for what it cannot do meanwhile
            raise UserError(f"--cuda-graph: the step cannot be captured ({error}); use --cuda-graph off") from error
        launch: Callable[[], None] = graph.launch
        return launch

    def _captured(self, work: Callable[[], None]) -> Any:
        # Not while capturing: what it collects may hold memory, streams or graphs, whose end would break the capture.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        self.stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):
                self.stream.end_capture()
            raise
        finally:
            if collects:
                gc.enable()
        return self.stream.end_capture()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with self.stream, cupy.cuda.using_allocator(self.pool.malloc), self.products.in_use():
            self.backend.repeats = True
            cupy.cuda.set_pinned_memory_allocator(_refuse)
            try:
                yield
            finally:
                self.backend.repeats = False
                cupy.cuda.set_pinned_memory_allocator(cupy.get_default_pinned_memory_pool().malloc)


def _refuse(size: int) -> Any:
    """Replaces the allocator of pinned memory, from which CuPy uploads: a replay would read that memory again."""
    raise UserError(f"--cuda-graph: the step uploads {size} bytes, which a graph cannot repeat; use --cuda-graph off")
