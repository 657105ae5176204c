"""python -m tinyforge.formats convert SRC DST, average SRC SRC OUT, or hub push DIR owner/name"""

from __future__ import annotations

import sys
from importlib import import_module

from tinyforge.errors import UserError, run_command
from tinyforge.invocation import MODULES

COMMANDS = ("convert", "average", "hub", "calibrate")  # calibrate: its place before recipes/calibrate.py


def main() -> int:
    if (name := "".join(sys.argv[1:2])) not in COMMANDS:
        raise UserError(f"usage: {__doc__}; each has --help")
    return import_module(MODULES[(name,)]).main(sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
