"""Workers answer in order, share memory, pass errors on, and never outlive the process that made them."""

import errno
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.workers import CAN_FORK, ForkedWorker, ThreadWorker, shared_zeros, worker_pids
from tinyforge.errors import UserError
from tinyforge.train.metrics import peak_memory_mib

forks = pytest.mark.skipif(not CAN_FORK, reason="this system cannot fork workers safely; it uses threads")
KINDS = [pytest.param(ForkedWorker, marks=forks), ThreadWorker]


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_sees_shared_memory_both_ways(kind: Any) -> None:
    array = shared_zeros((3, 4), np.dtype(np.float32))

    def double(times: int) -> float:
        array[...] *= times
        return float(array.sum())

    worker = kind(double)
    array[...] = 1  # after the worker was made
    for _ in range(2):
        worker.send(2)
        total = worker.receive()
    assert total == 48 and (array == 4).all()
    worker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_worker_is_raised_by_receive(kind: Any) -> None:
    worker = kind(lambda request: 1 // request)
    worker.send(0)
    with pytest.raises(ZeroDivisionError):
        worker.receive()
    worker.send(1)  # it is still there
    assert worker.receive() == 1
    worker.close()


@forks
def test_a_worker_that_was_killed_is_reported_with_the_fix() -> None:
    worker = ForkedWorker(time.sleep)
    worker.send(60)
    os.kill(worker_pids()[-1], signal.SIGKILL)
    with pytest.raises(UserError, match="a worker process died .* --resume and --workers 1"):
        worker.receive()


@forks
def test_ctrl_c_and_sigterm_are_left_to_the_caller() -> None:
    worker = ForkedWorker(lambda request: request)
    worker.send(1)
    worker.receive()  # its handlers are in place by now
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker_pids()[-1], number)
    worker.send(2)
    assert worker.receive() == 2


@forks
def test_a_worker_ends_when_it_is_let_go() -> None:
    before = set(worker_pids())
    worker = ForkedWorker(abs)
    (pid,) = set(worker_pids()) - before
    with_worker = peak_memory_mib()
    del worker
    assert set(worker_pids()) == before
    assert peak_memory_mib() < with_worker
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@forks
def test_letting_go_does_not_wait_for_work_under_way() -> None:
    worker = ForkedWorker(time.sleep)
    worker.send(60)
    start = time.monotonic()
    worker.close()
    assert time.monotonic() - start < 30


@forks
def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(UserError, match="cannot start a worker process: Resource .*unavailable; use fewer --w"):
        ForkedWorker(abs)
    assert set(os.listdir("/proc/self/fd")) == before


@forks
def test_workers_end_when_their_maker_is_killed() -> None:
    code = (
        "import time; from tinyforge.backends.workers import ForkedWorker, worker_pids\n"
        "workers = [ForkedWorker(abs) for _ in range(3)]; print(*worker_pids(), flush=True); time.sleep(60)"
    )
    die_with_their_maker(code)


def die_with_their_maker(code: str) -> None:
    """`code` starts three processes and prints their ids; it is killed, and they must end."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        pids = [int(word) for word in maker.stdout.readline().split()]
        maker.kill()
    assert len(pids) == 3
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlived the process that made them"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process runs; a zombie, which nobody has reaped yet, does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@forks
def test_a_forked_child_maps_without_its_parents_threads() -> None:
    backend = get_backend("numpy", workers=2)
    assert backend.map(abs, [-1, -2, -3]) == [1, 2, 3]  # starts the thread
    worker = ForkedWorker(lambda items: backend.map(abs, items))
    worker.send([-4, -5])
    assert worker.receive() == [4, 5]
    worker.close()


def test_map_waits_for_all_even_where_the_caller_is_interrupted() -> None:
    done = []

    def work(seconds: float) -> None:
        if not seconds:
            raise KeyboardInterrupt
        time.sleep(seconds)
        done.append(seconds)

    with pytest.raises(KeyboardInterrupt):
        get_backend("numpy", workers=3).map(work, [0.0, 0.05, 0.1])
    assert done == [0.05, 0.1]
