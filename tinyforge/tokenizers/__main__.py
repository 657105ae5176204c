"""`python -m tinyforge.tokenizers`: train, use and inspect a tokenizer."""

from tinyforge.errors import run_command
from tinyforge.tokenizers.command import main

run_command(main)
