"""Printing untrusted text on a terminal: a model's output, the content or name of a file, a server's answer. All of it
is printed through `printable`, or as a part of one line through `one_line`.
"""

from __future__ import annotations

import re
import sys
import unicodedata

LONGEST = 2000  # characters of `one_line`
# Control characters can steer a terminal; direction marks can show a line in another order than it has.
_STEERING = {"Cc", "Cs"}
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def one_line(text: str) -> str:
    """`printable` text on one line, so that it cannot pass for the program's own output; cut to LONGEST characters."""
    line = printable(" ".join(text.splitlines())).replace("\t", " ")
    return line if len(line) <= LONGEST else line[: LONGEST - 3] + "..."


def readable_argument(text: str) -> str:
    """`text` on one line as an argument of a shell's command: in double quotes, without what has a meaning in them."""
    plain = re.sub(r'["$`\\\\!]', "", one_line(text)).strip()
    return f'"{plain}"'


def printable(text: str) -> str:
    """`text` made safe to print: it cannot steer the terminal.

    Removes control characters except newline and tab, lone surrogates, and marks that change the writing direction.
    Characters that standard output cannot encode become question marks.
    """
    kept = "".join(c for c in text if c in "\n\t" or not (c in _DIRECTIONS or unicodedata.category(c) in _STEERING))
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return kept.encode(encoding, "replace").decode(encoding)
