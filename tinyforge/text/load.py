"""A tokenizer from its file, whichever kind it is."""

from __future__ import annotations

from pathlib import Path

from tinyforge.files import read_json
from tinyforge.text import chars
from tinyforge.text.bpe import Tokenizer
from tinyforge.text.vocabulary import TextTokenizer


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """What `save` of any tokenizer wrote. Raises UserError, naming the file, when it is missing or damaged."""
    kind = chars.CharTokenizer if read_json(path, "the tokenizer").get("format") == chars.FORMAT else Tokenizer
    return kind.load(path)
