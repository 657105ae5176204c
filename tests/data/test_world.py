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

from tinyforge.data.world import (
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
from tinyforge.tokenizers import Tokenizer
from tinyforge.tokenizers.chat_templates import render_prompt

TRAIN, VAL = WORDS["train"], WORDS["val"]
HELD_OUT_NAMES = {*VAL.girls, *VAL.boys}
TRAIN_NAMES = {*TRAIN.girls, *TRAIN.boys}
HELD_OUT = HELD_OUT_NAMES | {*VAL.things}
TRAINED = TRAIN_NAMES | {*TRAIN.things}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


@pytest.fixture(scope="module")
def train_documents() -> list[str]:
    return list(documents("train", 8_000))


@pytest.fixture(scope="module")
def val_documents() -> list[str]:
    return list(documents("val", 4_000))


@pytest.fixture(scope="module")
def train_instructions() -> list[Instruction]:
    return list(instructions("train", 8_000))


@pytest.fixture(scope="module")
def val_instructions() -> list[Instruction]:
    return list(instructions("val", 4_000))


@pytest.fixture(scope="module")
def tokenizer(train_documents: list[str]) -> Tokenizer:
    return Tokenizer.train(train_documents[:2_000], 512, progress=False)


def text_of(example: Instruction) -> str:
    return f"{example.instruction}\n{example.input}\n{example.output}"


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def words_and_things_in(text: str) -> set[str]:
    """The words of a text, and each two neighbours as a thing is called, the plural's "s" taken off."""
    words = words_of(text)
    return {*words, *(f"{first} {second.removesuffix('s')}" for first, second in itertools.pairwise(words))}


def pairs_in(text: str) -> set[tuple[int, int]]:
    """Pairs of numbers that a text adds, subtracts or compares; a difference c - b is the pair (b, c - b)."""
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
        times = {"once": 1, "twice": 2, "three": 3}[re.findall("once|twice|three", question)[0]]
        return " ".join([told] * times)
    if example.kind == "fact" and numbers:
        return str(numbers[0] + 1)
    if example.kind == "fact" and (day := [day for day in DAYS if day in question]):
        return DAYS[(DAYS.index(day[0]) + 1) % 7]
    return None


def test_document_depends_on_seed_split_and_index_alone() -> None:
    ten = list(documents("train", 10, seed=3))
    assert list(documents("train", 4, seed=3)) == ten[:4]
    assert list(documents("train", 10, seed=4)) != ten
    assert list(documents("val", 10, seed=3)) != ten
    assert list(instructions("val", 7)) == list(instructions("val", 30))[:7]


def test_same_text_in_another_process() -> None:
    # Another process has another hash seed: a generator that leaned on hash() or set order would differ.
    printed = subprocess.run(
        [sys.executable, "-m", "data.world", "--n", "40"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    assert printed == "\n\n".join(documents("train", 40)) + "\n"


def test_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        next(documents("test", 1))


def test_command_refuses_bad_count_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "data.world", "--n", "0"], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: --n is 0, expected 1 or more"]


def test_held_out_parts_are_apart_and_large_enough() -> None:
    assert not HELD_OUT & TRAINED
    assert not set(VAL.sums) & set(TRAIN.sums)
    assert not set(VAL.comparisons) & set(TRAIN.comparisons)
    assert len(TRAIN.girls + TRAIN.boys) >= 120
    assert len(TRAIN.things) >= 80
    assert len(HELD_OUT_NAMES) >= 16 and len(VAL.things) >= 12
    assert 0.08 <= len(VAL.sums) / len(VAL.sums + TRAIN.sums) <= 0.15
    assert all(held_out_pair(a, b) == held_out_pair(b, a) for a, b in itertools.product(range(21), repeat=2))


def test_training_sums_cover_every_number_and_result() -> None:
    assert {a for a, _ in TRAIN.sums} | {b for _, b in TRAIN.sums} >= set(range(LARGEST))
    assert {a + b for a, b in TRAIN.sums} == set(range(1, LARGEST + 1))


def test_every_part_of_a_held_out_word_occurs_in_training() -> None:
    assert {name[0] for name in HELD_OUT_NAMES} <= {name[0] for name in TRAIN_NAMES}
    assert {name[1:] for name in HELD_OUT_NAMES} <= {name[1:] for name in TRAIN_NAMES}
    for part in (0, 1):
        assert {thing.split()[part] for thing in VAL.things} <= {thing.split()[part] for thing in TRAIN.things}


def test_tokenizer_cuts_held_out_words_like_those_of_training(tokenizer: Tokenizer) -> None:
    # Words cut at odd places ("t" "eab" "ag") were what a small model could not copy.
    def lengths(words: set[str]) -> set[int]:
        return {len(tokenizer.encode(f" {word}")) for word in words}

    assert lengths(HELD_OUT_NAMES) == lengths(TRAIN_NAMES) == {2}
    assert lengths({*VAL.things}) == lengths({*TRAIN.things}) == {2}


def test_questions_with_answers_fit_the_small_context(
    tokenizer: Tokenizer, train_instructions: list[Instruction], val_instructions: list[Instruction]
) -> None:
    longest = sorted(train_instructions + val_instructions, key=lambda e: len(text_of(e)))[-200:]
    texts = (render_prompt(e.instruction, e.input) + e.output for e in longest)
    assert max(len(tokenizer.encode(text)) for text in texts) < 128


def test_training_text_holds_nothing_held_out(
    train_documents: list[str], train_instructions: list[Instruction]
) -> None:
    for text in itertools.chain(train_documents, map(text_of, train_instructions)):
        assert not HELD_OUT & words_and_things_in(text), text
        assert not [pair for pair in pairs_in(text) if held_out_pair(*pair)], text


def test_validation_text_holds_only_what_is_held_out(
    val_documents: list[str], val_instructions: list[Instruction]
) -> None:
    for text in itertools.chain(val_documents, map(text_of, val_instructions)):
        pairs = pairs_in(text)
        assert HELD_OUT & words_and_things_in(text) or pairs, text
        assert not TRAINED & words_and_things_in(text), text
        assert all(held_out_pair(*pair) for pair in pairs), text


def test_reader_of_pairs_sees_every_form() -> None:
    # A reader that found nothing would pass the two tests above.
    seen = {
        "7 + 5 = 12.": (7, 5),
        "12 - 5 = 7.": (5, 7),
        "Seven plus five is twelve.": (7, 5),
        "Add 7 and 5.": (7, 5),
        "Take 5 from 12.": (5, 7),
        "Which is larger, 7 or 12?": (7, 12),
        "12 is more than 7.": (12, 7),
        "Say the smaller: 7, 12.": (7, 12),
        "Mia has 7 kites. Ben gives her 5 more.": (7, 5),
        "Mia has 12 kites. She gives 5 to Ben.": (5, 7),
        "Mia has 12 kites. Ben takes 5 away.": (5, 7),
    }
    for text, pair in seen.items():
        assert pairs_in(text) == {pair}, text


def test_kinds_take_turns(train_instructions: list[Instruction]) -> None:
    assert 8 <= len(KINDS) <= 10
    assert [example.kind for example in train_instructions[: 2 * len(KINDS)]] == list(KINDS) * 2


def test_only_the_right_answer_is_correct(
    train_instructions: list[Instruction], val_instructions: list[Instruction]
) -> None:
    answers: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for example in train_instructions + val_instructions:
        answers[example.kind].add(example.output)
    for example in train_instructions[:500] + val_instructions[:500]:
        assert is_correct(example, example.output)
        assert is_correct(example, f" {example.output}\n")
        assert not any(is_correct(example, reply) for reply in ("", f"{example.output}.", f"{example.output} x"))
        # Answers of the same kind to other questions are the wrong answers that a model would give.
        assert not any(is_correct(example, other) for other in answers[example.kind] - {example.output})
    assert all(len(answers[kind]) >= 6 for kind in KINDS)


def test_answers_agree_with_a_solver(
    train_instructions: list[Instruction], val_instructions: list[Instruction]
) -> None:
    solved = Counter(
        example.kind
        for example in train_instructions + val_instructions
        if (answer := solve(example)) is not None
        and (answer == example.output or pytest.fail(f"{example}: the solver says {answer}"))
    )
    always = {"add", "subtract", "word_problem", "compare", "count", "repeat"}
    assert all(solved[kind] == 1_200 for kind in always)
    assert solved["fact"] > 250


def test_answer_about_a_scene_stands_in_it_once_for_the_one_asked_about(train_instructions: list[Instruction]) -> None:
    scenes = [example for example in train_instructions if example.kind in ("who", "where", "colour")]
    two = 0
    for example in scenes:
        told = example.input
        people = [word for word in words_of(told) if word in TRAIN_NAMES]
        two += len(people) == 2
        assert 1 <= len(people) <= 2
        # A scene is two sentences or one a person: cut it where the second person comes in.
        halves = [told]
        if len(people) == 2:
            sentences = re.split(r"(?<=\.) ", told)
            start = next(i for i, s in enumerate(sentences) if i and people[1] in s)
            halves = [" ".join(sentences[:start]), " ".join(sentences[start:])]
        keys = [*(words_and_things_in(example.instruction) & TRAINED)]
        place = re.search(r"(?:in|at|on|by) .*(?=\?)", example.instruction)
        key = keys[0] if keys else place[0] if place else ""
        mine = [half for half in halves if key and key in half]
        assert len(mine) == 1, example
        answer = example.output.removeprefix("It is ")
        assert answer in mine[0], example
        other_answers = TRAIN_NAMES if example.kind == "who" else set(COLOURS) if example.kind == "colour" else set()
        assert not (other_answers - {answer}) & set(words_of(mine[0])), example
    assert 0.05 < two / len(scenes) < 0.25


def test_lengths(train_documents: list[str], train_instructions: list[Instruction]) -> None:
    assert max(len(e.instruction) + len(e.input) for e in train_instructions) <= 155
    assert max(len(e.output) for e in train_instructions) <= 40
    assert max(len(text) for text in train_documents) <= 900


def test_stories_have_the_length_of_a_tiny_story() -> None:
    from tinyforge.data.world import Teller, story

    lengths = [len(story(Teller("train", str(i))).split()) for i in range(5_000)]
    assert min(lengths) >= 40 and max(lengths) <= 110


def test_text_is_clean(train_documents: list[str], train_instructions: list[Instruction]) -> None:
    for text in itertools.chain(train_documents, map(text_of, train_instructions)):
        assert text.isascii()
        assert not re.search(r"  | [.,?!]|\.\.|[{}]", text), text
        assert not re.search(r"\b[Aa] [aeiou]|\b[Aa]n [^aeiou]", text), text
        assert not re.search(r"[.?!] [a-z]", re.sub(r'[.?!]" [a-z]', "", text)), text
        assert text == text.strip() or text.endswith("\n"), text
        assert text.count('"') % 2 == 0, text


def test_pronouns_agree_with_the_people(train_documents: list[str]) -> None:
    girls, boys = set(TRAIN.girls), set(TRAIN.boys)
    she, he = {"she", "her", "girl"}, {"he", "him", "his", "boy"}
    checked = 0
    for text in train_documents:
        found = set(words_of(text))
        lower = {word.lower() for word in found}
        if not found & boys:
            assert not lower & he, text
        if not found & girls:
            assert not lower & she, text
        checked += bool(lower & (he | she)) and not (found & girls and found & boys)
    assert checked > 700


def test_a_thing_keeps_its_colour() -> None:
    from tinyforge.data.world import Teller, description, story

    colours = "|".join(COLOURS)
    things = 0
    for i in range(3_000):
        text = (story, description)[i % 2](Teller("train", str(i)))
        seen: dict[str, set[str]] = {}
        before = re.findall(rf"\b({colours}) ([a-z]+ [a-z]+)", text)
        after = [(colour, noun) for noun, colour in re.findall(rf"([a-z]+ [a-z]+) is ({colours})\b", text)]
        for colour, noun in before + after:
            if noun in TRAIN.things:
                seen.setdefault(noun, set()).add(colour)
        things += len(seen)
        assert all(len(found) == 1 for found in seen.values()), text
    assert things > 2_000


def test_few_documents_occur_twice(train_documents: list[str], val_documents: list[str]) -> None:
    assert len(set(train_documents)) > 0.999 * len(train_documents)
    assert len(set(val_documents)) > 0.99 * len(val_documents)
    assert not set(train_documents) & set(val_documents)


def test_vocabulary_is_small(train_documents: list[str]) -> None:
    assert len({word.lower() for text in train_documents for word in words_of(text)}) <= 900
