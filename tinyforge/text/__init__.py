"""Text to token ids and back: a byte-level BPE tokenizer, written by hand."""

from tinyforge.text.bpe import Tokenizer

__all__ = ["Tokenizer"]
