"""Shared by commands: the --json flag, checks made before minutes of measuring, counts in words, start-up times.

    with timed("tokenizer"):        prints a line at the end if it took a second or more: "tokenizer: 3.1 s"
        ...

With the environment variable TINYFORGE_TIMES=1 every such part prints its line, with the seconds since the process
began.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinyforge.errors import Parser, UserError

NOISE = " +-"  # after a score's name: its standard error, or its spread over seeds


def count_of(n: int, one: str, many: str = "") -> str:
    """ "1 step", "2,000 steps"; many: the plural where it is not `one` with an s."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def figure(value: float) -> str:
    """A measured number for people: three decimals, and at least three significant digits below 0.1."""
    return f"{value:,.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def add_json_flag(p: Parser) -> None:
    what = "all figures as JSON to FILE; without FILE to stdout, and the table to stderr"
    p.flag("--json", str, what, nargs="?", const="-", metavar="FILE")


def check_before(target: str | None, peer: str | None = None) -> None:
    """Fail now rather than after measuring: for a missing peer, or a --json path that cannot be a file."""
    package, name = ("xllamacpp", "llama.cpp") if peer == "llamacpp" else ("torch", "PyTorch")
    if peer and importlib.util.find_spec(package) is None:
        raise UserError(f"--peer {peer}: {name} is not installed; pip install {package}, or leave out --peer")
    if target and target != "-" and not Path(target).resolve().parent.is_dir():
        raise UserError(f"--json: {target} is in a folder that does not exist; make it first")
    if target and Path(target).is_dir():
        raise UserError(f"--json: {target} is a folder; name a file in it")


def publish(found: dict[str, Any], table: str, target: str | None) -> None:
    """Print the table, and write the JSON if --json asks for it."""
    print(table, file=sys.stderr if target == "-" else sys.stdout)
    write_json(found, target)


def write_json(found: dict[str, Any], target: str | None) -> None:
    """Write the JSON if --json asks for it; a file is written in place, since it may be a device."""
    if target == "-":
        print(json.dumps(found, indent=2))
    if target in (None, "-"):
        return
    try:
        Path(target).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: cannot write {target}: {error.strerror}; choose another file") from error


SLOW = 1.0  # seconds


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took; see the module's docstring."""
    start = time.perf_counter()
    yield
    took(what, time.perf_counter() - start)


def took(what: str, seconds: float, say: Callable[[str], Any] = print) -> None:
    """Print the line of a part that took `seconds`."""
    if os.environ.get("TINYFORGE_TIMES"):
        say(f"{what}: {seconds:.2f} s, at {since_start():.2f} s")
    elif seconds >= SLOW:
        say(f"{what}: {seconds:.1f} s")


def since_start() -> float:
    """Seconds since this process began, imports included; CPU seconds if the system does not tell."""
    try:
        began = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0]) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return time.process_time()
