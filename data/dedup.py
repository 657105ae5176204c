"""Duplicates: the words of a text as numbers, MinHash signatures, candidate pairs by banding, clusters.

    batch = Words(texts)
    WordHash().update(batch.normal_forms()[0])        # equal for texts with the same words
    signatures = batch.signatures(5, permutations(120))
    estimate(signatures[0], signatures[1])            # of the Jaccard similarity of their 5-word shingles

A word is a maximal run of letters and digits; a Chinese character or a kana ends it. Case, punctuation and white space
make no difference: texts are lower-cased, and everything else becomes one space. A letter or digit is one of ASCII, or
any character outside ASCII except the blocks "Latin-1 Supplement" up to U+00BF, "General Punctuation" and "CJK Symbols
and Punctuation". In code and formulas the hash and the signatures have operators too: `a + b` is not `a - b`.

Sources: A. Broder, "On the resemblance and containment of documents", 1997 (shingles, MinHash). K. Lee et al.,
"Deduplicating Training Data Makes Language Models Better", 2022 (MinHash for corpora, clusters as connected
components). J. Leskovec, A. Rajaraman, J. Ullman, "Mining of Massive Datasets", chapter 3 (banding, S-curve).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

import numpy as np

from tinyforge.data.cleaning import hashed

# The commonest words of English, four of ten in prose.
STOP_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "you were her she there been their one all we him has when who will no more if out so up said its"
).split()
_LONGEST_STOP = max(map(len, STOP_WORDS))
_SPACE, _END = 0x20, 0xFF  # 0xFF does not occur in UTF-8: it ends a text
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
_EMPTY = np.uint32(0xFFFFFFFF)  # the signature of a text without words


_OPERATORS = b"!%&*+-/<=>^|~"
# Of the characters of a text that are `_CODE`, from which it is code, or formulas; prose has a tenth. Without the
# percent sign: articles on counties and their people have many.
_CODE_SHARE = 0.01
_CODE = bytes(byte in b"&*+/<=>\\^_{|}~" for byte in range(256))


def _make_table(kept: bytes = b"") -> bytes:
    """The replacement of each byte of a lower-cased text."""
    words = {*b"0123456789abcdefghijklmnopqrstuvwxyz", *range(0x80, 0x100), *kept}
    return bytes(byte if byte in words else _SPACE for byte in range(256))


_TABLE, _TABLE_OF_CODE = _make_table(), _make_table(_OPERATORS)


class Words:
    """The words of a few texts in one array, so that NumPy works on megabytes instead of words.

    counts: words of each text, (D,). letters: their characters without digits, (D,). characters: of the text, without
    white space and control characters, (D,). code: whether the text is code or formulas, (D,). operators: these belong
    to words too, so that texts that differ in them alone are different. Memory: about 40 bytes per byte of text, so a
    megabyte at a time is right.
    """

    def __init__(self, texts: Sequence[str], operators: bool = False) -> None:
        joined = bytearray(b"".join(hashed(text) + b"\xff" for text in texts))
        raw = np.frombuffer(joined, np.uint8)
        # bytes.translate looks up 60 MB in 0.04 s, an index array of NumPy in 0.1.
        normal = np.frombuffer(joined.translate(_TABLE_OF_CODE if operators else _TABLE), np.uint8)
        _blank_punctuation(raw, normal)
        is_word = (normal != _SPACE) & (normal != _END)
        keep = is_word | (normal == _END)
        keep[1:] |= is_word[:-1]  # one space after each word
        self._bytes, self._raw, self._is_word = normal[keep], raw, is_word
        ends = np.flatnonzero((self._bytes == _SPACE) | (self._bytes == _END))
        starts = np.concatenate([[0], ends[:-1] + 1])
        self._text_ends = np.flatnonzero(self._bytes == _END)
        full = ends > starts  # empty: between a last space and the end of its text
        self._starts, self._ends = starts[full], ends[full]
        self._firsts = np.concatenate([[0], np.searchsorted(self._starts, self._text_ends)])
        self.counts = np.diff(self._firsts)
        self._sums: np.ndarray | None = None
        self._grams: dict[tuple[int, int | None], tuple[np.ndarray, np.ndarray]] = {}
        # A character has exactly one byte that is not a continuation byte (0x80 to 0xbf).
        letter = (self._bytes >= 0x61) & ((self._bytes < 0x80) | (self._bytes >= 0xC0)) & (self._bytes != _END)
        self.letters = _counts(letter, self._text_ends)
        character = (raw > _SPACE) & ((raw < 0x80) | (raw >= 0xC0)) & (raw != _END)
        ends = np.flatnonzero(raw == _END)
        self.characters = _counts(character, ends)
        code = np.frombuffer(joined.translate(_CODE), bool)
        self.code = _counts(code, ends) > _CODE_SHARE * self.characters

    def normal_forms(self) -> list[bytes]:
        """Each text as its words with one space between them."""
        starts = np.concatenate([[0], self._text_ends[:-1] + 1])
        ends = zip(starts, self._text_ends, strict=True)
        return [self._bytes[start:end].tobytes().rstrip() for start, end in ends]

    def grams(self, n: int, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """A 64-bit hash of every run of n words, text after text, and the bounds of each text's runs: (G,), (D + 1,).

        A text of w >= n words has w - n + 1 runs; a shorter one has one, of all its words; one without words has none.
        most: the runs of each text that are hashed, from its beginning.

        The hash of the bytes c_i is h = mix(sum c_i B^i mod 2^64), a difference of two prefix sums: no run is ever
        built as a string.
        """
        if (n, most) in self._grams:
            return self._grams[n, most]
        counts = np.where(self.counts >= n, self.counts - n + 1, np.minimum(self.counts, 1))
        counts = counts if most is None else np.minimum(counts, most)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        first = np.arange(bounds[-1]) + np.repeat(self._firsts[:-1] - bounds[:-1], counts)
        last = np.minimum(first + n - 1, np.repeat(self._firsts[1:] - 1, counts))
        self._grams[n, most] = self._hashes(first, last), bounds
        return self._grams[n, most]

    def _hashes(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Of the runs from word `first` to word `last`."""
        powers, inverses = _powers(1 << (len(self._bytes) - 1).bit_length())
        if self._sums is None:
            self._sums = np.zeros(len(self._bytes) + 1, np.uint64)
            np.cumsum(self._bytes * powers[: len(self._bytes)], out=self._sums[1:])
        starts = self._starts[first]
        return _mix((self._sums[self._ends[last]] - self._sums[starts]) * inverses[starts])

    def windows(self, least: int) -> tuple[np.ndarray, ...]:
        """Runs of units, which are sentences and lines with a word: from each unit the shortest with `least` words.

        Returns of each window the hash, the text, and its first unit in the text and the one after its last.
        """
        raw = self._raw
        stops = np.flatnonzero((raw == 0x0A) | (raw == 0x21) | (raw == 0x2E) | (raw == 0x3F) | (raw == _END))
        stops = stops[
            (raw[stops] == 0x0A) | (raw[stops] == _END) | (raw[np.minimum(stops + 1, len(raw) - 1)] == _SPACE)
        ]
        begins = self._is_word.copy()
        begins[1:] &= ~self._is_word[:-1]
        # The words before each stop, which are the number of the first word after it; the last bound is all of them.
        bounds = np.concatenate([[0], np.cumsum(begins, dtype=np.int32)[stops]])
        bounds = bounds[np.append(True, bounds[1:] > bounds[:-1])]
        words = bounds[:-1]
        stop = np.searchsorted(bounds, words + least)
        of_text = np.searchsorted(self._firsts, words, "right") - 1
        full = (words + least <= self._firsts[1:][of_text]) & (stop < len(bounds))
        first_unit = np.searchsorted(of_text, np.arange(len(self.counts)))
        first, stop, of_text = np.flatnonzero(full), stop[full], of_text[full]
        hashes = self._hashes(bounds[first], bounds[stop] - 1)
        return hashes, of_text, first - first_unit[of_text], stop - first_unit[of_text]

    def repeats(self, n: int) -> np.ndarray:
        """The share of each text's runs of n words that stand in it before, 0 to 1, (D,)."""
        grams, bounds = self.grams(n)
        counts = np.diff(bounds)
        # 40 bits of the hash suffice in one text; of a million runs one in a million is taken for another.
        keys = np.repeat(np.arange(len(counts), dtype=np.uint64) << np.uint64(40), counts) | (grams >> np.uint64(24))
        keys.sort()
        again = keys[1:][keys[1:] == keys[:-1]] >> np.uint64(40)
        return np.bincount(again.astype(np.int64), minlength=len(counts)) / np.maximum(counts, 1)

    def stops(self) -> np.ndarray:
        """The share of each text's words that are among `STOP_WORDS`, 0 to 1, (D,)."""
        short = np.flatnonzero(self._ends - self._starts <= _LONGEST_STOP)
        hashes = self._hashes(short, short)
        hits = short[_stop_table()[hashes >> np.uint64(48)] == hashes]
        return np.diff(np.searchsorted(hits, self._firsts)) / np.maximum(self.counts, 1)

    def signatures(self, shingle_words: int, functions: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """MinHash: for each text and function (a, b) the minimum of a s + b mod 2^32 over its shingles s, (D, P)."""
        grams, bounds = self.grams(shingle_words)
        shingles = (grams >> np.uint64(32)).astype(np.uint32)
        found = np.flatnonzero(np.diff(bounds))
        out = np.full((len(functions[0]), len(self.counts)), _EMPTY)
        if len(found):
            values = np.empty_like(shingles)
            for row, a, b in zip(out, *functions, strict=True):
                np.multiply(shingles, a, out=values)
                np.add(values, b, out=values)
                row[found] = np.minimum.reduceat(values, bounds[found])
        return np.ascontiguousarray(out.T)


@cache
def _stop_table() -> np.ndarray:
    """By its first 16 bits, in which no two of them agree, the hash of each stop word; elsewhere 0."""
    hashes = Words(STOP_WORDS).grams(1)[0]
    table = np.zeros(1 << 16, np.uint64)
    table[hashes >> np.uint64(48)] = hashes
    return table


class WordHash:
    """128 bits (BLAKE2b) of the given words, in order, however the text is split into normal forms."""

    def __init__(self) -> None:
        self._hasher = hashlib.blake2b(digest_size=16)

    def update(self, normal_form: bytes) -> WordHash:
        self._hasher.update(normal_form + b" ")
        return self

    def halves(self) -> tuple[int, int]:
        digest = self._hasher.digest()
        return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


def permutations(count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` fixed pairs (a, b), a odd: s -> a s + b mod 2^32 permutes the 32-bit numbers."""
    bits = _mix(np.arange(1, 2 * count + 1, dtype=np.uint64) * np.uint64(_BASE)) >> np.uint64(32)
    return bits[:count].astype(np.uint32) | np.uint32(1), bits[count:].astype(np.uint32)


def estimate(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The share of equal entries of two signatures, (..., P) -> (...): an unbiased estimate of the Jaccard similarity J
    with standard deviation sqrt(J (1 - J) / P)."""
    return (a == b).mean(axis=-1)


def band_keys(signatures: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """(D, bands * rows) -> (D, bands): two texts are candidates if their keys agree in some band."""
    parts = signatures.reshape(len(signatures), bands, rows).astype(np.uint64)
    keys = np.zeros(parts.shape[:2], np.uint64)
    for row in range(rows):
        keys = _mix(keys * np.uint64(_BASE) + parts[:, :, row])
    return keys


def candidate_probability(similarity: float, bands: int, rows: int) -> float:
    """The S-curve: P(candidate | J) = 1 - (1 - J^rows)^bands."""
    return 1 - (1 - similarity**rows) ** bands


def components(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Connected components of the graph with edges (a_i, b_i): its sorted nodes, and for each the component's smallest.

    Every node takes the smallest label among its neighbours, then the label of its label, until nothing changes.
    """
    nodes, edges = np.unique(np.concatenate([a, b]), return_inverse=True)
    left, right = edges[: len(a)], edges[len(a) :]
    labels = np.arange(len(nodes))
    while True:
        before = labels.copy()
        np.minimum.at(labels, right, labels[left])
        np.minimum.at(labels, left, labels[right])
        labels = labels[labels]
        if np.array_equal(labels, before):
            return nodes, nodes[labels]


def _counts(flags: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How many flags are set up to each end, from the one before."""
    bounds = [0, *ends.tolist()]
    return np.array([np.count_nonzero(flags[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)], np.int64)


def _blank_punctuation(raw: np.ndarray, normal: np.ndarray) -> None:
    """Replace punctuation outside ASCII, two or three bytes, by spaces. The array ends with 0xff."""
    for lead, seconds, width in ((0xC2, range(0x80, 0xC0), 2), (0xE2, (0x80, 0x81), 3), (0xE3, (0x80,), 3)):
        at = np.flatnonzero(raw == lead)
        at = at[np.isin(raw[at + 1], seconds)]
        for offset in range(width):
            normal[at + offset] = _SPACE


@cache
def _powers(length: int) -> tuple[np.ndarray, np.ndarray]:
    """B^i and B^-i modulo 2**64, i < length."""
    tables = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        table = np.full(length, base, np.uint64)
        table[0] = 1
        tables.append(np.cumprod(table))
    return tables[0], tables[1]


def _mix(x: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of x (D. Stafford's variant 13 of MurmurHash3's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
