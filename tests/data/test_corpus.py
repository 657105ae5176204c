"""The stages of a corpus against slow references, what must not move, and what a faulty source or a kill leaves."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import fault_of as fault
from tests.data.test_dedup import jaccard, slow_grams
from tinyforge.data import corpus as corpus_module
from tinyforge.data import passes
from tinyforge.data.corpus import Settings, build_corpus, main
from tinyforge.data.files import parse_bytes
from tinyforge.data.filters import DEFAULT_FILTERS, check_filters, read_filters
from tinyforge.data.gutenberg import clean
from tinyforge.data.passes import cut, duckdb_faults
from tinyforge.data.source import Document, SourceWriter

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT.parent / "shared" / "data" / "gutenberg.zip"
KEEP_ALL = "-- filter: nothing\n-- Drops nothing.\nfalse;\n"


def write_source(folder: Path, documents: Sequence[Document | str], name: str = "") -> Path:
    with SourceWriter(folder, name or folder.name, licence="public domain") as writer:
        for index, document in enumerate(documents):
            writer.add(document if isinstance(document, Document) else Document(str(index), document))
    return folder


def prose(rng: random.Random, words: int) -> str:
    """Sentences that pass every filter, from a vocabulary so large that two texts share no 5-gram."""
    found = []
    for index in range(words):
        word = rng.choice(("the", "of", "and", "to")) if index % 3 == 0 else f"{rng.choice('bcdfg')}a{words_of(rng)}"
        found.append(word + (".\n\n" if index % 40 == 39 else ""))
    return " ".join(found)


def words_of(rng: random.Random) -> str:
    return "".join(rng.choice("aeioulmnrst") for _ in range(4))


def rows(out: Path, columns: str = "*", rest: str = "ORDER BY number") -> list[tuple[Any, ...]]:
    with duckdb.connect(str(out / "corpus.duckdb"), read_only=True) as catalogue:
        return catalogue.execute(f"SELECT {columns} FROM documents {rest}").fetchall()


def texts_of(out: Path, split: str) -> dict[str, str]:
    files = sorted((out / split).glob("*.parquet"))
    return {id_: text for file in files for id_, text in duckdb.sql(f"SELECT id, text FROM '{file}'").fetchall()}


def public_bytes(out: Path) -> dict[str, bytes]:
    """Everything that must be the same for the same input: all files but the catalogue, the plot and the lock."""
    skipped = {"corpus.duckdb", "report.png", ".lock"}
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name not in skipped}


def filter_file(folder: Path, text: str = KEEP_ALL) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "own.sql").write_text(text, encoding="utf-8")
    return folder / "own.sql"


# --- reading ---------------------------------------------------------------------------------------------------------


def test_parts_are_the_text_and_no_longer_than_allowed() -> None:
    rng = random.Random(0)
    odd = ("é" * 5000, "日本語 " * 3000, "a" * 4096, "word " * 2000, "l\n" * 4000, "\n" * 5000, "")
    for text in (prose(rng, 3000), *odd):
        parts = cut(text, 2048)
        assert "".join(text[start : start + length] for start, length, _ in parts) == text
        for start, length, size in parts:
            assert size == len(text[start : start + length].encode()) <= 2048
            assert size >= 500 or len(parts) == 1
    text = prose(rng, 3000)
    assert all(text[start - 2 : start] == "\n\n" for start, *_ in cut(text, 2048)[1:])


def test_parts_fall_into_step_again_behind_a_preface() -> None:
    text = prose(random.Random(1), 40_000)
    longer = "A preface of some length.\n\n" * 37 + text
    pieces = [{whole[s : s + n] for s, n, _ in cut(whole, 8192)} for whole in (text, longer)]
    assert len(pieces[0] & pieces[1]) > 0.8 * len(pieces[0])


def test_documents_come_through_with_their_provenance(tmp_path: Path) -> None:
    rng = random.Random(2)
    short, long = prose(rng, 200), prose(rng, 3000)
    books = write_source(tmp_path / "books", [Document("84", long, "A Title", "https://host/84", None)])
    web = write_source(tmp_path / "web", [Document("w", short, language_score=0.9)])
    out = tmp_path / "out"
    build_corpus([books, web], out, Settings(max_bytes=4096), workers=1)
    found = rows(out, "number, source, licence, id, title, url, bytes, language_score, dropped")
    parts = cut(long, 4096)
    assert [row[0] for row in found] == list(range(len(parts) + 1))
    assert [row[3] for row in found] == [*(f"84#{n}" for n in range(1, len(parts) + 1)), "w"]
    assert found[0][4:] == ("A Title", "https://host/84", parts[0][2], None, None)
    assert found[-1][1:] == ("web", "public domain", "w", "", "", len(short), 0.9, None)
    kept = texts_of(out, "train") | texts_of(out, "val")
    assert kept["w"] == short
    assert "".join(kept[f"84#{n}"] for n in range(1, len(parts) + 1)) == long
    with duckdb.connect(str(out / "corpus.duckdb"), read_only=True) as catalogue:
        assert catalogue.execute("SELECT name, documents FROM sources").fetchall() == [("books", 1), ("web", 1)]
        assert len(catalogue.execute("SELECT * FROM filters").fetchall()) == len(read_filters(DEFAULT_FILTERS))
        assert ("val_share", "0.01") in catalogue.execute("SELECT name, value FROM settings").fetchall()
        stored = catalogue.execute("SELECT column_name FROM information_schema.columns").fetchall()
        assert ("text",) not in stored


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("long", [1 << 15, 6 << 20])
def test_every_accepted_limit_finishes_and_the_least_is_named(long: int, tmp_path: Path) -> None:
    """Row groups of 16 MB, of many texts and of a few: at the least that the refusal names, and above, the result
    is the one of a limit with room."""
    rng = random.Random(21)
    page = prose(rng, 5000) * (1 + long // 30_000)
    texts = [f"{prose(rng, 50)} {page[: long - 400]}" for _ in range(min(1200, (40 << 20) // long))]
    source = write_source(tmp_path / "s", texts)
    settings, filters = Settings(similarity=1.0, max_overlap=1.0), DEFAULT_FILTERS
    build_corpus([source], tmp_path / "all", settings, filters, workers=1)
    message = fault(build_corpus, [source], tmp_path / "out", settings, filters, workers=6, memory_limit=403 << 20)
    match = re.search(
        r"expected ([\d,]+) or more: --workers 6, and a row group of the sources has ([\d,]+) bytes", message
    )
    assert match
    least, group = (int(number.replace(",", "")) for number in match.groups())
    assert group >= 16 << 20 or long < 1 << 20
    for workers, limit in ((6, least), (6, least + (24 << 20)), (1, 384 << 20)):
        build_corpus([source], tmp_path / f"{workers}-{limit}", settings, filters, workers=workers, memory_limit=limit)
        assert public_bytes(tmp_path / f"{workers}-{limit}") == public_bytes(tmp_path / "all")
        shutil.rmtree(tmp_path / f"{workers}-{limit}")


# --- filters ---------------------------------------------------------------------------------------------------------

GOOD = prose(random.Random(3), 400)
BAD = {
    "too-short": "the cat and the dog sat on the mat with a hat.",
    "word-length": "the be " + "antidisestablishmentarianism " * 100,
    "few-letters": GOOD + " | == |" * 300,
    "symbols": GOOD + " a#tag" * 100,
    "bullets": "\n".join(f"* the {line.strip()}" for line in GOOD.split(".\n\n")),
    "ellipses": "\n".join(f"the {line[:150]} of..." for line in GOOD.split(".\n\n")),
    "repeated-lines": "\n".join([GOOD, *["the same line and no other one of all"] * 40]),
    "repeated-paragraphs": "\n\n".join([GOOD[:900]] + ["every yellow line\nand of the river " * 20] * 5),
    "repeated-phrases": GOOD + " buy the best shoes of the town and the best hats of the town" * 15,
    "no-sentences": re.sub(r"\b(the|of|and|to)\b", "der", GOOD),
    "stop-words": " ".join(
        random.Random(1).choices("the that this and of with have which they there their".split(), k=200)
    ),
    "menus": "\n".join(line[:25] for line in GOOD.replace(".\n\n ", "").split(" the ")),
    "scanner": re.sub(r"([a-z])[aeiou]([a-z])", r"\1\g<1>0\2", GOOD).replace(" of ", " 0f "),
    "language": GOOD,
    "lorem-ipsum": GOOD + " Lorem ipsum dolor sit amet.",
    "javascript": GOOD + " Please enable JavaScript to read the page.",
    "code": GOOD + " {x}" * 30,
    "blob": GOOD + " " + "QUJD" * 100,
}


def reasons(folder: Path, documents: Sequence[Document | str], filters: Path = DEFAULT_FILTERS) -> list[str | None]:
    settings = Settings(boilerplate=0)  # encoded data would be cut
    build_corpus([write_source(folder / "s", documents)], folder / "out", settings, filters, workers=1)
    return [reason for (reason,) in rows(folder / "out", "dropped")]


def test_each_filter_drops_what_it_is_for_and_good_prose_stays(tmp_path: Path) -> None:
    of_files = {"bad-words", "quality"}  # tests/data/test_quality.py
    assert {*BAD, *of_files} == {block.name for block in read_filters(DEFAULT_FILTERS) if block.kind == "filter"}
    rng = random.Random(4)
    documents = [Document(name, text, language_score=0.3 if name == "language" else None) for name, text in BAD.items()]
    documents.append(Document("good", prose(rng, 400), language_score=0.99))
    documents.append(Document("verse", "\n".join("  " + prose(rng, 8) for _ in range(60))))
    # Film reviews in one line, or three.
    documents += [
        Document("dash", "- " + prose(rng, 79).replace("\n\n", "")),
        Document("teaser", f"{prose(rng, 79)}\n\n{prose(rng, 30)}..."),
    ]
    names = "; ".join(
        f"Ann B{words_of(rng)} the wife of Sir B{words_of(rng)} and of Lord C{words_of(rng)}" for _ in range(20)
    )
    tagged = " ".join(f"<b class='x'>{word}</b>" for word in prose(rng, 400).split())
    lists = [f"{names}.", names.replace("; ", " | "), tagged]
    assert reasons(tmp_path / "lists", lists)[:2] == ["menus"] * 2
    with duckdb.connect(str(tmp_path / "lists" / "out" / "corpus.duckdb"), read_only=True) as db:
        assert "code" in str(db.execute("SELECT rules FROM documents WHERE number = 2").fetchall())
    found = reasons(tmp_path, documents)
    # Repeated paragraphs are repeated lines too: the first of the two filters is named.
    expected = [{name, "repeated-lines"} if name == "repeated-paragraphs" else {name} for name in BAD]
    assert all(got in want for got, want in zip(found, expected, strict=False)), found
    assert found[-4:] == [None] * 4


def test_filters_are_sql_over_the_document_and_the_first_that_holds_is_named(tmp_path: Path) -> None:
    own = """
-- measure: vowels
len(regexp_extract_all(text, '[aeiou]'));
-- filter: many-vowels
-- More vowels than
-- words. -- sure
vowels > words -- a comment
;
-- filter: from-here
id = 'b' AND source = 's' AND title = 'T' AND url = 'U' AND bytes = 3 AND letters = 3 AND characters = 3
"""
    documents = ["aaa bbb", Document("b", "xyz", "T", "U"), "a\x01b c", "x 1"]
    assert reasons(tmp_path, documents, filter_file(tmp_path, own)) == ["many-vowels", "from-here", None, None]
    assert read_filters(tmp_path / "own.sql")[1].explanation == "More vowels than words. -- sure"
    assert (tmp_path / "out" / "filters.sql").read_text() == own


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-- filter: a-b\nwords <", ["filter 'a-b'", "fix its SQL"]),
        ("-- filter: ok\ntrue\n-- filter: worse\nno_such_column > 1", ["filter 'worse'", "no_such_column"]),
        ("-- measure: m\nnothing_like_it(text)\n-- filter: f\nm > 1", ["measure 'm'"]),
        ("-- filter: f\nwords + 1", ["filter 'f'", "BIGINT", "BOOLEAN"]),
        ("-- filter: f\n-- no expression\n", ["filter 'f'", "no expression"]),
        ("-- filter: f\ntrue;\n-- filter: f\ntrue;", ["'f' occurs twice"]),
        ("-- filter: near-duplicate\ntrue;", ["'near-duplicate'", "rename"]),
        ("-- measure: text\ntrue;\n-- filter: f\ntrue;", ["'text'", "rename"]),
        ("SELECT 1", ["own.sql", "no line '-- filter: NAME'"]),
        (
            "-- filter: ok\nfalse;\n-- filter: worse\nCAST(text AS INT) > 3",
            ["filter 'worse'", "Could not convert", "fix its SQL"],
        ),
    ],
)
def test_a_filter_that_is_no_sql_is_one_line_with_its_name(tmp_path: Path, text: str, words: list[str]) -> None:
    source = write_source(tmp_path / "s", [GOOD])
    message = fault(build_corpus, [source], tmp_path / "out", filters=filter_file(tmp_path, text), workers=1)
    assert all(word in message for word in words), message


def test_a_filter_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in fault(read_filters, tmp_path / "none.sql")
    (tmp_path / "latin.sql").write_bytes(b"-- filter: \xe9")
    assert "latin.sql" in fault(read_filters, tmp_path / "latin.sql")


def test_the_filters_of_the_project_are_sql() -> None:
    with duckdb.connect() as connection:
        check_filters(connection, read_filters(DEFAULT_FILTERS))


@pytest.mark.slow
@pytest.mark.skipif(not ARCHIVE.exists(), reason="the 38 real books (shared/data/gutenberg.zip next to the repository)")
def test_no_filter_drops_a_word_of_the_classics(tmp_path: Path) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive:
        bodies = {name: clean(archive.read(name)).body for name in sorted(archive.namelist()) if name.endswith(".txt")}
    source = write_source(tmp_path / "books", [Document(name, body) for name, body in bodies.items() if body])
    build_corpus([source], tmp_path / "out")
    found = rows(tmp_path / "out", "id, dropped")
    assert len({id_.split("#")[0] for id_, _ in found}) == 38
    # 345.txt and 345-8.txt are the same book in two encodings: one of them goes, and nothing else.
    assert {reason for _, reason in found} <= {None, "near-duplicate", "exact-duplicate"}
    assert {id_.split("#")[0] for id_, reason in found if reason} == {"345.txt"}


# --- duplicates ------------------------------------------------------------------------------------------------------


def near(text: str, share: float, rng: random.Random) -> str:
    words = text.split(" ")
    for at in rng.sample(range(len(words)), round(share * len(words))):
        words[at] = f"q{words_of(rng)}"
    return " ".join(words)


def test_equal_words_are_one_document_and_the_first_stays(tmp_path: Path) -> None:
    rng = random.Random(5)
    a, b = prose(rng, 100), prose(rng, 100)
    first = write_source(tmp_path / "first", [b, a, a.upper().replace(" ", "\n ")])
    second = write_source(tmp_path / "second", [a.replace(" ", " , "), a + " more"])
    settings = Settings(similarity=1.0, max_overlap=1.0)
    build_corpus([first, second], tmp_path / "out", settings, filter_file(tmp_path), workers=1)
    dropped = rows(tmp_path / "out", "dropped, cluster")
    same = "exact-duplicate"
    assert dropped == [(None, None), (None, 1), (same, 1), (same, 1), (None, None)]


def test_code_with_other_operators_is_no_duplicate(tmp_path: Path) -> None:
    rng = random.Random(20)
    lines = [f"    {words_of(rng)} = {words_of(rng)} + {words_of(rng)} * ({words_of(rng)} - 1)" for _ in range(40)]
    program = "\n".join(["def f(x):", *lines])
    other, spaced = program.replace(" + ", " - ", 1), program.replace("\n    ", "\n  ")
    book = prose(rng, 100)
    documents = [program, other, program.replace("+", "%"), spaced, book, book.replace(" ", " - ")]
    settings, filters = Settings(val_share=0.0), filter_file(tmp_path)
    build_corpus([write_source(tmp_path / "s", documents)], tmp_path / "out", settings, filters, workers=1)
    same = "exact-duplicate"
    assert [reason for (reason,) in rows(tmp_path / "out", "dropped")] == [None, None, None, same, None, same]


@pytest.mark.slow
def test_the_join_over_bands_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As few bands, and as few of their keys, at a time as fit: the same pairs."""
    rng, texts = random.Random(6), []
    for _ in range(30):
        original = prose(rng, 120)
        texts += [original, near(original, 0.01, rng), near(original, 0.05, rng)]
    whole = corpus_module._slices
    source, found = write_source(tmp_path / "s", texts), []
    for limit, joins in ((10**9, 1), (96 * 4 * 91 * 7, 3), (96 * 4 * 40, 60)):
        assert len(list(whole(20, 91, limit))) == joins
        monkeypatch.setattr(corpus_module, "_slices", lambda bands, count, _, limit=limit: whole(bands, 91, limit))
        out = tmp_path / str(limit)
        build_corpus([source], out, Settings(max_overlap=1.0), workers=1)
        found.append((rows(out, "number, dropped, cluster"), (out / "corpus.json").read_bytes()))
    assert found[0] == found[1] == found[2] and sum(dropped == "near-duplicate" for _, dropped, _ in found[0][0]) > 20


def test_near_duplicates_against_exact_jaccard(tmp_path: Path) -> None:
    rng = random.Random(6)
    texts = []
    for _ in range(25):
        original = prose(rng, rng.randrange(100, 300))
        shares = rng.choices((0.002, 0.01, 0.05, 0.2), k=rng.randrange(4))
        texts += [original, *(near(original, share, rng) for share in shares)]
    rng.shuffle(texts)
    settings = Settings(max_overlap=1.0)
    build_corpus([write_source(tmp_path / "s", texts)], tmp_path / "out", settings, workers=1)
    found = rows(tmp_path / "out", "number, dropped, cluster")
    cluster = {number: number if first is None else first for number, _, first in found}
    planted = 0
    for i, a in enumerate(texts):
        for j in range(i):
            if (similarity := jaccard(a, texts[j])) >= 0.92:
                planted += 1
                assert cluster[i] == cluster[j], similarity
        joined = [jaccard(a, texts[j]) for j in range(len(texts)) if j != i and cluster[i] == cluster[j]]
        assert not joined or max(joined) > 0.68  # 3.3 standard deviations below the threshold
    assert planted > 9
    for number, dropped, first in found:
        assert (dropped in ("near-duplicate", "exact-duplicate")) == (first is not None and first < number)
        assert first is None or found[first][1] is None


def test_what_a_filter_dropped_is_no_original(tmp_path: Path) -> None:
    filters = filter_file(tmp_path, "-- filter: first\nid = '0';")
    texts = [prose(random.Random(7), 100)] * 3
    assert reasons(tmp_path, texts, filters) == ["first", None, "exact-duplicate"]


def test_texts_without_words_and_empty_sources(tmp_path: Path) -> None:
    empty = write_source(tmp_path / "empty", [])
    odd = write_source(tmp_path / "odd", ["", " ", "?!", "one", "One."])
    out = tmp_path / "out"
    build_corpus([empty, odd], out, filters=filter_file(tmp_path), workers=1)
    dropped = [reason for (reason,) in rows(out, "dropped")]
    assert dropped == [None, "exact-duplicate", "exact-duplicate", None, "exact-duplicate"]
    manifest = json.loads((out / "corpus.json").read_text())
    assert manifest["sources"][0]["train"] == {"documents": 0, "bytes": 0}


def test_a_folder_with_brackets_is_no_pattern(tmp_path: Path) -> None:
    """[1] matches 1: DuckDB would read the folder next to it."""
    write_source(tmp_path / "web1", ["one"], "web")
    many = write_source(tmp_path / "web[1]", [f"{i}" for i in range(20)], "web")
    build_corpus([many], tmp_path / "out", filters=filter_file(tmp_path), workers=1)
    assert len(rows(tmp_path / "out")) == 20


# --- the split -------------------------------------------------------------------------------------------------------


def splits(folder: Path, texts: Sequence[str], share: float) -> dict[str, set[str]]:
    """The splits of each text's documents."""
    out = folder / f"out{len(texts)}-{share}"
    source = write_source(folder / f"s{len(texts)}", texts, "s")
    settings = Settings(val_share=share, max_bytes=2048)
    build_corpus([source], out, settings, filter_file(folder), workers=1)
    found: dict[str, set[str]] = {}
    for row, split in rows(out, "row, split"):
        found.setdefault(texts[row], set()).add(split)
    return found


def test_other_documents_and_a_larger_share_never_move_one_out_of_val(tmp_path: Path) -> None:
    rng = random.Random(8)
    texts = [prose(rng, rng.choice((30, 60, 900))) for _ in range(200)]
    everything = splits(tmp_path, texts, 0.2)
    some = rng.sample(texts, 75)
    assert splits(tmp_path, some, 0.2) == {text: everything[text] for text in some}
    assert all(len(found) == 1 for found in everything.values())  # all parts of a text
    in_val = {text for text, found in everything.items() if found == {"val"}}
    assert 25 < len(in_val) < 55
    more = splits(tmp_path, texts, 0.4)
    assert in_val < {text for text, found in more.items() if found == {"val"}}


@pytest.mark.parametrize("texts", [1, pytest.param(3, marks=pytest.mark.slow), 40])
@pytest.mark.parametrize("settings", [Settings(), Settings(split_by="part", max_bytes=16384)], ids=["text", "part"])
@pytest.mark.parametrize("words", [9000, pytest.param(70_000, marks=pytest.mark.slow)])  # 60 and 500 kB
def test_a_small_corpus_always_has_something_held_out(
    tmp_path: Path, texts: int, settings: Settings, words: int
) -> None:
    rng = random.Random(texts)
    source = write_source(tmp_path / "s", [prose(rng, words // texts) for _ in range(texts)])
    build_corpus([source], tmp_path / "out", settings, workers=1)
    kept = rows(tmp_path / "out", "split, bytes", "WHERE dropped IS NULL")
    sizes = {split: sum(size for of, size in kept if of == split) for split in ("train", "val")}
    assert 0 < sizes["val"] <= sum(sizes.values()) / 2 and sizes["train"] > 0
    assert texts != 40 or sizes["val"] < 0.15 * sum(sizes.values())
    assert "No document for val" not in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_what_the_report_advises_gives_a_source_something_in_val(tmp_path: Path) -> None:
    rng = random.Random(21)
    sources = [write_source(tmp_path / name, [prose(rng, 300) for _ in range(n)]) for name, n in (("a", 9), ("b", 9))]
    build_corpus(sources, tmp_path / "out", Settings(val_shares=(("b", 0.0),)), workers=1)
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    found = re.search(r"No document for val in b: build again with `--val-share b=([0-9.]+)`", report)
    assert found
    build_corpus(sources, tmp_path / "again", Settings(val_shares=(("b", float(found[1])),)), workers=1)
    assert ("b", "val") in rows(tmp_path / "again", "source, split", "WHERE dropped IS NULL")


def test_no_share_for_val_means_none(tmp_path: Path) -> None:
    rng = random.Random(5)
    source = write_source(tmp_path / "s", [prose(rng, 300) for _ in range(5)])
    build_corpus([source], tmp_path / "out", Settings(val_share=0.0), workers=1)
    assert {split for (split,) in rows(tmp_path / "out", "split")} == {"train"}


def test_a_source_can_have_a_share_of_its_own(tmp_path: Path) -> None:
    rng = random.Random(9)
    a, b = (write_source(tmp_path / name, [prose(rng, 60) for _ in range(20)]) for name in "ab")
    build_corpus([a, b], tmp_path / "out", Settings(val_share=0.0, val_shares=(("b", 1.0),)), workers=1)
    assert set(rows(tmp_path / "out", "source, split")) == {("a", "train"), ("b", "val")}
    assert "No document for val in a" in (tmp_path / "out" / "report.md").read_text()


def test_parts_of_few_books_can_go_their_own_ways(tmp_path: Path) -> None:
    """Val gets parts of each book; the same part is in the same split, whatever else there is."""
    rng = random.Random(12)
    books = [prose(rng, 9000) for _ in range(2)]
    settings = Settings(val_share=0.2, split_by="part", max_bytes=2048)
    found = []
    for name, texts in (("both", books), ("one", books[1:])):
        source = write_source(tmp_path / name, texts, "s")
        build_corpus([source], tmp_path / f"out-{name}", settings, filter_file(tmp_path), workers=1)
        found.append({hash_: split for hash_, split in rows(tmp_path / f"out-{name}", "hash, split")})
    by_book = rows(tmp_path / "out-both", "row, count(*), count(*) FILTER (split = 'val')", "GROUP BY row ORDER BY row")
    assert len(by_book) == 2 and all(0.05 * parts < held < 0.4 * parts for _, parts, held in by_book)
    assert found[1].items() < found[0].items()


# --- decontamination -------------------------------------------------------------------------------------------------


def test_overlap_with_val_is_the_share_of_grams(tmp_path: Path) -> None:
    rng = random.Random(10)
    exam = [prose(rng, 300) for _ in range(6)]
    train = []
    for index in range(40):
        quoted = rng.choice(exam).split(" ")[: rng.randrange(300)] if index % 2 else []
        train.append(f"{prose(rng, 150)} {' '.join(quoted)} {prose(rng, 150)}")
    train += ["too few words", " ".join(exam[0].split(" ")[:9])]
    settings = Settings(val_share=0.0, val_shares=(("exam", 1.0),), max_overlap=0.25)
    sources = [write_source(tmp_path / "train", train), write_source(tmp_path / "exam", exam)]
    build_corpus(sources, tmp_path / "out", settings, filter_file(tmp_path), workers=1)
    known = {gram for text in exam for gram in slow_grams(text, 13)}
    found = rows(tmp_path / "out", "val_overlap, dropped", "WHERE source = 'train' ORDER BY number")
    dropped = 0
    for text, (overlap, reason) in zip(train, found, strict=True):
        grams = slow_grams(text, 13)
        share = sum(gram in known for gram in grams) / len(grams)
        assert (overlap or 0.0) == pytest.approx(share)
        assert reason == ("contaminated" if share > 0.25 else None)
        dropped += reason is not None
    assert 3 < dropped < 20
    assert len(texts_of(tmp_path / "out", "val")) == 6


def test_a_shared_header_is_no_contamination_and_the_report_shows_a_passage(tmp_path: Path) -> None:
    rng = random.Random(12)
    header = prose(rng, 38)
    exam = [f"{header} {prose(rng, 150)}" for _ in range(4)]
    train = [f"{header} {prose(rng, 100)}" for _ in range(60)]
    passage = exam[1].split(" ")[60:110]
    train += [f"{prose(rng, 50)} {exam[0]} {prose(rng, 50)}", f"{header} {prose(rng, 50)} {' '.join(passage)}"]
    # Runs of 16 words: many grams are shared, but no passage.
    train += [" ".join(f"{prose(rng, 9)} {' '.join(exam[2].split(' ')[at : at + 16])}" for at in range(40, 140, 20))]
    settings = Settings(val_share=0.0, val_shares=(("exam", 1.0),))
    sources = [write_source(tmp_path / "train", train), write_source(tmp_path / "exam", exam)]
    build_corpus(sources, tmp_path / "out", settings, filter_file(tmp_path), workers=1)
    found = rows(tmp_path / "out", "id, passage", "WHERE dropped = 'contaminated' ORDER BY number")
    assert [id_ for id_, _ in found] == ["60", "61"]
    words = " ".join(re.findall("[a-z]+", " ".join(passage)))
    assert words in found[1][1] and found[1][1] in re.sub(r"[^a-z]+", " ", train[61])
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## Text that is held out" in report and words[:200] in report
    [(overlap,)] = rows(tmp_path / "out", "val_overlap", "WHERE id = '62' AND source = 'train'")
    assert 0.1 < overlap < 0.3


WIKIPEDIA = ROOT.parent / "shared" / "data" / "text" / "simple-wikipedia.parquet"


@pytest.mark.slow
@pytest.mark.skipif(not WIKIPEDIA.exists(), reason="the Simple English Wikipedia (shared/data next to the repository)")
def test_articles_by_one_template_are_no_contamination_and_copies_are(tmp_path: Path) -> None:
    towns = duckdb.sql(f"SELECT id, text FROM '{WIKIPEDIA}' WHERE title LIKE '%, Kansas' ORDER BY id::INT").fetchall()
    first = build_and_read(tmp_path / "first", [Document(*row) for row in towns])
    assert len(towns) == 380 and sum(reason is not None for _, _, reason in first) <= 2
    held_out, others = (
        [row for row in towns if (row[0], split) in {f[:2] for f in first}] for split in ("val", "train")
    )
    copies = [Document(f"copy-{id_}", f"{others[n][1]}\n{text}") for n, (id_, text) in enumerate(held_out)]
    again = build_and_read(tmp_path / "again", [Document(*row) for row in towns] + copies)
    kept = [id_ for id_, split, reason in again if id_.startswith("copy") and split == "train" and reason is None]
    assert len(copies) >= 2 and not kept


def build_and_read(folder: Path, documents: Sequence[Document]) -> list[tuple[Any, ...]]:
    build_corpus([write_source(folder / "s", documents)], folder / "out", workers=1)
    return rows(folder / "out", "id, split, dropped")


# --- the same bytes, whatever happens --------------------------------------------------------------------------------


def mixture(folder: Path, documents: int = 120) -> list[Path]:
    rng = random.Random(11)
    texts = [prose(rng, rng.randrange(20, 200)) for _ in range(documents)]
    texts += [near(text, 0.01, rng) for text in texts[:20]] + texts[:10]
    books = [prose(rng, 4000) for _ in range(3)]
    return [write_source(folder / "books", books), write_source(folder / "web", texts)]


SETTINGS = Settings(val_share=0.1, max_bytes=8192)
Mixed = tuple[list[Path], Path]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Mixed:
    """Sources, and the corpus that one process makes of them."""
    folder = tmp_path_factory.mktemp("mixed")
    sources = mixture(folder, 60)
    build_corpus(sources, folder / "out", SETTINGS, workers=1, memory_limit=10**9)
    return sources, folder / "out"


@pytest.mark.slow
def test_workers_and_memory_change_no_byte(mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, out = mixed
    build_corpus(sources, tmp_path / "b", SETTINGS, workers=2, memory_limit=1 << 29)
    assert public_bytes(out) == public_bytes(tmp_path / "b")
    assert not (out / ".work").exists()
    monkeypatch.setattr(passes, "_BATCH_BYTES", 1 << 12)
    monkeypatch.setattr(passes, "_FILTER_BYTES", 1 << 12)
    build_corpus(sources, tmp_path / "c", SETTINGS, workers=1)
    assert public_bytes(out) == public_bytes(tmp_path / "c")


@pytest.mark.slow
def test_long_sources_are_read_and_written_in_several_files(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, one = mixed
    monkeypatch.setattr(corpus_module, "_FILE_BYTES", 20_000)
    build_corpus(sources, tmp_path / "many", SETTINGS, workers=1)
    assert len(list((tmp_path / "many" / "train").iterdir())) > 4
    for split in ("train", "val"):
        assert list(texts_of(tmp_path / "many", split).items()) == list(texts_of(one, split).items())


def test_a_corpus_that_is_there_is_not_made_again_and_other_settings_replace_it(mixed: Mixed, tmp_path: Path) -> None:
    sources, out = mixed[0], tmp_path / "out"
    shutil.copytree(mixed[1], out)
    assert build_corpus(sources, out, SETTINGS, workers=2) == {}
    before = public_bytes(out)
    build_corpus(sources[:1], out, SETTINGS, workers=1)
    assert not any("web" in name for name in public_bytes(out))
    build_corpus(sources, out, SETTINGS, workers=1)
    assert public_bytes(out) == before


@pytest.mark.slow
def test_a_source_that_is_added_does_not_have_the_others_read_again(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(12)
    header = "A line of many words, which all of these pages have above their text, is cut out of each one of them.\n"
    pages = write_source(tmp_path / "pages", [header + prose(rng, 100) for _ in range(30)])
    added = write_source(tmp_path / "added", [header + prose(rng, 100), *[prose(rng, 60) for _ in range(5)], "few"])
    kept, settings = [mixed[0][0], pages, mixed[0][1]], replace(SETTINGS, detect_language=False)
    build_corpus(kept, tmp_path / "out", settings, workers=1)
    looked: list[str] = []
    for name in ("read_texts", "clean_texts", "find_rules"):
        real = getattr(passes, name)

        def counted(job: Any, span: Any, *rest: Any, real: Any = real) -> Any:
            looked.append(getattr(span, "span", span).source)
            return real(job, span, *rest)

        monkeypatch.setattr(passes, name, counted)
    for sources in ([*kept[:2], added, kept[2]], kept[::-1]):
        looked.clear()
        build_corpus(sources, tmp_path / "out", settings, workers=1)
        assert set(looked) == ({"added"} if added in sources else set())
        build_corpus(
            sources, tmp_path / f"new-{sources[0].name}-{len(sources)}-{sources[-1].name}", settings, workers=1
        )
        assert public_bytes(tmp_path / "out") == public_bytes(
            tmp_path / f"new-{sources[0].name}-{len(sources)}-{sources[-1].name}"
        )
    looked.clear()
    build_corpus(kept, tmp_path / "out", replace(settings, similarity=0.7), workers=1)
    assert not looked  # documents are compared again, and none is measured
    next((tmp_path / "out" / ".kept" / "pages").glob("clean-*.npy")).unlink()  # incomplete, so not used
    build_corpus(kept, tmp_path / "out", replace(settings, similarity=0.8), workers=1)
    assert set(looked) == {"pages"}
    looked.clear()
    build_corpus(kept, tmp_path / "out", replace(settings, boilerplate=0), workers=1)
    assert set(looked) == {"books", "pages", "web"}


class Stop(Exception):
    """Stands for whatever ends a run."""


@pytest.mark.slow
@pytest.mark.parametrize("begun", [False, True])
def test_a_run_that_ends_anywhere_goes_on_and_gives_the_same_bytes(
    begun: bool, mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run is ended at a rename, or a link, and gets one file further than the one before. begun: the corpus of
    one of the sources is there."""
    (sources, whole), out, left = mixed, tmp_path / "out", 0
    if begun:
        build_corpus(sources[1:], out, SETTINGS, workers=1)

    def counted(real: Any) -> Any:
        def step(source: Any, target: Any) -> None:
            nonlocal left
            if left == 0:
                raise Stop
            left -= 1
            real(source, target)

        return step

    for name in ("replace", "link"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for ended in range(1, 100):
        left = ended
        try:
            build_corpus(sources, out, SETTINGS, workers=1)
            break
        except Stop:
            assert begun or not (out / "corpus.json").exists()
    assert 6 < ended < 99
    assert public_bytes(out) == public_bytes(whole)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_run_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    sources, out = mixture(tmp_path, 1500), tmp_path / "out"
    build_corpus(sources, tmp_path / "whole", SETTINGS, workers=1)
    command = [
        sys.executable,
        "-m",
        "data.corpus",
        *map(str, sources),
        "--out",
        str(out),
        "--val-share",
        "0.1",
        "--max-bytes",
        "8192",
        "--workers",
        "2",
    ]
    for wait in (1.0, 1.7, 2.4):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(0.5)  # its workers go too, and with them their locks
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert public_bytes(out) == public_bytes(tmp_path / "whole")


# --- faults ----------------------------------------------------------------------------------------------------------


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "source.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_parquet(folder: Path, select: str, options: str = "", patch: tuple[bytes, bytes] = (b"", b"")) -> None:
    """Another parquet file, which source.json agrees with."""
    import hashlib

    path = folder / "documents-00000.parquet"
    path.unlink()
    duckdb.sql(f"COPY ({select}) TO '{path}' (FORMAT parquet{options})")
    raw = path.read_bytes().replace(*patch) if patch[0] else path.read_bytes()
    path.write_bytes(raw)
    entry = {"file": path.name, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    edit_manifest(folder, parquet=[entry])


PLAIN = ", COMPRESSION uncompressed"
COLUMNS = "'a' AS id, '' AS title, '' AS url, NULL::DOUBLE AS language_score"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "source.json").unlink(), ["s: no source.json"]),
        (lambda f: edit_manifest(f, version=9), ["source.json", "version 9"]),
        (lambda f: (f / "source.json").write_text("{"), ["source.json", "JSON"]),
        (lambda f: (f / "documents-00000.parquet").unlink(), ["documents-00000.parquet", "missing"]),
        (lambda f: (f / "documents-00000.parquet").open("ab").write(b"x"), ["documents-00000.parquet", "bytes"]),
        (lambda f: rewrite_parquet(f, "SELECT 'a' AS id, 'b' AS words"), ["documents-00000.parquet", "got columns"]),
        (lambda f: rewrite_parquet(f, f"SELECT {COLUMNS}, 3 AS text"), ["text INTEGER", "text VARCHAR"]),
        (lambda f: rewrite_parquet(f, f"SELECT {COLUMNS}, NULL::VARCHAR AS text"), ["row 0 has no text"]),
        (
            lambda f: rewrite_parquet(f, f"SELECT {COLUMNS}, 'QQQQ' AS text", PLAIN, (b"QQQQ", b"Q\xff\xfeQ")),
            ["documents-00000.parquet", "UTF-8"],
        ),
        (lambda f: edit_manifest(f, name="a/b"), ["source 'a/b'", "letters"]),
    ],
)
def test_a_faulty_source_is_refused_by_name(tmp_path: Path, damage: Any, words: list[str]) -> None:
    folder = write_source(tmp_path / "s", [GOOD])
    damage(folder)
    message = fault(build_corpus, [folder], tmp_path / "out", workers=1)
    assert all(word in message for word in words), message
    assert not (tmp_path / "out" / "corpus.json").exists()


def test_a_parquet_file_that_was_altered_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "s", [GOOD])
    path = folder / "documents-00000.parquet"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert "SHA-256" in fault(build_corpus, [folder], tmp_path / "out", workers=1)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"settings": Settings(val_shares=(("x", 0.1),))}, ["--val-share x", "no such source"]),
        ({"memory_limit": 1000}, ["--memory-limit", "384MiB"]),
        ({"workers": 0}, ["--workers is 0"]),
    ],
)
def test_a_bad_argument_is_one_line(tmp_path: Path, keywords: dict[str, Any], words: list[str]) -> None:
    message = fault(build_corpus, [write_source(tmp_path / "s", [GOOD])], tmp_path / "out", **keywords)
    assert all(word in message for word in words), message


def test_a_script_without_a_guard_is_told_what_it_lacks(tmp_path: Path) -> None:
    source, script = write_source(tmp_path / "s", [GOOD]), tmp_path / "own.py"
    call = f"build_corpus([Path({str(source)!r})], Path({str(tmp_path / 'out')!r}), workers=2)"
    script.write_text(f"from pathlib import Path\nfrom tinyforge.data.corpus import build_corpus\n{call}\n")
    found = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (
        found.returncode == 1 and "a worker ended early" in found.stderr.splitlines()[-1] and "__main__" in found.stderr
    )


def test_the_same_source_twice_and_no_source(tmp_path: Path) -> None:
    folder = write_source(tmp_path / "s", [GOOD])
    assert "twice" in fault(build_corpus, [folder, folder], tmp_path / "out")
    assert "no source folder" in fault(build_corpus, [], tmp_path / "out")
    assert "choose another folder" in fault(build_corpus, [folder], tmp_path / "x" / ".." / "s")


@pytest.mark.parametrize(
    "bad",
    [
        {"val_share": 1.1},
        {"similarity": -1},
        {"max_overlap": 2},
        {"max_bytes": 9},
        {"rows": 0},
        {"bands": 300},
        {"rows": 10**9},
        {"shingle_words": 10**30},
        {"gram_words": 10**30},
        {"gram_words": 0},
        {"split_by": "book"},
    ],
)
def test_a_setting_out_of_bounds_names_its_flag(bad: dict[str, Any]) -> None:
    assert f"--{next(iter(bad)).replace('_', '-')} is" in fault(Settings, **bad)


def test_bytes_with_and_without_units() -> None:
    sizes = {
        "7": 7,
        "1GB": 10**9,
        "1.5 MiB": 3 << 19,
        "2kb": 2000,
        "250000": 250_000,
        "50mb": 50 * 10**6,
        "1.5 GB": 1_500_000_000,
        "7B": 7,
        "2k": 2000,
        " 1T ": 10**12,
    }
    assert {text: parse_bytes(text, "--bytes") for text in sizes} == sizes
    for text in ("1 parsec", "", "0", "-1", "9" * 400, "\u0663MB"):
        assert fault(parse_bytes, text, "--memory-limit").startswith(f"--memory-limit is {text!r}, expected bytes")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (duckdb.IOException("IO Error: Could not write file: No space left on device"), "the disk is full"),
        (duckdb.OutOfMemoryException("Out of Memory Error: failed to offload"), "raise --memory-limit"),
        (duckdb.IOException("IO Error: Permission denied"), "Permission denied"),
    ],
)
def test_duckdb_faults_that_the_user_can_mend(error: duckdb.Error, words: str) -> None:
    def run() -> None:
        with duckdb_faults("here"):
            raise error

    message = fault(run)
    assert message.startswith("here: ") and words in message


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = write_source(tmp_path / "s", [GOOD]), tmp_path / "out"
    real, left = os.replace, 3

    def replace(source: Any, target: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        assert "the disk is full" in fault(build_corpus, [source], out, workers=1)
    build_corpus([source], out, workers=1)
    assert (out / "corpus.json").exists()


# --- the report and the command --------------------------------------------------------------------------------------


def test_the_command_builds_reports_and_counts_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tinyforge.tokenizers import Tokenizer

    rng = random.Random(12)
    texts = [prose(rng, 100) for _ in range(8)]
    tokenizer = Tokenizer.train(texts, 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    source, out = write_source(tmp_path / "s", [*texts, texts[0], "short"]), tmp_path / "out"
    arguments = [
        str(source),
        "--out",
        str(out),
        "--tokenizer",
        str(tmp_path / "tokenizer.json"),
        "--workers",
        "1",
        "--val-share",
        "s=0.5",
        "--memory-limit",
        "500MB",
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "read " in printed and "MB/s" in printed
    assert printed.endswith(f"next: python -m data.shards --corpus {out} --out shards\n")
    counts = {id_: tokens for id_, tokens in rows(out, "id, tokens")}
    assert counts["3"] == len(tokenizer.encode(texts[3]))
    sizes = [len(text.encode()) for text in (*texts, texts[0], "short")]
    report = (out / "report.md").read_text()
    assert f"| all | 10 | {sum(sizes):,} | 100.00 | {sum(counts.values()):,} |" in report
    assert f"| exact-duplicate | 1 | {sizes[0]:,} |" in report and "| too-short | 1 | 5 |" in report
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    (out / "report.md").unlink()
    assert main(["report", str(out)]) == 0
    assert capsys.readouterr().out.strip() == report.strip() == (out / "report.md").read_text().strip()
    assert main(arguments) == 0
    assert "already built" in capsys.readouterr().out


def test_a_report_of_what_is_no_corpus(tmp_path: Path) -> None:
    assert "no such file" in fault(main, ["report", str(tmp_path)])
    (tmp_path / "corpus.duckdb").write_bytes(b"nothing" * 1000)
    assert "not a readable catalogue" in fault(main, ["report", str(tmp_path)])


def test_faults_of_the_command_line(tmp_path: Path) -> None:
    source = write_source(tmp_path / "s", [GOOD])
    begin = [str(source), "--out", str(tmp_path / "out"), "--val-share"]
    assert "--val-share is 'many'" in fault(main, [*begin, "many"])
    assert "--val-share: s is given twice" in fault(main, [*begin, "s=0.1", "s=0.2"])
    assert "--val-share: a share for all is given twice" in fault(main, [*begin, "0.1", "s=0.3", "0.2"])
