"""What the CUDA decoders share, as far as it runs without a GPU: the order of launches, and copies on their way."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy", reason="the launchers import CuPy")


def blocks(count: int, most: int, log: list[Any], gives: int = 1) -> Iterator[np.ndarray]:
    """A run of `_two_under_way` over passes that give `gives` tokens each, until there are `count`."""
    from tinyforge.infer.cuda.device import DeviceDecoder

    def launch(passes: int, ahead: int) -> np.ndarray:
        log.append(("launch", passes, ahead))
        return np.zeros((passes, 1))

    decoder: Any = SimpleNamespace(
        _copy_out=lambda found: (found, len(found)), _wait=lambda event: log.append(("wait", event))
    )
    made = 0

    def left() -> int:
        return count - made

    for found in DeviceDecoder._two_under_way(decoder, launch, left, most):
        made += gives * len(found)
        yield found


def test_a_launch_is_under_way_while_another_is_read() -> None:
    log: list[Any] = []
    stream = blocks(100, 16, log)
    next(stream)
    assert log == [("launch", 1, 0), ("launch", 2, 1), ("wait", 1)]
    next(stream)
    assert log[3:] == [("launch", 4, 2), ("wait", 2)]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 7, 30, 31, 100])
def test_no_pass_is_launched_that_is_not_needed(count: int) -> None:
    log: list[Any] = []
    sizes = [len(found) for found in blocks(count, 16, log)]
    launched = [entry[1] for entry in log if entry[0] == "launch"]
    assert sum(sizes) == count == sum(launched) and sizes == launched
    assert all(size == min(1 << i, 16) for i, size in enumerate(sizes[:-1]))


def test_passes_that_give_more_end_the_stream_early() -> None:
    """As speculation does: what is still under way then is not waited for."""
    log: list[Any] = []
    sizes = [len(found) for found in blocks(20, 8, log, gives=3)]
    assert sizes == [1, 2, 4] and [e for e in log if e[0] == "wait"] == [("wait", 1), ("wait", 2), ("wait", 4)]
    assert [e[1] for e in log if e[0] == "launch"] == [1, 2, 4, 7]


def test_memory_that_is_written_to_is_not_given_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the host goes on when its reader and its decoder are gone: until it ends, its memory is held."""
    from tinyforge.infer.cuda import device

    given: list[weakref.ref[Any]] = []
    events: list[SimpleNamespace] = []

    def allocate(size: int) -> Any:
        given.append(weakref.ref(memory := np.zeros(size, np.uint8)))
        return memory

    def event(**how: bool) -> Any:
        events.append(made := SimpleNamespace(done=False, record=lambda: None))
        return made

    cuda = SimpleNamespace(alloc_pinned_memory=allocate, Event=event)
    monkeypatch.setattr(device, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "_in_transit", [], raising=False)
    found: Any = SimpleNamespace(nbytes=8, dtype=np.dtype(np.int32), size=2, shape=(2,), get=lambda out, blocking: None)
    for _ in range(3):
        decoder: Any = SimpleNamespace(_in_transit=[])
        device.DeviceDecoder._copy_out(decoder, found)
        del decoder
    assert all(memory() is not None for memory in given)
    events[0].done = events[1].done = True
    device.DeviceDecoder._copy_out(SimpleNamespace(_in_transit=[]), found)  # type: ignore[arg-type]
    assert [memory() is not None for memory in given] == [False, False, True, True]
