"""Reading a tokenizer from any supported file."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.tokenizers import bpe, chars, huggingface, ids, sentencepiece, tiktoken, wordpiece
from tinyforge.tokenizers.vocabulary import TextTokenizer

NAMES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer.bin", "vocab.txt")
"""In a folder, in order of preference."""
_VERSION = re.compile(r"\.v\d+(m\d+)?")  # Mistral's: tokenizer.model.v3
READERS: dict[str, Callable[[Path], TextTokenizer]] = {
    ".model": sentencepiece.read_model,
    ".bin": sentencepiece.read_llama2c,
    ".txt": wordpiece.read_vocab,
}
KINDS: dict[Any, type[Any]] = {
    sentencepiece.FORMAT: sentencepiece.SentencePiece,
    chars.FORMAT: chars.CharTokenizer,
    wordpiece.FORMAT: wordpiece.WordPiece,
    ids.FORMAT: ids.Ids,
}
"""By "format" in the JSON that `save` writes; all else is a `Tokenizer`'s."""


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer in a file, or in a folder that has one under its usual name.

    Reads the files that `save` writes, Hugging Face's tokenizer.json, SentencePiece's tokenizer.model (*.model),
    Mistral's tokenizer.model.v1 to .v7 and tekken.json, llama2.c's tokenizer.bin (*.bin), and BERT's vocab.txt (*.txt).
    Raises UserError, naming the file, if it is missing, damaged or not supported.
    """
    with _no_collection():
        return _load(Path(path))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A vocabulary is a million objects without cycles, through which Python's collector would go repeatedly."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _load(path: Path) -> TextTokenizer:
    if path.is_dir():
        found = next((path / name for name in NAMES if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: no tokenizer there, expected one of {', '.join(NAMES)}; check the path")
        path = found
    suffix = next((suffix for suffix in reversed(path.suffixes) if not _VERSION.fullmatch(suffix)), "")
    if suffix in READERS:
        return READERS[suffix](path)
    content = read_json(path, "the tokenizer")
    if "format" not in content and "model" in content:
        return huggingface.read_huggingface(content, path)
    if "format" not in content and "config" in content and "vocab" in content:
        return tiktoken.read_tekken(content, path)
    return KINDS.get(str(content.get("format")), bpe.Tokenizer).from_content(content, path)
