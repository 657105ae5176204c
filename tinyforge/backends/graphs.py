"""CUDA graphs: what a function launches, written down once and launched again as a whole.

A launch costs Python 10 to 25 us, a node of a graph about one. A node has the addresses and numbers of its launch: what
changes from one replay to the next must lie in arrays that stay where they are, and the backend refuses uploads
meanwhile (`CupyBackend.repeats`). So does the memory that the function takes for itself: it comes from a pool that
nobody else has. In there an array's memory is taken again as soon as Python lets go of it, as always: the nodes run in
the order in which they were captured.

Source: the CUDA programming guide, "CUDA Graphs"; the CuPy manual, `Stream.begin_capture`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import finalize

import cupy

from tinyforge.backends.cublas import Products
from tinyforge.backends.cupy_backend import CupyBackend, other_pools
from tinyforge.errors import UserError


class Graphs:
    """A stream and memory for graphs that run one after the other: they share both.

    products: matrix products that can be captured; for what is to have the same bits outside of a graph.
    """

    def __init__(self, backend: CupyBackend) -> None:
        self.backend = backend
        # What others ask of the default stream meanwhile does not end a capture on such a stream.
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pool = cupy.cuda.MemoryPool()
        other_pools.append(self.pool)
        finalize(self, other_pools.remove, self.pool)
        self.products = Products()

    def run(self, work: Callable[[], None]) -> None:
        """work() as `capture` will see it, but now: kernels are compiled, and the memory is there from then on."""
        self.backend.synchronize()
        cupy.get_default_memory_pool().free_all_blocks()  # of the steps before, which the graph's memory replaces
        with self._inside():
            work()
        self.backend.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What launches all of work() again, on the stream that is current then; nothing is computed now."""
        self.backend.synchronize()
        try:
            with self._inside():
                graph = self._captured(work)
        except RuntimeError as error:  # CUDA's, and CuPy's for what it cannot do meanwhile
            raise UserError(f"--capture: the step cannot be captured ({error}); use --capture off") from error
        launch: Callable[[], None] = graph.launch
        return launch

    def _captured(self, work: Callable[[], None]) -> Any:
        self.stream.begin_capture()
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):
                self.stream.end_capture()
            raise
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
    """In place of memory that CuPy uploads from, in functions of its own too: a graph would read it again later."""
    raise UserError(f"--capture: the step uploads {size} bytes, which a graph would not do again; use --capture off")
