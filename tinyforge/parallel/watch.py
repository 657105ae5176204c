"""The watch of a rank: a thread that ends the process when another rank is gone and nothing else would notice.

A GPU's work is asynchronous. If a rank dies, the others' kernels wait for it forever, and so does a thread that waits
for the device: the main thread may be stuck in the driver and see no error. This thread is not. It watches

- the lines to the other ranks: a process that dies closes its line; one that is stopped, or whose host is gone, falls
  silent;
- the oldest collective that the device has not finished, and how long it has been in flight;
- NCCL's own asynchronous error.

A second thread queries the device for the last two: while the main thread waits in the driver, a query may block too,
and the thread that watches the lines must not.

Rank 0 then prints which rank it was, in one line, and every rank exits by `os._exit`: files are written atomically, so
the last checkpoint is good.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tinyforge.errors import UserError
from tinyforge.parallel.star import Lost
from tinyforge.terminal import one_line

PULSE = 2.0  # seconds between two signs of life
SILENCE = 20.0  # seconds without one after which a process counts as stopped


@dataclass
class Collective:
    """since: when it was started. done: queries the device, without waiting, whether it has finished."""

    since: float
    what: str
    done: Callable[[], bool] = lambda: False


@dataclass
class Watch:
    """lines: on rank 0 to all others, in order; else to rank 0. patience: seconds that a collective may take.

    check: raises if the device's library reports an error; called from the thread. leave: ends the process.
    """

    rank: int
    lines: Sequence[Connection]
    names: Sequence[str]
    advice: Callable[[], str]
    patience: float
    check: Callable[[], None] = lambda: None
    leave: Callable[[int], Any] = os._exit
    _pending: deque[Collective] = field(default_factory=deque)
    _error: str = ""
    _closing: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        self._heard = [time.monotonic()] * len(self.lines)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        threading.Thread(target=self._ask_the_device, daemon=True).start()

    def begin(self, what: str) -> Collective:
        """Call before a collective is started, since starting it may block too; set its `done` afterwards."""
        self._pending.append(collective := Collective(time.monotonic(), what))
        return collective

    def close(self) -> None:
        """The run is ending: lines that close are not a fault any more."""
        self._closing.set()

    def _run(self) -> None:
        told = 0.0
        while not self._closing.wait(0.25):
            now = time.monotonic()
            if now - told > PULSE:
                told = now
                for line in self.lines:
                    with suppress(OSError):  # a closed line is noticed below, when reading
                        line.send(b"")
            if fault := self._fault(now):
                if self._closing.wait(1.0):  # the main thread has noticed it too, or the run is ending
                    return
                self._leave(fault)
                return

    def _ask_the_device(self) -> None:
        try:
            while not self._closing.wait(0.25):
                while self._pending and self._pending[0].done():
                    self._pending.popleft()
                self.check()
        except Exception as error:
            self._error = str(error)

    def _fault(self, now: float) -> str | UserError:
        for number, line in enumerate(self.lines):
            name = self.names[number + 1 if self.rank == 0 else 0]
            try:
                while line.poll(0):
                    if isinstance(said := line.recv(), UserError):
                        return said
                    self._heard[number] = now
            except (EOFError, OSError):
                return f"{name} died (the kernel kills one when memory runs out)"
            if now - self._heard[number] > SILENCE:
                return f"{name} has shown no sign of life for {SILENCE:.0f} s: it is stopped, or its host is gone"
        late = next(iter(self._pending.copy()), None)
        if late and now - late.since > self.patience:
            others = ", ".join(name for number, name in enumerate(self.names) if number != self.rank)
            here, seconds = self.names[self.rank], f"{self.patience:.0f} s"
            return f"{late.what} has been under way on {here} for {seconds}: {others} hangs, or the link to it"
        if self._error:
            return f"{self.names[self.rank]}: {self._error}"
        return ""

    def _leave(self, fault: str | UserError) -> None:
        """A UserError comes from another rank; any other fault is the loss of a rank."""
        if self.rank == 0:
            advice = "" if isinstance(fault, UserError) else f"; {self.advice()}"
            print(f"\nerror: {one_line(str(fault))}{advice}", file=sys.stderr, flush=True)
        self.leave(fault.status if isinstance(fault, UserError) else Lost.status)
