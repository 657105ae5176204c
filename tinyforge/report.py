"""What commands that measure share: the --json flag, and the checks that come before minutes of measuring."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError


def add_json_flag(p: argparse.ArgumentParser) -> None:
    p.add_argument("--json", nargs="?", const="-", metavar="FILE",
                   help="all figures as JSON to FILE; without FILE to stdout, and the table to stderr")  # fmt: skip


def check_before(target: str | None, peer: str | None = None) -> None:
    """Refuse now what would only show after measuring: a missing peer, a --json that is no place for a file."""
    if peer and importlib.util.find_spec("torch") is None:
        raise UserError(f"--peer {peer}: PyTorch is not installed; pip install torch, or leave out --peer")
    if target and target != "-" and not Path(target).resolve().parent.is_dir():
        raise UserError(f"--json: {target} is in a folder that does not exist; make it first")
    if target and Path(target).is_dir():
        raise UserError(f"--json: {target} is a folder; name a file in it")


def publish(found: dict[str, Any], table: str, target: str | None) -> None:
    """Print the table, and the JSON where --json asks for it."""
    print(table, file=sys.stderr if target == "-" else sys.stdout)
    write_json(found, target)


def write_json(found: dict[str, Any], target: str | None) -> None:
    """What --json asks for, if it does; a file is written in place, since it may be a device."""
    if target == "-":
        print(json.dumps(found, indent=2))
    if target in (None, "-"):
        return
    try:
        Path(target).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json: cannot write {target}: {error.strerror}; choose another file") from error
