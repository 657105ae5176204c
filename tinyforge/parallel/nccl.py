"""NCCL ranks: a process for each GPU, on one machine or many.

A collective is started on its own stream, after the work that is queued so far, and returns at once. Later work runs
concurrently until `join` makes it wait. So the gradients of the last layers are summed while backward still computes
those of the first (docs/parallel.md).

NCCL's kernels occupy multiprocessors that the ops' kernels need, so they get few blocks. On one host gradients and
weights lie in **windows** (windows_cuda.py): there a block of NCCL's moves more, and an all-gather is made of copies by
the GPU's copy engines, which occupy no multiprocessor.

The ranks' processes talk over lines (star.py). A collective does not wait for a meeting; the calls since the last
meeting are compared at the next. The watch notices a rank that dies or hangs in between (watch.py).

`Engine` is the part of NCCL and CUDA that is used; the tests have one that computes on NumPy arrays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from tinyforge.errors import UserError
from tinyforge.parallel.group import Array, Meeting, part_of, summed
from tinyforge.parallel.star import Call, ControlChannel
from tinyforge.parallel.sums import add_
from tinyforge.parallel.watch import Watch

if TYPE_CHECKING:
    from tinyforge.parallel.windows_cuda import Windows

BLOCKS = 4
"""Blocks of NCCL's kernels unless NCCL_MAX_CTAS is set. Each occupies a multiprocessor, and a kernel made for all of
them then takes twice as long (`Backend.spare`). NCCL's default of 24 is faster, but nothing waits for a sum under
backward."""
MOST_SPARED = 8
FIRST_WITH_WINDOWS = 22800  # the library's version number: 2.28, the first that gathers by copies
TRIED = 1 << 12  # numbers from each rank in the first sum
PATIENCE = 20.0  # seconds for it
HIGHEST = -5  # stream priority; CUDA clamps it to the highest that the device has


def spared() -> int:
    """Number of multiprocessors left free for NCCL: its block count, or 0 above MOST_SPARED. Reserving more slows every
    kernel, which costs more than an occasional second wave during a collective."""
    return found if (found := blocks()) <= MOST_SPARED else 0


def windows_wanted() -> bool:
    """False if NCCL's own variable turns them off."""
    return os.environ.get("NCCL_WIN_ENABLE") != "0"


def blocks() -> int:
    """Blocks of NCCL's kernels."""
    said = os.environ.get("NCCL_MAX_CTAS", str(BLOCKS))
    if not said.isdecimal() or not 1 <= int(said) <= 64:
        raise UserError(
            f"NCCL_MAX_CTAS is {said!r}, expected a number of blocks from 1 to 64; leave it out for {BLOCKS}"
        )
    return int(said)


class Engine(Protocol):
    """NCCL's calls over C-contiguous arrays of one device, started on the communicator's stream, in order.

    has_windows: whether `window` can be called.
    """

    @property
    def has_windows(self) -> bool: ...

    def window(self, count: int, dtype: Any) -> Array:
        """Zeros, (count,), in a window. All ranks call it."""

    def all_reduce(self, array: Array) -> None: ...
    def reduce_scatter(self, array: Array, out: Array) -> None: ...
    def all_gather(self, part: Array, out: Array) -> None: ...
    def broadcast(self, array: Array, root: int) -> None: ...
    def reduce(self, array: Array, root: int) -> None: ...
    def send(self, array: Array, to: int) -> None: ...
    def receive(self, out: Array, source: int) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        """A group of calls: none waits for another."""

    def run(self, work: Callable[[], Any]) -> None:
        """Run work() on the communicator's stream."""

    def fork(self) -> None:
        """Make the communicator's stream wait for the work queued on the current one."""

    def mark(self) -> Any:
        """The current place on the communicator's stream."""

    def join(self, mark: Any = None) -> None:
        """Make the current stream wait for the communicator's, or for this place on it."""

    def done(self) -> Callable[[], bool]:
        """A function that tells, from any thread, whether everything started until now is finished."""

    def add(self, out: Array, x: Array) -> None:
        """out += x, rounded as IEEE 754 says, subnormal numbers included."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...
    def check(self) -> None: ...


class NCCLGroup(Meeting):
    """See `Group`. Arrays are the device's: CuPy's, C-contiguous."""

    shares: ClassVar = False
    overlaps: ClassVar = True

    def __init__(self, rank: int, size: int, engine: Engine, star: ControlChannel, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self._engine, self._star, self._watch = engine, star, watch
        self._calls: list[Call] = []
        self._capturing = False
        self._launches: list[list[Callable[[], None]]] = []
        watch.check = engine.check

    @property
    def reserved_sms(self) -> int:
        return spared()

    def alloc_registered(self, count: int, dtype: Any, tree: bool = False) -> Array | None:
        # The messages that trees of more than two ranks are made of hang in windows (NCCL 2.28.9).
        if not self._engine.has_windows or (tree and self.size > 2):
            return None
        self._calls.append(("reachable", count, str(np.dtype(dtype))))
        started = self._watch.begin("reachable")
        array = self._engine.window(count, dtype)
        started.done = lambda: True
        return array

    def all_reduce_(self, array: Array, tree: bool = False) -> None:
        flat = self._begin("all_reduce_", array)
        if tree and self.size > 2:
            self._sum(flat, 1)
            self._gather(flat, 1)
        elif flat.size:
            self._engine.all_reduce(flat)
        self._end()

    def reduce_scatter_(self, array: Array, tree: bool = False, unit: int = 1) -> None:
        flat = self._begin("reduce_scatter_", array)
        if tree and self.size > 2:
            self._sum(flat, unit)
        elif flat.size % (self.size * unit) == 0 and flat.size:
            self._engine.reduce_scatter(flat, flat[part_of(self.rank, self.size, flat.size, unit)])
        else:
            with self._engine.together():
                for rank in range(self.size):
                    if (part := flat[part_of(rank, self.size, flat.size, unit)]).size:
                        self._engine.reduce(part, rank)
        self._end()

    def all_gather_(self, array: Array, unit: int = 1) -> None:
        flat = self._begin("all_gather_", array)
        self._gather(flat, unit)
        self._end()

    def broadcast_(self, array: Array) -> None:
        flat = self._begin("broadcast_", array)
        if flat.size:
            self._engine.broadcast(flat, 0)
        self._end()

    def mark(self) -> Any:
        return self._engine.mark()

    def join(self, mark: Any = None) -> None:
        self._engine.join(mark)

    def after(self, work: Callable[[], Any]) -> None:
        self._engine.run(work)

    def captured(self, capture: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        self._capturing = True
        try:
            launch = capture()
        finally:
            self._capturing = False

        self._launches.append(held := [launch])

        def watched() -> None:
            self._calls.append(("a captured step",))
            started = self._watch.begin("a captured step")
            held[0]()
            self._engine.fork()
            started.done = self._engine.done()

        return watched

    def forget(self) -> None:
        while self._launches:
            self._launches.pop().clear()

    def be_patient(self, seconds: float) -> None:
        self._star.patience = self._watch.patience = seconds

    def close(self) -> None:
        """Nothing: `launch.joined` lets the other ranks go at the end of the run."""

    def _meet(self, what: str, payload: Any = None, bring: Any = None) -> Any:
        """Meet, and compare the calls since the last meeting too."""
        calls, self._calls = self._calls, []
        before = [f"after {', '.join(' '.join(map(str, call)) for call in calls)}"] if calls else []
        return self._star.rendezvous((what, *before), payload, bring)

    def _begin(self, what: str, array: Array) -> Array:
        if not array.flags.c_contiguous:
            raise ValueError("group: a collective works in place: it expects a C-contiguous array")
        self._calls.append((what, tuple(array.shape), str(array.dtype)))
        self._started = None if self._capturing else self._watch.begin(what)
        self._engine.fork()
        return array.reshape(-1)

    def _end(self) -> None:
        if self._started:
            self._started.done = self._engine.done()

    def _gather(self, flat: Array, unit: int) -> None:
        if flat.size % (self.size * unit) == 0 and flat.size:
            self._engine.all_gather(flat[part_of(self.rank, self.size, flat.size, unit)], flat)
            return
        with self._engine.together():
            for rank in range(self.size):
                if (part := flat[part_of(rank, self.size, flat.size, unit)]).size:
                    self._engine.broadcast(part, rank)

    def _sum(self, flat: Array, unit: int) -> None:
        """Replace the rank's own part by the sum of all ranks', added as a binary tree."""
        own = flat[part_of(self.rank, self.size, flat.size, unit)]
        rows = self._engine.empty((self.size, own.size), own.dtype)
        with self._engine.together():
            for rank in range(self.size):
                if rank != self.rank:
                    if (part := flat[part_of(rank, self.size, flat.size, unit)]).size:
                        self._engine.send(part, rank)
                    if own.size:
                        self._engine.receive(rows[rank], rank)

        def add() -> None:
            rows[self.rank] = own
            summed(list(rows), True, own, self._engine.add)

        self._engine.run(add)


class CupyEngine:
    """NCCL through CuPy. windows: whether they are expected; the first `window` shows whether the library has them."""

    def __init__(self, size: int, rank: int, token: bytes, windows: bool = False) -> None:
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl = cupy, nccl
        self._device = cupy.cuda.Device()
        names = ("float32", "float64", "bfloat16", "int32", "int64", "uint8")
        self._types = {name: getattr(nccl, f"NCCL_{name.upper()}") for name in names}
        os.environ["NCCL_MAX_CTAS"] = str(blocks())  # read by the library when it makes its first communicator
        if windows:
            os.environ["NCCL_NVLS_ENABLE"] = "0"  # windows would be bound to multicast, which is not needed here
            os.environ.setdefault("NCCL_CTA_POLICY", "2")  # zero CTA: gather by copies
        self._comm = nccl.NcclCommunicator(size, token, rank)
        self._windows: Windows | None = None
        if windows:
            from tinyforge.parallel.windows_cuda import Windows

            self._windows = Windows(self._comm.comm)
        # High priority: its blocks go before those of earlier kernels that still wait for a multiprocessor.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=HIGHEST)
        self._add = add_.bind(SimpleNamespace(name="cupy"))

    @property
    def has_windows(self) -> bool:
        return self._windows is not None

    def window(self, count: int, dtype: Any) -> Array:
        assert self._windows
        return self._windows.zeros(count, dtype)

    def give_up(self) -> None:
        """Abort the communicator, which may be broken."""
        self._windows = None
        self._comm.abort()

    def all_reduce(self, array: Array) -> None:
        at = array.data.ptr
        self._comm.allReduce(at, at, array.size, self._type(array), self._nccl.NCCL_SUM, self._stream.ptr)

    def reduce_scatter(self, array: Array, out: Array) -> None:
        self._comm.reduceScatter(
            array.data.ptr, out.data.ptr, out.size, self._type(array), self._nccl.NCCL_SUM, self._stream.ptr
        )

    def all_gather(self, part: Array, out: Array) -> None:
        self._comm.allGather(part.data.ptr, out.data.ptr, part.size, self._type(out), self._stream.ptr)

    def broadcast(self, array: Array, root: int) -> None:
        at = array.data.ptr
        self._comm.broadcast(at, at, array.size, self._type(array), root, self._stream.ptr)

    def reduce(self, array: Array, root: int) -> None:
        at = array.data.ptr
        self._comm.reduce(at, at, array.size, self._type(array), self._nccl.NCCL_SUM, root, self._stream.ptr)

    def send(self, array: Array, to: int) -> None:
        self._comm.send(array.data.ptr, array.size, self._type(array), to, self._stream.ptr)

    def receive(self, out: Array, source: int) -> None:
        self._comm.recv(out.data.ptr, out.size, self._type(out), source, self._stream.ptr)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    def run(self, work: Callable[[], Any]) -> None:
        with self._stream:
            work()

    def fork(self) -> None:
        self._stream.wait_event(self._event(self._cupy.cuda.get_current_stream()))

    def mark(self) -> Any:
        return self._event(self._stream)

    def join(self, mark: Any = None) -> None:
        self._cupy.cuda.get_current_stream().wait_event(mark or self.mark())

    def _event(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event

    def done(self) -> Callable[[], bool]:
        event = self.mark()

        def ask() -> bool:
            self._device.use()  # a thread begins on GPU 0
            return event.done

        return ask

    def add(self, out: Array, x: Array) -> None:
        if out.dtype.kind == "f":
            self._add(out, x)
        else:
            out += x

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        with self._stream:  # the pool hands memory out by stream
            return self._cupy.empty(shape, dtype)

    def check(self) -> None:
        self._comm.check_async_error()

    def _type(self, array: Array) -> int:
        return self._types[np.dtype(array.dtype).name]


def new_token() -> bytes:
    """NCCL's id, made by rank 0, by which the ranks find each other."""
    from cupy.cuda import nccl

    return nccl.get_unique_id()


def first_window(engine: Engine, size: int) -> tuple[Array, str]:
    """Memory for `first_sum` in a window, or the reason why there is none. All ranks call it."""
    try:
        return engine.window(2 * size * TRIED, np.float32), ""
    except (RuntimeError, UserError) as error:
        return None, str(error)


def first_sum(engine: Engine, window: Array, rank: int, size: int) -> str:
    """The reason why windows do not work here; empty if they do. All ranks call it."""
    total, gathered = window.reshape(2, -1)
    own = gathered.reshape(size, -1)[rank]
    total[...] = rank + 1
    own[...] = rank + 1
    try:
        engine.fork()
        engine.all_reduce(total)
        engine.all_gather(own, gathered)
    except (RuntimeError, UserError) as error:
        return str(error)
    over, until = engine.done(), time.monotonic() + PATIENCE
    while not over():
        if time.monotonic() > until:
            return f"the first sum has not ended after {PATIENCE:.0f} s"
        time.sleep(0.001)
    engine.join()
    right = all((of == r + 1).all() for r, of in enumerate(gathered.reshape(size, -1)))
    return "" if right and (total == size * (size + 1) // 2).all() else "the first sum in a window is wrong"


def no_windows(hosts: int) -> str:
    """The reason why ranks on `hosts` hosts cannot have windows; empty if they may."""
    from cupy.cuda import nccl

    if hosts > 1:
        return f"the ranks are on {hosts} hosts"
    if (version := nccl.get_version()) < FIRST_WITH_WINDOWS:
        return f"this NCCL is {version // 10000}.{version // 100 % 100}, 2.28 is the first that gathers by copies"
    return ""
