"""A group of ranks and its collectives, as data-parallel training uses them.

Every rank calls the same collectives in the same order with arrays of the same shape and dtype, and each call works in
place (hence the underscore). Sums are taken in the order of the ranks, so they have the same bits on every run.

    group = start_group(4, follow)      this process is rank 0; ranks 1 to 3 run follow(group)
    group.all_reduce_(gradients)        every rank now has the sum

A call that does not match the others' raises RuntimeError on every rank, and a rank that has died or hangs is named
(star.py). Nothing waits forever. Here are this process alone and the forked workers of one machine; `mpi.py` and
`nccl.py` have the groups of processes with memory of their own, `launch.py` starts and finds those.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from threading import Thread
from typing import Any, ClassVar, Protocol

import numpy as np

from tinyforge.backends.workers import ADVICE, CAN_FORK, fork, shared_zeros
from tinyforge.parallel.star import Star
from tinyforge.parallel.sums import add_

Array = Any  # numpy.ndarray; of the groups of one and of NCCL cupy.ndarray too
SLOT = 4 << 20  # bytes of a collective that are under way at a time


class Group(Protocol):
    """`size` ranks, of which this is number `rank`.

    shares: the ranks share the memory of weights (forked workers), or each has its own. overlaps: collectives only
    start when they are called, and run beside what is computed until `join`.

    Arrays are C-contiguous NumPy arrays, those of NCCL's group CuPy's; `Alone` takes any. Raises ValueError for another
    layout, RuntimeError where the ranks' calls do not match, `star.Lost` where a rank has died or hangs.

    spares: multiprocessors that the ops' kernels are to leave to the collectives.

    tree: add in the order of a binary tree over the ranks, ((r0 + r1) + (r2 + r3)), not one after the other; the number
    of ranks is then a power of two. unit: the parts of a flat array are multiples of so many elements.
    """

    rank: int
    size: int
    shares: ClassVar[bool]
    overlaps: ClassVar[bool]

    @property
    def spares(self) -> int: ...

    def reachable(self, count: int, dtype: Any) -> Array | None:
        """Zeros, (count,), in memory where collectives are faster; None where there is no such memory. All ranks call
        it."""

    def all_reduce_(self, array: Array, tree: bool = False) -> None:
        """array = the sum of all ranks' arrays, added in the order of the ranks."""

    def reduce_scatter_(self, array: Array, tree: bool = False, unit: int = 1) -> None:
        """array[part_of(rank, size, len, unit)] = that part of the sum, in the flat array; the rest is undefined."""

    def all_gather_(self, array: Array, unit: int = 1) -> None:
        """Each rank brings its part of the flat array, `part_of`, and gets the others'."""

    def broadcast_(self, array: Array) -> None:
        """array = that of rank 0."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def send_object(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank; pickled on the way. The others call it without one."""

    def gather_objects(self, value: Any) -> Any:
        """On rank 0 a list of all ranks' values; pickled on the way."""

    def mark(self) -> Any:
        """This place among the collectives, for `join`."""

    def join(self, mark: Any = None) -> None:
        """What is computed from here on waits for the collectives that were called, or for those before the mark."""

    def after(self, work: Callable[[], Any]) -> None:
        """Compute something behind the collectives that were called, without what is computed elsewhere waiting."""

    def captured(self, capture: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """What capture() returns: a launch of what it captures in a graph, collectives among it. All ranks call it,
        and launch together."""

    def forget(self) -> None:
        """Drop what was captured: NCCL does not leave while a graph has its calls."""

    def be_patient(self, seconds: float) -> None:
        """A rank may keep the others waiting for so long; longer, and it counts as lost."""

    def name(self, rank: int) -> str:
        """The rank and its host, for messages."""

    def close(self) -> None:
        """Let the other ranks go. Called on rank 0; without it they go when nothing refers to the group."""


def part_of(rank: int, size: int, count: int, unit: int = 1) -> slice:
    """Which of `count` things are rank's: parts in order, whose sizes differ by at most one `unit`; count is a multiple
    of it."""
    units = count // unit
    return slice(unit * (units * rank // size), unit * (units * (rank + 1) // size))


def summed(
    rows: Sequence[Array], tree: bool, out: Array, add: Callable[[Array, Array], None] = add_
) -> None:
    """out = the sum of the rows, each rank's: from the first to the last, or as a binary tree. Rows other than out may
    be written to. add(out, x): out += x."""
    step = 1 if tree else len(rows)
    rows = list(rows)
    while tree and step < len(rows):
        for first in range(0, len(rows), 2 * step):
            add(rows[first], rows[first + step])
        step *= 2
    out[...] = rows[0]
    for row in () if tree else rows[1:]:
        add(out, row)


class Finished:
    """Of a group whose collectives are over when they return, wherever an array lies."""

    overlaps: ClassVar = False
    spares: ClassVar = 0

    def reachable(self, count: int, dtype: Any) -> Array | None:
        return None

    def mark(self) -> Any:
        pass

    def join(self, mark: Any = None) -> None:
        pass

    def after(self, work: Callable[[], Any]) -> None:
        work()

    def captured(self, capture: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        return capture()

    def forget(self) -> None:
        pass


class Alone(Finished):
    """The group of one, which has nobody to talk to. Its arrays may be a device's.

    size: more than one only for a forecast of what a rank of so many needs, where nothing is computed.
    """

    rank = 0
    shares: ClassVar = False

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def all_reduce_(self, array: Array, tree: bool = False) -> None:
        pass

    def reduce_scatter_(self, array: Array, tree: bool = False, unit: int = 1) -> None:
        pass

    def all_gather_(self, array: Array, unit: int = 1) -> None:
        pass

    def broadcast_(self, array: Array) -> None:
        pass

    def barrier(self) -> None:
        pass

    def send_object(self, value: Any = None) -> Any:
        return value

    def gather_objects(self, value: Any) -> Any:
        return [value]

    def be_patient(self, seconds: float) -> None:
        pass

    def name(self, rank: int) -> str:
        return "this process"

    def close(self) -> None:
        pass


class SharedMemory(Finished):
    """Ranks on one machine that share memory: forked processes, or threads.

    The data goes through `slots`: a row of memory for each rank, one for the result. A sum is shared out: each rank
    adds up its own part of it.
    """

    shares: ClassVar = True

    def __init__(self, rank: int, pipes: Sequence[Connection], slots: np.ndarray) -> None:
        """pipes: of rank 0, to the others in their order; of another rank, to rank 0. slots: (size + 1, SLOT) bytes."""
        self.rank, self.size = rank, len(slots) - 1
        self._slots = slots
        self._star = Star(rank, pipes, ["the run's process", *["a worker process"] * (self.size - 1)], ADVICE)
        self.close: Callable[[], Any] = partial(_close, pipes)
        self._star.on_loss = lambda: self.close()

    def all_reduce_(self, array: np.ndarray, tree: bool = False) -> None:
        self._reduce(_flat(array), "all_reduce_", array, tree)

    def reduce_scatter_(self, array: np.ndarray, tree: bool = False, unit: int = 1) -> None:
        flat = _flat(array)
        total = flat.copy()
        self._reduce(total, "reduce_scatter_", array, tree)
        own = part_of(self.rank, self.size, flat.size, unit)
        flat[own] = total[own]

    def all_gather_(self, array: np.ndarray, unit: int = 1) -> None:
        flat = _flat(array)
        for start, result, _ in self._pieces(flat, "all_gather_", array):
            own = part_of(self.rank, self.size, flat.size, unit)
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
        self._star.meet(("barrier",))

    def send_object(self, value: Any = None) -> Any:
        data = np.frombuffer(pickle.dumps(value) if self.rank == 0 else b"", np.uint8)
        size = np.array([data.size])
        self.broadcast_(size)
        data = data.copy() if self.rank == 0 else np.empty(size[0], np.uint8)
        self.broadcast_(data)
        return value if self.rank == 0 else pickle.loads(data.tobytes())

    def gather_objects(self, value: Any) -> Any:
        return self._star.meet(("gather_objects",), bring=value)

    def be_patient(self, seconds: float) -> None:
        self._star.patience = seconds

    def name(self, rank: int) -> str:
        return f"worker {rank}"

    def _reduce(self, flat: np.ndarray, what: str, array: np.ndarray, tree: bool) -> None:
        for start, result, slots in self._pieces(flat, what, array):
            slots[self.rank][...] = flat[start : start + result.size]
            self.barrier()
            own = part_of(self.rank, self.size, result.size)
            summed([slot[own] for slot in slots], tree, result[own])
            self.barrier()
            flat[start : start + result.size] = result

    def _pieces(self, flat: np.ndarray, what: str, array: np.ndarray) -> Any:
        """Parts of `flat` that fit a slot: (start, the result's memory, the ranks' memory), after all ranks agree.

        Meeting before each piece also keeps a fast rank from overwriting memory that a slow one still reads.
        """
        count = max(1, SLOT // flat.itemsize)
        for start in range(0, max(1, flat.size), count):
            self._star.meet((what, array.shape, str(array.dtype)))
            used = min(count, flat.size - start) * flat.itemsize
            rows = self._slots[:, :used].view(flat.dtype)
            yield start, rows[-1], rows[:-1]

    def say(self, error: Exception) -> None:
        self._star.say(error)


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
    group._star.on_loss = group.close = weakref.finalize(group, _close_all, ends)
    return group


def _follower(
    rank: int, slots: np.ndarray, follow: Callable[[Group], None], others: Sequence[Connection], pipe: Connection
) -> None:
    """The life of a rank above 0. others: rank 0's ends of older pipes, which a fork has copied: while they are open
    here, the ranks behind them would not learn that rank 0 has died."""
    _close(others)
    group = SharedMemory(rank, [pipe], slots)
    try:
        follow(group)
    except SystemExit:
        pass
    except Exception as error:
        group.say(error)
    finally:
        pipe.close()


def _thread(run: Callable[[Connection], None]) -> tuple[Connection, Callable[[], None]]:
    """`backends.workers.fork` with a thread, which ends at its next collective."""
    ours, theirs = Pipe()
    Thread(target=run, args=(theirs,), daemon=True).start()
    return ours, ours.close


def _close(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        with suppress(OSError):
            pipe.close()


def _close_all(ends: Sequence[Callable[[], None]]) -> None:
    for end in ends:
        end()


def _flat(array: np.ndarray) -> np.ndarray:
    """The array as one row, without a copy."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("group: a collective works in place: it wants a NumPy array, C-contiguous and writeable")
    return array.reshape(-1)
