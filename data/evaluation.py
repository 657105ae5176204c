"""Evaluation sets: find, check and read the published files of benchmarks.

    sets = find_sets([Path("eval")])                    folders, zips in them, or files
    arc = read_set("arc_easy", sets)                    Set(name="arc_easy", items=(Choice(...), ...), sha256="...")
    python -m data.evaluation eval                      list the sets, their items and versions

Prompts are worded as in EleutherAI's lm-evaluation-harness, so that scores are comparable. A set is identified by the
SHA-256 of its contents (questions, choices, answers, in order), whatever file they came in. Another version of a set
is refused. docs/evaluation.md says where the files are published.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinyforge.data.files import read_file, zip_members
from tinyforge.data.local import read_documents
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import json_value, sha256_of, shown
from tinyforge.infer.tasks import Choice, Item, LastWord, Passage, Problem
from tinyforge.rng import Stream
from tinyforge.terminal import one_line

MOST_FILES = 10_000  # in the folders that are searched
SHOTS, SHOT_SEED = 5, 1234  # few-shot examples of GSM8K, sampled as lm-evaluation-harness samples them
Records = list[Any]


@dataclass(frozen=True)
class Found:
    """A file, or a member of a zip. place: for messages. path: of the file, or of the zip."""

    place: str
    path: Path
    read: Callable[[], bytes]


class MissingSet(UserError):
    """There is no file for a task."""


@dataclass(frozen=True)
class Set:
    """A task's items. sha256: of their contents, see above. variant: how this version differs from the published
    one."""

    name: str
    title: str
    items: tuple[Item, ...]
    sha256: str
    files: tuple[Found, ...]
    variant: str = ""


# --- the files --------------------------------------------------------------------------------------------------------


def find_sets(paths: Sequence[Path]) -> dict[str, Found]:
    """Every file under `paths`, by its path in lower case with '/'. Zips count as folders.

    Raises UserError for a path that is missing, a zip that cannot be trusted, and for folders of too many files.
    """
    found: dict[str, Found] = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}")
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        if len(found) + len(files) > MOST_FILES:
            raise UserError(f"{path}: more than {MOST_FILES:,} files; give the folder that holds the evaluation sets")
        for file in files:
            # With the folder's own name, which may tell whose test.jsonl it is.
            name = file.name if path.is_file() else f"{path.resolve().name}/{file.relative_to(path).as_posix()}"
            if file.suffix.lower() == ".zip":
                for member in zip_members(file):
                    place = f"{file}!{member.name}"
                    found.setdefault(f"{name[:-4]}/{member.name}".lower(), Found(place, file, member.read))
            else:
                found.setdefault(name.lower(), Found(str(file), file, partial(read_file, file)))
    return found


def _pick(files: Mapping[str, Found], endings: Sequence[str]) -> Found | None:
    """The file whose path ends in one of `endings`, in their order; endings match whole components of the path."""
    for ending in endings:
        for name in sorted(files, key=lambda name: (name.count("/"), name)):
            if f"/{name}".endswith(f"/{ending}"):
                return files[name]
    return None


def _records(found: Found) -> Records:
    """The values of a JSON list or of JSON lines."""
    text = _text(found)
    if text.lstrip().startswith("["):
        values = _json(text, found, 1)
        if isinstance(values, list):
            return values
    return [_json(line, found, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def _json(text: str, found: Found, line: int) -> Any:
    try:
        return json_value(text)
    except ValueError as error:
        raise UserError(f"{found.place}: line {line}: not JSON ({error}); get the file again") from None


def _text(found: Found) -> str:
    try:
        return found.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{found.place}: not UTF-8 ({error.reason} at byte {error.start:,}); get it again") from None


# --- the tasks --------------------------------------------------------------------------------------------------------


def _science(records: Records) -> Records:
    """ARC's and OpenBookQA's published form: [stem, [choices], number of the answer]."""
    found = []
    for record in records:
        choices = record["question"]["choices"]
        labels = [choice["label"] for choice in choices]
        found.append([record["question"]["stem"], [c["text"] for c in choices], labels.index(record["answerKey"])])
    return found


def _as_question(stem: str, choices: Sequence[str], gold: int) -> Choice:
    return _as_statement(f"Question: {stem}\nAnswer:", choices, gold)


def _as_statement(stem: str, choices: Sequence[str], gold: int) -> Choice:
    return Choice(tuple((stem, f" {choice}") for choice in choices), tuple(choices), gold)


_NUMBERED = re.compile(r"\s*Answer format:.*\Z", re.DOTALL)


def _worded(instruction: str, start: str, label: str) -> tuple[str, list[str]]:
    """The question and the choices of a record in the form of an instruction: `start` question `label`1: ..."""
    if not instruction.startswith(start):
        raise ValueError(f"an instruction that does not begin with {start!r}")
    question, *choices = re.split(rf"\s*{label}\d: ", _NUMBERED.sub("", instruction[len(start) :]))
    return question.strip(), [choice.strip() for choice in choices]


def _openbookqa(records: Records) -> Records:
    if "instruction" not in records[0]:
        return _science(records)
    start = "Please choose the correct answer to the question: "
    return [[*_worded(r["instruction"], start, "Answer"), int(r["answer"].removeprefix("answer")) - 1] for r in records]


def _winogrande(records: Records) -> Records:
    """[sentence, [option 1, option 2], number of the answer]"""
    if "instruction" not in records[0]:
        return [[r["sentence"], [r["option1"], r["option2"]], int(r["answer"]) - 1] for r in records]
    start = "Please choose the correct answer to fill in the blank to complete the given sentence: "
    return [[*_worded(r["instruction"], start, "Option"), int(r["answer"].removeprefix("option")) - 1] for r in records]


def _as_blank(sentence: str, options: Sequence[str], gold: int) -> Choice:
    """Partial scoring (Trinh and Le): compare the ending's likelihood after each option."""
    before, blank, after = sentence.partition("_")
    if not blank:
        raise ValueError("a sentence without a blank, _")
    pairs = tuple((before + option, f" {after.strip()}") for option in options)
    return Choice(pairs, tuple(options), gold)


def _boolq(records: Records) -> Records:
    """[passage, or "" where the file has none; question; whether the answer is yes]"""
    if "instruction" not in records[0]:
        return [[r["passage"], r["question"], bool(r["label"] if "label" in r else r["answer"])] for r in records]
    start = "Please answer the following question with true or false, question: "
    return [["", _worded(r["instruction"], start, "Answer")[0].rstrip("?"), r["answer"] == "true"] for r in records]


def _as_yes_or_no(passage: str, question: str, yes: bool) -> Choice:
    context = f"{passage}\n" * bool(passage) + f"Question: {question}?\nAnswer:"
    return Choice(((context, " no"), (context, " yes")), ("no", "yes"), int(yes))


def _as_last_word(text: str) -> LastWord:
    context, _, word = text.rpartition(" ")
    if not (context and word):
        raise ValueError("a text of one word")
    return LastWord(context, f" {word}")


_HEADING = re.compile(r"^ = [^=\n]+ = ?$", re.MULTILINE)


def pages_of(text: str) -> list[str]:
    """WikiText's articles: each begins at a line " = Title = "."""
    starts = [match.start() for match in _HEADING.finditer(text)]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] if starts else [text]


# Undo WikiText's tokenisation, in this order: (text, replacement).
_PLAIN = [("s '", "s'"), *((f" @{sign}@ ", sign) for sign in "-,."), *((f" {sign} ", f"{sign} ") for sign in ":;.!?,")]
_AROUND = ("()", "[]", "{}", '""', "''")
_AFTER = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]


def detokenised(text: str) -> str:
    """WikiText as ordinary text, without blanks around punctuation, brackets and quotes."""
    for found, put in _PLAIN:
        text = text.replace(found, put)
    for pair in _AROUND:
        opens, closes = map(re.escape, pair)
        text = re.sub(rf"{opens}\s*([^{closes}]*?)\s*{closes}", rf"{pair[0]}\1{pair[1]}", text)
    for found, put in _AFTER:
        text = text.replace(found, put)
    return text


def passage(text: str, scored: str | None = None) -> Passage:
    return Passage(text if scored is None else scored, len(text.encode()), len(re.split(r"\s+", text)))


@dataclass(frozen=True)
class Task:
    """files: for each file to read, the endings that its path may have; the first one found is used. read: the relevant
    contents of the files. items: made of these. known: the SHA-256 of known versions, and how they differ from the
    published set; if empty, the version is not checked."""

    title: str
    files: tuple[tuple[str, ...], ...]
    read: Callable[[list[Found]], Records]
    items: Callable[[Records], list[Item]]
    known: dict[str, str]


def _from_records(convert: Callable[[Records], Records]) -> Callable[[list[Found]], Records]:
    return lambda files: convert(_records(files[0]))


def _pages(files: list[Found]) -> Records:
    return [[page] for page in pages_of(_text(files[0]))]


def _each(make: Callable[..., Item]) -> Callable[[Records], list[Item]]:
    return lambda records: [make(*record) for record in records]


def _piqa(files: list[Found]) -> Records:
    records, labels = _records(files[0]), _text(files[1]).split()
    if len(records) != len(labels):
        raise ValueError(f"{len(records)} questions and {len(labels)} labels")
    return [[r["goal"], [r["sol1"], r["sol2"]], int(label)] for r, label in zip(records, labels, strict=True)]


def _gsm8k(files: list[Found]) -> Records:
    return [[[r["question"], r["answer"]] for r in _records(file)] for file in files]


def _problems(records: Records) -> list[Item]:
    """Each problem with examples of the training set, sampled as lm-evaluation-harness samples them."""
    test, train = records
    draw = random.Random(SHOT_SEED)
    shown = [tuple((q, a) for q, a in draw.sample(train, min(SHOTS, len(train)))) for _ in test]
    return [Problem(question, answer, shots) for (question, answer), shots in zip(test, shown, strict=True)]


def _blimp(files: list[Found]) -> Records:
    """[phenomenon, [the good sentence, the bad one]]"""
    return [[r["UID"], [r["sentence_good"], r["sentence_bad"]]] for file in files for r in _records(file)]


def _as_pair(phenomenon: str, sentences: Sequence[str]) -> Choice:
    return Choice(tuple(("", f" {text}") for text in sentences), tuple(sentences), 0, phenomenon)


TASKS = {
    "blimp": Task(
        "BLiMP, 67 phenomena",
        (),
        _blimp,
        _each(_as_pair),
        {"9b3ea786ca6db92b6863e22de1625eea9e9f55fefb9489507f357d0f712f3b1d": ""},
    ),
    "arc_easy": Task(
        "ARC-Easy, test",
        (("arc_easy-test.jsonl", "arc-easy-test.jsonl"),),
        _from_records(_science),
        _each(_as_question),
        {"1b319c18c866226c6ca484c04f85a5638a29243336400eb1b44ab6ecc70fba4e": ""},
    ),
    "arc_challenge": Task(
        "ARC-Challenge, test",
        (("arc_challenge-test.jsonl", "arc-challenge-test.jsonl"),),
        _from_records(_science),
        _each(_as_question),
        {"a2a338a26c156563c32377cd212037a78140eeafa69adb7ca44cdefd91f59acf": "1,170 of 1,172 questions"},
    ),
    "piqa": Task(
        "PIQA, validation",
        (("piqa-valid.jsonl", "piqa/valid.jsonl"), ("piqa-valid-labels.lst", "piqa/valid-labels.lst")),
        _piqa,
        _each(_as_question),
        {"74df5afb97446a8e2c237364927f2198c73b6f13ef2c8c35e7cc634fd7e4dffe": ""},
    ),
    "boolq": Task(
        "BoolQ, validation", (("boolq/val.jsonl", "boolq/dev.jsonl"),), _from_records(_boolq), _each(_as_yes_or_no), {}
    ),
    "boolq_closed": Task(
        "BoolQ, validation, without the passages",
        (("boolq-test.json",),),
        _from_records(_boolq),
        _each(_as_yes_or_no),
        {"5afa0e8f3aa2b5de1102a4691ecbe841a7e1b1ba57ec04cedebca82dc5f8ab20": ""},
    ),
    "winogrande": Task(
        "Winogrande, validation",
        (("winogrande_1.1/dev.jsonl", "winogrande/dev.jsonl", "winogrande-test.json"),),
        _from_records(_winogrande),
        _each(_as_blank),
        {"82d8d206a9485cfd4b13fa84598156933add1d444ddfad6a0b8427f569c8a65b": ""},
    ),
    "openbookqa": Task(
        "OpenBookQA, test",
        (("openbookqa/test.jsonl", "data/main/test.jsonl", "openbookqa-test.json"),),
        _from_records(_openbookqa),
        _each(_as_statement),
        {"51e09a522b1d3a9bce1b5bb0a4e32f8d1f6b2207807f0e654e5138a5ba225946": ""},
    ),
    "lambada": Task(
        "LAMBADA, test, as OpenAI published it",
        (("lambada_test.jsonl", "lambada/test.jsonl"),),
        _from_records(lambda records: [[r["text"]] for r in records]),
        _each(_as_last_word),
        {},
    ),
    "gsm8k": Task(
        "GSM8K, test",
        (
            ("gsm8k-test.jsonl", "gsm8k/test.jsonl", "grade_school_math/data/test.jsonl"),
            ("gsm8k-train.jsonl", "gsm8k/train.jsonl", "grade_school_math/data/train.jsonl"),
        ),
        _gsm8k,
        _problems,
        {"83cd3a9ac262d4027bd902d3fc5fde140f4dca0db615dde9f1c13869dae359ab": ""},
    ),
    "wikitext": Task(
        "WikiText-2, test", (("wiki.test.raw",),), _pages, _each(lambda page: passage(page, detokenised(page))), {}
    ),
}


TEXT_TASKS = {"text": "bits per byte of --data", "last_words": "last words of --data, in the manner of LAMBADA"}
"""Tasks that can be made from any text."""
FEWEST_WORDS, MOST_WORDS, LAST_WORDS = 40, 120, 500
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_LAST = re.compile(r"(.*\s)([a-z]{3,})[.!?]", re.DOTALL)


def text_set(name: str, documents: Sequence[str], seed: int) -> Set:
    """A set of TEXT_TASKS, from documents."""
    items: Sequence[Item] = [passage(text) for text in documents]
    if name == "last_words":
        items = last_words(documents, LAST_WORDS, seed)
        if not items:
            raise UserError(f"--data: no passage of {FEWEST_WORDS} words ends with one of its words; give more text")
    read = [*documents, f"{seed}" * (name == "last_words")]
    digest = hashlib.sha256(json.dumps(read, ensure_ascii=False).encode()).hexdigest()
    return Set(name, TEXT_TASKS[name], tuple(items), digest, (), f"seed {seed}" if name == "last_words" else "")


def last_words(documents: Sequence[str], count: int, seed: int) -> list[Item]:
    """Up to `count` passages whose last word also occurs earlier in them. Most of LAMBADA's passages are of this kind:
    the word can be guessed from the whole passage, but not from its last sentence.

    A passage is a run of sentences of one paragraph with 40 to 120 words. Passages do not overlap.
    """
    found = []
    for paragraph in (part for text in documents for part in re.split(r"\n\s*\n", text)):
        held: list[str] = []
        for sentence in _SENTENCE_END.split(" ".join(paragraph.split())):
            held.append(sentence)
            words = sum(len(part.split()) for part in held)
            if words < FEWEST_WORDS:
                continue
            match = _LAST.fullmatch(" ".join(held)) if words <= MOST_WORDS else None
            if match and match[2] in re.findall(r"[a-z]+", " ".join(held[:-1]).lower()):
                found.append(LastWord(match[1].rstrip(), f" {match[2]}"))
            elif words <= MOST_WORDS:
                continue
            held = []
    chosen = sorted(Stream(seed, "last words").permutation(len(found))[:count].tolist())
    return [found[i] for i in chosen]


def _sentence_files(files: Mapping[str, Found]) -> list[Found]:
    """BLiMP's files, one for each phenomenon, in the order of their names."""
    folders: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.endswith(".jsonl") and "blimp" in name:
            folders.setdefault(name.rpartition("/")[0], []).append(name)
    largest = max(folders.values(), key=len, default=[])
    return [files[name] for name in largest]


def check_tasks(names: Sequence[str]) -> list[str]:
    """The tasks of --tasks, separated by blanks or commas; UserError for one that is unknown or given twice."""
    expected = [name for joined in names for name in joined.split(",") if name]
    for name in expected:
        if name not in (*TASKS, *TEXT_TASKS):
            raise UserError(f"--tasks: unknown task {shown(name)}; known: {', '.join((*TASKS, *TEXT_TASKS))}")
        if expected.count(name) > 1:
            raise UserError(f"--tasks: {name} is given twice; give it once")
    if not expected:
        raise UserError(f"--tasks names none; known: {', '.join(TASKS)}")
    return expected


def read_set(name: str, files: Mapping[str, Found], any_version: bool = False) -> Set:
    """A task's set, from the files that `find_sets` found.

    Raises UserError if a file is missing or malformed, and, unless any_version, if the set is not the published
    version.
    """
    task = TASKS[name]
    found = _sentence_files(files) if name == "blimp" else [_pick(files, ends) for ends in task.files]
    if not found or None in found:
        missing = (
            "BLiMP's zip, or its folder data"
            if name == "blimp"
            else (" or ".join(next(ends for ends, file in zip(task.files, found, strict=True) if file is None)))
        )
        raise MissingSet(
            f"--task-data: no file for {name}; expected {missing}; docs/evaluation.md says where to get it"
        )
    given = [file for file in found if file is not None]
    place = given[0].place
    try:
        records = task.read(given)
        items = tuple(task.items(records))
        digest = hashlib.sha256(json.dumps(records, ensure_ascii=False).encode()).hexdigest()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        fault = shown(f"{type(error).__name__}: {error}", 120)
        raise UserError(f"{place}: not as {name} is published ({fault}); get the file again") from None
    if not items:
        raise UserError(f"{place}: holds no item of {name}; get the file again")
    if task.known and digest not in task.known and not any_version:
        raise UserError(
            f"{place}: another version of {name} (SHA-256 {digest[:16]}, expected "
            f"{' or '.join(known[:16] for known in task.known)}); get the published file, or give --any-version, "
            "whose scores are not comparable"
        )
    variant = task.known.get(digest, "another version" if task.known else "version not checked")
    return Set(name, task.title, items, digest, tuple(given), variant)


def read_sets(
    names: Sequence[str], paths: Sequence[str], data: Sequence[str], encoding: str, seed: int, any_version: bool
) -> list[Set]:
    """The sets of tasks: of TASKS from the files under `paths`, of TEXT_TASKS from the text in `data`."""
    made = [name for name in names if name in TEXT_TASKS]
    if made and not data:
        raise UserError(f"--tasks {made[0]} expects text: --data FILE")
    if len(made) < len(names) and not paths:
        missing = next(name for name in names if name not in TEXT_TASKS)
        raise UserError(
            f"--tasks {missing} reads files: give their folder with --task-data; docs/evaluation.md says "
            "where they are published"
        )
    texts = read_documents(data, encoding) if made else []
    files = find_sets([Path(path) for path in paths])
    return [text_set(name, texts, seed) if name in TEXT_TASKS else read_set(name, files, any_version) for name in names]


def refuse_if_learned(found: Set, learned: Collection[str]) -> None:
    """UserError where a model has learned from a file of the set, or from the zip that it is in. learned: SHA-256 of
    the files that it has read."""
    if not learned:
        return
    places = {sha256_of(path): str(path) for path in {file.path for file in found.files}}
    places |= {hashlib.sha256(file.read()).hexdigest(): file.place for file in found.files}
    if place := next((places[digest] for digest in places if digest in learned), None):
        raise UserError(
            f"--tasks {found.name}: the model was trained on {place}, so its score would say nothing; "
            "leave the task out, or train without that file"
        )


def first_of_each(items: Sequence[Item], limit: int | None) -> list[Item]:
    """The first `limit` items, per part if the set has parts."""
    if limit is None:
        return list(items)
    taken: dict[str, int] = {}
    kept = []
    for item in items:
        part = item.group if isinstance(item, Choice) else ""
        taken[part] = taken.get(part, 0) + 1
        if taken[part] <= limit:
            kept.append(item)
    return kept


def text_of(item: Item) -> str:
    """The text of an item that must not occur in training text; docs/evaluation.md, Decontamination."""
    if isinstance(item, Choice):
        beginnings = list(dict.fromkeys(context for context, _ in item.pairs))
        return (
            " ".join([*beginnings[:1], *(rest for _, rest in item.pairs)])
            if len(beginnings) == 1
            else " ".join(context + rest for context, rest in item.pairs)
        )
    if isinstance(item, LastWord):
        return item.context + item.word
    return item.text if isinstance(item, Passage) else f"{item.question} {item.answer}"


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m data.evaluation", description="List the evaluation sets in some files, with their versions."
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="folders, zips or files")
    args = parser.parse_args(arguments)
    files = find_sets(args.paths)
    for name in TASKS:
        try:
            found = read_set(name, files, any_version=True)
        except UserError as error:
            print(one_line(f"{name:<14}{str(error).removeprefix('--task-data: ')}"))
            continue
        print(one_line(f"{name:<14}{len(found.items):>6,} items  {found.sha256}  {found.variant or 'as published'}"))
    return 0


if __name__ == "__main__":
    run_command(main)
