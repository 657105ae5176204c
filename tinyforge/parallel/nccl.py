"""NCCL ranks: a process for each GPU, on one machine or many.

A collective is started on a stream of its own, behind what has been asked of the device so far, and returns at once:
what is computed meanwhile runs beside it, until `join` makes the next work wait for it. So the gradients of the last
layers travel while backward still computes those of the first (docs/parallel.md).

A kernel of NCCL's holds multiprocessors that the ops' kernels miss: it has few blocks. With NCCL_CTA_POLICY=2 gradients
and weights travel by **copies** on one host: the arrays lie in windows (windows_cuda.py), NCCL hands an all-to-all or
an all-gather to the GPU's copy engines, and a kernel of ours adds what has come, in the order of the ranks.

The ranks' processes talk over lines (star.py). A collective of NCCL's does not wait for a meeting; what was called
since the last one is compared at the next. A rank that dies or hangs in between is for the watch to notice (watch.py).

`Engine` is all that is asked of NCCL and CUDA; the tests have one that computes on NumPy arrays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from tinyforge.errors import UserError
from tinyforge.parallel.group import Array, part_of, summed
from tinyforge.parallel.star import Call, Star
from tinyforge.parallel.sums import add_
from tinyforge.parallel.watch import Watch

if TYPE_CHECKING:
    from tinyforge.parallel.windows_cuda import Windows

BLOCKS = 4
"""Of NCCL's kernels where NCCL_MAX_CTAS does not say otherwise. Each holds a multiprocessor, and kernels that are made
for all of them take twice their time (`Backend.spare`). NCCL by itself takes 24 and is done sooner, but nothing waits
for a sum under backward."""
MOST_SPARED = 8
SMALL = 1 << 14  # bytes of an array that goes to all ranks whole, to be summed there
FIRST_WITH_COPIES = 22800  # as the library gives its version: 2.28
PATIENCE = 20.0  # seconds for the first copy
HIGHEST = -5  # of the priorities of streams; CUDA takes the highest that the device has


def spared() -> int:
    """Multiprocessors that the ops' kernels leave to sums by NCCL's: as many as it has blocks, but none above
    MOST_SPARED. Sparing more would slow every kernel down by more than a second wave costs those that run beside a sum.
    """
    return found if (found := blocks()) <= MOST_SPARED else 0


def copies_wanted() -> bool:
    """By NCCL's own variable for it: zero CTA. They have not run in a step on GPUs, see docs/parallel.md."""
    return os.environ.get("NCCL_CTA_POLICY") == "2"


def spared_alone() -> int:
    """Of one GPU that is to compute the bits of several."""
    return 0 if copies_wanted() else spared()


def blocks() -> int:
    """Of NCCL's kernels here."""
    said = os.environ.get("NCCL_MAX_CTAS", str(BLOCKS))
    if not said.isdecimal() or not 1 <= int(said) <= 64:
        raise UserError(f"NCCL_MAX_CTAS is {said!r}, wants a number of blocks from 1 to 64; leave it out for {BLOCKS}")
    return int(said)


class Engine(Protocol):
    """NCCL's calls over C-contiguous arrays of one device, started on the communicator's stream, in order.

    copies: whether all-to-all and all-gather within windows are copies.
    """

    @property
    def copies(self) -> bool: ...

    def window(self, count: int, dtype: Any) -> Array:
        """Zeros, (count,), in a window. All ranks call it."""

    def holds(self, array: Array) -> bool:
        """Whether the array lies in a window."""

    def exchange(self, array: Array, out: Array) -> None:
        """out[r] = the part of rank r's flat array that is this rank's; parts are of one size. Both lie in windows."""

    def all_reduce(self, array: Array) -> None: ...
    def reduce_scatter(self, array: Array, out: Array) -> None: ...
    def all_gather(self, part: Array, out: Array) -> None: ...
    def broadcast(self, array: Array, root: int) -> None: ...
    def reduce(self, array: Array, root: int) -> None: ...
    def send(self, array: Array, to: int) -> None: ...
    def receive(self, out: Array, source: int) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        """The calls inside are one: none waits for another."""

    def run(self, work: Callable[[], Any]) -> None:
        """Compute something on the communicator's stream."""

    def fork(self) -> None:
        """The communicator's stream waits for what has been asked of the current one."""

    def mark(self) -> Any:
        """This place on the communicator's stream."""

    def join(self, mark: Any = None) -> None:
        """The current stream waits for the communicator's, or for this place on it."""

    def done(self) -> Callable[[], bool]:
        """Asks, later and from any thread, whether all that was started until now is finished."""

    def add(self, out: Array, x: Array) -> None:
        """out += x, rounded as IEEE 754 says, small numbers too."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...
    def check(self) -> None: ...


class NCCLGroup:
    """See `Group`. Arrays are the device's: CuPy's, C-contiguous."""

    shares: ClassVar = False
    overlaps: ClassVar = True

    def __init__(self, rank: int, size: int, engine: Engine, star: Star, watch: Watch) -> None:
        self.rank, self.size = rank, size
        self._engine, self._star, self._watch = engine, star, watch
        self.copies = engine.copies  # or not, though there are windows: for whoever compares the two
        self._calls: list[Call] = []
        self._capturing = False
        self._inbox: Array = None  # bytes, in windows: what the other ranks send, and what they are sent
        self._outbox: Array = None
        watch.check = engine.check

    @property
    def spares(self) -> int:
        return 0 if self.copies else spared()

    def reachable(self, count: int, dtype: Any) -> Array | None:
        if not self.copies:
            return None
        self._calls.append(("reachable", count, str(np.dtype(dtype))))
        started = self._watch.begin("reachable")
        array = self._engine.window(count, dtype)
        started.done = lambda: True
        return array

    def prepare(self, most: int) -> None:
        if self.copies and (self._inbox is None or self._inbox.size < most):
            self._inbox = self._engine.window(most, np.uint8)

    def all_reduce_(self, array: Array, tree: bool = False) -> None:
        flat = self._begin("all_reduce_", array)
        if (self._splits(flat) and self._engine.holds(flat)) or (tree and self.size > 2):
            self._sum(flat, 1, tree)
            self._gather(flat, 1)
        elif self.copies and 0 < flat.nbytes <= SMALL:
            self._sum_of_all(flat, tree)
        elif flat.size:
            self._engine.all_reduce(flat)
        self._end()

    def reduce_scatter_(self, array: Array, tree: bool = False, unit: int = 1) -> None:
        flat = self._begin("reduce_scatter_", array)
        if self._splits(flat, unit) or (tree and self.size > 2):
            self._sum(flat, unit, tree)
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

    def barrier(self) -> None:
        self._meet("barrier")

    def send_object(self, value: Any = None) -> Any:
        return self._meet("send_object", value)

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

        def watched() -> None:
            self._calls.append(("a captured step",))
            started = self._watch.begin("a captured step")
            launch()
            self._engine.fork()
            started.done = self._engine.done()

        return watched

    def gather_objects(self, value: Any) -> list[Any]:
        return self._meet("gather_objects", bring=value)

    def be_patient(self, seconds: float) -> None:
        self._star.patience = self._watch.patience = seconds

    def name(self, rank: int) -> str:
        return self._star.names[rank]

    def close(self) -> None:
        """Nothing: `launch.joined` lets the other ranks go at the end of the run."""

    def _meet(self, what: str, payload: Any = None, bring: Any = None) -> Any:
        """The calls since the last meeting are part of what the ranks compare."""
        calls, self._calls = self._calls, []
        before = [f"after {', '.join(' '.join(map(str, call)) for call in calls)}"] if calls else []
        return self._star.meet((what, *before), payload, bring)

    def _begin(self, what: str, array: Array) -> Array:
        if not array.flags.c_contiguous:
            raise ValueError("group: a collective works in place: it wants a C-contiguous array")
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

    def _splits(self, flat: Array, unit: int = 1) -> bool:
        """Whether copies can exchange the parts of these arrays."""
        return self.copies and flat.size > 0 and flat.size % (self.size * unit) == 0

    def _sum(self, flat: Array, unit: int, tree: bool) -> None:
        """The rank's own part becomes the sum of all ranks', in their order or in that of a tree."""
        own = flat[part_of(self.rank, self.size, flat.size, unit)]
        if not self._splits(flat, unit):
            rows = self._sent(flat, own, unit)
        else:
            self.prepare(flat.nbytes)
            rows = _in(self._inbox, flat).reshape(self.size, -1)
            if not self._engine.holds(flat):
                flat = self._put(flat)
            self._engine.exchange(flat, rows)
        self._engine.run(partial(self._add, rows, own, tree))

    def _sum_of_all(self, flat: Array, tree: bool) -> None:
        """Every rank gets the others' arrays, and adds them up. Nobody waits for a rank that is late in a kernel."""
        self.prepare(self.size * SMALL)
        rows = _in(self._inbox, flat, self.size).reshape(self.size, -1)

        def put() -> None:
            rows[self.rank] = flat

        self._engine.run(put)
        self._engine.all_gather(rows[self.rank], rows.reshape(-1))
        self._engine.run(partial(self._add, rows, flat, tree))

    def _add(self, rows: Array, own: Array, tree: bool) -> None:
        """own = the sum of the rows, this rank's being its own."""
        if self.size == 2:  # of two the order is no question
            self._engine.add(own, rows[1 - self.rank])
            return
        rows[self.rank] = own
        summed(list(rows), tree, own, self._engine.add)

    def _put(self, flat: Array) -> Array:
        """The other ranks' parts, where copies can take them from."""
        if self._outbox is None or self._outbox.size < flat.nbytes:
            self._outbox = self._engine.window(self._inbox.size, np.uint8)
        out, own = _in(self._outbox, flat), part_of(self.rank, self.size, flat.size)

        def put() -> None:
            out[: own.start] = flat[: own.start]
            out[own.stop :] = flat[own.stop :]

        self._engine.run(put)
        return out

    def _sent(self, flat: Array, own: Array, unit: int) -> Array:
        """The other ranks' parts, by NCCL's kernels."""
        rows = self._engine.empty((self.size, own.size), own.dtype)
        with self._engine.together():
            for rank in range(self.size):
                if rank != self.rank:
                    if (part := flat[part_of(rank, self.size, flat.size, unit)]).size:
                        self._engine.send(part, rank)
                    if own.size:
                        self._engine.receive(rows[rank], rank)
        return rows


def _in(box: Array, flat: Array, count: int = 1) -> Array:
    """The beginning of a box, as `count` arrays like `flat` one behind the other."""
    return box[: count * flat.nbytes].view(flat.dtype)


class CupyEngine:
    """NCCL by way of CuPy. copies: wanted; `window` shows whether the library has them."""

    def __init__(self, size: int, rank: int, token: bytes, copies: bool = False) -> None:
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl = cupy, nccl
        self._device = cupy.cuda.Device()
        self._types = {
            "float32": nccl.NCCL_FLOAT32, "float64": nccl.NCCL_FLOAT64, "bfloat16": nccl.NCCL_BFLOAT16,
            "int32": nccl.NCCL_INT32, "int64": nccl.NCCL_INT64, "uint8": nccl.NCCL_UINT8,
        }  # fmt: skip
        os.environ["NCCL_MAX_CTAS"] = str(blocks())  # read by the library when it makes its first communicator
        if copies:
            os.environ["NCCL_NVLS_ENABLE"] = "0"  # windows would be bound to multicast, which copies do not use
        self._comm = nccl.NcclCommunicator(size, token, rank)
        self._windows: Windows | None = None
        if copies:
            from tinyforge.parallel.windows_cuda import Windows

            self._windows = Windows(self._comm.comm)
        # Its blocks come before those of kernels that were started earlier and still wait for a multiprocessor.
        self._stream = cupy.cuda.Stream(non_blocking=True, priority=HIGHEST)
        self._add = add_.bind(_Name("cupy"))

    @property
    def copies(self) -> bool:
        return self._windows is not None

    def window(self, count: int, dtype: Any) -> Array:
        assert self._windows
        return self._windows.zeros(count, dtype)

    def give_up(self) -> None:
        """Leave the communicator, which may be broken."""
        self._windows = None
        self._comm.abort()

    def holds(self, array: Array) -> bool:
        return self._windows is not None and self._windows.holds(array)

    def exchange(self, array: Array, out: Array) -> None:
        assert self._windows
        self._windows.exchange(array, out, self._type(array), self._stream.ptr)

    def all_reduce(self, array: Array) -> None:
        at = array.data.ptr
        self._comm.allReduce(at, at, array.size, self._type(array), self._nccl.NCCL_SUM, self._stream.ptr)

    def reduce_scatter(self, array: Array, out: Array) -> None:
        self._comm.reduceScatter(array.data.ptr, out.data.ptr, out.size, self._type(array), self._nccl.NCCL_SUM,
                                 self._stream.ptr)  # fmt: skip

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

    def together(self) -> AbstractContextManager[None]:
        return _Together(self._nccl)

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


@dataclass
class _Name:
    name: str


class _Together(AbstractContextManager[None]):
    def __init__(self, nccl: Any) -> None:
        self._nccl = nccl

    def __enter__(self) -> None:
        self._nccl.groupStart()

    def __exit__(self, *exc: object) -> None:
        self._nccl.groupEnd()


def new_token() -> bytes:
    """What rank 0 makes and all ranks need to find each other."""
    from cupy.cuda import nccl

    return nccl.get_unique_id()


def first_window(engine: Engine, size: int) -> tuple[Array, str]:
    """Three numbers for each rank in a window, or why there is none. All ranks call it."""
    try:
        return engine.window(3 * size, np.int32), ""
    except (RuntimeError, UserError) as error:
        return None, str(error)


def first_copies(engine: Engine, window: Array, rank: int, size: int) -> str:
    """Why copies do not work here; empty where they do. All ranks that have a window call it."""
    given, got, gathered = rows = window.reshape(3, size)
    given[...] = size * rank
    for other in range(size):
        given[other] += other
    try:
        engine.fork()
        engine.exchange(given, got.reshape(size, 1))
        engine.all_gather(got[rank : rank + 1], gathered)
    except (RuntimeError, UserError) as error:
        return str(error)
    over, until = engine.done(), time.monotonic() + PATIENCE
    while not over():
        if time.monotonic() > until:
            return f"a copy of {size} numbers has not ended after {PATIENCE:.0f} s"
        time.sleep(0.001)
    engine.join()
    found = [[int(number) for number in row] for row in rows[1:]]
    wanted = [[size * r + rank for r in range(size)], [size * r + r for r in range(size)]]
    return "" if found == wanted else f"copies gave {found}, wanted {wanted}"


def no_copies(hosts: int) -> str:
    """Why sums are not made of copies here, where ranks on so many hosts wish for them; empty where they may be."""
    from cupy.cuda import nccl

    if hosts > 1:
        return f"the ranks are on {hosts} hosts"
    if (version := nccl.get_version()) < FIRST_WITH_COPIES:
        return f"this NCCL is {version // 10000}.{version // 100 % 100}, 2.28 is the first with windows"
    return ""
