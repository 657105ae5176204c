"""Evaluation sets: each published form, read from tiny files of it; versions; what is refused; what a corpus drops."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tinyforge.data import evaluation
from tinyforge.data.corpus import Settings, build_corpus
from tinyforge.data.evaluation import (
    TASKS,
    find_sets,
    first_of_each,
    last_words,
    main,
    pages_of,
    read_set,
    refuse_if_learned,
    text_of,
    text_set,
)
from tinyforge.data.source import Document, SourceWriter, read_source
from tinyforge.errors import UserError
from tinyforge.files import sha256_of
from tinyforge.infer.tasks import Choice, LastWord, Passage, Problem

SHARED = Path(__file__).parents[3] / "shared" / "data" / "eval"
STEM = {"stem": "What is ice?", "choices": [{"text": "Water", "label": "A"}, {"text": "Stone", "label": "B"}]}
FILES: dict[str, list[Any] | str] = {
    "sets/blimp/data/causative.jsonl": [
        {"sentence_good": "Ann has sunk it.", "sentence_bad": "Ann has died it.", "UID": "causative"},
        {"sentence_good": "He broke it.", "sentence_bad": "He vanished it.", "UID": "causative"},
    ],
    "sets/blimp/data/passive_1.jsonl": [
        {"sentence_good": "It was seen.", "sentence_bad": "It was slept.", "UID": "passive_1"}
    ],
    "sets/ARC-Easy-Test.jsonl": [{"id": "1", "question": STEM, "answerKey": "A"}],
    "sets/arc_challenge-test.jsonl": [{"id": "1", "question": STEM, "answerKey": "B"}],
    "sets/piqa/valid.jsonl": [{"goal": "Open a door", "sol1": "push it", "sol2": "eat it"}],
    "sets/piqa/valid-labels.lst": "0\n",
    "sets/boolq/val.jsonl": [{"passage": "Ice is cold.", "question": "is ice cold", "label": True, "idx": 0}],
    "sets/winogrande/dev.jsonl": [
        {"sentence": "Ann paid Bob since _ owed money.", "option1": "Ann", "option2": "Bob", "answer": "1"}
    ],
    "sets/openbookqa/test.jsonl": [{"question": STEM, "answerKey": "A"}],
    "sets/lambada_test.jsonl": [{"text": "He saw a dog and called the dog"}],
    "sets/gsm8k/train.jsonl": [{"question": f"{i} and 1?", "answer": f"#### {i + 1}"} for i in range(9)],
    "sets/gsm8k/test.jsonl": [{"question": "2 and 2?", "answer": "It is 4.\n#### 4"}],
    "sets/wiki.test.raw": " \n = Ice = \n \n Ice is cold , and wet . \n = Snow = \n Snow is white . \n",
}
WORDED = {
    "openbookqa-test.json": [
        {
            "instruction": "Please choose the correct answer to the question: What is ice?\n\nAnswer1: Water "
            "Answer2: Stone\n\nAnswer format: answer1/answer2",
            "answer": "answer1",
        }
    ],
    "winogrande-test.json": [
        {
            "instruction": "Please choose the correct answer to fill in the blank to complete the given sentence: Ann "
            "paid Bob since _ owed money.\n\nOption1: Ann Option2: Bob Answer format: option1/option2",
            "answer": "option1",
        }
    ],
    "boolq-test.json": [
        {
            "instruction": "Please answer the following question with true or false, question: is ice "
            "cold?\n\nAnswer format: true/false",
            "answer": "true",
        }
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = content if isinstance(content, str) else "".join(json.dumps(record) + "\n" for record in content)
        path.write_text(lines, encoding="utf-8")
    return tmp_path / "sets"


def items(name: str, folder: Path) -> tuple[Any, ...]:
    return read_set(name, find_sets([folder]), any_version=True).items


def test_every_task_in_its_published_form(folder: Path) -> None:
    """The wording is that of lm-evaluation-harness."""
    question = "Question: What is ice?\nAnswer:"
    pairs = ((question, " Water"), (question, " Stone"))
    assert items("arc_easy", folder) == (Choice(pairs, ("Water", "Stone"), 0),)
    assert items("arc_challenge", folder) == (Choice(pairs, ("Water", "Stone"), 1),)
    assert items("openbookqa", folder)[0].pairs == (("What is ice?", " Water"), ("What is ice?", " Stone"))
    door = "Question: Open a door\nAnswer:"
    assert items("piqa", folder) == (Choice(((door, " push it"), (door, " eat it")), ("push it", "eat it"), 0),)
    ice = "Ice is cold.\nQuestion: is ice cold?\nAnswer:"
    assert items("boolq", folder) == (Choice(((ice, " no"), (ice, " yes")), ("no", "yes"), 1),)
    blank = (("Ann paid Bob since Ann", " owed money."), ("Ann paid Bob since Bob", " owed money."))
    assert items("winogrande", folder) == (Choice(blank, ("Ann", "Bob"), 0),)
    assert items("lambada", folder) == (LastWord("He saw a dog and called the", " dog"),)
    pages = items("wikitext", folder)
    assert [page.text for page in pages] == [" = Ice =\n\nIce is cold, and wet.\n", " = Snow =\nSnow is white.\n"]
    assert pages[0].bytes == len(" = Ice = \n \n Ice is cold , and wet . \n") and pages[1].words == 9
    blimp = items("blimp", folder)
    assert [item.group for item in blimp] == ["causative", "causative", "passive_1"]
    assert blimp[2] == Choice(
        (("", " It was seen."), ("", " It was slept.")), ("It was seen.", "It was slept."), 0, "passive_1"
    )
    assert first_of_each(blimp, 1) == [blimp[0], blimp[2]]
    (problem,) = items("gsm8k", folder)
    assert isinstance(problem, Problem) and len(set(problem.shown)) == 5 and problem.answer.endswith("#### 4")


def test_sets_that_are_worded_as_instructions(folder: Path, tmp_path: Path) -> None:
    """The same items as in the published form; BoolQ without its passages is another task."""
    other = tmp_path / "worded"
    other.mkdir()
    for name, records in WORDED.items():
        (other / name).write_text(json.dumps(records), encoding="utf-8")
    for name in ("openbookqa", "winogrande"):
        assert items(name, other) == items(name, folder)
        assert read_set(name, find_sets([other]), True).sha256 == read_set(name, find_sets([folder]), True).sha256
    (item,) = items("boolq_closed", other)
    assert item.pairs[1] == ("Question: is ice cold?\nAnswer:", " yes") and item.gold == 1
    with pytest.raises(UserError, match="no file for boolq; expected boolq/val.jsonl"):
        items("boolq", other)


def test_a_zip_is_read_like_its_folder(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for file in folder.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(folder))
    for name in TASKS:
        if name != "boolq_closed":
            zipped = read_set(name, find_sets([tmp_path / "all.zip"]), True)
            assert zipped.items == items(name, folder)
            assert {file.path for file in zipped.files} == {tmp_path / "all.zip"}


def test_a_model_that_has_read_a_set_is_not_scored_on_it_in_a_zip_either(folder: Path, tmp_path: Path) -> None:
    file, packed = folder / "ARC-Easy-Test.jsonl", tmp_path / "all.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(file, file.name)
    found = read_set("arc_easy", find_sets([packed]), True)
    refuse_if_learned(found, [])
    refuse_if_learned(found, ["0" * 64])
    for read, named in ((file, f"{packed}!{file.name}"), (packed, str(packed))):
        with pytest.raises(UserError, match=re.escape(f"the model was trained on {named}, so its score would say")):
            refuse_if_learned(found, [sha256_of(read)])


def test_another_version_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"ARC-Easy-Test.jsonl: another version of arc_easy \(SHA-256 .*any-version"):
        read_set("arc_easy", find_sets([folder]))
    assert read_set("arc_easy", find_sets([folder]), any_version=True).variant == "another version"


@pytest.mark.parametrize(
    ("name", "file", "content", "message"),
    [
        ("arc_easy", "ARC-Easy-Test.jsonl", '{"question": 3}\n', "not as arc_easy is published .*TypeError"),
        ("arc_easy", "ARC-Easy-Test.jsonl", "[1, 2]", "not as arc_easy is published"),
        ("arc_easy", "ARC-Easy-Test.jsonl", "", "not as arc_easy is published|holds no item"),
        ("arc_easy", "ARC-Easy-Test.jsonl", "{\n", "line 1: not JSON"),
        ("arc_easy", "ARC-Easy-Test.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("piqa", "piqa/valid-labels.lst", "0\n1\n", "1 questions and 2 labels"),
        (
            "winogrande",
            "winogrande/dev.jsonl",
            '{"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}',
            "a sentence without a blank",
        ),
        ("lambada", "lambada_test.jsonl", '{"text": "word"}', "a text of one word"),
        ("lambada", "lambada_test.jsonl", '{"text": "half a \\ud83d"}', "not as lambada is published .*surrogates"),
    ],
)
def test_a_file_of_another_form(folder: Path, name: str, file: str, content: str, message: str) -> None:
    (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as found:
        items(name, folder)
    assert "\n" not in str(found.value)


def test_passages_that_end_with_a_word_of_their_own() -> None:
    long = " ".join(["The old dog ran over the hill and saw a cat by the wide river."] * 2)
    long += " Nobody in the whole town had heard such a terrible noise for many years."
    (passage,) = last_words([f"{long} Then it barked at the cat.\n\nToo short, the cat."], 5, 0)
    assert isinstance(passage, LastWord) and passage.word == " cat" and passage.context.endswith("barked at the")
    assert not last_words([f"{long} Then it barked at the moon."], 5, 0)
    ending = f"{long} Then it barked at the cat."
    assert text_set("last_words", [ending], 0).sha256 != text_set("last_words", [ending], 1).sha256
    assert isinstance(text_set("text", [long], 0).items[0], Passage)


def test_text_without_headings_is_one_page() -> None:
    assert pages_of("no heading = here =\n") == ["no heading = here =\n"]


def test_the_command_says_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "blimp              3 items" in shown and "boolq_closed  no file for boolq_closed; expected" in shown


def test_a_corpus_without_the_evaluation_sets(folder: Path, tmp_path: Path) -> None:
    """A train document that has 13 words in a row of an item is dropped, and the catalogue knows the sets."""
    question = "Which of these long words would a patient teacher choose to write on her old blackboard today?"
    record = {"question": {"stem": question, "choices": STEM["choices"]}, "answerKey": "A"}
    (folder / "ARC-Easy-Test.jsonl").write_text(json.dumps(record), encoding="utf-8")
    words = [f"word{i}" for i in range(400)]
    texts = [" ".join(words[i * 40 : i * 40 + 200]) for i in range(4)]
    texts += [f"{' '.join(words)} He read: {question[:-1].upper()} and went on.", f"{words[0]} {question[:40]}"]
    with SourceWriter(tmp_path / "text", "text", "MIT") as writer:
        writer.add_input("text.txt", 5, "ab" * 32)
        for i, text in enumerate(texts):
            writer.add(Document(str(i), text))
    assert read_source(tmp_path / "text").inputs == ("ab" * 32,)
    filters = tmp_path / "none.sql"
    filters.write_text("-- filter: nothing\n-- drops nothing\nfalse\n", encoding="utf-8")
    out = tmp_path / "corpus"
    settings = Settings(val_share=0.0, max_bytes=1 << 17, similarity=1.0)
    build_corpus([tmp_path / "text"], out, settings, filters, workers=1, decontaminate=[folder])
    import duckdb

    with duckdb.connect(str(out / "corpus.duckdb"), read_only=True) as catalogue:
        found = dict(catalogue.execute("SELECT id, dropped FROM documents").fetchall())
    assert found["4"] == "evaluation-set" and found["5"] is None
    described = json.loads((out / "corpus.json").read_text(encoding="utf-8"))
    known = read_set("arc_easy", find_sets([folder]), True).sha256
    assert described["settings"]["evaluation_sets"]["arc_easy"] == known
    assert described["sources"][0]["inputs"] == ["ab" * 32]
    assert build_corpus([tmp_path / "text"], out, settings, filters, workers=1, decontaminate=[folder]) == {}
    with pytest.raises(UserError, match="--decontaminate: no evaluation set in"):
        build_corpus([tmp_path / "text"], out, settings, filters, decontaminate=[tmp_path / "text"])


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="real sets (shared/data/eval next to the repository)")
def test_the_published_sets() -> None:
    """Each is the version that is known; every item has something to be looked for in training text."""
    files = find_sets([SHARED])
    sizes = {
        "arc_easy": 2376,
        "arc_challenge": 1170,
        "piqa": 1838,
        "boolq_closed": 3270,
        "winogrande": 1267,
        "openbookqa": 500,
        "gsm8k": 1319,
        "blimp": 67_000,
    }
    for name, size in sizes.items():
        found = read_set(name, files)
        assert len(found.items) == size and found.sha256 in evaluation.TASKS[name].known
        assert all(len(text_of(item).split()) > 3 for item in found.items[:200])
        groups = {item.group for item in found.items if isinstance(item, Choice)}
        assert len(groups) == (67 if name == "blimp" else name != "gsm8k")
