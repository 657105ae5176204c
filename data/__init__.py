"""Corpora: the built-in small world, and commands that download, clean, filter and tokenise other text."""

from tinyforge import interrupt  # noqa: F401  before a command's own imports
