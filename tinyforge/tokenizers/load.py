"""Reading a tokenizer from any supported file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.tokenizers import bpe, chars, huggingface, labels, sentencepiece, wordpiece
from tinyforge.tokenizers.vocabulary import TextTokenizer

NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bin", "vocab.txt")  # in a folder, in order of preference
READERS: dict[str, Callable[[Path], TextTokenizer]] = {
    ".model": sentencepiece.read_model,
    ".bin": sentencepiece.read_llama2c,
    ".txt": wordpiece.read_vocab,
}
KINDS: dict[Any, type[Any]] = {
    sentencepiece.FORMAT: sentencepiece.SentencePiece,
    chars.FORMAT: chars.CharTokenizer,
    wordpiece.FORMAT: wordpiece.WordPiece,
    labels.FORMAT: labels.Labels,
    huggingface.FORMAT: huggingface.ImportedBPE,
}
"""By "format" in the JSON that `save` writes; all else is a `Tokenizer`'s."""


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer in a file, or in a folder that has one under its usual name.

    Reads the files that `save` writes, Hugging Face's tokenizer.json, SentencePiece's tokenizer.model (*.model),
    llama2.c's tokenizer.bin (*.bin), and BERT's vocab.txt (*.txt). Raises UserError, naming the file, if it is missing,
    damaged or not supported.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in NAMES if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: no tokenizer there, wanted one of {', '.join(NAMES)}; check the path")
        path = found
    if path.suffix in READERS:
        return READERS[path.suffix](path)
    content = read_json(path, "the tokenizer")
    if "format" not in content and "model" in content:
        return huggingface.read_huggingface(content, path)
    return KINDS.get(str(content.get("format")), bpe.Tokenizer).from_content(content, path)
