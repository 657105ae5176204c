"""Text to token ids and back: tokenizers, chat templates and shards of ids, written by hand."""

from tinyforge.text.bpe import Tokenizer
from tinyforge.text.chars import CharTokenizer
from tinyforge.text.load import load_tokenizer
from tinyforge.text.vocabulary import TextTokenizer

__all__ = ["CharTokenizer", "TextTokenizer", "Tokenizer", "load_tokenizer"]
