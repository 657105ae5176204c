"""Rendering Jinja templates in a process of their own, which a hostile template cannot outlive: see `jinja_sandbox`.

    render(source, [{"messages": [...], "add_generation_prompt": True}])     ["..."]

The process starts with the first call and is kept for the next ones; it ends with this one. Where the system can fork,
a copy of it renders, so that what a hostile template ends is made again without importing Jinja.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from tinyforge.errors import UserError
from tinyforge.requirements import needs
from tinyforge.terminal import one_line

SANDBOX = Path(__file__).with_name("jinja_sandbox.py")
LONGEST_WAIT = 20.0
"""Seconds of waiting for the process: a job's CPU time is bounded by the sandbox, but the machine may be busy."""
SHORT_WAIT, LEAST_STARTS, STARTS_A_BYTE = 1.0, 0.4, 6e-5
"""On a busy machine a job's CPU time is long. After SHORT_WAIT seconds of waiting, less of it is enough to give up,
counted in starts of the process, which say how fast the machine is: one takes 70 ms where the slowest of 80 published
templates, of 18 kB, compiles in 50 ms, and renders a byte of a conversation in 2 us."""
MOST_SHOWN = 300  # characters of an error


class Refusal(UserError):
    """What a template says of a conversation that it does not render."""


def render(source: str, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The text of a template for each of the `jobs`, its variables. Raises UserError, one line, for a template that
    raises or is not Jinja (a `Refusal`), and for one that needs more time or memory than the sandbox allows."""
    return _PROCESS.render(source, jobs)


class _Process:
    """The process, and the lock of its pipes."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = self._copy = 0
        self._start_cpu = 0.0

    def render(self, source: str, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
        request = json.dumps({"source": source, "jobs": jobs}).encode() + b"\n"
        with self._lock:
            answer = self._exchange(request)
        if "error" in answer:
            raise Refusal(f"the chat template says: {one_line(answer['error'])[:MOST_SHOWN]}")
        texts: list[str] = answer["texts"]
        return texts

    def _exchange(self, request: bytes) -> dict[str, Any]:
        try:
            found = self._start()
            if self._child is not None:
                assert self._child.stdin is not None
                self._child.stdin.write(request)
                self._child.stdin.flush()
                least_cpu = self._start_cpu * (LEAST_STARTS + len(request) * STARTS_A_BYTE)
                found = self._read(least_cpu or LONGEST_WAIT)
        except OSError:
            found = self.stop()
        except BaseException:  # Ctrl-C: the answer is still to come, and would be taken for the next one
            self.stop()
            raise
        if isinstance(found, dict):
            return found
        if sys.platform != "win32" and found == -signal.SIGPROF:
            raise UserError("the chat template did not end in 0.5 s of CPU time; use another with --template")
        self.stop()
        raise UserError(
            f"the process that renders the chat template ended with status {found}; use another template "
            "with --template"
        )

    def _start(self) -> dict[str, Any] | int:
        """0, or the status of a process that does not start."""
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is None:
            return 0
        if importlib.util.find_spec("jinja2") is None:
            raise UserError(needs("the model's chat template", "jinja2", "hub"))
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", str(SANDBOX)]
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        self._owner, self._copy = os.getpid(), 0
        status = self._read()
        self._start_cpu = _cpu(self._child.pid) if self._child else 0.0
        return status

    def _read(self, least_cpu: float = LONGEST_WAIT) -> dict[str, Any] | int:
        """The answer, or the status of the copy, which has ended or was ended here for its time."""
        assert self._child is not None
        line = _read_line(self._child, self._copy, least_cpu)
        if not line:
            return self.stop()
        found: dict[str, Any] | list[int] = json.loads(line)
        if isinstance(found, dict):
            return found
        self._copy, status = found
        return status

    def stop(self) -> int:
        """End the process; returns its status."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return 0
        assert child.stdin is not None and child.stdout is not None
        child.kill()
        with suppress(OSError):  # of a request that it did not read
            child.stdin.close()
        child.stdout.close()
        return child.wait()


def _read_line(child: subprocess.Popen[bytes], copy: int, least_cpu: float) -> bytes:
    """The next line; "" if the process ends first, or after LONGEST_WAIT. A copy that has used `least_cpu` seconds of
    CPU time after SHORT_WAIT is ended, and the line is that of the next one."""
    assert child.stdout is not None
    if sys.platform == "win32":
        timer = Timer(LONGEST_WAIT, child.kill)
        timer.start()
        try:
            return child.stdout.readline()
        finally:
            timer.cancel()
    began, most, wait = time.monotonic(), _cpu(copy) + least_cpu, SHORT_WAIT
    while not select.select([child.stdout], [], [], wait)[0]:
        wait = 0.05
        if time.monotonic() - began > LONGEST_WAIT:
            return b""
        if copy and _cpu(copy) >= most:
            os.kill(copy, signal.SIGPROF)
            copy = 0
    return child.stdout.readline()


def _cpu(process: int) -> float:
    """CPU time of a process in seconds, where the system has a clock for it: Linux, clock_getcpuclockid(3)."""
    return time.clock_gettime(~process << 3 | 2) if process and sys.platform == "linux" else 0.0


_PROCESS = _Process()
atexit.register(_PROCESS.stop)
