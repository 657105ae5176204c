"""The built-in corpus: deterministic, disjoint splits, one right answer a question, sound grammar.

What the generator claims is checked on its text by a reader of its own (regular expressions and a small solver), not
by the tables that the text was made from, except for the lists of held-out words and pairs.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from data.world import (
    COLOURS,
    KINDS,
    LARGEST,
    NUMBER_WORDS,
    WORDS,
    Instruction,
    documents,
    held_out_pair,
    instructions,
    is_correct,
)

TRAIN, VAL = WORDS["train"], WORDS["val"]
HELD_OUT_NAMES = {*VAL.girls, *VAL.boys}
HELD_OUT_WORDS = HELD_OUT_NAMES | {*VAL.things} | {f"{thing}s" for thing in VAL.things}
TRAIN_WORDS = {*TRAIN.girls, *TRAIN.boys, *TRAIN.things} | {f"{thing}s" for thing in TRAIN.things}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


@pytest.fixture(scope="module")
def train_documents() -> list[str]:
    return list(documents("train", 20_000))


@pytest.fixture(scope="module")
def val_documents() -> list[str]:
    return list(documents("val", 4_000))


@pytest.fixture(scope="module")
def train_instructions() -> list[Instruction]:
    return list(instructions("train", 20_000))


@pytest.fixture(scope="module")
def val_instructions() -> list[Instruction]:
    return list(instructions("val", 4_000))


def text_of(example: Instruction) -> str:
    return f"{example.instruction}\n{example.input}\n{example.output}"


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def pairs_in(text: str) -> set[tuple[int, int]]:
    """Pairs of numbers that a text adds, takes from one another or compares; a difference c - b is the pair (b, c - b)."""
    words = {word: n for n, word in enumerate(NUMBER_WORDS)}
    digits = re.sub(r"[a-z]+", lambda m: str(words.get(m[0], m[0])), text.lower())
    found = {(int(a), int(b)) for a, b in re.findall(r"(\d+) (?:\+|plus) (\d+)", digits)}
    found |= {(int(b), int(c) - int(b)) for c, b in re.findall(r"(\d+) (?:-|minus) (\d+)", digits)}
    found |= {(int(a), int(b)) for a, b in re.findall(r"add (\d+) and (\d+)", digits)}
    found |= {(int(b), int(c) - int(b)) for b, c in re.findall(r"take (\d+) from (\d+)", digits)}
    compared = r"(\d+)(?: or |, | is (?:larger|smaller|more) than )(\d+)"
    for sentence in re.split(r"\n|[.?] ", digits):
        if re.search(r"which (?:is|number is)|say the (?:larger|smaller)|than", sentence):
            found |= {(int(a), int(b)) for a, b in re.findall(compared, sentence)}
    for start, change, n in re.findall(r"has (\d+) \w+\. \w+ ((?:\w+ )+?)(\d+)\b", digits):
        a, b = int(start), int(n)
        found.add((a, b) if re.search(r"gives (?:him|her)|finds|gets", change) else (b, a - b))
    return found


def solve(example: Instruction) -> str | None:
    """The answer to a question about numbers or their order, worked out from its words; None for another kind."""
    question, told = example.instruction, example.input
    numbers = [int(n) for n in re.findall(r"\d+", f"{told} {question}")]
    if example.kind == "add":
        return " ".join(str(n) for n in range(numbers[0], sum(numbers) + 1)) + f", so {sum(numbers)}"
    if example.kind in ("subtract", "word_problem"):
        first, second = numbers[::-1] if question.startswith("Take") else numbers
        if re.search(r"gives (him|her) \d|finds|gets", told):
            return " ".join(str(n) for n in range(first, first + second + 1)) + f", so {first + second}"
        return " ".join(str(n) for n in range(first, first - second - 1, -1)) + f", so {first - second}"
    if example.kind == "compare":
        return str(max(numbers) if re.search("larger|more", question) else min(numbers))
    if example.kind == "count":
        return str(len(told.split(",")))
    if example.kind == "repeat":
        word, times = re.search(r"(\w+) (once|twice|three times)\.", question) or [None] * 2, 0
        del word
        times = {"once": 1, "twice": 2, "three": 3}[re.findall("once|twice|three", question)[0]]
        said = re.sub(r"^(Say the word|Say|Write|Repeat)|once|twice|three times|[:.]", "", question).strip()
        return " ".join([said] * times)
    if example.kind == "fact" and numbers:
        return str(numbers[0] + 1)
    if example.kind == "fact" and (day := [day for day in DAYS if day in question]):
        return DAYS[(DAYS.index(day[0]) + 1) % 7]
    return None
