"""How text is cut: GPT-2's pattern, the same rule on arrays, and the numbers that pieces get."""

from __future__ import annotations

import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import pytest

from tinyforge.tokenizers import pieces

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

TRICKY = {
    "don't you're I've I'm we'll he'd it's": "don|'t| you|'re| I|'ve| I|'m| we|'ll| he|'d| it|'s",
    "IT'S O'Neil 'sword 'tis": "IT|'|S| O|'|Neil| '|sword| '|tis",
    "a\u00a0b": "a|\u00a0|b",  # the no-break space is white space, but only U+0020 joins the next word
    "a\x1c!b \x1f c": "a|\x1c!|b| \x1f| c",  # not White_Space in Unicode, though Python's \s says so
    "a\x85b\u2028c\u3000d": "a|\x85|b|\u2028|c|\u3000|d",
    "zero\u200bwidth": "zero|\u200b|width",
    "\u0663\u0664 in 1984": "\u0663\u0664| in| 1984",  # Arabic-Indic digits
    "x\u00b22\u00b3 \u00bd": "x|\u00b22\u00b3| \u00bd",  # superscripts and fractions (No) are numbers
    "\u2167 of \u2167a": "\u2167| of| \u2167|a",  # Roman numeral letters (Nl) are numbers
    "\u4e2d\u6587 \u4e00\u4e8c": "\u4e2d\u6587| \u4e00\u4e8c",  # ideographs are letters, numerals too
    "cafe\u0301s": "cafe|\u0301|s",  # a combining accent is neither letter nor number
    "snake_case __init__": "snake|_|case| __|init|__",
    "two  spaces   three": "two| | spaces|  | three",
    "end   ": "end|   ",
    "line\n\n  next\r\n\r\n": "line|\n\n | next|\r\n\r\n",
    "\t tab\n": "\t| tab|\n",
    # Beyond U+FFFF: a letter, a digit, an ideograph, an emoji.
    "\U0001d4d0\U0001d7d8\U00020000 \U0001f600!": "\U0001d4d0|\U0001d7d8|\U00020000| \U0001f600!",
    "": "",
}


SINGLE_DIGITS = {
    "in 1984, 3 or  42": "in| |1|9|8|4|,| |3| or|  |4|2",  # no white space belongs to a digit
    "1a b2c 3's 5\n\n6 ": "1|a| b|2|c| |3|'s| |5|\n\n|6| ",
    "x\u00b22\u00b3 \u00bd": "x|\u00b2|2|\u00b3| |\u00bd",
}


def split_all(text: str, pattern: pieces.Pattern = pieces.GPT2) -> list[str]:
    return list(chain.from_iterable(pieces.split(text, pattern)))


def random_unicode(rng: random.Random, length: int) -> str:
    """Characters from all planes, assigned in this Python's Unicode or not; never a surrogate."""
    ranges = [(0, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x1F300, 0x1FB00), (0x10000, 0x110000)]
    return "".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(length))


# --- the pattern


@pytest.mark.parametrize(("string", "expected"), TRICKY.items(), ids=ascii)
def test_pattern_on_tricky_strings(string: str, expected: str) -> None:
    assert split_all(string) == [piece for piece in expected.split("|") if piece]


def assigned_text(rng: random.Random, length: int) -> str:
    """Random characters of known category, so that another library's newer Unicode tables cannot disagree."""
    known = [c for c in random_unicode(rng, 2 * length) if unicodedata.category(c) not in ("Cn", "Co")]
    spaces = "  \n\t\r\u00a0\u2009\u3000\x1c\x1f'"
    return "".join(chain.from_iterable(zip(known[:length], rng.choices(["", *spaces], k=length), strict=False)))


def test_pattern_equals_the_regex_package() -> None:
    regex = pytest.importorskip("regex")
    rng = random.Random(1)
    for _ in range(200):
        string = assigned_text(rng, 100)
        assert split_all(string) == regex.findall(GPT2_PATTERN, string)
        assert split_all(string, pieces.DIGITS) == regex.findall(pieces.DIGITS.published, string)
    # Between "a" and "1." a letter joins the left, a number the middle, a sign the right, white space none.
    known = [chr(code) for code in range(0x40000) if unicodedata.category(chr(code)) not in ("Cn", "Cs")]
    string = "\n".join(f"a{character}1{character}." for character in known)
    assert split_all(string) == regex.findall(GPT2_PATTERN, string)
    assert split_all(string, pieces.DIGITS) == regex.findall(pieces.DIGITS.published, string)


def test_no_letter_or_number_lies_beyond_the_table() -> None:
    beyond = {unicodedata.category(chr(code))[0] for code in range(pieces.ASSIGNED_END, 0x110000)}
    assert beyond.isdisjoint("LN")


def test_chunks_do_not_change_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(2)
    string = "".join(
        rng.choices(["a", "b1", " ", "  ", "\n", "\r\n", "\u00a0", "\x1c", "'s", "!", "\U0001f600"], k=3000)
    )
    whole = pieces.split_pattern(pieces.ASSIGNED_END).findall(string)
    for chunk in (1, 2, 3, 7, 64):
        monkeypatch.setattr(pieces, "CHUNK", chunk)
        assert split_all(string) == whole
    assert len(list(pieces.split(string))) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pattern: pattern.replace(f"[{pieces.WHITE_SPACE}]", r"\s").replace(f"[^{pieces.WHITE_SPACE}", r"[^\s"),
        lambda pattern: "(?i)" + pattern,
        lambda pattern: pattern.replace("'ve|", ""),
        lambda pattern: pattern.replace(f"(?![^{pieces.WHITE_SPACE}])", ""),
        lambda pattern: pattern.replace("| ?[^", "|[^"),
        lambda pattern: pattern.replace("\u00b2-\u00b3", ""),
        lambda pattern: pattern.replace("a-z", "a-z_"),
    ],
    ids=["python's \\s", "ignores case", "no 've", "no look-ahead", "no space before signs", "no superscripts", "_"],
)
def test_a_wrong_pattern_is_caught(wrong: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fault seeded into the pattern must show on the tricky strings."""

    def split_pattern(end: int, pattern: pieces.Pattern) -> re.Pattern[str]:
        right = right_pattern(end, pattern).pattern
        assert wrong(right) != right
        return re.compile(wrong(right))

    right_pattern = pieces.split_pattern
    monkeypatch.setattr(pieces, "split_pattern", split_pattern)
    assert any(split_all(string) != [p for p in expected.split("|") if p] for string, expected in TRICKY.items())


# --- the same on arrays


def pieces_by_arrays(
    texts: Sequence[str], table: pieces.PieceTable | None = None, pattern: pieces.Pattern = pieces.GPT2
) -> list[list[bytes]]:
    """The pieces of each text as the arrays find them, whatever its length."""
    table = table or pieces.PieceTable(pattern)
    data = b"".join(text.encode() + pieces.EDGE_BYTES for text in texts)
    codes = np.array([ord(c) for text in texts for c in text + pieces.EDGE_CHARACTER], np.uint32)
    numbers = table._number_by_arrays(data, codes)
    found = [table.pieces[number] for number in numbers]
    ends = np.flatnonzero(numbers == 0)
    assert len(ends) == len(texts) and ends[-1] == len(numbers) - 1
    return [found[start + 1 : end] for start, end in zip([-1, *ends[:-1]], ends, strict=True)]


def in_utf8(text: str, pattern: pieces.Pattern = pieces.GPT2) -> list[bytes]:
    return [piece.encode() for piece in split_all(text, pattern)]


# All that the rule tells apart, and what is easily taken for something else.
DENSE = [
    *"  ''stmdrevlLS17.\n\t",
    "'s",
    "'re",
    "'ve",
    "'ll",
    "  ",
    "\r\n",
    "\x00",
    "\x1c",
    "\x85",
    "\u00a0",
    "\u3000",
    "\u00e9",
    "\u0301",
    "\u00b2",
    "\u2167",
    "\u4e2d",
    "\u017f",
    "\U0001d4d0",
    "\U0001f600",
    "\U000e0100",
]


@pytest.mark.parametrize(("string", "expected"), TRICKY.items(), ids=ascii)
def test_arrays_on_tricky_strings(string: str, expected: str) -> None:
    assert pieces_by_arrays([string]) == [[piece.encode() for piece in expected.split("|") if piece]]


@pytest.mark.parametrize(("string", "expected"), SINGLE_DIGITS.items(), ids=ascii)
def test_single_digits(string: str, expected: str) -> None:
    assert split_all(string, pieces.DIGITS) == expected.split("|")
    assert pieces_by_arrays([string], pattern=pieces.DIGITS) == [[piece.encode() for piece in expected.split("|")]]


@pytest.mark.parametrize("pattern", [pieces.GPT2, pieces.DIGITS], ids=lambda pattern: pattern.name)
def test_arrays_cut_where_the_pattern_cuts(pattern: pieces.Pattern) -> None:
    rng = random.Random(3)
    texts = ["".join(rng.choices(DENSE, k=rng.randrange(60))) for _ in range(3000)]
    texts += [random_unicode(rng, rng.randrange(60)) for _ in range(1000)]
    assert pieces_by_arrays(texts, pattern=pattern) == [in_utf8(text, pattern) for text in texts]


def test_arrays_cut_at_the_edges_of_texts_whatever_is_beyond() -> None:
    parts = ["", "'", "s", "'r", "e", " ", "  ", "a", "1", "!", "\n", "\u00a0", "'l", "l"]
    texts = [part for first in parts for second in parts for part in (first, second)]
    assert pieces_by_arrays(texts) == [in_utf8(text) for text in texts]


def test_every_code_point_has_the_kind_of_its_category() -> None:
    white = {pieces.SPACE: " ", pieces.EDGE: pieces.EDGE_CHARACTER}
    for code, kind in enumerate(pieces.kinds().tolist()):
        character = chr(code)
        if kind in white:
            assert character == white[kind]
        elif kind == pieces.WHITE:
            assert character.isspace() and not "\x1c" <= character <= "\x1f"
        else:
            major = unicodedata.category(character)[0]
            assert kind == {"L": pieces.LETTER, "N": pieces.NUMBER}.get(major, pieces.SIGN)
            assert major != "Z" and not (character.isspace() and code != 0x1C and code > 0x1F)


@pytest.mark.parametrize(
    ("character", "kind"),
    [
        ("\x1c", pieces.WHITE),
        ("\u00b2", pieces.SIGN),
        ("\u00a0", pieces.SPACE),
        ("_", pieces.LETTER),
        (" ", pieces.WHITE),
        ("\u0301", pieces.LETTER),
    ],
    ids=ascii,
)
def test_a_wrong_kind_is_caught(character: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = pieces.kinds().copy()
    assert wrong[ord(character)] != kind
    wrong[ord(character)] = kind
    monkeypatch.setattr(pieces, "kinds", lambda: wrong)
    assert any(pieces_by_arrays([text]) != [in_utf8(text)] for text in TRICKY)


# --- numbers


def names(table: pieces.PieceTable, texts: Sequence[str]) -> list[bytes]:
    return [table.pieces[number] for number in table.number(texts)]


def test_equal_pieces_have_equal_numbers_and_others_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths around those that fit into one word and into two, zero bytes, and slots that all pieces share."""
    words = [letter * length for letter in ("a", "b", "\u00e9") for length in range(1, 40)]
    words += ["\x00" * length for length in range(1, 20)] + ["a" * 8 + "b" * length for length in range(9)]
    rng = random.Random(4)
    texts = ["\n".join(rng.choices(words, k=400)) for _ in range(4)]
    expected = [name for text in texts for name in (*in_utf8(text), b"")]
    for bits in (1, 4, 18):
        monkeypatch.setattr(pieces, "SLOT_BITS", bits)
        table = pieces.PieceTable()
        for _ in range(2):
            assert names(table, texts) == expected
        assert len(set(table.pieces)) == len(table.pieces)
        assert table.size == sum(map(len, table.pieces))


def test_short_texts_and_surrogates_take_the_pattern_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    table = pieces.PieceTable()
    long = "the cat's hat " * 200
    assert len(long) > pieces.SHORT
    expected = [*in_utf8(long), b""]
    assert names(table, [long]) == expected
    count = len(table.pieces)
    monkeypatch.setattr(pieces, "SHORT", 10**6)
    assert names(table, [long]) == expected and len(table.pieces) == count  # the same numbers either way
    monkeypatch.setattr(pieces, "SHORT", 0)
    # A raw byte, a lone surrogate, and the bytes that would spell the edge.
    for broken in ("a\udcff b", "a\ud800b\ud83d", "\udced\udca0\udc80"):
        found = names(table, [broken, long, ""])
        assert found == [*(pieces.to_utf8(piece) for piece in split_all(broken)), b"", *expected, b""]


@pytest.mark.parametrize("size", [1, 10, 100, 10**6])
def test_batches_hold_all_texts_in_order(size: int) -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices(DENSE, k=rng.choice([0, 1, 5, 300]))) for _ in range(200)]
    again, text = [], ""
    for batch in pieces.batches(iter(texts), size):
        assert batch
        for part, is_last in batch:
            text += part
            if is_last:
                again.append(text)
                text = ""
    assert again == texts and text == ""
    together = [[part for batch in pieces.batches([text], size) for part, _ in batch] for text in texts]
    assert [[p for part in parts for p in split_all(part)] for parts in together] == [split_all(text) for text in texts]


def test_batches_of_empty_texts_end() -> None:
    assert [len(batch) for batch in pieces.batches([""] * 25, 10)] == [10, 10, 5]


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_text_in_blocks_is_cut_between_pieces(size: int) -> None:
    rng = random.Random(6)
    texts = ["".join(rng.choices(DENSE, k=200)) for _ in range(50)] + ["a" * 500, ""]
    for text in texts:
        parts = list(pieces.recut(text[at : at + size] for at in range(0, len(text), size)))
        assert "".join(parts) == text and all(parts)
        assert [piece for part in parts for piece in split_all(part)] == split_all(text)
    assert len(list(pieces.recut(["the cat", " sat ", "on"]))) == 3
