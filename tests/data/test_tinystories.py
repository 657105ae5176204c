"""Stories are cut at their separators, fetched as published, and the same after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import fault_of
from tinyforge.data import tinystories
from tinyforge.data.download import Downloader, FetchError, Patience
from tinyforge.data.source import Source
from tinyforge.data.tinystories import FILE, REPOSITORY, main, make_source
from tinyforge.errors import UserError

QUICK = Patience(timeout=2.0, attempts=2, backoff=0.01, gap=0.0)
# As it is published: stories of several paragraphs, a separator on a line of its own after each, also after the last.
STORIES = ["Once there was a cat.\n\nIt slept.", "Tom had a ball.", 'Lily said, "I’m sad."\nThe end.']
TEXT = "".join(f"\n{story}\n<|endoftext|>" for story in STORIES).encode() + b"\n"


def texts(source: Source) -> dict[str, str]:
    names = [str(path) for path in source.parquet]
    return dict(duckdb.execute("SELECT id, text FROM read_parquet($1)", [names]).fetchall())


def expected(name: str) -> dict[str, str]:
    return {f"{name}:{i}": f"{story}\n" for i, story in enumerate(STORIES)}


def fetch(out: Path, host: Any, **how: Any) -> Source:
    return make_source(out, base_url=host.url, downloader=Downloader(QUICK), **how)


def fault(*arguments: str | Path) -> str:
    return fault_of(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("chunk", [1, 2, 5, 13, 1 << 20])
def test_stories_are_cut_at_separators_wherever_a_chunk_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(tinystories, "CHUNK", chunk)
    (tmp_path / "a.txt").write_bytes(TEXT)
    assert texts(make_source(tmp_path / "out", [tmp_path / "a.txt"])) == expected("a.txt")


@pytest.mark.parametrize(
    "text", [TEXT.rstrip(), TEXT.rstrip().removesuffix(b"<|endoftext|>"), TEXT.replace(b"\n", b"\r\n")]
)
def test_a_missing_last_separator_and_other_line_ends(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text)
    assert texts(make_source(tmp_path / "out", [tmp_path / "a.txt"])) == expected("a.txt")


def test_a_parquet_file_has_a_story_a_row(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    duckdb.execute(f"COPY (SELECT unnest($1) AS text) TO '{path}' (FORMAT parquet)", [STORIES])
    assert texts(make_source(tmp_path / "out", [path])) == expected("train.parquet")


def test_a_story_that_is_no_text_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT.replace(b"Tom", b"T\xffm"))
    source = make_source(tmp_path / "out", [tmp_path / "a.txt"])
    assert list(texts(source)) == ["a.txt:0", "a.txt:2"]
    assert source.refused[0].record == "a.txt:1" and "got byte 0xff, expected UTF-8" in source.refused[0].reason


def test_the_published_file_is_fetched_and_checked(tmp_path: Path, host: Any, faults: Any) -> None:
    host.publish(REPOSITORY, {FILE: TEXT, "other.txt": b"other"})
    (path,) = (path for path, content in host.files.items() if content == TEXT)
    host.faults[path] = [faults.other(TEXT.replace(b"Tom", b"Tim")), faults.other(TEXT[:-4])]
    with pytest.raises(FetchError, match=f"is {len(TEXT) - 4} bytes long, expected {len(TEXT)}"):
        fetch(tmp_path, host)
    source = fetch(tmp_path, host)
    assert texts(source) == expected(FILE)
    assert (source.name, source.licence) == ("tinystories", "CDLA-Sharing-1.0")
    host.log.clear()
    assert texts(fetch(tmp_path, host)) == expected(FILE) and host.log == []


def test_files_are_named_without_a_list(tmp_path: Path, host: Any) -> None:
    host.files[f"/datasets/{REPOSITORY}/resolve/main/data/b.txt"] = TEXT
    assert texts(fetch(tmp_path, host, files=["data/b.txt"])) == expected("b.txt")
    with pytest.raises(FetchError, match=r"c\.txt: could not be downloaded from .*HTTP 404"):
        fetch(tmp_path, host, files=["c.txt"])


def test_a_data_set_without_the_file_says_what_it_has(tmp_path: Path, host: Any) -> None:
    host.publish(REPOSITORY, {"TinyStories-train.txt": TEXT})
    with pytest.raises(UserError, match=f"{FILE}: not in {REPOSITORY} .*which has TinyStories-train.txt; name --files"):
        fetch(tmp_path, host)


def test_bad_files_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = ("--out", tmp_path / "out")
    assert "no.txt: no such file" in fault(tmp_path / "no.txt", *out)
    (tmp_path / "empty.txt").write_text(" \n")
    assert "empty.txt: no story in it" in fault(tmp_path / "empty.txt", *out)
    (tmp_path / "words.parquet").write_text("only words")
    assert "words.parquet: not a readable parquet file" in fault(tmp_path / "words.parquet", *out)
    assert "expected one or the other" in fault("a.txt", "--files", "b.txt", *out)
    monkeypatch.setattr(tinystories, "MAX_BYTES", 1000)
    (tmp_path / "book.txt").write_text("A book. " * 1000)
    assert "1,000 bytes without <|endoftext|>" in fault(tmp_path / "book.txt", *out)
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_came_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT + b"\xff")
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]) == 1
    printed = capsys.readouterr().out
    assert "3 stories" in printed and "refused: a.txt:3: got byte 0xff" in printed


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(tmp_path: Path, host: Any) -> None:
    host.publish(REPOSITORY, {FILE: TEXT * 10_000})
    host.check_kills("data.tinystories", [], tmp_path, pace=0.01, seed=9)  # 0.7 s for the file


def test_a_row_that_lost_its_separators_is_cut_where_stories_begin(tmp_path: Path) -> None:
    story = "Once upon a time, there was a cat.\n\nOne day, {}.\n\n" + "It slept in the sun all day long. " * 8
    whole = [story.format(f"it saw bird {number}").strip() for number in range(90)]
    duckdb.execute(
        "COPY (SELECT unnest($1) AS text) TO '%s' (FORMAT parquet)" % (tmp_path / "a.parquet"),
        [["\n\n".join(["and so it ended.", *whole]), whole[0]]],
    )
    found = texts(make_source(tmp_path / "out", [tmp_path / "a.parquet"]))
    # The first piece has lost its beginning, the last may have lost its end.
    pieces = [text.replace("\n", "\n\n").strip() for key, text in found.items() if key.startswith("a.parquet:0.")]
    assert pieces == whole[:-1]
    assert found["a.parquet:1"] == f"{whole[0]}\n"


def test_where_paragraphs_have_blank_lines_single_line_ends_divide_stories() -> None:
    stories = [f"Tom had {number} balls.\n\n" + "He threw them high and far. " * 9 for number in range(5)]
    assert len(tinystories.cut_apart("\n".join(stories))) == 3
    assert tinystories.cut_apart("Too short.\n\nOnce upon a time.") == []
