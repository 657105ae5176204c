"""One function on all cores: results in order, errors passed on, and nobody left waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinyforge.backends.workers import CAN_FORK, ThreadWorker, worker_pids
from tinyforge.errors import UserError
from tinyforge.tokenizers import parallel
from tinyforge.tokenizers.parallel import FEW, ordered_map

ROOT = Path(__file__).resolve().parents[2]
forks = pytest.mark.skipif(not CAN_FORK, reason="this system cannot fork workers safely; it uses threads")


class Summing:
    """A function with a state, as an encoder with its memory is."""

    def __init__(self) -> None:
        self.calls = 0

    def add(self, item: int) -> tuple[int, int, int]:
        self.calls += 1
        time.sleep(0.001 * (item % 3))  # so that they do not end in the order they began
        return item * item, self.calls, os.getpid()


@pytest.fixture(params=["processes", "threads"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "processes" and not CAN_FORK:
        pytest.skip("this system cannot fork workers safely")
    if request.param == "threads":
        monkeypatch.setattr(parallel, "CAN_FORK", False)
        monkeypatch.setattr(parallel, "Worker", ThreadWorker)
    return str(request.param)


@pytest.mark.parametrize("workers", [None, 1, 2, 5])
def test_results_come_in_order(workers: int | None, kind: str) -> None:
    for count in (0, 1, 2, FEW, FEW + 1, 40):
        results = list(ordered_map(Summing().add, iter(range(count)), workers))
        assert [square for square, _, _ in results] == [item * item for item in range(count)]
    assert not worker_pids()


def test_each_worker_has_its_own_state_which_starts_as_that_of_the_first_item(kind: str) -> None:
    summing = Summing()
    calls = [calls for _, calls, _ in ordered_map(summing.add, range(9), 2)]
    assert summing.calls == 1
    assert calls == [1, 2, 2, 3, 3, 4, 4, 5, 5]


@forks
def test_few_items_start_no_process() -> None:
    for count, workers in ((FEW - 1, 2), (50, 1)):
        assert {pid for _, _, pid in ordered_map(Summing().add, range(count), workers)} == {os.getpid()}
    assert len({pid for _, _, pid in ordered_map(Summing().add, range(50), 2)}) == 3  # the first item is done here


def test_no_item_is_taken_before_a_worker_is_free(kind: str) -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    for done, _ in enumerate(ordered_map(abs, items(), 3)):
        assert len(taken) <= done + 1 + FEW
    assert len(taken) == 100


def test_errors_are_passed_on(kind: str) -> None:
    found = []
    with pytest.raises(ZeroDivisionError):
        for result in ordered_map(lambda item: 1 // (item - 7), range(20), 2):
            found.append(result)
    assert len(found) == 7

    def broken() -> Iterator[int]:
        yield from range(10)
        raise UserError("the input is damaged")

    with pytest.raises(UserError, match="the input is damaged"):
        list(ordered_map(abs, broken(), 2))
    with pytest.raises(UserError, match="workers: got 0, expected 1 or more"):
        list(ordered_map(abs, range(3), 0))
    assert not worker_pids()


def test_letting_go_ends_the_workers(kind: str) -> None:
    results = ordered_map(abs, iter(int, 1), 2)
    for _ in range(10):
        next(results)
    assert bool(worker_pids()) == (kind == "processes")
    results.close()  # type: ignore[attr-defined]
    assert not worker_pids()


@forks
def test_a_worker_that_is_killed_is_an_error_and_not_a_hang() -> None:
    results = ordered_map(abs, iter(int, 1), 2)
    next(results)
    next(results)
    os.kill(worker_pids()[0], signal.SIGKILL)
    with pytest.raises(UserError) as caught:
        for _ in range(10):
            next(results)
    assert str(caught.value).startswith("a worker process died") and "one worker" in str(caught.value)
    assert "\n" not in str(caught.value) and "checkpoint" not in str(caught.value)
    assert not worker_pids()


@forks
def test_ctrl_c_leaves_no_process_and_no_traceback_of_one() -> None:
    program = (
        "import time\n"
        "from tinyforge.backends.workers import worker_pids\n"
        "from tinyforge.errors import run_command\n"
        "from tinyforge.tokenizers.parallel import ordered_map\n"
        "def main():\n"
        "    for result in ordered_map(time.sleep, [0] * 10 + [60] * 10, 2):\n"
        "        print(*worker_pids(), flush=True)\n"
        "run_command(main)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # its own group, so that all of them get the signal, as from a terminal
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        pids: list[str] = []
        for _ in range(5):
            pids = process.stdout.readline().split() or pids
        os.killpg(process.pid, signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 130
        assert process.stderr.read() == "\nstopped\n"
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
