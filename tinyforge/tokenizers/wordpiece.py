"""WordPiece, BERT's tokenizer: words are split into the longest pieces in the vocabulary, from the left.

    tokenizer = WordPiece.train(texts, vocab_size=8192)
    tokenizer.encode("unaffable")  ->  the ids of un, ##aff, ##able

A text is cleaned (control characters removed, all white space made spaces), if `lower` is set lower-cased and stripped
of accents, and split at white space and around each punctuation mark and Chinese character. The results are words. A
piece that continues a word has the prefix ##. A word that cannot be split into pieces is [UNK].

Source: Devlin et al., "BERT" (2018); the rules are those of its `BasicTokenizer` and of Hugging Face's tokenizers. The
vocabulary is learned by byte-pair merges within words; their tokens are then counted as pieces.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError, errors_in
from tinyforge.files import MORE_DIGITS, read_json, read_text
from tinyforge.tokenizers.bpe import PairRanks, apply_merges, learn_merges
from tinyforge.tokenizers.pieces import to_utf8
from tinyforge.tokenizers.vocabulary import After, Vocabulary, are_texts

FORMAT, VERSION = "tinyforge-wordpiece", 1
PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIALS = (PAD, UNK, CLS, SEP, MASK)
PREFIX = "##"
LONGEST = 100  # characters of a word; a longer one is [UNK]
RARE = 3  # a character that occurs less often gets no token
MODEL = {"unk_token": UNK, "continuing_subword_prefix": PREFIX, "max_input_chars_per_word": LONGEST}
"""What "model" of a tokenizer.json says of all WordPiece tokenizers here."""

# The blocks of Chinese characters, which have no space between words.
IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class _Table(dict[int, int | str | None]):
    """A table for str.translate that computes each character's entry on first use."""

    def __missing__(self, code: int) -> int | str | None:
        self[code] = found = self.made(chr(code))
        return found

    def made(self, char: str) -> int | str | None:
        raise NotImplementedError


class _Cleaned(_Table):
    def made(self, char: str) -> int | str | None:
        if char in "\t\n\r" or char.isspace() and unicodedata.category(char) != "Cc":
            return " "
        if char in "\0\ufffd" or unicodedata.category(char) in ("Cc", "Cf", "Co", "Cs"):
            return None
        return f" {char} " if any(first <= ord(char) <= last for first, last in IDEOGRAPHS) else ord(char)


class _Unaccented(_Table):
    def made(self, char: str) -> int | str | None:
        return None if unicodedata.category(char) == "Mn" else ord(char)


class _Separated(_Table):
    def made(self, char: str) -> int | str | None:
        sign = char.isascii() and not char.isalnum() and char > " " or unicodedata.category(char).startswith("P")
        return f" {char} " if sign else ord(char)


_CLEANED, _UNACCENTED, _SEPARATED = _Cleaned(), _Unaccented(), _Separated()


def words_of(text: str, lower: bool) -> list[str]:
    """The words and punctuation marks of a text."""
    text = text.translate(_CLEANED)
    if lower:
        if not text.isascii():
            text = unicodedata.normalize("NFD", text).translate(_UNACCENTED).replace("\u03a3", "\u03c3")
        text = text.lower()
    return text.translate(_SEPARATED).split()


class WordPiece(Vocabulary):
    """Ids are positions in the list of tokens, which includes the special ones. lower: ignore case and accents."""

    def __init__(self, tokens: Sequence[str], lower: bool = True) -> None:
        """UserError for a list that lacks one of `SPECIALS` or has a token twice."""
        self.tokens, self.lower = list(tokens), lower
        ids = {token: id for id, token in enumerate(self.tokens)}
        missing = [special for special in SPECIALS if special not in ids]
        if missing or len(ids) != len(self.tokens):
            fault = f"lacks {missing[0]}" if missing else "has a token twice"
            raise UserError(f"the vocabulary {fault}; expected BERT's, with {', '.join(SPECIALS)} and every token once")
        super().__init__([to_utf8(token) for token in self.tokens], {special: ids[special] for special in SPECIALS})
        self._starts = {token: id for token, id in ids.items() if token not in SPECIALS}
        self._known: dict[str, list[int]] = {}

    # --- text to ids and back

    def encode(self, text: str, after: After = "start") -> list[int]:
        """Ids of the pieces of all words, without [CLS] and [SEP]. `after` does not matter."""
        known, found = self._known, []
        for word in words_of(text, self.lower):
            ids = known.get(word)
            if ids is None:
                ids = known[word] = self._cut(word)
            found += ids
        if len(known) > 1 << 20:
            known.clear()
        return found

    def _cut(self, word: str) -> list[int]:
        if len(word) > LONGEST:
            return [self.specials[UNK]]
        ids, start, end = [], 0, len(word)
        while start < len(word):
            id = self._starts.get(word[start:end] if start == 0 else PREFIX + word[start:end])
            if id is None:
                end -= 1
                if end == start:
                    return [self.specials[UNK]]
                continue
            ids.append(id)
            start, end = end, len(word)
        return ids

    def decode(self, ids: Iterable[int], after: After = "start") -> str:
        """The words, with spaces between them: case, accents and the original spaces are lost."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], after: After = "start") -> bytes:
        found = b"".join(b" " + self.token_bytes(id) for id in ids)
        return found.replace(b" " + PREFIX.encode(), b"").removeprefix(b" ")

    # --- making one

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, lower: bool = True, progress: bool = False) -> WordPiece:
        """Learn a vocabulary of up to `vocab_size` tokens: the special ones, every character that is not rare, at the
        beginning of a word and within one, and the most frequent pieces.

        Raises UserError if there is no text, and if `vocab_size` does not hold the characters.
        """
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(words_of(text, lower))
        words = {to_utf8(word): count for word, count in counts.items() if len(word) <= LONGEST}
        if not words:
            raise UserError("no text to train the tokenizer on: got 0 words; give a file with text")
        characters = Counter[str]()
        for word, count in counts.items():
            for place, char in enumerate(word):
                characters[char if place == 0 else PREFIX + char] += count
        alphabet = sorted(char for char, count in characters.items() if count >= RARE) or sorted(characters)
        if len(SPECIALS) + len(alphabet) > vocab_size:
            raise UserError(
                f"vocabulary too small for the characters: got vocab_size {vocab_size}, expected at least "
                f"{len(SPECIALS) + len(alphabet)}; raise vocab_size"
            )
        merges = learn_merges(words, vocab_size, progress)
        ranks = PairRanks({pair: rank for rank, pair in enumerate(merges)})
        spelt = [bytes([byte]) for byte in range(256)]
        for left, right in merges:
            spelt.append(spelt[left] + spelt[right])
        made = range(256, 256 + len(merges))
        pieces: Counter[str] = Counter()
        for word_bytes, count in words.items():
            # The word's tokens, and all tokens that they were merged from, which split words not seen here.
            left_to_right = [(place == 0, id) for place, id in enumerate(apply_merges(list(word_bytes), ranks, made))]
            while left_to_right:
                first, id = left_to_right.pop()
                piece = spelt[id].decode("utf-8", "ignore")
                if piece and to_utf8(piece) == spelt[id]:  # merges join bytes: half a character is not a piece
                    pieces[piece if first else PREFIX + piece] += count
                if id >= 256:
                    left, right = merges[id - 256]
                    left_to_right += [(first, left), (False, right)]
        for char in alphabet:
            pieces.pop(char, None)
        room = vocab_size - len(SPECIALS) - len(alphabet)
        best = sorted(pieces, key=lambda piece: (-pieces[piece], piece))[:room]
        return cls([*SPECIALS, *alphabet, *best], lower)

    # --- on disk

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "lower": self.lower, "tokens": self.tokens}

    @classmethod
    def from_content(cls, content: dict[str, Any], path: Path) -> WordPiece:
        """The tokenizer in a file that `save` wrote, as JSON read it. Raises UserError, naming `path`."""
        tokens, lower = content.get("tokens"), content.get("lower")
        sound = are_texts(tokens) and tokens and all(tokens) and isinstance(lower, bool)
        if content.get("version") != VERSION or not sound:
            raise UserError(f"{path} is not a WordPiece vocabulary; the file is damaged, make the tokenizer again")
        return _named(path, tokens, lower)


def _named(path: Path, tokens: Any, lower: Any) -> WordPiece:
    with errors_in(path):
        return WordPiece(tokens, lower)


def read_vocab(path: Path) -> WordPiece:
    """BERT's vocab.txt, one token per line; tokenizer_config.json next to it says whether it is lower case."""
    tokens = read_text(path, "the vocabulary").split("\n")
    settings = path.parent / "tokenizer_config.json"
    given = read_json(settings, "the tokenizer's config", digits=MORE_DIGITS) if settings.is_file() else {}
    lower = bool(given.get("do_lower_case", True))
    return _named(path, [t.rstrip("\r") for t in tokens[: -1 if not tokens[-1] else None]], lower)


def from_huggingface(content: dict[str, Any]) -> WordPiece:
    """From a tokenizer.json with a WordPiece model. UserError for one that splits text differently."""
    model, normal = content["model"], content.get("normalizer") or {}
    vocab = model.get("vocab")
    for key, value in MODEL.items():
        if model.get(key, value) != value:
            raise UserError(f"got model.{key} {model[key]!r}, expected {value!r}; no other WordPiece can be read")
    if not isinstance(normal, dict) or normal.get("type") != "BertNormalizer":
        raise UserError(f"got normalizer {str(normal)[:60]}, expected a BertNormalizer; no other WordPiece can be read")
    lower = normal.get("lowercase") is True
    accents = normal.get("strip_accents")
    if not (normal.get("clean_text") and normal.get("handle_chinese_chars")) or accents not in (None, lower):
        raise UserError("got a BertNormalizer whose clean_text, handle_chinese_chars or strip_accents is not BERT's")
    if not isinstance(cut := content.get("pre_tokenizer"), dict) or cut.get("type") != "BertPreTokenizer":
        raise UserError("expected a BertPreTokenizer; no other WordPiece can be read")
    if not isinstance(vocab, dict) or sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str):
        raise UserError("got a vocab whose ids are not 0 and up; the file is damaged, get it again")
    return WordPiece(sorted(vocab, key=vocab.__getitem__), lower)
