"""Reading a tokenizer, whatever made the file."""

from __future__ import annotations

from pathlib import Path

from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.text import bpe, chars, huggingface, labels, sentencepiece, wordpiece
from tinyforge.text.vocabulary import TextTokenizer

# What a folder can hold, in the order of preference.
NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer.bin", "vocab.txt")


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer in a file, or in a folder that has one under its usual name.

    Read are what `save` of any tokenizer here wrote, Hugging Face's tokenizer.json, SentencePiece's tokenizer.model
    (*.model), llama2.c's tokenizer.bin (*.bin), and BERT's vocab.txt (*.txt). Raises UserError, naming the file, when
    it is missing or damaged, or asks for what is not supported.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in NAMES if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: got no tokenizer there, wanted one of {', '.join(NAMES)}; check the path")
        path = found
    if path.suffix == ".model":
        return sentencepiece.read_model(path)
    if path.suffix == ".txt":
        return wordpiece.read_vocab(path)
    if path.suffix == ".bin":
        return sentencepiece.read_llama2c(path)
    content = read_json(path, "the tokenizer")
    if content.get("format") == sentencepiece.FORMAT:
        return sentencepiece.SentencePiece.from_content(content, path)
    if content.get("format") == chars.FORMAT:
        return chars.CharTokenizer.from_content(content, path)
    if content.get("format") == wordpiece.FORMAT:
        return wordpiece.WordPiece.from_content(content, path)
    if content.get("format") == labels.FORMAT:
        return labels.Labels.from_content(content, path)
    if content.get("format") == huggingface.FORMAT:
        return huggingface.ImportedBPE.from_content(content, path)
    if "format" not in content and "model" in content:
        return huggingface.read_huggingface(content, path)
    return bpe.Tokenizer.from_content(content, path)
