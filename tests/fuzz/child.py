"""A command in a forked child: with limits, and an account of how it ended.

    outcome = run_child(lambda: chat.main(["--checkpoint", "run"]), folder, Limits())

The child is a copy of this process, so that modules are imported once: a command takes milliseconds. It has its own
session, no standard input, and the folder as its working directory. The caller must have no threads. Linux alone.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from tqdm import tqdm

from tinyforge.errors import run_command

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """seconds: after which the child is killed. memory: bytes of data that it may have beyond its parent's, 0 for no
    limit; more is a MemoryError."""

    seconds: float = 10.0
    memory: int = 1 << 30


@dataclass(frozen=True)
class Outcome:
    """status: what the child left with; -N after signal N. stdout, stderr: what it printed. seconds: from its beginning
    to its end, without those in which other programs had the processor. peak: the most memory that it held, bytes.
    slow: it was killed because its time was over."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    peak: int
    slow: bool = False


def run_child(main: Callable[[], object], folder: Path, limits: Limits, prepare: Callable[[], None] = bool) -> Outcome:
    """Run a command's `main` in a child as `run_command` does. prepare: called in the child just before."""
    names = [folder.with_name(f"{folder.name}.{stream}") for stream in ("out", "err")]
    child = start_child(main, folder, names, limits.memory, prepare)
    began, slow = time.monotonic(), False
    pause, waited = 0.0005, 0.0
    while True:
        waited = queued(child)  # before it is gone
        pid, code, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - began > limits.seconds and not slow:
            os.kill(child, signal.SIGKILL)
            slow = True
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    seconds = time.monotonic() - began - waited
    end_session(child)
    stdout, stderr = (name.read_bytes().decode("utf-8", "backslashreplace") for name in names)
    for name in names:
        name.unlink()
    return Outcome(os.waitstatus_to_exitcode(code), stdout, stderr, seconds, usage.ru_maxrss * 1024, slow)


def start_child(
    main: Callable[[], object], folder: Path, names: list[Path], memory: int, prepare: Callable[[], None] = bool
) -> int:
    """The process of a child that has begun. names: of the files for its standard output and its standard error."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in the child must not copy the pages of what it shares with us
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        opened = [os.open(os.devnull, os.O_RDONLY)]
        opened += [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in names]
        for number, descriptor in enumerate(opened):
            os.dup2(descriptor, number)
        for stream, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):  # a test runner's are not files
            mode = "r" if number == 0 else "w"
            setattr(sys, stream, os.fdopen(number, mode, encoding="utf-8", errors="backslashreplace", closefd=False))
        if memory:
            most = data_bytes() + memory
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1)  # prints where it is
        # No thread after progress bars, and a lock of its own: tqdm's is shared by all that are forked, and once a
        # child is killed while it holds it, all later ones wait forever.
        tqdm.monitor_interval = 0
        tqdm.set_lock(RLock())
        prepare()
        run_command(main)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def queued(process: int) -> float:
    """Seconds that a process was ready to run while others ran; 0 where the kernel does not count them."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{process}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0


@dataclass(frozen=True)
class Patience:
    """How long a child may take. idle: seconds in which none of its session's processes uses or waits for a processor,
    or waits for the disk. work: their processor seconds. Both tell a child that hangs from one on a busy machine."""

    idle: float = 30.0
    work: float = 120.0


class Watch:
    """Looks now and then whether a child's session still does something."""

    def __init__(self, child: int, patience: Patience) -> None:
        self.child, self.patience = child, patience
        self.before: object = None
        self.moved = self.looked = time.monotonic()

    def fault(self) -> str:
        """That it hangs, and where; "" while it does not."""
        now = time.monotonic()
        if now - self.looked < min(1.0, self.patience.idle / 2):
            return ""
        self.looked = now
        used, waited, at_disk = session_times(self.child)
        if at_disk or (used, waited) != self.before:
            self.before, self.moved = (used, waited), now
        if used > self.patience.work:
            return f"used {used:.0f} s of a processor and did not end; {where(self.child)}"
        if now - self.moved > self.patience.idle:
            return f"hangs: {used:.1f} s of a processor, then nothing for {now - self.moved:.0f} s; {where(self.child)}"
        return ""


def session_times(session: int) -> tuple[float, float, bool]:
    """Of a session's processes: processor seconds, seconds that they waited for one, and whether any waits for the
    disk."""
    used = waited = 0.0
    at_disk = False
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # Behind the name, which may hold anything: state, parent, group, session, ...
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == session:
                used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                waited += queued(int(folder.name))
                at_disk |= fields[0] == "D"
    return used, waited, at_disk


def where(session: int) -> str:
    """What the processes of a session wait in, by the kernel; its first prints where in its code."""
    with suppress(OSError):
        os.kill(session, signal.SIGUSR1)
        time.sleep(0.5)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == session:
                name, call = ((folder / file).read_text(encoding="utf-8").strip() for file in ("comm", "wchan"))
                found.append(f"{name} ({folder.name}) in {call}")
    return f"waiting: {', '.join(found)}"


def data_bytes() -> int:
    """What counts towards RLIMIT_DATA now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def end_session(child: int) -> int:
    """End what a child has left running. Returns 1 if there was anything, else 0."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return 0
    return 1
