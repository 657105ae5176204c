"""A source folder is whole or not a source; the same documents give the same bytes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.data.conftest import fault_of
from tinyforge.data import source
from tinyforge.data.files import write_fault
from tinyforge.data.shards import read_corpus
from tinyforge.data.source import Document, Source, SourceWriter, read_source
from tinyforge.errors import UserError

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    Document(id="1", text="One.\n", title="A title", url="https://host/1", language_score=0.5),
    Document(id="2", text="Zwölf Boxkämpfer 😀\n"),
    Document(id="3", text="quote ' and \" and\ttab\r\n\x00end"),
]


def write(folder: Path, documents: list[Document] = DOCUMENTS) -> Source:
    with SourceWriter(folder, "test", "none") as writer:
        writer.add_input("file.txt", 5, "abc")
        for document in documents:
            writer.add(document)
        writer.refuse("file.txt:9", "is empty")
    return read_source(folder, verify=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def rows(found: Source) -> list[tuple[object, ...]]:
    names = [str(path) for path in found.parquet]
    return duckdb.execute("SELECT id, title, url, language_score, text FROM read_parquet($1)", [names]).fetchall()


def fault(folder: Path, verify: bool = False) -> str:
    return fault_of(read_source, folder, verify)


def test_what_stands_before_a_source_or_after_it_is_named(tmp_path: Path) -> None:
    text, own, found = tmp_path / "my text.txt", tmp_path / "texts", tmp_path / "source"
    text.write_text("A text.")
    own.mkdir()
    write(found)
    assert f"is a file, expected the folder of a source; make one: python -m data.local '{text}' --out" in fault(text)
    assert f"python -m data.local {own} --out sources" in fault(own)
    assert fault_of(read_corpus, found) == (
        f"{found} is a source; make a corpus of it: python -m data.corpus {found} --out corpus"
    )


def test_documents_come_back_as_they_went_in(tmp_path: Path) -> None:
    found = write(tmp_path)
    assert rows(found) == [(d.id, d.title, d.url, d.language_score, d.text) for d in DOCUMENTS]
    assert (found.documents, found.bytes) == (3, sum(len(d.text.encode()) for d in DOCUMENTS))
    kinds = duckdb.execute("DESCRIBE SELECT * FROM read_parquet($1)", [str(found.parquet[0])]).fetchall()
    assert [kind[:2] for kind in kinds] == [
        ("id", "VARCHAR"),
        ("title", "VARCHAR"),
        ("url", "VARCHAR"),
        ("language_score", "DOUBLE"),
        ("text", "VARCHAR"),
    ]


def test_the_manifest_has_what_the_contract_says(tmp_path: Path) -> None:
    write(tmp_path)
    manifest = json.loads((tmp_path / "source.json").read_text())
    (parquet,) = manifest.pop("parquet")
    assert manifest == {
        "format": "tinyforge-source",
        "version": 1,
        "name": "test",
        "licence": "none",
        "files": [{"url": "file.txt", "bytes": 5, "sha256": "abc"}],
        "documents": 3,
        "bytes": 56,
        "refused": [{"record": "file.txt:9", "reason": "is empty"}],
    }
    assert parquet["file"] == "documents-00000.parquet"
    assert parquet["bytes"] == (tmp_path / parquet["file"]).stat().st_size


def test_the_same_documents_give_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS * 3000)
    code = (
        "import sys; sys.path[:0] = ['.', 'tests/data']; from pathlib import Path; import test_source as t; "
        f"t.write(Path({str(tmp_path / 'b')!r}), t.DOCUMENTS * 3000)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_many_documents_are_cut_into_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FILE_BYTES", 1000)
    documents = [Document(id=str(i), text=f"text {i} " * 20) for i in range(50)]
    found = write(tmp_path, documents)
    assert len(found.parquet) > 5 and [row[0] for row in rows(found)] == [d.id for d in documents]
    fewer = write(tmp_path, documents[:3])  # the files that are not needed any more go
    assert len(fewer.parquet) == 1 and sorted(contents(tmp_path)) == ["documents-00000.parquet", "source.json"]


def test_a_parquet_file_is_taken_over(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    with SourceWriter(tmp_path / "b", "test", "none") as writer:
        writer.add(Document(id="0", text="before"))
        writer.add_parquet(first.parquet[0], first.documents, first.bytes)
        writer.add(Document(id="9", text="after"))
    found = read_source(tmp_path / "b", verify=True)
    assert [row[0] for row in rows(found)] == ["0", "1", "2", "3", "9"]
    assert (found.documents, found.bytes) == (5, first.bytes + 11)


def test_half_of_a_surrogate_pair_is_refused_in_a_text_and_escaped_in_a_name(tmp_path: Path) -> None:
    bad = [Document(id="a", text="\ud83d"), Document(id="b", text="", title="\ud83d"), Document(id="\ud83d", text="")]
    found = write(tmp_path, [*DOCUMENTS, *bad])
    assert found.documents == 5 and found.refused[0].record == "a"
    with duckdb.connect() as db:
        names = db.execute("SELECT id, title FROM read_parquet($1) OFFSET 3", [str(found.parquet[0])]).fetchall()
    assert names == [("b", "\\ud83d"), ("\\ud83d", "")]


def test_an_error_leaves_the_older_source(tmp_path: Path) -> None:
    write(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(RuntimeError), SourceWriter(tmp_path, "test", "none") as writer:
        writer.add(Document(id="x", text="other"))
        writer._flush()
        raise RuntimeError
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("call", "left"),
    [(1, "old"), (2, "none"), (3, "none"), (4, "none"), (5, "new")],
    ids=["documents", "no manifest", "names", "manifest", "its name"],
)
def test_a_full_disk_leaves_the_old_source_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, left: str
) -> None:
    """Each of five steps is synced to disk; the disk is full at the call-th. A rerun mends it."""
    write(tmp_path)
    before = contents(tmp_path)
    calls, sync = 0, os.fsync

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    with monkeypatch.context() as patched, pytest.raises(UserError, match="the disk is full") as caught:
        patched.setattr(os, "fsync", full)
        write(tmp_path, DOCUMENTS[:1])
    assert "\n" not in str(caught.value) and calls == call
    if left == "none":
        assert "no source.json" in fault(tmp_path)
    else:
        assert (contents(tmp_path) == before) == (left == "old")
        assert read_source(tmp_path, verify=True).documents == (3 if left == "old" else 1)
    assert write(tmp_path, DOCUMENTS[:1]).documents == 1
    assert sorted(contents(tmp_path)) == ["documents-00000.parquet", "source.json"]


def test_a_disk_that_duckdb_cannot_write_to(tmp_path: Path) -> None:
    code = (
        "import resource, sys; sys.path[:0] = ['.', 'tests/data']; from pathlib import Path; import test_source as t\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "from tinyforge.errors import run_command\n"
        f"run_command(lambda: t.write(Path({str(tmp_path / 'b')!r}), t.DOCUMENTS * 3000))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "cannot be written" in done.stderr
    assert list(contents(tmp_path / "b")) == []


def test_a_folder_that_is_not_whole_or_was_altered_is_refused(tmp_path: Path) -> None:
    assert "no source.json" in fault(tmp_path)
    write(tmp_path)
    parquet, manifest = tmp_path / "documents-00000.parquet", tmp_path / "source.json"
    good, text = parquet.read_bytes(), manifest.read_text()
    parquet.write_bytes(good[:-1])
    assert f"{parquet}: {len(good) - 1:,} bytes, but source.json says {len(good):,}" in fault(tmp_path)
    parquet.write_bytes(good[:-1] + b"?")
    read_source(tmp_path)
    assert "it was altered" in fault(tmp_path, verify=True)
    parquet.unlink()
    assert "is missing" in fault(tmp_path)
    manifest.write_text(text[:-5])
    assert "not readable as JSON" in fault(tmp_path)
    manifest.write_text("[]")
    assert "got format 'list'" in fault(tmp_path)
    manifest.write_text(text.replace('"version": 1', '"version": 2'))
    assert "version 2, expected 'tinyforge-source', 1" in fault(tmp_path)
    manifest.write_text(text.replace('"documents":', '"papers":'))
    parquet.write_bytes(good)
    assert "not the manifest of a source (KeyError('documents'))" in fault(tmp_path)


def test_a_file_that_numpy_could_not_write_whole_is_a_full_disk(tmp_path: Path) -> None:
    assert "the disk is full" in str(write_fault(tmp_path, OSError("8040 requested and 4064 written")))
    assert "the disk is full" not in str(write_fault(tmp_path, OSError("other")))
