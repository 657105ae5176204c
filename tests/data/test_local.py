"""Documents come back as they were written, and what cannot be read is named in one line with a fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from data.local import read_documents, read_text
from tinyforge.errors import UserError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_parquet(path: Path, select: str, options: str = "") -> Path:
    """`select` is the SQL whose rows go into the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = path.parent / "plain-name.tmp"
    duckdb.sql(f"COPY ({select}) TO '{target}' (FORMAT parquet{options})")
    return target.rename(path)


def fault(*paths: Path, encoding: str = "utf-8") -> str:
    """The message of the UserError that reading `paths` raises, which is one line."""
    with pytest.raises(UserError) as caught:
        read_documents(paths, encoding)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_text_file_of_any_suffix_is_one_document(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, f"{name}\n\nends.\n") for name in ("a.txt", "b.md", "c.tex", "d")]
    assert read_documents(paths) == [f"{path.name}\n\nends.\n" for path in paths]
    assert read_documents([str(paths[1]), paths[0]]) == ["b.md\n\nends.\n", "a.txt\n\nends.\n"]


def test_byte_order_mark_and_line_ends_are_normalised(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n\r\n\xe2\x82\xac")
    assert read_documents([path]) == ["one\ntwo\nthree\n\n€"]
    utf16 = write(tmp_path / "b.txt", "one\r\ntwo".encode("utf-16"))
    assert read_documents([utf16], encoding="utf-16") == ["one\ntwo"]


def test_a_folder_is_read_recursively_in_order_without_hidden_and_blank_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "c/deep/x.txt", ".hidden.txt", ".git/y.txt", "a/.cache/w.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "blank.txt", " \n")
    write_parquet(tmp_path / "a" / "m.parquet", "SELECT unnest(['row 0', 'row 1']) AS text")
    assert read_documents([tmp_path]) == ["row 0", "row 1", "a/z.md", "b.txt", "c/deep/x.txt"]


def test_a_folder_inside_a_hidden_folder_can_be_named(tmp_path: Path) -> None:
    write(tmp_path / ".corpora" / "books" / "a.txt", "a book")
    assert read_documents([tmp_path / ".corpora" / "books"]) == ["a book"]


def test_parquet_keeps_row_order_over_row_groups(tmp_path: Path) -> None:
    select = "SELECT i AS id, 'doc ' || i AS text FROM range(50000) t(i)"
    path = write_parquet(tmp_path / "web.PARQUET", select, ", ROW_GROUP_SIZE 2048")
    assert read_documents([path]) == [f"doc {i}" for i in range(50000)]


def test_parquet_skips_null_and_blank_rows_and_normalises(tmp_path: Path) -> None:
    select = "SELECT unnest(['one', NULL, '', ' ', 'two' || chr(13) || chr(10)]) AS text"
    assert read_documents([write_parquet(tmp_path / "a.parquet", select)]) == ["one", "two\n"]


def test_parquet_strings_stored_as_plain_bytes_are_read(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", "SELECT 'caf\\xC3\\xA9'::BLOB AS text")
    assert read_documents([path]) == ["café"]


@pytest.mark.parametrize("name", ["a[1]", "b*", "c?", "d's", "text=7/e"])
def test_a_parquet_path_is_taken_literally(tmp_path: Path, name: str) -> None:
    for decoy in ("a1", "bb", "cc"):
        write_parquet(tmp_path / f"{decoy}.parquet", "SELECT 'decoy' AS text")
    path = write_parquet(tmp_path / f"{name}.parquet", "SELECT 'this one' AS text")
    assert read_documents([path]) == ["this one"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("no.txt", "no.parquet"):
        assert fault(tmp_path / name).startswith(f"{tmp_path / name}: no such file")


@pytest.mark.parametrize("content", [b"", b" \r\n\t", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "a.txt: is empty" in fault(write(tmp_path / "a.txt", content))


def test_parquet_without_any_text_is_refused(tmp_path: Path) -> None:
    assert "is empty" in fault(write_parquet(tmp_path / "a.parquet", "SELECT NULL::VARCHAR AS text"))


def test_a_folder_without_documents_is_refused(tmp_path: Path) -> None:
    write(tmp_path / ".hidden.txt", "hidden")
    write(tmp_path / "blank.txt", "")
    assert "no documents" in fault(tmp_path)


def test_bytes_that_are_not_utf8_are_located_and_latin1_offered(tmp_path: Path) -> None:
    path = write(tmp_path / "books" / "old.txt", b"\xef\xbb\xbfcaf\xe9 au lait")
    message = fault(tmp_path / "books")
    assert message.startswith(f"{path}: got byte 0xe9 at offset 6, wanted utf-8")
    assert "--encoding latin-1" in message
    path.write_bytes(b"caf\xe9 au lait")
    assert read_documents([path], encoding="latin-1") == ["café au lait"]


def test_an_archive_or_utf16_gets_another_hint_than_latin1(tmp_path: Path) -> None:
    archive = fault(write(tmp_path / "books.zip", b"PK\x03\x04\x14\x00\x00\x00\xb5\x1e"))
    assert "unpack" in archive and "latin-1" not in archive
    assert "--encoding utf-16" in fault(write(tmp_path / "a.txt", "text".encode("utf-16")))


@pytest.mark.parametrize("encoding", ["utf-9", "base64", "rot13", ""])
def test_an_unknown_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "a.txt", "a")
    assert fault(path, encoding=encoding).startswith(f"--encoding {encoding}: no such text encoding")


def test_parquet_without_a_text_column_lists_its_columns(tmp_path: Path) -> None:
    absent = fault(write_parquet(tmp_path / "a.parquet", "SELECT 'a' AS body, 1 AS score"))
    assert "got columns body VARCHAR, score INTEGER" in absent and "wanted a column 'text'" in absent
    assert "got columns text INTEGER" in fault(write_parquet(tmp_path / "b.parquet", "SELECT 1 AS text"))


def test_a_corrupt_parquet_is_refused(tmp_path: Path) -> None:
    select = "SELECT 'word ' || i AS text FROM range(9999) t(i)"
    good = write_parquet(tmp_path / "a.parquet", select).read_bytes()
    for name, content in {
        "words.parquet": b"these are only words",
        "empty.parquet": b"",
        "truncated.parquet": good[: len(good) // 2],
        "damaged.parquet": good[:4] + b"\xff" * 200 + good[204:],
    }.items():
        path = write(tmp_path / name, content)
        assert fault(path).startswith(f"{path}: not a readable parquet file (")


def test_read_text_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="got a folder, wanted a file"):
        read_text(tmp_path)


def test_importing_the_reader_does_not_import_duckdb() -> None:
    code = "import sys, data.local; sys.exit('duckdb' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
