"""A group of ranks and its collectives, as data-parallel training uses them.

Every rank calls the same collectives in the same order with arrays of the same shape and dtype, and each call works in
place (hence the underscore). Sums are taken in the order of the ranks, so they have the same bits on every run.

    group = start_group(4, follow)      this process is rank 0; ranks 1 to 3 run follow(group)
    group.all_reduce_(gradients)        every rank now has the sum

A call that does not match the others' raises RuntimeError on every rank. A rank that has died is noticed by all who
wait for it: they wait on a pipe, whose other end closes with the process. Nothing waits forever.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from threading import Thread
from typing import Any, Protocol

import numpy as np

from tinyforge.backends.workers import ADVICE, CAN_FORK, fork, shared_zeros
from tinyforge.errors import UserError

Array = Any  # numpy.ndarray; of the group of one cupy.ndarray too
SLOT = 4 << 20  # bytes of a collective that are under way at a time


class Group(Protocol):
    """`size` ranks, of which this is number `rank`.

    Arrays are C-contiguous NumPy arrays; `Alone` takes any. Raises ValueError for another layout,
    RuntimeError where the ranks' calls do not match, UserError where a rank has died.
    """

    rank: int
    size: int

    def all_reduce_(self, array: Array) -> None:
        """array = the sum of all ranks' arrays, added in the order of the ranks."""

    def reduce_scatter_(self, array: Array) -> None:
        """array[part_of(rank, size, len)] = that part of the sum, in the flat array; the rest is as it was."""

    def all_gather_(self, array: Array) -> None:
        """Each rank brings its part of the flat array, `part_of`, and gets the others'."""

    def broadcast_(self, array: Array) -> None:
        """array = that of rank 0."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Let the other ranks go. Called on rank 0; without it they go when nothing refers to the group."""


def part_of(rank: int, size: int, count: int) -> slice:
    """Which of `count` things are rank's: parts in order, whose sizes differ by at most one."""
    return slice(count * rank // size, count * (rank + 1) // size)


class Alone:
    """The group of one, which has nobody to talk to. Its arrays may be a device's."""

    rank, size = 0, 1

    def all_reduce_(self, array: Array) -> None:
        pass

    reduce_scatter_ = all_gather_ = broadcast_ = all_reduce_

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class SharedMemory:
    """Ranks on one machine that share memory: forked processes, or threads.

    Rank 0 has a pipe to each of the others. They meet by saying over the pipe what they are about to do; rank 0
    compares it and lets them all go on. The data goes through `slots`: a row of memory for each rank, one for the
    result. A sum is shared out: each rank adds up its own part of it.
    """

    def __init__(self, rank: int, pipes: Sequence[Connection], slots: np.ndarray) -> None:
        """pipes: of rank 0, to the others in their order; of another rank, to rank 0. slots: (size + 1, SLOT) bytes."""
        self.rank, self.size = rank, len(slots) - 1
        self._pipes, self._slots = pipes, slots
        self.close: Callable[[], Any] = partial(_close, pipes)

    def all_reduce_(self, array: np.ndarray) -> None:
        self._reduce(_flat(array), "all_reduce_", array)

    def reduce_scatter_(self, array: np.ndarray) -> None:
        flat = _flat(array)
        total = flat.copy()
        self._reduce(total, "reduce_scatter_", array)
        own = part_of(self.rank, self.size, flat.size)
        flat[own] = total[own]

    def all_gather_(self, array: np.ndarray) -> None:
        flat = _flat(array)
        for start, result, _ in self._pieces(flat, "all_gather_", array):
            own = part_of(self.rank, self.size, flat.size)
            low, high = max(own.start, start), min(own.stop, start + result.size)
            if low < high:
                result[low - start : high - start] = flat[low:high]
            self.barrier()
            flat[start : start + result.size] = result

    def broadcast_(self, array: np.ndarray) -> None:
        flat = _flat(array)
        for start, result, _ in self._pieces(flat, "broadcast_", array):
            if self.rank == 0:
                result[...] = flat[start : start + result.size]
            self.barrier()
            flat[start : start + result.size] = result

    def barrier(self) -> None:
        self._meet(("barrier",))

    def _reduce(self, flat: np.ndarray, what: str, array: np.ndarray) -> None:
        for start, result, slots in self._pieces(flat, what, array):
            slots[self.rank][...] = flat[start : start + result.size]
            self.barrier()
            own = part_of(self.rank, self.size, result.size)
            np.add(slots[0][own], slots[1][own], out=result[own])
            for other in slots[2:]:
                result[own] += other[own]
            self.barrier()
            flat[start : start + result.size] = result

    def _pieces(self, flat: np.ndarray, what: str, array: np.ndarray) -> Any:
        """Parts of `flat` that fit a slot: (start, the result's memory, the ranks' memory), after all ranks agree.

        Meeting before each piece also keeps a fast rank from overwriting memory that a slow one still reads.
        """
        count = max(1, SLOT // flat.itemsize)
        for start in range(0, max(1, flat.size), count):
            self._meet((what, array.shape, str(array.dtype)))
            used = min(count, flat.size - start) * flat.itemsize
            rows = self._slots[:, :used].view(flat.dtype)
            yield start, rows[-1], rows[:-1]

    def _meet(self, what: tuple[Any, ...]) -> None:
        """Go on when every rank is about to do `what`."""
        if self.rank:
            try:
                self._pipes[0].send(what)
                verdict = self._pipes[0].recv()
            except (EOFError, OSError):  # rank 0 has gone, and with it who would want to know
                raise SystemExit from None
        else:
            verdict = _mismatch([what, *self._calls()])
            for pipe in self._pipes:
                with suppress(OSError):  # who has gone since is noticed at the next meeting
                    pipe.send(verdict)
        if verdict:
            raise RuntimeError(verdict)

    def _calls(self) -> list[tuple[Any, ...]]:
        """What the other ranks are about to do. Raises what one of them raised, or UserError, as soon as one has ended,
        while others still compute; they are let go then."""
        calls: dict[Connection, tuple[Any, ...]] = {}
        try:
            while waiting := [pipe for pipe in self._pipes if pipe not in calls]:
                for pipe in wait(waiting):
                    assert isinstance(pipe, Connection)
                    call: Any = pipe.recv()
                    if isinstance(call, BaseException):
                        raise call
                    calls[pipe] = call
        except (EOFError, OSError) as error:
            self.close()
            raise UserError(f"a worker process died (the kernel kills one when memory runs out); {ADVICE}") from error
        except BaseException:
            self.close()
            raise
        return [calls[pipe] for pipe in self._pipes]


def start_group(size: int, follow: Callable[[Group], None]) -> Group:
    """A group of `size` whose rank 0 is this process. Each other rank runs follow(group) in a forked process, or where
    that is not possible in a thread; an exception there is raised here by the next collective."""
    if size == 1:
        return Alone()
    slots = shared_zeros((size + 1, SLOT), np.dtype(np.uint8))
    pipes: list[Connection] = []
    ends: list[Callable[[], None]] = []
    for rank in range(1, size):
        run = partial(_follower, rank, slots, follow, tuple(pipes) if CAN_FORK else ())
        pipe, end = (fork if CAN_FORK else _thread)(run)
        pipes.append(pipe)
        ends.append(end)
    group = SharedMemory(0, pipes, slots)
    group.close = weakref.finalize(group, _close_all, ends)
    return group


def send_object(group: Group, value: Any = None) -> Any:
    """Rank 0's value, on every rank; pickled on the way. The others call it without one."""
    if group.size == 1:
        return value
    data = np.frombuffer(pickle.dumps(value) if group.rank == 0 else b"", np.uint8)
    size = np.array([data.size])
    group.broadcast_(size)
    data = data.copy() if group.rank == 0 else np.empty(size[0], np.uint8)
    group.broadcast_(data)
    return value if group.rank == 0 else pickle.loads(data.tobytes())


def _follower(
    rank: int, slots: np.ndarray, follow: Callable[[Group], None], others: Sequence[Connection], pipe: Connection
) -> None:
    """The life of a rank above 0. others: rank 0's ends of older pipes, which a fork has copied: while they are open
    here, the ranks behind them would not learn that rank 0 has died."""
    _close(others)
    try:
        follow(SharedMemory(rank, [pipe], slots))
    except SystemExit:
        pass
    except Exception as error:
        with suppress(OSError):
            pipe.send(error)
    finally:
        pipe.close()


def _thread(run: Callable[[Connection], None]) -> tuple[Connection, Callable[[], None]]:
    """`backends.workers.fork` with a thread, which ends at its next collective."""
    ours, theirs = Pipe()
    Thread(target=run, args=(theirs,), daemon=True).start()
    return ours, ours.close


def _close(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.close()


def _close_all(ends: Sequence[Callable[[], None]]) -> None:
    for end in ends:
        end()


def _mismatch(calls: Sequence[tuple[Any, ...]]) -> str:
    """What is wrong with the ranks' calls; empty where they agree."""
    odd = next((rank for rank, call in enumerate(calls) if call != calls[0]), None)
    if odd is None:
        return ""
    return (
        f"group: rank 0 calls {_shown(calls[0])}, rank {odd} {_shown(calls[odd])}; all ranks must make the same calls"
    )


def _shown(call: tuple[Any, ...]) -> str:
    return call[0] if len(call) == 1 else f"{call[0]} with {call[1]} {call[2]}"


def _flat(array: np.ndarray) -> np.ndarray:
    """The array as one row, without a copy."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("group: a collective works in place: it wants a NumPy array, C-contiguous and writeable")
    return array.reshape(-1)
