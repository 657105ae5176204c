"""NCCL's windows, over a stand-in for the library: what is called, and what is memory of a window."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge.errors import UserError

pytest.importorskip("cupy")
from tinyforge.backends import cupy_backend
from tinyforge.parallel import windows_cuda as windows

BASE = 1 << 40


class Library:
    """Windows lie one after the other with gaps; refuse: a call that fails."""

    def __init__(self, refuse: str = "") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuse = refuse

    def ncclMemAlloc(self, address: Any, size: int) -> int:
        address._obj.value = BASE + len(self.calls) * (1 << 30)
        return self._called("ncclMemAlloc", size)

    def ncclCommWindowRegister(self, communicator: int, address: Any, size: int, window: Any, flags: int) -> int:
        return self._called("ncclCommWindowRegister", communicator, address.value, size, flags)

    def ncclGetLastError(self, communicator: int) -> bytes:
        return b"Cuda failure 'out of memory'"

    def _called(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        return int(name == self.refuse)


def of(address: int, count: int) -> Any:
    """What stands for an array on the device."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address), size=count, fill=lambda value: None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[windows.Windows, Library]]:
    cuda = SimpleNamespace(
        UnownedMemory=lambda address, size, owner: address,
        MemoryPointer=lambda memory, offset: memory + offset,
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    cupy = SimpleNamespace(cuda=cuda, ndarray=lambda shape, dtype, at: of(at, shape[0]))
    monkeypatch.setattr(windows, "cupy", cupy)
    monkeypatch.setattr(cupy_backend, "other_pools", pools := list[Any]())
    monkeypatch.setattr(windows, "other_pools", pools)

    def make(refuse: str = "") -> tuple[windows.Windows, Library]:
        library = Library(refuse)
        monkeypatch.setattr(windows, "_library", lambda: library)
        return windows.Windows(77), library

    return make


def test_windows(made: Callable[..., tuple[windows.Windows, Library]]) -> None:
    """Whole pages, registered as symmetric; the memory counts."""
    mine, library = made()
    first, second = mine.zeros(1000, np.float32), mine.zeros(3 << 20, np.uint8)
    at, size = first.data.ptr, 2 << 20
    assert library.calls == [
        ("ncclMemAlloc", size),
        ("ncclCommWindowRegister", 77, at, size, 1),
        ("ncclMemAlloc", 2 * size),
        ("ncclCommWindowRegister", 77, second.data.ptr, 2 * size, 1),
    ]
    assert mine.used_bytes() == mine.total_bytes() == 3 * size and cupy_backend.other_pools == [mine]


@pytest.mark.parametrize("name", ["ncclMemAlloc", "ncclCommWindowRegister"])
def test_what_is_refused_is_said_in_one_line(name: str, made: Callable[..., tuple[windows.Windows, Library]]) -> None:
    mine, _ = made(name)
    with pytest.raises(UserError, match=f"^{name} failed: Cuda failure 'out of memory'; set NCCL_WIN_ENABLE=0"):
        mine.zeros(8, np.float32)
    assert mine.used_bytes() == 0
