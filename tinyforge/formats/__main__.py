"""python -m tinyforge.formats convert SRC DST, average SRC SRC OUT, and calibrate SRC OUT --data SHARDS"""

from __future__ import annotations

import sys

from tinyforge.errors import UserError, run_command


def main() -> int:
    from tinyforge.formats import average, calibrate, convert

    commands = {"convert": convert.main, "average": average.main, "calibrate": calibrate.main}
    if (name := "".join(sys.argv[1:2])) not in commands:
        raise UserError(
            "usage: python -m tinyforge.formats convert SRC DST, average SRC SRC OUT, or calibrate SRC OUT "
            "--data SHARDS; each has --help"
        )
    return commands[name](sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
