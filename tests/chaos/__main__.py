"""Kill every command that writes, again and again, run it to its end, and compare what it leaves byte for byte.

    python -m tests.chaos --seconds 1200
    python -m tests.chaos --seconds 60 --only corpus
    python -m tests.chaos --only "convert to ours" --seed 17         one life of one command again

A command runs in a child that ends by SIGKILL: half of the time at a random moment, and half just before the n-th time
that it opens a file to write, renames, removes or makes one, so that the moments between two such steps are hit too.
Half of the kills take the command's own children along, the others leave them running. After one to four kills the
same command is run until it is done; a pretraining is resumed. What it has written must then be what a run that
nobody disturbed has written: the same names, the same bytes, but for the figures of clocks (commands.py).
"""

from __future__ import annotations

import os

# One BLAS thread: a process with threads cannot be forked.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401  (once, not in every child)

from tests.chaos.commands import Command, commands, contents, make_inputs, rows_of_the_web, stories
from tests.data.conftest import Host, server_of
from tests.fuzz.child import Patience, Watch, end_session, start_child
from tests.fuzz.turns import in_turns, name_of, parser, table
from tinyforge.data import fineweb_edu
from tinyforge.formats import convert

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
HELD = 120.0  # seconds for which what a kill has left after may hold the folder
BUSY = ("another run is writing there", "already holds a run")  # what a child that was left after has begun, or ended


class Failure(Exception):
    """A command that did not come to the same end."""


@dataclass
class Whole:
    """An undisturbed run: what it left, its seconds, and how often it touched the file system."""

    contents: dict[str, str]
    seconds: float
    events: int


@dataclass
class Chaos:
    """Runs commands in a folder of its own, where `inputs` is a link to what they read."""

    folder: Path
    keep: Path
    patience: Patience = Patience()
    whole: dict[str, Whole] = field(default_factory=dict)

    # --- one child

    def start(self, command: Command, prepare: Callable[[], None]) -> int | None:
        arguments = command.arguments(self.folder)
        if arguments is None:
            return None
        names = [self.folder.with_suffix(f".{stream}") for stream in ("out", "err")]
        return start_child(lambda: command.main(arguments), self.folder, names, 0, prepare)

    def said(self) -> str:
        return self.folder.with_suffix(".err").read_text(encoding="utf-8", errors="replace")[-3000:]

    def is_held(self) -> bool:
        """Whether the last run was refused because of a child that a kill has left."""
        logs = self.folder.glob("out/*/*/log.txt")  # of an ablation's runs
        said = [self.said(), *(path.read_text(encoding="utf-8", errors="replace")[-3000:] for path in logs)]
        return any(word in text for text in said for word in BUSY)

    def finish(self, command: Command, prepare: Callable[[], None]) -> None:
        """Run the command to its end. One that was killed may have left children that still hold the folder."""
        until = time.monotonic() + HELD
        while time.monotonic() < until:
            child = self.start(command, prepare)
            if child is None:
                return
            status = self.wait(child)
            if status == 0:
                return
            if not self.is_held():
                raise Failure(f"ended with status {status}; it said: {self.said()}")
            time.sleep(0.1)
        raise Failure(f"what was killed held the folder for {HELD:.0f} s")

    def wait(self, child: int, seconds: float = math.inf, alone: bool = False) -> int | None:
        """As `wait_for`; Failure for a child that hangs."""
        try:
            return wait_for(child, self.patience, seconds, alone)
        except TimeoutError as hung:
            raise Failure(f"{hung}; it said: {self.said()}") from None

    def kill(self, command: Command, rng: random.Random) -> bool:
        """Begin, or go on, and kill; False where the command was done before."""
        whole, alone = self.whole[command.name], rng.random() < 0.5
        at = rng.randrange(1, whole.events + 1) if rng.random() < 0.5 else 0
        child = self.start(command, lambda: doom(at, alone))
        if child is None:
            return False
        status = self.wait(child, math.inf if at else rng.uniform(0.0, 1.05 * whole.seconds), alone)
        if status not in (None, 0, -signal.SIGKILL) and not self.is_held():
            raise Failure(f"ended with status {status} after a kill; it said: {self.said()}")
        return status in (None, -signal.SIGKILL)

    # --- a life

    def measure(self, command: Command) -> None:
        """The undisturbed run, twice: the second one is timed, and both must agree."""
        log = self.folder / "events"
        for _ in range(2):
            self.clear(command)
            log.unlink(missing_ok=True)
            began = time.monotonic()
            self.finish(command, lambda: doom(0, log=log))
            found = Whole(self.digest(), time.monotonic() - began, log.stat().st_size if log.exists() else 0)
            before = self.whole.setdefault(command.name, found)
            if other := differing(before.contents, found.contents):
                raise Failure(f"two runs that nobody disturbed differ in {', '.join(other[:10])}")
            self.whole[command.name] = found

    def live(self, command: Command, seed: int) -> int:
        """A command's life: kills, the end, the comparison. Returns the number of kills; raises Failure."""
        rng = random.Random(f"{command.name}:{seed}")
        self.clear(command)
        kills = 0
        for _ in range(rng.randint(1, 4)):
            kills += self.kill(command, rng)
        self.finish(command, lambda: doom(0))
        expected, got = self.whole[command.name].contents, self.digest()
        if other := differing(expected, got):
            raise Failure(f"after {kills} kills these differ from an undisturbed run: {', '.join(other[:10])}")
        return kills

    def trial(self, command: Command, seed: int) -> dict[str, Any]:
        """A life, and before the first one the measure. What failed is kept."""
        row: dict[str, Any] = {"command": command.name, "kills": 0, "failed": ""}
        try:
            if command.name not in self.whole:
                self.measure(command)
            row["kills"] = self.live(command, seed)
        except Failure as failure:
            row["failed"] = f"{command.name}, seed {seed}: {failure}"
            kept = self.keep / name_of(command.name, seed)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.folder, kept, symlinks=True, ignore_dangling_symlinks=True)
        return row

    def clear(self, command: Command) -> None:
        for path in self.folder.iterdir():
            if path.name != "inputs":
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        command.begin(self.folder)

    def digest(self) -> dict[str, str]:
        """A hash for each file of `out`, taken in a child: this process must not have a library's threads."""
        import hashlib

        result = self.folder / "digest.json"

        def write() -> None:
            found = {name: hashlib.sha256(data).hexdigest() for name, data in contents(self.folder / "out").items()}
            result.write_text(json.dumps(found), encoding="utf-8")

        names = [self.folder.with_suffix(f".{stream}") for stream in ("out", "err")]
        if self.wait(start_child(write, self.folder, names, 0)) != 0:
            raise Failure(f"what it left cannot be read: {self.said()}")
        return json.loads(result.read_text(encoding="utf-8"))


def differing(expected: dict[str, str], got: dict[str, str]) -> list[str]:
    """The names that only one of them has, or with other bytes."""
    return sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))


def wait_for(child: int, patience: Patience, seconds: float = math.inf, alone: bool = False) -> int | None:
    """The status of a child, -9 after a kill; killed when its time is over: then None. alone: without its children.

    Raises TimeoutError, and ends its session, where it hangs.
    """
    until, pause, watch = time.monotonic() + seconds, 0.0005, Watch(child, patience)
    while True:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(code)
            if status != -signal.SIGKILL:
                end_session(child)
            return status
        over = time.monotonic() >= until
        if over or (fault := watch.fault()):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL) if over and alone else os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if over:
                return None
            raise TimeoutError(fault)
        time.sleep(pause)
        pause = min(2 * pause, 0.005)


def doom(at: int, alone: bool = True, log: Path | None = None) -> None:
    """In the child: die just before the `at`-th change of the file system, 0: never. log: gets a byte for each one.

    Python announces them to audit hooks. What libraries write by themselves is not among them: random moments are for
    that.
    """
    me, seen = os.getpid(), 0
    counted = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if log else -1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event in WRITES or (event == "open" and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)))
        if not writes or os.getpid() != me:
            return
        seen += 1
        if counted >= 0:
            os.write(counted, b".")
        if seen == at:
            os.kill(me, signal.SIGKILL) if alone else os.killpg(me, signal.SIGKILL)

    sys.addaudithook(hook)


# --- all of them ------------------------------------------------------------------------------------------------------


def chaos(seconds: float, workers: int, only: str, first: int, keep: Path, once: bool = False) -> int:
    """Prints the figures; returns the number of lives that came to another end."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        inputs = Path(folder, "inputs")
        make_inputs(inputs)
        host, server = _publish(Path(folder))
        listed = [command for command in commands(host.url) if only in command.name]

        def begin(number: int) -> Callable[[Command, int], dict[str, Any]]:
            mine = Path(folder, f"work-{number}")
            mine.mkdir()
            (mine / "inputs").symlink_to(inputs)
            return Chaos(mine, keep).trial

        try:
            rows = in_turns(begin, listed, workers, seconds, [first] if once else count(first))
        finally:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    for row in rows:
        if row["failed"]:
            print(f"FAILED {row['failed']}\n  what is there is under {keep}")
    cells = []
    for name in (*(command.name for command in listed), ""):
        of_it = [row for row in rows if name in ("", row["command"])]
        cells.append(
            (
                name or f"all in {time.monotonic() - began:.0f} s",
                len(of_it),
                sum(row["kills"] for row in of_it),
                sum(bool(row["failed"]) for row in of_it),
            )
        )
    print(table(("command", "lives", "kills", "different"), cells))
    return cells[-1][-1]


def _publish(folder: Path) -> tuple[Host, int]:
    """A local host of files to download, slow enough to be cut; and its process."""
    host = Host(pace=0.005)
    server = server_of(host)
    host.publish("roneneldan/TinyStories", stories())
    host.publish(fineweb_edu.REPOSITORY, rows_of_the_web())
    child = os.fork()
    if not child:
        try:
            server.serve_forever(poll_interval=0.02)
        finally:
            os._exit(0)
    server.socket.close()
    return host, child


def main(argv: Sequence[str] | None = None) -> int:
    p = parser("chaos", __doc__ or "", "commands", "what differs goes")
    p.add_argument("--seed", type=int, help="of one life; the commands are those of --only")
    args = p.parse_args(argv)
    matplotlib.use("Agg")
    first = args.first if args.seed is None else args.seed
    workers = 1 if args.seed is not None else args.workers
    print(f"{args.seconds:.0f} s, {workers} workers, seeds from {first}", flush=True)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    assert convert  # imported once, here
    return int(chaos(args.seconds, workers, args.only, first, args.keep, args.seed is not None) > 0)


if __name__ == "__main__":
    sys.exit(main())
