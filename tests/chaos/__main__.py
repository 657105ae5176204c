"""Kill every command that writes, again and again, run it to its end, and compare what it leaves byte for byte.

    python -m tests.chaos --seconds 1200
    python -m tests.chaos --seconds 60 --only corpus
    python -m tests.chaos --only "convert to ours" --seed 17         one life of one command again

A command runs in a child that ends by SIGKILL: half of the time at a random moment, and half just before the n-th time
that it opens a file to write, renames, removes or makes one, so that the moments between two such steps are hit too.
Half of the kills take the command's own children along, the others leave them behind. After one to four kills the
same command is run until it is done; a pretraining is resumed. What it has written must then be what a run that
nobody disturbed has written: the same names, the same bytes, but for the figures of clocks (commands.py).
"""

from __future__ import annotations

import argparse
import os

# One BLAS thread: a process with threads cannot be forked.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import matplotlib.pyplot  # noqa: F401  (once, not in every child)
import tqdm

from tests.chaos.commands import Command, commands, contents, make_inputs, stories
from tests.data.conftest import Host, server_of
from tests.fuzz.child import Limits, end_session, start_child
from tinyforge.hub import convert

ROOT = Path(__file__).resolve().parents[2]
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
LONGEST = Limits(seconds=120.0).seconds  # for a run that nobody kills
BUSY = ("another run is writing there", "already holds a run")  # what a child that was left behind has begun, or ended


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
        """Whether the last run was refused because of a child that a kill has left behind."""
        logs = self.folder.glob("out/*/*/log.txt")  # of an ablation's runs
        said = [self.said(), *(path.read_text(encoding="utf-8", errors="replace")[-3000:] for path in logs)]
        return any(word in text for text in said for word in BUSY)

    def finish(self, command: Command, prepare: Callable[[], None]) -> None:
        """Run the command to its end. One that was killed may have left children that still hold the folder."""
        until = time.monotonic() + LONGEST
        while time.monotonic() < until:
            child = self.start(command, prepare)
            if child is None:
                return
            status = wait_for(child, until - time.monotonic())
            if status == 0:
                return
            if status is None:
                raise Failure(f"did not end within {LONGEST:.0f} s; it said: {self.said()}")
            if not self.is_held():
                raise Failure(f"ended with status {status}; it said: {self.said()}")
            time.sleep(0.1)
        raise Failure(f"what was killed held the folder for {LONGEST:.0f} s")

    def kill(self, command: Command, rng: random.Random) -> bool:
        """Begin, or go on, and kill; False where the command was done before."""
        whole, alone = self.whole[command.name], rng.random() < 0.5
        at = rng.randrange(1, whole.events + 1) if rng.random() < 0.5 else 0
        child = self.start(command, lambda: doom(at, alone))
        if child is None:
            return False
        status = wait_for(child, LONGEST if at else rng.uniform(0.0, 1.05 * whole.seconds), alone)
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
        wanted, got = self.whole[command.name].contents, self.digest()
        if other := differing(wanted, got):
            raise Failure(f"after {kills} kills these differ from an undisturbed run: {', '.join(other[:10])}")
        return kills

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
        if wait_for(start_child(write, self.folder, names, 0), LONGEST) != 0:
            raise Failure(f"what it left cannot be read: {self.said()}")
        return json.loads(result.read_text(encoding="utf-8"))


def differing(wanted: dict[str, str], got: dict[str, str]) -> list[str]:
    """The names that only one of them has, or with other bytes."""
    return sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))


def wait_for(child: int, seconds: float, alone: bool = False) -> int | None:
    """The status of a child, -9 after a kill; killed when its time is over: then None. alone: without its children."""
    until, pause = time.monotonic() + seconds, 0.0005
    while True:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(code)
            if status != -signal.SIGKILL:
                end_session(child)
            return status
        if time.monotonic() >= until:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL) if alone else os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.005)


def doom(at: int, alone: bool = True, log: Path | None = None) -> None:
    """In the child: die just before the `at`-th change of the file system, 0: never. log: gets a byte for each one.

    Python announces them to audit hooks. What libraries write by themselves is not among them: random moments are for
    that.
    """
    tqdm.tqdm.monitor_interval = 0
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


def work(chaos: Chaos, listed: Sequence[Command], seeds: Any, until: float, log: Path) -> None:
    """Lives of all commands in turn until the clock says so; a line of JSON for each goes to `log`."""
    with open(log, "a", encoding="utf-8", buffering=1) as lines:
        for seed in seeds:
            for command in listed:
                if time.monotonic() >= until:
                    return
                row: dict[str, Any] = {"command": command.name, "lives": 1, "kills": 0, "failed": ""}
                try:
                    if command.name not in chaos.whole:
                        chaos.measure(command)
                    row["kills"] = chaos.live(command, seed)
                except Failure as failure:
                    row["failed"] = f"{command.name}, seed {seed}: {failure}"
                    kept = chaos.keep / f"{''.join(c if c.isalnum() else '-' for c in command.name)}-{seed}"
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(chaos.folder, kept, symlinks=True, ignore_dangling_symlinks=True)
                lines.write(json.dumps(row) + "\n")


def chaos(seconds: float, workers: int, only: str, first: int, keep: Path, once: bool = False) -> int:
    """Prints the figures; returns the number of lives that came to another end."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        inputs = Path(folder, "inputs")
        make_inputs(inputs)
        host, server = _publish(Path(folder))
        until = time.monotonic() + seconds
        listed = [command for command in commands(host.url) if only in command.name]
        children, logs = [], [Path(folder, f"log-{worker}") for worker in range(workers)]
        for worker, log in enumerate(logs):
            child = os.fork()
            if not child:
                status = 1
                try:
                    mine = Path(folder, f"work-{worker}")
                    mine.mkdir()
                    (mine / "inputs").symlink_to(inputs)
                    seeds = [first] if once else count(first + worker, workers)
                    # Workers begin at different commands, so that a short run covers all of them.
                    at = worker * len(listed) // workers
                    work(Chaos(mine, keep), [*listed[at:], *listed[:at]], seeds, until, log)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        lines = [log.read_text(encoding="utf-8").splitlines() for log in logs if log.exists()]
    if any(ended):
        raise SystemExit(f"a worker ended with status {max(map(abs, ended))}: see its traceback above")
    rows = [json.loads(line) for line in chain.from_iterable(lines)]
    for row in rows:
        if row["failed"]:
            print(f"FAILED {row['failed']}\n  what is there is under {keep}")
    print(table([command.name for command in listed], rows, time.monotonic() - began))
    return sum(bool(row["failed"]) for row in rows)


def _publish(folder: Path) -> tuple[Host, int]:
    """A local host of files to download, slow enough to be cut; and its process."""
    host = Host(pace=0.005)
    server = server_of(host)
    host.publish("roneneldan/TinyStories", stories())
    child = os.fork()
    if not child:
        try:
            server.serve_forever(poll_interval=0.02)
        finally:
            os._exit(0)
    server.socket.close()
    return host, child


def table(names: Sequence[str], rows: Sequence[dict[str, Any]], seconds: float) -> str:
    width = max(map(len, names))
    lines = [f"{'command':<{width}}  {'lives':>5}  {'kills':>5}  {'different':>9}"]
    parts = {name: [row for row in rows if row["command"] == name] for name in names}
    for name, of_it in {**parts, f"all in {seconds:.0f} s": rows}.items():
        different = sum(bool(row["failed"]) for row in of_it)
        lines.append(f"{name:<{width}}  {len(of_it):>5}  {sum(row['kills'] for row in of_it):>5}  {different:>9}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--seconds", type=float, default=60.0, help="for how long (default: %(default)s)")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="lives side by side (default: the cores)")
    p.add_argument("--keep", type=Path, default=ROOT / "runs" / "chaos",
                   help="where what differs goes (default: runs/chaos)")  # fmt: skip
    p.add_argument("--only", default="", metavar="TEXT", help="commands with this in their name")
    p.add_argument("--seed", type=int, help="of one life; the commands are those of --only")
    p.add_argument("--first", type=int, help="the first seed (default: a random one)")
    args = p.parse_args(argv)
    matplotlib.use("Agg")
    first = args.seed if args.seed is not None else args.first if args.first is not None else secrets.randbelow(10**9)
    workers = 1 if args.seed is not None else args.workers
    print(f"{args.seconds:.0f} s, {workers} workers, seeds from {first}", flush=True)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    assert convert  # imported once, here
    return int(chaos(args.seconds, workers, args.only, first, args.keep, args.seed is not None) > 0)


if __name__ == "__main__":
    sys.exit(main())
