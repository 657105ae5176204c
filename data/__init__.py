"""Corpora: the built-in small world, and getting, cleaning and tokenising other text."""

from tinyforge import interrupt  # noqa: F401  before a command's own imports
