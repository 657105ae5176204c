"""`python -m tinyforge`: the command `tinyforge`. See `tinyforge.cli`."""

from tinyforge.cli import main
from tinyforge.errors import run_command

if __name__ == "__main__":
    run_command(main)
