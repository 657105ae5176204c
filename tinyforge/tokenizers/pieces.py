r"""Pre-tokenisation: text is split into pieces (words, numbers, signs, space) by GPT-2's pattern.

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

In words: an English contraction; else a run of letters, digits or other signs with one space before it; else a run of
white space, without its last character if a word follows (that space belongs to the word). DIGITS is the same pattern
except that each digit is a piece of its own.

These two are implemented twice. `split` is the pattern itself as a regular expression: the reference, and the path of
short and damaged texts. `piece_starts` decides from each character and its two neighbours, for all characters of a text
at once in NumPy. `PieceTable` gives equal pieces the same number, also in NumPy, so that a long text never becomes a
list of millions of Python strings.

PATTERNS has the patterns of other models too, only as regular expressions.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from unicodedata import is_normalized, normalize

import numpy as np
import numpy.typing as npt

CHUNK = 1 << 16  # characters that the regular expression splits at a time, so as not to list millions of pieces
BATCH = 1 << 18  # characters that NumPy splits at a time: enough to amortise its overhead, few enough to bound memory
SHORT = 2000  # characters; below that the regular expression is faster than many NumPy calls

# Parts of texts, and whether each is the last part of its text.
Batch = list[tuple[str, bool]]

# The Unicode property White_Space, the meaning of `\s` in GPT-2's pattern. Python's `\s` also matches the separators
# U+001C..U+001F, and would split text that holds them differently.
WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@dataclass(frozen=True)
class Pattern:
    r"""One way to split text into pieces.

    `published` is the pattern as models' files spell it, or the last of several in `parts`; it is compared, never
    compiled here. `regex` is the same for Python's `re`, with {L}, {N} and {S} inside classes for \p{L}, \p{N} and \s,
    which `re` lacks or defines otherwise, and the other names of `Classes`.
    Text can be cut into parts where a character of `safe` follows one that is not white space: no piece and no
    look-ahead crosses such a place.
    """

    name: str
    published: str
    regex: str
    safe: str = WHITE_SPACE
    parts: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[str, ...]:
        """The published patterns, each of which splits what the one before has left."""
        return self.parts or (self.published,)


CODES = {
    name: chr(0x100 + i)
    for i, name in enumerate(
        "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn".split()
    )
}
"""A character for each of Unicode's categories."""
CLASSES = {"UPPER": ("Lu", "Lt", "Lm", "Lo", "M"), "LOWER": ("Ll", "Lm", "Lo", "M"), "SIGN": ("P", "S")}
"""The categories of the classes in patterns that are not one category."""
CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"  # DeepSeek's

# A sign and the line ends after it are one piece, so text for Llama 3 and Qwen2 must not be cut before a line end.
NO_LINE_END = WHITE_SPACE.replace("\t-\r", "\t\v\f")

_PATTERNS = (
    Pattern(
        "gpt2",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+| ?[{N}]+| ?[^{S}{L}{N}]+|[{S}]+(?![^{S}])|[{S}]+",
    ),
    # Numbers in groups of three digits, words with one sign of any kind before them.
    Pattern(
        "llama3",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{L}{N}]?[{L}]+|[{N}]{{1,3}}"
        r"| ?[^{S}{L}{N}]+[\r\n]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+",
        NO_LINE_END,
    ),
    # The same with single digits.
    Pattern(
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n{L}{N}]?[{L}]+|[{N}]"
        r"| ?[^{S}{L}{N}]+[\r\n]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+",
        NO_LINE_END,
    ),
    # SmolLM2: digits are split off one by one, and the text between them is split by GPT-2's pattern, so a space before
    # a number is a piece too. Its file has two steps for this; as one pattern it is spelt here.
    Pattern(
        "digits",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+|[{N}]| ?[^{S}{L}{N}]+|[{S}]+(?![^{S}{N}])|[{S}]+",
    ),
)
_O200K_UPPER, _O200K_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n{L}{N}]?[{UPPER}]*[{LOWER}]+END|[^\r\n{L}{N}]?[{UPPER}]+[{LOWER}]*END"
    r"|DIGITS| ?[^{S}{L}{N}]+[\r\n/]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    f"[{CJK}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^CRLF\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[CRLF]*|\s*[CRLF]+|\s+(?!\S)|\s+".replace("CRLF", "\r\n"),
)
# The three steps as one. A step sees the end of a text where the ones before it have cut; what no step matches, such as
# control characters, is a piece up to the next match.
_DEEPSEEK_MATCH = (
    r"[{N}]{{1,3}}|[{CJK}]+|[!-/:-@\[-`{{-~][A-Za-z]+|(?:(?![{CJK}])[^\r\n{N}{L}{SIGN}])?(?:(?![{CJK}])[{L}{M}])+"
    r"| ?(?:(?![{CJK}])[{SIGN}])+[\r\n]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}{N}{CJK}])|[{S}]+"
)
_BORDERED = (
    # GPT-4o, gpt-oss: a word begins with capitals and goes on in small letters, and a contraction belongs to it.
    Pattern(
        "o200k",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}*{_O200K_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}+{_O200K_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}{_O200K_REST}",
        _O200K.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", "[{N}]{{1,3}}"),
        NO_LINE_END,
    ),
    # Mistral's tekken: the same with single digits, and contractions as pieces of their own.
    Pattern(
        "tekken",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}*{_O200K_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_O200K_UPPER}+{_O200K_LOWER}*"
        rf"|\p{{N}}{_O200K_REST}",
        _O200K.replace("END", "").replace("DIGITS", "[{N}]"),
        NO_LINE_END,
    ),
    Pattern("deepseek", _DEEPSEEK[-1], rf"{_DEEPSEEK_MATCH}|(?:(?!{_DEEPSEEK_MATCH})(?s:.))+", NO_LINE_END, _DEEPSEEK),
)
PATTERNS = {pattern.name: pattern for pattern in (*_PATTERNS, *_BORDERED)}
GPT2, DIGITS = PATTERNS["gpt2"], PATTERNS["digits"]
OWN_PATTERNS = (GPT2, DIGITS)  # those of our own vocabularies: on arrays too, and text may come in parts (`recut`)

# Up to the last place where a text can be cut for GPT-2's pattern.
LAST_SAFE_CUT = re.compile(f"(?s:.*)[^{WHITE_SPACE}](?=[{WHITE_SPACE}])")

BMP_END = 0x10000
ASSIGNED_END = 0x40000  # the planes above hold no letters and no numbers
UNICODE_END = 0x110000


def major_categories(end: int) -> str:
    """One character per code point below `end`: "L" for letters, "N" for numbers, others for the rest."""
    # A category has two letters, such as "Lu" or "Nd"; only the first matters here.
    return "".join(map(unicodedata.category, map(chr, range(end))))[::2]


@cache
def safe_cut(pattern: Pattern) -> re.Pattern[str]:
    """Finds the character before a place where text can be cut."""
    return re.compile(f"[^{WHITE_SPACE}](?=[{pattern.safe}])")


def cut(text: str, size: int, pattern: Pattern = GPT2) -> Iterator[str]:
    """`text` in parts of about `size` characters, cut between pieces where possible."""
    start = 0
    while start < len(text):
        found = safe_cut(pattern).search(text, start + size)
        stop = found.end() if found else len(text)
        yield text[start:stop]
        start = stop


def recut(blocks: Iterable[str]) -> Iterator[str]:
    """A text that comes in blocks of any size, as parts that end between two pieces of OWN_PATTERNS where possible.

    Whether a space belongs to the next piece depends on what follows, so the end of a block is held for the next one.
    """
    held: list[str] = []
    for block in blocks:
        found = LAST_SAFE_CUT.match(block)
        stop = found.end() if found else 0
        if found:
            yield "".join([*held, block[:stop]])
            held = []
        held.append(block[stop:])
    if any(held):
        yield "".join(held)


def batches(texts: Iterable[str], size: int | None = None, pattern: Pattern | None = GPT2) -> Iterator[Batch]:
    """`texts` in lists of about `size` characters (default: BATCH): short texts together, long ones in parts.

    Parts end between two pieces; without a pattern no text is cut.
    """
    size = size or BATCH
    batch: Batch = []
    room = size
    for text in texts:
        left = len(text)
        for part in cut(text, size, pattern) if text and pattern else [text]:
            left -= len(part)
            room -= len(part) + 1  # even an empty text costs something
            batch.append((part, left == 0))
            if room <= 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch


def to_utf8(piece: str) -> bytes:
    """UTF-8 bytes of any string: U+DC80..U+DCFF stand for raw bytes, other surrogates become U+FFFD."""
    return replace_surrogates(piece).encode("utf-8", "surrogateescape")


def replace_surrogates(text: str) -> str:
    """`text` with U+FFFD for lone surrogates, except U+DC80..U+DCFF, which stand for raw bytes."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\ufffd", text)
    return text


# Marks that Unicode has had since its version 10.
_LATER_MARKS = (
    "7fd 897 898-89f 8ca-8d3 9fe c3c d3b-d3c eba ece 1715 1abf-1ace 1df6-1dfa a82c 10d24-10d27 10d69-10d6d "
    "10eab-10eac 10efc-10eff 10f46-10f50 10f82-10f85 11070 1133b 113ce-113d0 113e1-113e2 1145e 11839-1183a "
    "11930 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 1612f 16ff0-16ff1 "
    "1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef"
)
LATER_MARK = re.compile(
    f"([{''.join('-'.join(chr(int(code, 16)) for code in codes.split('-')) for codes in _LATER_MARKS.split())}])"
)


def nfc(text: str) -> str:
    """`text` in Unicode's form C as the package tokenizers has it, whose tables are those of version 9: later marks
    keep their places, and nothing is joined across them."""
    if is_normalized("NFC", text):
        return text
    return "".join(normalize("NFC", part) for part in LATER_MARK.split(text))


# --- the pattern as a regular expression ---------------------------------------------------------------------


class Classes(dict[str, str]):
    """The bodies of a regular expression's classes for code points below `end`, by the names that patterns use: a
    category such as L or Lu, or one of CLASSES. `re` has no \\p{L}, so they are spelt out from Python's tables."""

    def __init__(self, end: int) -> None:
        super().__init__(S=WHITE_SPACE, CJK=CJK)
        self.categories = categories(end)

    def __missing__(self, name: str) -> str:
        expected = [code for category, code in CODES.items() if category.startswith(CLASSES.get(name, (name,)))]
        runs = (match.span() for match in re.finditer(f"[{''.join(expected)}]+", self.categories))
        self[name] = "".join(f"{re.escape(chr(first))}-{re.escape(chr(stop - 1))}" for first, stop in runs)
        return self[name]


@cache
def categories(end: int) -> str:
    """One character per code point below `end`: its category's in CODES."""
    return "".join(CODES[category] for category in map(unicodedata.category, map(chr, range(end))))


classes = cache(Classes)


@cache
def split_pattern(end: int, pattern: Pattern = GPT2) -> re.Pattern[str]:
    """The pattern for text with code points below `end`."""
    return re.compile(pattern.regex.format_map(classes(end)))


def split(text: str, pattern: Pattern = GPT2) -> Iterator[list[str]]:
    """The pieces of `text`, a chunk at a time; joined, they are the text."""
    for chunk in cut(text, CHUNK, pattern):
        # `re` looks up the first 65,536 code points in a table but tries the ranges beyond one by one, which is three
        # times as slow on English text, so these are in the pattern only if they are in the text. The quickest way to
        # find out: such a character takes two units of UTF-16.
        is_bmp = len(chunk.encode("utf-16-le", "surrogatepass")) == 2 * len(chunk)
        yield split_pattern(BMP_END if is_bmp else ASSIGNED_END, pattern).findall(chunk)


# --- the pattern on arrays -----------------------------------------------------------------------------------

SPACE, WHITE, LETTER, NUMBER, SIGN, EDGE = 1, 2, 4, 8, 16, 32  # kinds of characters; SPACE is only U+0020
BLANK = SPACE | WHITE

# Texts that are split together are joined end to end, each followed by this: no valid text has a lone surrogate.
EDGE_CHARACTER = "\ud800"
EDGE_BYTES = EDGE_CHARACTER.encode("utf-8", "surrogatepass")

APOSTROPHE = ord("'")
CONTRACTED_1 = np.array([ord(letter) for letter in "stmd"], np.uint32)
CONTRACTED_2 = np.array([ord(a) << 8 | ord(b) for a, b in ("re", "ve", "ll")], np.uint32)


@cache
def kinds() -> npt.NDArray[np.uint8]:
    """The kind of each code point."""
    table = np.full(UNICODE_END, SIGN, np.uint8)
    categories = np.frombuffer(major_categories(ASSIGNED_END).encode(), np.uint8)
    table[:ASSIGNED_END][categories == ord("L")] = LETTER
    table[:ASSIGNED_END][categories == ord("N")] = NUMBER
    for match in re.finditer("(.)-(.)|.", WHITE_SPACE, re.DOTALL):
        table[ord(match[0][0]) : ord(match[0][-1]) + 1] = WHITE
    table[ord(" ")] = SPACE
    table[ord(EDGE_CHARACTER)] = EDGE
    return table


def piece_starts(codes: npt.NDArray[np.uint32], pattern: Pattern = GPT2) -> npt.NDArray[np.intp]:
    """Where pieces of GPT2 or DIGITS begin in texts given as code points, each followed by the edge character. An edge
    is a piece."""
    single = NUMBER if pattern == DIGITS else 0
    # One more edge at each end, so that every character has two neighbours.
    padded = np.full(len(codes) + 2, EDGE, np.uint8)
    kinds().take(codes, out=padded[1:-1], mode="clip")
    before, here, after = padded[:-2], padded[1:-1], padded[2:]

    # A run of letters, digits or signs begins where the kind changes, or with the space before it.
    run_starts = (here != before) & (before != SPACE) | (here & (EDGE | single) != 0)
    # White space begins after something else, and again at its last character if a word follows.
    blank_starts = (before & BLANK == 0) | (after & (BLANK | EDGE | single) == 0)
    is_blank = here & BLANK != 0
    starts = is_blank & blank_starts | ~is_blank & run_starts

    # An apostrophe that starts a piece and a contraction is one piece with it: 's, not ' and s.
    at = np.flatnonzero(starts & (codes == APOSTROPHE))
    first, second = codes[at + 1], codes.take(at + 2, mode="clip")
    one = np.isin(first, CONTRACTED_1)
    two = np.isin(first << 8 | second, CONTRACTED_2) & (first < 128) & (second < 128)
    starts[at[one | two] + 1] = False
    starts[at[one] + 2] = True
    starts[at[two] + 3] = True
    return np.flatnonzero(starts)


# --- numbers for pieces --------------------------------------------------------------------------------------

# A piece of up to 15 bytes is two 64-bit words: its first 8 bytes, and the rest with the length in the top byte. Unlike
# with hashes, equal words mean equal pieces.
PACKED = 15
WORD_MASKS = np.array([(1 << 8 * count) - 1 for count in range(9)], np.uint64)
SLOT_BITS = 18
MIX_1, MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd numbers without a pattern

# A table is full at either limit; its user then begins a new one, which soon holds the few common pieces again.
TABLE_PIECES = 1 << 18
TABLE_BYTES = 1 << 24


class NumbersOfText(dict[str, int]):
    """Piece as text -> its number, from `number_of` on first use."""

    def __init__(self, number_of: Callable[[bytes], int]) -> None:
        self.number_of = number_of

    def __missing__(self, piece: str) -> int:
        number = self[piece] = self.number_of(to_utf8(piece))
        return number


class PieceTable:
    """Distinct pieces and their numbers, in the order first seen. Number 0 is the edge at the end of a text.

    A dictionary has them all. A cache in front of it, with one slot per hash, finds the common ones for a whole array
    at once; which piece has a slot affects only the speed.
    """

    def __init__(self, pattern: Pattern = GPT2) -> None:
        self.pattern = pattern
        self.pieces: list[bytes] = [b""]
        self.size = 0  # bytes of all pieces
        self._numbers: dict[bytes, int] = {}
        self._numbers_of_text = NumbersOfText(self._number_of)
        self._low = np.zeros(1 << SLOT_BITS, np.uint64)
        self._high = np.zeros(1 << SLOT_BITS, np.uint64)
        self._slot_numbers = np.zeros(1 << SLOT_BITS, np.int32)

    @property
    def is_full(self) -> bool:
        return max(len(self.pieces), len(self._numbers_of_text)) >= TABLE_PIECES or self.size >= TABLE_BYTES

    def number(self, texts: Sequence[str]) -> npt.NDArray[np.int32]:
        """The numbers of all pieces of `texts`, in order, with a 0 after each text."""
        if self.pattern not in OWN_PATTERNS or sum(map(len, texts)) < SHORT:
            return self._number_by_pattern(texts)
        try:
            data = b"".join([part for text in texts for part in (text.encode(), EDGE_BYTES)])
        except UnicodeEncodeError:  # a lone surrogate
            return self._number_by_pattern(texts)
        joined = EDGE_CHARACTER.join([*texts, ""])
        codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))
        return self._number_by_arrays(data, codes)

    def _number_by_pattern(self, texts: Iterable[str]) -> npt.NDArray[np.int32]:
        numbers: list[int] = []
        for text in texts:
            numbers += map(self._numbers_of_text.__getitem__, chain.from_iterable(split(text, self.pattern)))
            numbers.append(0)
        return np.array(numbers, np.int32)

    def _number_of(self, piece: bytes) -> int:
        number = self._numbers.get(piece)
        if number is None:
            number = len(self.pieces)
            self.size += len(piece)
            self.pieces.append(piece)
            self._numbers[piece] = number  # last, so that Ctrl-C in between cannot give two pieces one number
        return number

    def _number_by_arrays(self, data: bytes, codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
        """data, codes: the same texts in UTF-8 and as code points, with their edges."""
        octets = np.frombuffer(data, np.uint8)
        characters = np.flatnonzero(octets & 0xC0 != 0x80)  # where each character begins in `data`
        starts_in_codes = piece_starts(codes, self.pattern)
        starts = characters[starts_in_codes]
        lengths = np.diff(starts, append=len(data))

        # The eight bytes from every position, as overlapping words.
        words = np.ndarray(len(data) + 9, np.dtype("<u8"), data + bytes(16), strides=(1,))
        low = words.take(starts) & WORD_MASKS.take(lengths, mode="clip")
        high = lengths.astype(np.uint64) << np.uint64(56)
        longer = np.flatnonzero(lengths > 8)
        high[longer] |= words[starts[longer] + 8] & WORD_MASKS[np.minimum(lengths[longer] - 8, 7)]
        slots = ((low ^ high * MIX_2) * MIX_1 >> np.uint64(64 - SLOT_BITS)).astype(np.intp)
        packed = lengths <= PACKED
        found = (self._low.take(slots) == low) & (self._high.take(slots) == high) & packed
        numbers = self._slot_numbers.take(slots)

        missing = np.flatnonzero(~found)
        first, stop = starts[missing], starts[missing] + lengths[missing]
        numbers[missing] = [self._number_of(data[a:b]) for a, b in zip(first.tolist(), stop.tolist(), strict=True)]
        new = missing[packed[missing]]
        at = slots[new]
        self._high[at] = 0  # no piece has length 0: an incomplete slot matches nothing
        self._low[at], self._slot_numbers[at] = low[new], numbers[new]
        self._high[at] = high[new]

        numbers[codes[starts_in_codes] == ord(EDGE_CHARACTER)] = 0
        return numbers
