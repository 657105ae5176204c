"""`python -m tinyforge.text`: train a tokenizer, use it, and look into it."""

from tinyforge.errors import run_command
from tinyforge.text.command import main

run_command(main)
