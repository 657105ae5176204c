"""python -m tinyforge.hub convert SRC DST, and average SRC SRC OUT"""

from __future__ import annotations

import sys

from tinyforge.errors import UserError, run_command


def main() -> int:
    from tinyforge.hub import average, convert

    commands = {"convert": convert.main, "average": average.main}
    if (name := "".join(sys.argv[1:2])) not in commands:
        raise UserError("usage: python -m tinyforge.hub convert SRC DST, or average SRC SRC OUT; each has --help")
    return commands[name](sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
