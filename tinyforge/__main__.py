"""`python -m tinyforge`: the command `tinyforge`. See `tinyforge.commands`."""

from tinyforge.commands import main
from tinyforge.errors import run_command

if __name__ == "__main__":
    run_command(main)
