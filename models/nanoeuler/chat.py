"""Talk to a trained NanoEuler: `python -m models.nanoeuler.chat` is `python -m tinyforge.chat`, for any model."""

from __future__ import annotations

from tinyforge.chat import main
from tinyforge.errors import run_command

if __name__ == "__main__":
    run_command(main)
