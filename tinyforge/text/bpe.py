"""Byte-level byte-pair encoding (BPE): learn a vocabulary from text, turn text into token ids, and back.

Text is cut into pieces (words, numbers, punctuation, space) by GPT-2's pattern. A piece starts as its UTF-8
bytes, one token each; then every learned merge replaces a pair of neighbouring tokens by one new token, the
merge learned first going first. Bytes are tokens, so every byte string has an encoding, and no merge crosses
the edge of a piece.

    tokenizer = Tokenizer.train(texts, vocab_size=4096)
    ids = tokenizer.encode("Once upon a time")
    assert tokenizer.decode(ids) == "Once upon a time"

The same from the command line (`--help` says more):

    python -m tinyforge.text.bpe train book.txt --vocab-size 4096 --out tokenizer.json
    python -m tinyforge.text.bpe inspect "Once upon a time" --tokenizer tokenizer.json

Token ids: 0..255 the bytes, then one id per merge in the order learned, then the special tokens.

Sources: Gage, "A New Algorithm for Data Compression" (1994); Sennrich, Haddow, Birch, "Neural Machine
Translation of Rare Words with Subword Units" (2016); Radford et al., "Language Models are Unsupervised
Multitask Learners" (2019) for the bytes and the pattern. `docs/tokenizer.md` is the long version of this
page.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError

Pair = tuple[int, int]

FORMAT = "tinyforge-bpe"
VERSION = 1
PATTERN = "gpt2"

# GPT-2's printable bytes come first, then the rest: its files spell each byte as a visible character.
GPT2_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_ORDERS: dict[str, tuple[int, ...]] = {
    "plain": tuple(range(256)),
    "gpt2": (*GPT2_PRINTABLE, *(b for b in range(256) if b not in GPT2_PRINTABLE)),
}

CHUNK = 1 << 16  # characters split at a time: a long text shall not become one list of millions of pieces
CACHE_ENTRIES = 1 << 18
CACHED_PIECE = 64  # characters; a longer piece hardly ever comes back, and would only fill the cache


# --- pre-tokenisation ---------------------------------------------------------------------------------------

# The Unicode property White_Space, which is what `\s` means in GPT-2's pattern. Python's own `\s` is wider:
# it also takes the separators U+001C..U+001F, and would cut text that holds them in other places.
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

# A cut is safe where a space follows something that is not one: no piece reaches across (a space joins only
# what comes after it), and the look-ahead of the pattern looks no further than the run of space it stands in.
SAFE_CUT = re.compile(f"[^{WHITE_SPACE}](?=[{WHITE_SPACE}])")

BMP_END = 0x10000
ASSIGNED_END = 0x40000  # the planes above hold no letter and no number


def class_body(categories: str, wanted: str) -> str:
    """Body of a regular-expression class: the code points where `categories` has the letter `wanted`."""
    runs = (match.span() for match in re.finditer(f"{wanted}+", categories))
    return "".join(f"{chr(first)}-{chr(stop - 1)}" for first, stop in runs)


@cache
def split_pattern(end: int) -> re.Pattern[str]:
    r"""GPT-2's pattern for text whose characters all lie below `end`.

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

    In words: an English contraction; else letters, digits or other signs, each run with the one space before
    it; else a run of white space, less its last character when a word follows (that space belongs to the
    word).
    """
    # `re` has no \p{L}, so the classes are spelt out from the Unicode tables that come with Python. A
    # category has two letters, "Lu" or "Nd"; the first is the one that counts here.
    categories = "".join(map(unicodedata.category, map(chr, range(end))))[::2]
    letters, numbers = class_body(categories, "L"), class_body(categories, "N")
    return re.compile(
        f"'s|'t|'re|'ve|'m|'ll|'d| ?[{letters}]+| ?[{numbers}]+| ?[^{WHITE_SPACE}{letters}{numbers}]+"
        f"|[{WHITE_SPACE}]+(?![^{WHITE_SPACE}])|[{WHITE_SPACE}]+"
    )


def split(text: str) -> Iterator[list[str]]:
    """The pieces of `text`, a chunk of about 64 K characters at a time. Joined, they are the text again."""
    start = 0
    while start < len(text):
        cut = SAFE_CUT.search(text, start + CHUNK)
        stop = cut.end() if cut else len(text)
        chunk = text[start:stop]
        # `re` looks up the first 65,536 characters in a table but tries the ranges beyond one by one, three
        # times as slow over English; so they are in the pattern only where they are in the text. A character
        # beyond takes two units of UTF-16, which is the quickest way to see one.
        is_bmp = len(chunk.encode("utf-16-le", "surrogatepass")) == 2 * len(chunk)
        yield split_pattern(BMP_END if is_bmp else ASSIGNED_END).findall(chunk)
        start = stop


def to_utf8(piece: str) -> bytes:
    """UTF-8 bytes of any string: U+DC80..U+DCFF stand for raw bytes, other surrogates become U+FFFD."""
    try:
        return piece.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", piece).encode()


# --- merging ------------------------------------------------------------------------------------------------


def apply_merges(ids: list[int], merged: dict[Pair, int]) -> list[int]:
    """Apply all merges to one piece: always the pair with the smallest new id, from left to right.

    `merged` maps a pair to its new id; ids grow in the order of learning, so the new id is also the rank. A
    linked list of tokens and a heap of candidates make it O(n log n) for n bytes: a long run without a space
    stays cheap.
    """
    ids = ids.copy()
    end = len(ids)
    following = list(range(1, end + 1))
    preceding = list(range(-1, end - 1))
    heap = [(merged[pair], at) for at, pair in enumerate(pairwise(ids)) if pair in merged]
    heapify(heap)
    while heap:
        new, left = heappop(heap)
        right = following[left]
        if right == end or merged.get((ids[left], ids[right])) != new:
            continue  # one of the two has gone into another merge since
        ids[left], ids[right] = new, -1
        following[left] = after = following[right]
        if after < end:
            preceding[after] = left
            if (pair := (new, ids[after])) in merged:
                heappush(heap, (merged[pair], left))
        before = preceding[left]
        if before >= 0 and (pair := (ids[before], new)) in merged:
            heappush(heap, (merged[pair], before))
    return [token for token in ids if token >= 0]


class PieceCache(dict[str, tuple[int, ...]]):
    """Piece of text -> its token ids, worked out when first asked for.

    Emptied when full: the few pieces that make up most of a text are soon back.
    """

    def __init__(self, byte_ids: list[int], merged: dict[Pair, int]) -> None:
        self.byte_ids = byte_ids
        self.merged = merged

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = tuple(apply_merges([self.byte_ids[byte] for byte in to_utf8(piece)], self.merged))
        if len(piece) <= CACHED_PIECE:
            if len(self) >= CACHE_ENTRIES:
                self.clear()
            self[piece] = ids
        return ids


# --- training -----------------------------------------------------------------------------------------------


def replace_pair(word: list[int], pair: Pair, new: int) -> list[int]:
    """`word` with every occurrence of `pair`, from left to right and without overlap, replaced by `new`."""
    out = []
    at, last = 0, len(word) - 1
    while at <= last:
        if at < last and word[at] == pair[0] and word[at + 1] == pair[1]:
            out.append(new)
            at += 2
        else:
            out.append(word[at])
            at += 1
    return out


def learn_merges(pieces: Counter[str], count: int, progress: bool) -> list[Pair]:
    """Learn up to `count` merges: each the most frequent pair, of equals the smallest pair of ids.

    `pieces` holds each distinct piece with its number of occurrences. Counted once, the pairs are then kept
    up to date: a merge touches only the pieces that hold its pair. The heap is lazy: a count in it can be too
    high, never too low (a count grows only in the step in which the pair is born), so an entry that comes up
    with an old count goes back with the true one. Returns fewer merges when every piece has become one token.
    """
    from tqdm import tqdm

    words = [list(to_utf8(piece)) for piece in pieces]
    weights = list(pieces.values())
    pair_counts: defaultdict[Pair, int] = defaultdict(int)
    holders: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, (word, weight) in enumerate(zip(words, weights, strict=True)):
        for pair in pairwise(word):
            pair_counts[pair] += weight
            holders[pair].add(index)
    heap = [(-pair_count, pair) for pair, pair_count in pair_counts.items()]
    heapify(heap)

    merges: list[Pair] = []
    with tqdm(total=count, desc="learning merges", unit="merge", disable=not progress) as bar:
        while heap and len(merges) < count:
            negative_count, best = heappop(heap)
            true_count = pair_counts[best]
            if true_count < -negative_count:
                if true_count > 0:
                    heappush(heap, (-true_count, best))
                continue
            new = 256 + len(merges)
            merges.append(best)
            born: set[Pair] = set()
            for index in holders.pop(best):
                old_word, weight = words[index], weights[index]
                new_word = replace_pair(old_word, best, new)
                if len(new_word) == len(old_word):
                    continue  # a merge since then has taken the pair out of this word
                for pair in pairwise(old_word):
                    pair_counts[pair] -= weight
                for pair in pairwise(new_word):
                    pair_counts[pair] += weight
                    if new in pair:
                        born.add(pair)
                        holders[pair].add(index)
                words[index] = new_word
            del pair_counts[best]
            for pair in born:
                heappush(heap, (-pair_counts[pair], pair))
            bar.update()
    return merges


# --- the tokenizer ------------------------------------------------------------------------------------------


class Tokenizer:
    """A byte-level BPE vocabulary: 256 bytes, the merges, the special tokens, with ids in this order.

    `merges[i]` is the pair of ids that becomes id 256 + i. `byte_order` is "plain" (id b is byte b) or
    "gpt2". Raises UserError when a merge uses an id not yet made or is given twice, or a special token is
    empty or repeated.
    """

    def __init__(self, merges: Iterable[Pair], specials: Iterable[str], byte_order: str = "plain") -> None:
        self.merges = list(merges)
        self.byte_order = byte_order
        special_texts = list(specials)
        if not all(special_texts) or len(set(special_texts)) < len(special_texts):
            raise UserError(f"special tokens: got {special_texts}, wanted distinct texts, none empty; name each once")

        order = BYTE_ORDERS[byte_order]
        vocab = [bytes([byte]) for byte in order]
        merged: dict[Pair, int] = {}
        for pair in self.merges:
            if not (min(pair) >= 0 and max(pair) < len(vocab)) or pair in merged:
                raise UserError(
                    f"tokenizer merge {len(merged)}: got {pair}, wanted a pair of ids below {len(vocab)} not "
                    "merged before; the file is damaged, train the tokenizer again"
                )
            merged[pair] = len(vocab)
            vocab.append(vocab[pair[0]] + vocab[pair[1]])

        self.specials = {text: len(vocab) + index for index, text in enumerate(special_texts)}
        self.byte_lengths: npt.NDArray[np.int64] = np.array(
            [len(token) for token in vocab] + [0] * len(special_texts), dtype=np.int64
        )
        # A dict, not a list: a negative id must be an error, not the tail of the vocabulary.
        self._vocab = dict(enumerate(vocab + [to_utf8(text) for text in special_texts]))
        self._piece_ids = PieceCache([order.index(byte) for byte in range(256)], merged)

    @property
    def vocab_size(self) -> int:
        """Number of token ids: 256 + merges + special tokens."""
        return len(self._vocab)

    # --- making one

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        specials: tuple[str, ...] = ("<|endoftext|>", "</s>"),
        progress: bool = True,
    ) -> Tokenizer:
        """Learn a vocabulary of exactly `vocab_size` ids from `texts`, whose order does not matter.

        Raises UserError when `vocab_size` cannot hold the bytes, when there is no text, and when the text is
        too small or too uniform for so many merges.
        """
        from tqdm import tqdm

        smallest = 256 + len(specials)
        if vocab_size < smallest:
            raise UserError(
                f"vocabulary too small for the bytes: got vocab_size {vocab_size}, wanted at least "
                f"{smallest} (256 bytes and {len(specials)} special tokens); raise vocab_size"
            )
        pieces: Counter[str] = Counter()
        with tqdm(desc="counting words", unit="char", unit_scale=True, disable=not progress) as bar:
            for text in texts:
                for chunk in split(text):
                    pieces.update(chunk)
                bar.update(len(text))
        if not pieces:
            raise UserError("no text to train the tokenizer on: got 0 characters; give a file with text")
        merges = learn_merges(pieces, vocab_size - smallest, progress)
        if len(merges) < vocab_size - smallest:
            raise UserError(
                f"too little text for vocab_size {vocab_size}: got {len(merges)} possible merges, wanted "
                f"{vocab_size - smallest}; ask for vocab_size {smallest + len(merges)} or give more text"
            )
        return cls(merges, specials)

    @classmethod
    def from_gpt2(cls, encoder_json: str | Path, vocab_bpe: str | Path) -> Tokenizer:
        """GPT-2's own vocabulary from the two files OpenAI published: the same ids, `<|endoftext|>` = 50256.

        encoder.json maps each token to its id, vocab.bpe lists the merges in order, both with every byte
        spelt as a visible character. Raises UserError when a file cannot be read or the two do not belong
        together.
        """
        encoder = read_json(encoder_json)
        # A printable byte is spelt as itself, the n-th of the others as the character 256 + n.
        spelt = [*GPT2_PRINTABLE, *range(256, 512 - len(GPT2_PRINTABLE))]
        ids = {chr(code): index for index, code in enumerate(spelt)}
        merges: list[Pair] = []
        for number, line in enumerate(read_text(vocab_bpe).split("\n"), start=1):
            if not line or (number == 1 and line.startswith("#version")):
                continue
            left, _, right = line.partition(" ")
            if left not in ids or right not in ids:
                raise UserError(
                    f"{vocab_bpe} line {number}: got {line!r}, wanted two earlier tokens; get GPT-2's vocab.bpe again"
                )
            ids[left + right] = 256 + len(merges)
            merges.append((ids[left], ids[right]))
        ids["<|endoftext|>"] = 256 + len(merges)
        if encoder != ids:
            raise UserError(
                f"{encoder_json} and {vocab_bpe} do not belong together: got ids that do not follow from the "
                "merges; get both of GPT-2's files again, from one place"
            )
        return cls(merges, ["<|endoftext|>"], byte_order="gpt2")

    # --- text to ids and back

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`. Text that spells a special token is encoded as plain bytes, never as its id.

        A lone surrogate, which no UTF-8 can hold, becomes U+FFFD (U+DC80..U+DCFF: the raw byte, see
        `encode_bytes`).
        """
        return list(chain.from_iterable(map(self._piece_ids.__getitem__, chain.from_iterable(split(text)))))

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes, valid UTF-8 or not: `decode_bytes` gives the same bytes back."""
        return self.encode(data.decode("utf-8", "surrogateescape"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 (half a character, say) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of `ids`, special tokens as the bytes of their text. Raises UserError for an unknown id."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token. Raises UserError for an unknown id."""
        try:
            return self._vocab[id]
        except KeyError:
            raise UserError(
                f"token id {id} is not in the vocabulary: wanted 0..{self.vocab_size - 1}; "
                "use the tokenizer that the ids were made with"
            ) from None

    # --- on disk

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "pattern": PATTERN,
            "byte_order": self.byte_order,
            "specials": list(self.specials),
            "merges": [list(pair) for pair in self.merges],
        }

    def hash(self) -> str:
        """SHA-256, in hex, of all that decides the ids. Equal hashes encode alike; checkpoints store it."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write one readable JSON file, a merge per line. An old file stays until the new one is whole.

        Raises UserError when the file cannot be written; then the old one is still there.
        """
        content = self._content()
        merges = content.pop("merges")
        head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items())
        body = ",\n".join(f"    {json.dumps(pair)}" for pair in merges)
        path = Path(path)
        temporary = path.with_name(path.name + ".tmp")
        try:
            with open(temporary, "w", encoding="utf-8", newline="\n") as file:
                file.write(f'{{\n{head}  "merges": [\n{body}\n  ]\n}}\n')
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise UserError(
                f"cannot write the tokenizer {path}: {error.strerror}; free space or choose another folder"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a file that `save` wrote. Raises UserError, naming the file, when it is missing or damaged."""
        content = read_json(path)
        for key, wanted in (("format", FORMAT), ("version", VERSION), ("pattern", PATTERN)):
            if content.get(key) != wanted:
                raise UserError(
                    f"{path} is not a tokenizer that this version reads: got {key} {content.get(key)!r}, "
                    f"wanted {wanted!r}; train one again"
                )
        byte_order, specials, merges = (content.get(key) for key in ("byte_order", "specials", "merges"))
        damaged = "the file is damaged, train the tokenizer again"
        if not isinstance(byte_order, str) or byte_order not in BYTE_ORDERS:
            raise UserError(f"{path}: byte_order {byte_order!r} is none of {', '.join(BYTE_ORDERS)}; {damaged}")
        if not isinstance(specials, list) or not all(isinstance(text, str) for text in specials):
            raise UserError(f"{path}: specials is not a list of texts; {damaged}")
        if not isinstance(merges, list) or not all(_is_pair(merge) for merge in merges):
            raise UserError(f"{path}: merges is not a list of pairs of ids; {damaged}")
        try:
            return cls([(left, right) for left, right in merges], specials, byte_order)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _is_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and all(type(token) is int for token in merge)


def read_text(path: str | Path) -> str:
    """Text of a tokenizer file in UTF-8. Raises UserError when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the tokenizer file {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}, so no tokenizer; check the path") from error


def read_json(path: str | Path) -> dict[str, Any]:
    """The JSON object in a tokenizer file. Raises UserError when it cannot be read or is no object."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON (line {error.lineno}: {error.msg}); get or make the file again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: got a JSON {type(content).__name__}, wanted an object; check the path")
    return content


if __name__ == "__main__":
    from tinyforge.errors import run_command
    from tinyforge.text.command import main

    run_command(main)
