"""Text to token ids and back: tokenizers, chat templates and shards of ids, written by hand."""

from tinyforge.tokenizers.bpe import Tokenizer
from tinyforge.tokenizers.chars import CharTokenizer
from tinyforge.tokenizers.load import load_tokenizer
from tinyforge.tokenizers.sentencepiece import SentencePiece
from tinyforge.tokenizers.vocabulary import TextTokenizer
from tinyforge.tokenizers.wordpiece import WordPiece

__all__ = ["CharTokenizer", "SentencePiece", "TextTokenizer", "Tokenizer", "WordPiece", "load_tokenizer"]
