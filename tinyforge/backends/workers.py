"""Workers that compute in parallel with the caller: forked processes, or threads where a process cannot be forked.

Why processes: NumPy releases the interpreter lock inside an array function and takes it again at its end, about a
thousand times in a training step. With two threads the elementwise half of a step was a third slower than with two
processes (docs/performance.md).
"""

from __future__ import annotations

import mmap
import os
import platform
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError

_pids: set[int] = set()  # forked and not yet ended

# For the user of a training run in which a worker dies.
ADVICE = "a checkpoint that was saved is intact: continue with --resume and --workers 1 or a smaller --batch-size"

# On macOS a forked child may not call the system's libraries, BLAS among them; Windows has no fork.
CAN_FORK = sys.platform == "linux"


def cores() -> int:
    """CPU cores that this process may use: the default number of workers everywhere."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    """The CPU's name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def shared_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros in memory that forked workers share: each process sees what the others write."""
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, max(1, count * dtype.itemsize)), dtype, count).reshape(shape)


def worker_pids() -> list[int]:
    """The process ids of the workers that are running."""
    return sorted(_pids)


def fork(run: Callable[[Connection], Any]) -> tuple[Connection, Callable[[], None]]:
    """Start a child process that calls run(pipe) and exits; returns our end of the pipe, and a function that ends the
    child.

    The child has copies of all objects as they are now; arrays of `shared_zeros` stay shared. Each end of the pipe
    closes when its process ends, however it ends, and the reader of the other end sees that. Raises UserError if the
    system starts no more processes.
    """
    ours, theirs = Pipe()
    try:
        pid = os.fork()
    except OSError as error:  # a limit on processes, of a container say, or on memory
        ours.close()
        theirs.close()
        raise UserError(
            f"cannot start a worker process: {error.strerror}; use fewer --workers, or raise the limit on "
            "processes or memory"
        ) from error
    if pid == 0:
        ours.close()
        _live(run, theirs)
    theirs.close()
    _pids.add(pid)
    return ours, partial(_end, ours, pid)


def _live(run: Callable[[Connection], Any], pipe: Connection) -> None:
    """All that the child does. It leaves by _exit: the caller's buffered output and exit handlers are not its own."""
    # Ctrl-C reaches every process of a terminal; the caller finishes the step and then ends the child.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        run(pipe)
    finally:
        os._exit(0)


def _end(pipe: Connection, pid: int) -> None:
    pipe.close()
    _pids.discard(pid)
    os.kill(pid, signal.SIGKILL)  # it may be in the middle of a long step whose result is not needed any more
    os.waitpid(pid, 0)


def on_all_cores(work: Callable[[Any], None], tasks: Sequence[Any], least: int = 1) -> None:
    """work(task) for every task, with a process for each core; the results go into arrays of `shared_zeros`.

    least: the fewest tasks that are worth a process. Without fork all tasks run here, one after the other.
    """
    count = max(1, min(cores(), len(tasks) // least)) if CAN_FORK else 1

    def take(first: int) -> None:
        for task in tasks[first::count]:
            work(task)

    helpers = [ForkedWorker(take, "start again with less memory in use") for _ in range(1, count)]
    for number, helper in enumerate(helpers, start=1):
        helper.send(number)
    take(0)
    for helper in helpers:
        helper.receive()
        helper.close()


class ForkedWorker:
    """A child process that answers each request with answer(request), in order.

    It ends when the caller drops this object or dies, because the pipe closes then. If it dies itself, the error
    message ends with `advice`.
    """

    def __init__(self, answer: Callable[[Any], Any], advice: str = ADVICE) -> None:
        self._advice = advice
        self._pipe, end = fork(partial(_serve, answer))
        self.close = weakref.finalize(self, end)

    def send(self, request: Any) -> None:
        self._talk(self._pipe.send, request)

    def receive(self) -> Any:
        result = self._talk(self._pipe.recv)
        if isinstance(result, BaseException):
            raise result
        return result

    def _talk(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except (EOFError, OSError) as error:
            raise UserError(
                f"a worker process died (the kernel kills one when memory runs out); {self._advice}"
            ) from error


def _serve(answer: Callable[[Any], Any], pipe: Connection) -> None:
    while True:
        request = pipe.recv()
        try:
            result = answer(request)
        except Exception as error:
            result = error
        pipe.send(result)


class ThreadWorker:
    """The same on a thread, which cannot die on its own."""

    def __init__(self, answer: Callable[[Any], Any], advice: str = ADVICE) -> None:
        self._answer = answer
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[Any] | None = None
        self.close = self._pool.shutdown

    def send(self, request: Any) -> None:
        self._pending = self._pool.submit(self._answer, request)

    def receive(self) -> Any:
        assert self._pending is not None, "receive without send"
        return self._pending.result()


Worker = ForkedWorker if CAN_FORK else ThreadWorker
