"""Text of others on a terminal: what a model says, what stands in a file, how a file or a source is called, what a
server answers. All of it is printed through `printable`, or as a part of one line through `one_line`.
"""

from __future__ import annotations

import sys
import unicodedata

# Control characters can steer a terminal, marks of writing direction can show a line in another order than it has.
_STEERING = {"Cc", "Cs"}
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def one_line(text: str, most: int = 2000) -> str:
    """`printable` text in one line, so that it cannot pass for a line of the program's own; the rest of what is longer
    than `most` characters is left out."""
    line = printable(" ".join(text.splitlines())).replace("\t", " ")
    return line if len(line) <= most else line[: most - 3] + "..."


def printable(text: str) -> str:
    """`text` as it may be printed: a model, a file or a file's name must not be able to steer the terminal.

    Control characters are left out, newline and tab stay; so are lone surrogates and what changes the direction of
    writing. What standard output cannot encode becomes a question mark.
    """
    kept = "".join(
        c for c in text if c in "\n\t" or not (c in _DIRECTIONS or unicodedata.category(c) in _STEERING)
    )
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return kept.encode(encoding, "replace").decode(encoding)
