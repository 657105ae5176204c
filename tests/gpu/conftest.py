"""Tests marked `gpu` run where CuPy finds a GPU; elsewhere they skip and say why."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tinyforge.backends import gpu_is_there


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]  # keywords hold folder names too
    if marked and not gpu_is_there():
        found = "CuPy finds no GPU" if importlib.util.find_spec("cupy") else "CuPy is not installed"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {found}"))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New arrays hold NaN (or -1), as bytes of 0xFF: what a kernel leaves unwritten shows."""
    import cupy

    pool = cupy.get_default_memory_pool()

    def allocate(size: int) -> object:
        memory = pool.malloc(size)
        memory.memset_async(0xFF, size)
        return memory

    cupy.cuda.set_allocator(allocate)
    yield
    cupy.cuda.set_allocator(pool.malloc)
