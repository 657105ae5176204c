"""`python -m tinyforge.text`: train, use and inspect a tokenizer."""

from tinyforge.errors import run_command
from tinyforge.text.command import main

run_command(main)
