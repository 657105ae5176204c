"""Text to token ids and back: tokenizers, chat templates and shards of ids, written by hand."""

from tinyforge.text.bpe import Tokenizer
from tinyforge.text.chars import CharTokenizer
from tinyforge.text.load import load_tokenizer
from tinyforge.text.sentencepiece import SentencePiece
from tinyforge.text.vocabulary import TextTokenizer
from tinyforge.text.wordpiece import WordPiece

__all__ = ["CharTokenizer", "SentencePiece", "TextTokenizer", "Tokenizer", "WordPiece", "load_tokenizer"]
