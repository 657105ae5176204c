"""python -m models list, show, record, page: the registered models. See `tinyforge.zoo.command`."""

from __future__ import annotations

from tinyforge.errors import run_command
from tinyforge.zoo.command import main

if __name__ == "__main__":
    run_command(main)
