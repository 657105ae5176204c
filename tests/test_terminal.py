"""Text of others cannot steer a terminal, nor break it."""

from __future__ import annotations

import io
import sys

import pytest

from tinyforge.terminal import one_line, printable


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain\n\ttext, é 你 🌍 👩\u200d🚀", "plain\n\ttext, é 你 🌍 👩\u200d🚀"),
        ("a\x1b[2J\x07b\r\x00\x7f\x9bc", "a[2Jbc"),
        ("good\u202egnp.exe \u2066x\u2069 \u200fy", "goodgnp.exe x y"),
        ("half \ud83d a pair, \udcff a byte", "half  a pair,  a byte"),
        ("", ""),
    ],
)
def test_what_is_printed(text: str, wanted: str) -> None:
    assert printable(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a\nerror: no\r\nb\tc", "a error: no b c"),
        ("a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g", "a b c d e f g"),
        ("a  b\x1b[2J", "a  b[2J"),
        ("x" * 3000, "x" * 1997 + "..."),
    ],
)
def test_what_is_printed_as_a_part_of_a_line(text: str, wanted: str) -> None:
    assert one_line(text) == wanted


def test_what_standard_output_cannot_encode_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert printable("naïve 你") == "na?ve ?"
