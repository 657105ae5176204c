"""Groups: collectives do what they say, wrong calls and dead ranks raise, and nothing waits forever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.backends.test_workers import die_with_their_maker
from tinyforge.backends.workers import CAN_FORK, worker_pids
from tinyforge.errors import UserError
from tinyforge.parallel import Group, group, part_of, start_group

forks = pytest.mark.skipif(not CAN_FORK, reason="this system cannot fork workers safely; it uses threads")


@pytest.fixture(params=[pytest.param(True, marks=forks, id="processes"), pytest.param(False, id="threads")])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """start_group with forked processes, and with threads; a test that hangs is killed by an alarm."""
    monkeypatch.setattr(group, "CAN_FORK", request.param)
    monkeypatch.setattr(group, "SLOT", 64)  # a few numbers: collectives take several pieces
    if hasattr(signal, "alarm"):
        signal.alarm(60)
    yield start_group
    if hasattr(signal, "alarm"):
        signal.alarm(0)


def own(rank: int, shape: tuple[int, ...], dtype: Any = np.float64) -> np.ndarray:
    """What a rank brings; the sum of floats depends on the order."""
    return (np.random.default_rng(rank).normal(size=shape) * 10.0**rank).astype(dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 41)])
def test_collectives(start: Callable[..., Group], size: int, shape: tuple[int, ...]) -> None:
    def everything(ranks: Group) -> list[np.ndarray]:
        made = []
        for method in ("all_reduce_", "reduce_scatter_", "all_gather_", "broadcast_"):
            array = own(ranks.rank, shape)
            getattr(ranks, method)(array)
            made.append(array)
            ranks.barrier()
        return made

    def follow(ranks: Group) -> None:
        """Send what came out to rank 0, by way of a sum in which it is alone."""
        made = everything(ranks)
        for rank in range(1, ranks.size):
            for array in made:
                ranks.all_reduce_(array if rank == ranks.rank else np.zeros_like(array))

    ranks = start(size, follow)
    found = {0: everything(ranks)}
    for rank in range(1, size):
        found[rank] = [np.zeros(shape) for _ in range(4)]
        for array in found[rank]:
            ranks.all_reduce_(array)
    total = own(0, shape)
    for rank in range(1, size):
        total = total + own(rank, shape)
    gathered = np.concatenate([own(r, shape).reshape(-1)[part_of(r, size, total.size)] for r in range(size)])
    for rank, (reduced, scattered, all_of_them, sent) in found.items():
        part = part_of(rank, size, total.size)
        assert np.array_equal(reduced, total)  # to the last bit: the order of the ranks
        assert np.array_equal(scattered.reshape(-1)[part], total.reshape(-1)[part])
        assert np.array_equal(all_of_them.reshape(-1), gathered)
        assert np.array_equal(sent, own(0, shape))
    ranks.close()


def test_parts_cover_everything_once() -> None:
    for count in (0, 1, 5, 12):
        for size in (1, 2, 5):
            parts = [range(count)[part_of(rank, size, count)] for rank in range(size)]
            assert [i for part in parts for i in part] == list(range(count))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_objects_travel(start: Callable[..., Group]) -> None:
    def follow(ranks: Group) -> None:
        said = ranks.send_object()
        ranks.all_reduce_(np.array([float(len(said["text"]))]))

    ranks = start(3, follow)
    ranks.send_object({"text": "x" * 1000})
    count = np.zeros(1)
    ranks.all_reduce_(count)
    assert count == 2000


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (lambda r: r.all_reduce_(np.zeros(3)), r"rank 0 calls all_reduce_ with \(4,\) float64, rank 1 .* \(3,\)"),
        (lambda r: r.all_reduce_(np.zeros(4, np.float32)), "rank 1 all_reduce_ with .* float32; all ranks must make"),
        (lambda r: r.broadcast_(np.zeros(4)), "rank 1 broadcast_ with"),
        (lambda r: r.barrier(), "rank 1 barrier; all ranks must make the same calls"),
    ],
)
def test_calls_that_do_not_match(start: Callable[..., Group], theirs: Callable[[Group], None], message: str) -> None:
    ranks = start(2, theirs)
    with pytest.raises(RuntimeError, match=message):
        ranks.all_reduce_(np.zeros(4))


def test_arrays_that_cannot_be_filled_in_place(start: Callable[..., Group]) -> None:
    ranks = start(2, lambda r: r.barrier())
    for array in (np.zeros((4, 4)).T[1:], [1.0], np.broadcast_to(np.zeros(()), (3,))):
        with pytest.raises(ValueError, match="C-contiguous and writeable"):
            ranks.all_reduce_(array)  # type: ignore[arg-type]
    ranks.barrier()


def test_a_rank_that_returned_is_noticed(start: Callable[..., Group]) -> None:
    ranks = start(3, lambda r: None)
    with pytest.raises(UserError, match="a worker process died"):
        ranks.barrier()


def test_an_exception_of_a_rank_is_raised_on_rank_0_and_stops_the_others(start: Callable[..., Group]) -> None:
    def follow(ranks: Group) -> None:
        if ranks.rank == 1:
            raise ZeroDivisionError("of rank 1")
        ranks.barrier()

    ranks = start(3, follow)
    with pytest.raises(ZeroDivisionError, match="of rank 1"):
        ranks.barrier()


@forks
def test_a_rank_that_was_killed_is_noticed() -> None:
    before = set(worker_pids())
    ranks = start_group(3, lambda r: r.barrier() or time.sleep(60))  # type: ignore[func-returns-value]
    ranks.barrier()
    os.kill(max(set(worker_pids()) - before), signal.SIGKILL)
    with pytest.raises(UserError, match="a worker process died .* --resume and --workers 1"):
        while True:  # the other one sleeps: closing the group ends it
            ranks.barrier()


@forks
def test_ranks_end_when_the_group_is_let_go() -> None:
    before = set(worker_pids())
    ranks = start_group(3, lambda r: time.sleep(60))
    assert len(set(worker_pids()) - before) == 2
    start = time.monotonic()
    del ranks
    assert set(worker_pids()) == before and time.monotonic() - start < 30


@forks
@pytest.mark.parametrize("waiting", ["r.barrier()", "time.sleep(0.5); r.barrier()"])
def test_ranks_end_when_rank_0_is_killed(waiting: str) -> None:
    code = (
        "import time; from tinyforge.parallel import start_group\n"
        "from tinyforge.backends.workers import worker_pids\n"
        f"def follow(r): {waiting}\n"
        "group = start_group(4, follow); print(*worker_pids(), flush=True); time.sleep(60)"
    )
    die_with_their_maker(code)
