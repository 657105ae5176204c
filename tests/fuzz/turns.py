"""Trials of many things in turn, side by side, until the clock says so: what fuzz and chaos have in common.

rows = in_turns(lambda number: trial, things, workers=2, seconds=60.0, seeds=count(1))      # trial(thing, seed)
print(table(("thing", "trials"), [("a", "3"), ("b", "4")]))
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


def parser(prog: str, doc: str, what: str, how: str) -> argparse.ArgumentParser:
    """The flags of both. what: is tried; how: what is kept."""
    p = argparse.ArgumentParser(
        prog=f"python -m tests.{prog}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--seconds", type=float, default=60.0, help="for how long (default: %(default)s)")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="side by side (default: the cores)")
    p.add_argument("--keep", type=Path, default=ROOT / "runs" / prog, help=f"where {how} (default: runs/{prog})")
    p.add_argument("--only", default="", metavar="TEXT", help=f"{what} with this in their name")
    p.add_argument("--first", type=int, default=secrets.randbelow(10**9), help="the first seed (default: a random one)")
    return p


def name_of(thing: str, seed: int) -> str:
    """Of the file or folder in which a trial is kept."""
    return f"{''.join(c if c.isalnum() else '-' for c in thing)}-{seed}"


def in_turns(
    begin: Callable[[int], Callable[[T, int], dict[str, Any]]],
    things: Sequence[T],
    workers: int,
    seconds: float,
    seeds: Iterable[int],
) -> list[dict[str, Any]]:
    """What the trials return, which must be JSON. begin: called in each of the forked workers with its number."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        children, logs = [], [Path(folder, f"log-{number}") for number in range(workers)]
        for number, log in enumerate(logs):
            child = os.fork()
            if not child:
                status = 1
                try:
                    # Workers begin at different things, so that a short run covers all of them.
                    at = number * len(things) // workers
                    mine = islice(seeds, number, None, workers)
                    _work(begin(number), [*things[at:], *things[:at]], mine, until, log)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(status)
            children.append(child)
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(ended):
            raise SystemExit(f"a worker ended with status {max(map(abs, ended))}: see its traceback above")
        return [json.loads(line) for log in logs for line in log.read_text(encoding="utf-8").splitlines()]


def _work(
    trial: Callable[[T, int], dict[str, Any]], things: Sequence[T], seeds: Iterable[int], until: float, log: Path
) -> None:
    with open(log, "a", encoding="utf-8", buffering=1) as lines:
        for seed in seeds:
            for thing in things:
                if time.monotonic() >= until:
                    return
                lines.write(json.dumps(trial(thing, seed)) + "\n")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """In columns as wide as what is in them; the first is of names, the others are of figures."""
    lines = [head, *([str(cell) for cell in row] for row in rows)]
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join([line[0].ljust(wide[0]), *map(str.rjust, line[1:], wide[1:])]) for line in lines)
