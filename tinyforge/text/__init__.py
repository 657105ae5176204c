"""Text to token ids and back: a byte-level BPE tokenizer, written by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinyforge.text.bpe import Tokenizer

__all__ = ["Tokenizer"]


def __getattr__(name: str) -> object:
    # Not imported above: `python -m tinyforge.text.bpe` would then find the module loaded already, and warn.
    if name == "Tokenizer":
        from tinyforge.text.bpe import Tokenizer

        return Tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
