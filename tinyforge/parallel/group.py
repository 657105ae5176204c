"""A group of ranks and its collectives, as data-parallel training uses them.

Every rank calls the same collectives in the same order with arrays of the same shape and dtype, and each call works in
place (hence the underscore). Sums are taken in the order of the ranks, so they have the same bits on every run.

    group = start_group(4, follow)      this process is rank 0; ranks 1 to 3 run follow(group)
    group.all_reduce_(gradients)        every rank now has the sum

If the ranks' calls do not match, every rank raises RuntimeError, and a rank that has died or hangs is named (star.py).
Nothing waits forever. This module has the group of one process and that of one machine's forked workers; `mpi.py` and
`nccl.py` have the groups of processes with memory of their own, which `launch.py` starts and finds.
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
from tinyforge.parallel.star import ControlChannel
from tinyforge.parallel.sums import add_

Array = Any  # numpy.ndarray; of the groups of one and of NCCL cupy.ndarray too
SLOT = 4 << 20  # bytes of a collective that are in flight at a time


class Group(Protocol):
    """`size` ranks, of which this is number `rank`.

    shares: whether the ranks share the memory of the weights, as forked workers do. overlaps: collectives return when
    they are started, and run concurrently with other work until `join`.

    Arrays are C-contiguous: NumPy's, or CuPy's for NCCL's group; `Alone` takes any. Raises ValueError for another
    layout, RuntimeError if the ranks' calls do not match, `star.Lost` if a rank has died or hangs.

    spares: multiprocessors that the ops' kernels leave to the collectives.

    tree: add in the order of a binary tree over the ranks, ((r0 + r1) + (r2 + r3)), not one after the other; the number
    of ranks must be a power of two. unit: the parts of a flat array are multiples of `unit` elements.
    """

    rank: int
    size: int
    shares: ClassVar[bool]
    overlaps: ClassVar[bool]

    @property
    def reserved_sms(self) -> int: ...

    def alloc_registered(self, count: int, dtype: Any, tree: bool = False) -> Array | None:
        """Zeros, (count,), in memory that makes collectives faster; None if there is no such memory. tree: whether it
        will be summed as a tree. All ranks call it."""

    def all_reduce_(self, array: Array, tree: bool = False) -> None:
        """array = the sum of all ranks' arrays, added in the order of the ranks."""

    def reduce_scatter_(self, array: Array, tree: bool = False, unit: int = 1) -> None:
        """array[part_of(rank, size, len, unit)] = that part of the sum, in the flat array; the rest is undefined."""

    def all_gather_(self, array: Array, unit: int = 1) -> None:
        """Each rank sends its part of the flat array, `part_of`, and gets the others' parts."""

    def broadcast_(self, array: Array) -> None:
        """array = rank 0's."""

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def send_object(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank; it is pickled. The others call it without a value."""

    def gather_objects(self, value: Any) -> Any:
        """On rank 0 a list of all ranks' values; they are pickled."""

    def mark(self) -> Any:
        """The current place among the collectives, for `join`."""

    def join(self, mark: Any = None) -> None:
        """Later work waits for the collectives called so far, or for those before the mark."""

    def after(self, work: Callable[[], Any]) -> None:
        """Run work() after the collectives called so far; other work does not wait for it."""

    def captured(self, capture: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """capture(), which returns a function that launches a captured graph, collectives included. All ranks call it,
        and launch together."""

    def forget(self) -> None:
        """Drop captured graphs: NCCL cannot shut down while a graph holds its calls."""

    def be_patient(self, seconds: float) -> None:
        """A rank may keep the others waiting for `seconds`; after that it counts as lost."""

    def name(self, rank: int) -> str:
        """The rank and its host, for messages."""

    def close(self) -> None:
        """End the other ranks. Called on rank 0; otherwise they end when nothing refers to the group."""


def part_of(rank: int, size: int, count: int, unit: int = 1) -> slice:
    """The rank's part of range(count): parts in order, whose sizes differ by at most one `unit`; count is a multiple of
    `unit`."""
    units = count // unit
    return slice(unit * (units * rank // size), unit * (units * (rank + 1) // size))


def summed(rows: Sequence[Array], tree: bool, out: Array, add: Callable[[Array, Array], None] = add_) -> None:
    """out = the sum of the ranks' rows, from the first to the last or as a binary tree. The rows may be overwritten.
    add(out, x): out += x."""
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
    """Base of groups whose collectives are finished when they return."""

    overlaps: ClassVar = False
    reserved_sms: ClassVar = 0

    def _nothing(self, *arguments: Any, **named: Any) -> None:
        """What a call does where there is nothing to do."""

    alloc_registered = mark = join = forget = _nothing

    def after(self, work: Callable[[], Any]) -> None:
        work()

    def captured(self, capture: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        return capture()


class Meeting:
    """Base of groups whose ranks talk over a star: the calls that are only a meeting."""

    _star: ControlChannel

    def barrier(self) -> None:
        self._meet("barrier")

    def send_object(self, value: Any = None) -> Any:
        return self._meet("send_object", value)

    def gather_objects(self, value: Any) -> Any:
        return self._meet("gather_objects", bring=value)

    def be_patient(self, seconds: float) -> None:
        self._star.patience = seconds

    def name(self, rank: int) -> str:
        return self._star.names[rank]

    def _meet(self, what: str, payload: Any = None, bring: Any = None) -> Any:
        return self._star.rendezvous((what,), payload, bring)


class Alone(Finished):
    """The group of one process. Its arrays may be a device's.

    size: more than 1 only to forecast the memory of one rank among `size`, where nothing is computed.
    """

    rank = 0
    shares: ClassVar = False

    def __init__(self, size: int = 1) -> None:
        self.size = size

    all_reduce_ = reduce_scatter_ = all_gather_ = broadcast_ = barrier = be_patient = close = Finished._nothing

    def send_object(self, value: Any = None) -> Any:
        return value

    def gather_objects(self, value: Any) -> Any:
        return [value]

    def name(self, rank: int) -> str:
        return "this process"


class SharedMemory(Meeting, Finished):
    """Ranks on one machine that share memory: forked processes, or threads.

    Data goes through `slots`: a row of memory for each rank, and one for the result. Each rank computes its own part of
    a sum.
    """

    shares: ClassVar = True

    def __init__(self, rank: int, pipes: Sequence[Connection], slots: np.ndarray) -> None:
        """pipes: on rank 0 one to each other rank, in order; else one to rank 0. slots: (size + 1, SLOT) bytes."""
        self.rank, self.size = rank, len(slots) - 1
        self._slots = slots
        names = ["the run's process", *["a worker process"] * (self.size - 1)]
        self._star = ControlChannel(rank, pipes, names, lambda: ADVICE)
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

    def send_object(self, value: Any = None) -> Any:
        data = np.frombuffer(pickle.dumps(value) if self.rank == 0 else b"", np.uint8)
        size = np.array([data.size])
        self.broadcast_(size)
        data = data.copy() if self.rank == 0 else np.empty(size[0], np.uint8)
        self.broadcast_(data)
        # What is read comes from this run's own first process.
        return value if self.rank == 0 else pickle.loads(data.tobytes())  # noqa: S301 - of this process group

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
        """Parts of `flat` that fit a slot: (start, memory of the result, memory of the ranks), after all have agreed.

        Meeting before each part also keeps a fast rank from overwriting memory that a slow one still reads.
        """
        count = max(1, SLOT // flat.itemsize)
        for start in range(0, max(1, flat.size), count):
            self._star.rendezvous((what, array.shape, str(array.dtype)))
            used = min(count, flat.size - start) * flat.itemsize
            rows = self._slots[:, :used].view(flat.dtype)
            yield start, rows[-1], rows[:-1]

    def say(self, error: Exception) -> None:
        self._star.say(error)


def start_group(size: int, follow: Callable[[Group], None]) -> Group:
    """A group of `size` ranks whose rank 0 is this process. Each other rank runs follow(group) in a forked process, or
    in a thread where forking is not possible; the next collective here raises an exception of theirs."""
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
    """All that a rank above 0 does. others: rank 0's ends of older pipes, copied by the fork: while they are open
    here, the ranks at their other ends would not notice that rank 0 has died."""
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
    """The array as one row, a view."""
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable:
        raise ValueError("group: a collective works in place: it expects a NumPy array, C-contiguous and writeable")
    return array.reshape(-1)
