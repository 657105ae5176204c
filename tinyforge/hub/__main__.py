"""python -m tinyforge.hub convert SRC DST"""

from __future__ import annotations

import sys

from tinyforge.errors import UserError, run_command


def main() -> int:
    from tinyforge.hub import convert

    if sys.argv[1:2] != ["convert"]:
        raise UserError("usage: python -m tinyforge.hub convert SRC DST; see python -m tinyforge.hub convert --help")
    return convert.main(sys.argv[2:])


if __name__ == "__main__":
    run_command(main)
