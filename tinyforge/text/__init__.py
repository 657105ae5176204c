"""Text to token ids and back: tokenizers, chat templates and shards of ids, written by hand."""

from tinyforge.text.bpe import Tokenizer
from tinyforge.text.vocabulary import TextTokenizer

__all__ = ["TextTokenizer", "Tokenizer"]
