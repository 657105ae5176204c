"""Documents come back as they were written, and what cannot be read is named in one line with a fix."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.data.conftest import fault_of
from tinyforge.data.local import main, make_source, read_documents, read_text
from tinyforge.data.source import read_source
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
    return fault_of(read_documents, paths, encoding)


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


def test_lines_and_items_of_json_are_documents_to_recipes_too(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '{"text": "one\\r\\n"}\n\n{"text": " "}\n{"text": "two", "label": 1}\n')
    items = write(tmp_path / "b.json", '[{"text": "three"}]')
    assert read_documents([lines, items]) == ["one\n", "two", "three"]
    assert "b.jsonl:2: malformed JSON" in fault(write(tmp_path / "b.jsonl", '{"text": "one"}\n{"text": '))
    assert "c.jsonl:1: got the keys ['body'], expected 'text'" in fault(write(tmp_path / "c.jsonl", '{"body": "one"}'))
    assert "d.json: got dict as JSON" in fault(write(tmp_path / "d.json", "{}"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for name in ("no.txt", "no.parquet", "no.jsonl"):
        assert fault(tmp_path / name).startswith(f"{tmp_path / name}: no such file")


@pytest.mark.parametrize("content", [b"", b" \r\n\t", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    assert "a.txt: is empty" in fault(write(tmp_path / "a.txt", content))


def test_parquet_without_any_text_is_refused(tmp_path: Path) -> None:
    assert "is empty" in fault(write_parquet(tmp_path / "a.parquet", "SELECT NULL::VARCHAR AS text"))


@pytest.mark.parametrize("stage", ["corpus", "source"])
def test_an_earlier_stage_of_the_data_is_told_what_comes_next(tmp_path: Path, stage: str) -> None:
    write(tmp_path / f"{stage}.json", "{}")
    message = fault(tmp_path)
    assert message.startswith(f"{tmp_path} is a {stage}; make ") and "python -m data.shards" in message


def test_a_folder_without_documents_is_refused(tmp_path: Path) -> None:
    write(tmp_path / ".hidden.txt", "hidden")
    write(tmp_path / "blank.txt", "")
    assert "no documents" in fault(tmp_path)


def test_bytes_that_are_not_utf8_are_located_and_latin1_offered(tmp_path: Path) -> None:
    path = write(tmp_path / "books" / "old.txt", b"\xef\xbb\xbfcaf\xe9 au lait")
    message = fault(tmp_path / "books")
    assert message.startswith(f"{path}: got byte 0xe9 at offset 6, expected utf-8")
    assert "--encoding latin-1" in message
    path.write_bytes(b"caf\xe9 au lait")
    assert read_documents([path], encoding="latin-1") == ["café au lait"]
    path.write_bytes("a “café”".encode("cp1252"))  # whose quotes are control characters in Latin-1
    with pytest.raises(UserError, match="--encoding cp1252"):
        read_documents([path])


def test_an_archive_or_utf16_gets_another_hint_than_latin1(tmp_path: Path) -> None:
    archive = fault(write(tmp_path / "books.zip", b"PK\x03\x04\x14\x00\x00\x00\xb5\x1e"))
    assert "unpack" in archive and "latin-1" not in archive
    assert "--encoding utf-16" in fault(write(tmp_path / "a.txt", "text".encode("utf-16")))
    assert "--encoding utf-32" in fault(write(tmp_path / "a.txt", "text".encode("utf-32")))


@pytest.mark.parametrize("encoding", ["utf-9", "base64", "rot13", ""])
def test_an_unknown_encoding_is_refused(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "a.txt", "a")
    assert fault(path, encoding=encoding).startswith(f"--encoding {encoding}: no such text encoding")


def test_parquet_without_a_text_column_lists_its_columns(tmp_path: Path) -> None:
    absent = fault(write_parquet(tmp_path / "a.parquet", "SELECT 'a' AS body, 1 AS score"))
    assert "got columns body VARCHAR, score INTEGER" in absent and "expected a column 'text'" in absent
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
    with pytest.raises(UserError, match="got a folder, expected a file"):
        read_text(tmp_path)


def test_importing_the_reader_does_not_import_duckdb() -> None:
    code = "import sys, data.local; sys.exit('duckdb' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# --- the command -----------------------------------------------------------------------------------------------------


def documents(out: Path) -> dict[str, str]:
    """The documents of a source, by id."""
    names = [str(path) for path in read_source(out, verify=True).parquet]
    return dict(duckdb.execute("SELECT id, text FROM read_parquet($1)", [names]).fetchall())


def refused(out: Path) -> dict[str, str]:
    return {refusal.record: refusal.reason for refusal in read_source(out).refused}


def command_fault(*arguments: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        main([str(argument) for argument in arguments])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def pack(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


LINES = b'{"text": "one", "title": "T", "url": "https://host/1", "language_score": 0.5}\n\n{"text": "two\\r\\n"}\n'


def test_text_lines_parquet_folders_and_zips_become_one_source(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write(folder / "deep" / "a.txt", "\ufeffa book\r\n")
    write(folder / ".git" / "b.txt", "hidden")
    write(folder / "web.jsonl", LINES)
    write(folder / "items.json", '[{"text": "item 0"}, {"text": "item 1"}]')
    table = write_parquet(tmp_path / "t.parquet", "SELECT unnest(['row 0', NULL, 'row 2']) AS text, 'title' AS title")
    members = {"x/a.txt": b"zipped", "x/b.jsonl": LINES, "__MACOSX/c.txt": b"no", "t.parquet": table.read_bytes()}
    archive = pack(tmp_path / "z.zip", members)
    out = folder / "out"
    arguments = [str(folder), str(table), str(archive), "--out", str(out), "--name", "notes", "--licence", "mine"]
    expected = {
        "mine/deep/a.txt": "a book\n",
        "mine/items.json:0": "item 0",
        "mine/items.json:1": "item 1",
        "mine/web.jsonl:1": "one",
        "mine/web.jsonl:3": "two\n",
        "t.parquet:0": "row 0",
        "t.parquet:2": "row 2",
        "z.zip/x/a.txt": "zipped",
        "z.zip/x/b.jsonl:1": "one",
        "z.zip/x/b.jsonl:3": "two\n",
        "z.zip/t.parquet:0": "row 0",
        "z.zip/t.parquet:2": "row 2",
    }
    assert main(arguments) == 0
    before = (out / "source.json").read_bytes()
    assert documents(out) == expected
    assert main(arguments) == 0  # what is in --out is no input, and the bytes are the same
    assert (out / "source.json").read_bytes() == before
    source = read_source(out)
    assert (source.name, source.licence, source.documents) == ("notes", "mine", 12)
    manifest = json.loads(before)
    assert [entry["url"] for entry in manifest["files"]] == [
        "mine/deep/a.txt",
        "mine/items.json",
        "mine/web.jsonl",
        "t.parquet",
        "z.zip/x/a.txt",
        "z.zip/x/b.jsonl",
        "z.zip/t.parquet",
    ]
    assert str(tmp_path) not in before.decode()


def test_titles_urls_and_scores_are_taken_over(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", LINES)
    table = write_parquet(
        tmp_path / "b.parquet", "SELECT 'x' AS text, 'T' AS title, 'u' AS url, 0.5::DOUBLE AS language_score"
    )
    main([str(lines), str(table), str(write(tmp_path / "c.txt", "c")), "--out", str(tmp_path / "out")])
    rows = duckdb.sql(f"SELECT title, url, language_score FROM '{tmp_path}/out/*.parquet'").fetchall()
    assert rows == [("T", "https://host/1", 0.5), ("", "", None), ("T", "u", 0.5), ("c", "", None)]


def test_another_column_and_another_encoding(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '{"body": "one", "text": "not this"}')
    table = write_parquet(tmp_path / "b.parquet", "SELECT 'two' AS body, 'not this' AS text")
    text = write(tmp_path / "c.txt", b"caf\xe9")
    inputs = [str(lines), str(table), str(text)]
    assert main([*inputs, "--out", str(tmp_path / "out"), "--column", "body", "--encoding", "latin-1"]) == 0
    assert list(documents(tmp_path / "out").values()) == ["one", "two", "café"]


def test_a_bad_record_is_named_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = [b'{"text": "fine"}', b"no json", b'["a"]', b'{"body": "x"}', b'{"text": 5}', b'{"text": " "}']
    bad += [b'{"text": "\xff"}', b'{"text": "\\ud83d"}', b'{"text": "fine too"}']
    folder = tmp_path / "mine"
    write(folder / "a.jsonl", b"\n".join(bad))
    write(folder / "b.json", '{"text": "no list"}')
    write(folder / "c.json", "[1, ")
    write(folder / "d.txt", b"caf\xe9")
    write(folder / "e.txt", " \n")
    write(folder / "f.parquet", "only words")
    write_parquet(folder / "g.parquet", "SELECT 1 AS score")
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 1
    assert list(documents(tmp_path / "out").values()) == ["fine", "fine too"]
    reasons = refused(tmp_path / "out")
    for record, reason in {
        "mine/a.jsonl:2": "malformed JSON",
        "mine/a.jsonl:3": "got list, expected an object with 'text'",
        "mine/a.jsonl:4": "got the keys ['body'], expected 'text'",
        "mine/a.jsonl:5": "got 'text' of type int",
        "mine/a.jsonl:6": "is empty",
        "mine/a.jsonl:7": "got byte 0xff, expected UTF-8",
        "mine/a.jsonl:8": "half of a surrogate pair",
        "mine/b.json": "got dict as JSON, expected a list",
        "mine/c.json": "malformed JSON",
        "mine/d.txt": "got byte 0xe9 at offset 3",
        "mine/e.txt": "is empty",
        "mine/f.parquet": "not a readable parquet file",
        "mine/g.parquet": "got columns score INTEGER, expected a column 'text'",
    }.items():
        assert reason in reasons.pop(record), record
    assert reasons == {}
    printed = capsys.readouterr().out
    assert "2 documents" in printed and "13 refused" in printed and "refused: mine/a.jsonl:2: malformed JSON" in printed
    assert f"next: python -m data.corpus {tmp_path / 'out'} --out corpus" in printed


@pytest.mark.parametrize("name", ["../a.txt", "b/../../a.txt", "/a.txt", "..\\a.txt", "C:\\a.txt"])
def test_an_archive_that_climbs_out_is_refused_and_the_rest_goes_on(tmp_path: Path, name: str) -> None:
    archive = pack(tmp_path / "z.zip", {"good.txt": b"good"})
    with zipfile.ZipFile(archive, "a") as opened:
        opened.writestr(zipfile.ZipInfo(name), "bad")
    inputs = [str(archive), str(write(tmp_path / "own.txt", "own"))]
    assert main([*inputs, "--out", str(tmp_path / "deep" / "out")]) == 1
    assert documents(tmp_path / "deep" / "out") == {"own.txt": "own"}
    assert "leads out of its folder" in refused(tmp_path / "deep" / "out")["z.zip"]
    assert sorted(os.listdir(tmp_path)) == ["deep", "own.txt", "z.zip"]


def test_a_zip_bomb_a_damaged_archive_and_one_in_another_are_refused(tmp_path: Path) -> None:
    pack(tmp_path / "bomb.zip", {"a.txt": b"0" * 5_000_000})
    write(tmp_path / "words.zip", "only words")
    inner = pack(tmp_path / "inner.zip", {"a.txt": b"x"}).read_bytes()
    pack(tmp_path / "outer.zip", {"inner.zip": inner, "a.txt": b"fine"})
    names = [str(tmp_path / name) for name in ("bomb.zip", "words.zip", "outer.zip")]
    assert main([*names, "--out", str(tmp_path / "out")]) == 1
    assert documents(tmp_path / "out") == {"outer.zip/a.txt": "fine"}
    reasons = refused(tmp_path / "out")
    assert "and 100 times" in reasons["bomb.zip"] and "not a readable zip" in reasons["words.zip"]
    assert "an archive in an archive" in reasons["outer.zip/inner.zip"]


def test_what_the_command_refuses_as_a_whole(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out")
    path = write(tmp_path / "a.txt", "text")
    assert "no.txt: no such file" in command_fault(tmp_path / "no.txt", path, *out)
    assert "--encoding utf-9: no such text encoding" in command_fault(path, *out, "--encoding", "utf-9")
    assert "--name 'a/b': expected letters" in command_fault(path, *out, "--name", "a/b")
    (tmp_path / "empty").mkdir()
    assert "empty: no documents there" in command_fault(tmp_path / "empty", *out)
    assert "is an input too; choose another folder" in command_fault(tmp_path, "--out", tmp_path)
    blank = write(tmp_path / "blank.txt", "")
    assert "no documents there" in (message := command_fault(blank, *out)) and "blank.txt: is empty" in message
    assert not (tmp_path / "out" / "source.json").exists()


def test_the_folder_we_are_in_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "notes" / "a.txt", "a")
    monkeypatch.chdir(tmp_path / "notes")
    assert main([".", "--out", str(tmp_path / "out")]) == 0
    assert documents(tmp_path / "out") == {"notes/a.txt": "a"}


def test_two_inputs_of_one_name(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1" / "a.txt", "first"), write(tmp_path / "2" / "a.txt", "second")
    assert main([str(first), str(second), "--out", str(tmp_path / "out")]) == 1
    assert documents(tmp_path / "out") == {"a.txt": "first"}
    assert "another input has this name" in refused(tmp_path / "out")["a.txt"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes, as on POSIX")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    assert main([str(tmp_path / "pipe.txt"), str(write(tmp_path / "a.txt", "a")), "--out", str(tmp_path / "out")]) == 1
    assert "is a pipe" in refused(tmp_path / "out")["pipe.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read_is_counted(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret.txt", "secret")
    secret.chmod(0)
    main([str(secret), str(write(tmp_path / "a.txt", "a")), "--out", str(tmp_path / "out")])
    assert "check its permissions" in refused(tmp_path / "out")["secret.txt"]


def test_a_full_disk_leaves_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "the disk is full" in command_fault(write(tmp_path / "a.txt", "text"), "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_zip_is_opened_once_however_many_members_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening reads the whole directory: done for each member it made 4,000 files take minutes."""
    archive = pack(tmp_path / "z.zip", {f"{n}.txt": b"A cat sat." for n in range(300)})
    opened, real = [], zipfile.ZipFile.__init__

    def counted(self: zipfile.ZipFile, *args: Any, **keywords: Any) -> None:
        opened.extend(name for name in args[:1] if name == archive)  # Python looks for packages in one of its own
        real(self, *args, **keywords)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", counted)
    assert make_source(tmp_path / "out", [archive], "x").documents == 300
    assert len(opened) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes on Linux alone")
def test_a_file_name_that_is_no_utf8(tmp_path: Path) -> None:
    """Its text is read, under a name in which the bytes are escaped; a folder for DuckDB is refused in one line."""
    folder = os.fsencode(tmp_path / "in")
    (tmp_path / "in").mkdir()
    duckdb.sql(f"COPY (SELECT 'in parquet' AS text) TO '{tmp_path / 'in' / 'rows.parquet'}'")
    os.rename(tmp_path / "in" / "rows.parquet", os.path.join(folder, b"rows\xe9.parquet"))
    for name, text in ((b"good.txt", "hello"), (b"bad\xff.txt", "hello"), (b"\xfe\n.jsonl", "{")):
        Path(os.fsdecode(os.path.join(folder, name))).write_text(text, encoding="utf-8")
    source = make_source(tmp_path / "out", [tmp_path / "in"], "x")
    with duckdb.connect() as db:
        found = db.execute(f"SELECT id, text FROM '{source.parquet[0]}' ORDER BY id").fetchall()
    assert found == [
        ("in/bad\\udcff.txt", "hello"),
        ("in/good.txt", "hello"),
        ("in/rows\\udce9.parquet:0", "in parquet"),
    ]
    assert [r.record for r in source.refused] == ["in/\\udcfe\n.jsonl:1"]
    named = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"out\xe9")))
    assert "not UTF-8" in fault_of(make_source, named, [tmp_path / "in"], "x")
    assert "not UTF-8" in fault_of(read_source, named)
