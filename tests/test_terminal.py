"""Text of others cannot steer a terminal, nor break it."""

from __future__ import annotations

import io
import shlex
import sys

import pytest

from tinyforge.terminal import one_line, printable, readable_argument


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\n\ttext, é 你 🌍 👩\u200d🚀", "plain\n\ttext, é 你 🌍 👩\u200d🚀"),
        ("a\x1b[2J\x07b\r\x00\x7f\x9bc", "a[2Jbc"),
        ("good\u202egnp.exe \u2066x\u2069 \u200fy", "goodgnp.exe x y"),
        ("half \ud83d a pair, \udcff a byte", "half  a pair,  a byte"),
        ("", ""),
    ],
)
def test_what_is_printed(text: str, expected: str) -> None:
    assert printable(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nerror: no\r\nb\tc", "a error: no b c"),
        ("a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g", "a b c d e f g"),
        ("a  b\x1b[2J", "a  b[2J"),
        ("x" * 3000, "x" * 1997 + "..."),
    ],
)
def test_what_is_printed_as_a_part_of_a_line(text: str, expected: str) -> None:
    assert one_line(text) == expected


def test_what_standard_output_cannot_encode_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("naïve 你") == "na?ve ?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"Well," said Anna,\n"it\'s late."', "Well, said Anna, it's late."),
        ("$HOME costs `5`!", "HOME costs 5"),
        ("back\\slash", "backslash"),
    ],
)
def test_an_argument_is_readable_and_means_itself(text: str, expected: str) -> None:
    assert readable_argument(text) == f'"{expected}"' and shlex.split(readable_argument(text)) == [expected]
