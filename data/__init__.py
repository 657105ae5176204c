"""Corpora: the built-in small world, and getting, cleaning and tokenising other text."""
