r"""Documents from files: text, JSON, tables, parquet, web pages, WARC, PDF, Word, EPUB, and folders and zips of these.

    python -m data.local --out mine notes/ web.jsonl.gz crawl.warc.gz pages.parquet books.zip     # a source folder
    python -m data.local --out mine hf://datasets/OWNER/NAME                                      # of the hub
    read_documents(["book.txt", "notes/", "web.parquet"])  ->  list[str], one entry per document

A text file is one document, and so is each line of a .jsonl, each item of a .json, each row of a table or parquet file
and each page of a .warc. Of a web page the main text is taken; the only other cleaning removes the byte-order mark and
ends each line with "\n". The command skips and reports files and records that it cannot read; `read_documents`, which
recipes use, stops at the first error.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import IO, Any

from tinyforge.data import readers
from tinyforge.data.datasets import fetch_dataset, is_dataset
from tinyforge.data.files import MAX_BYTES, files_in, is_utf8, locked, name_of, opening, write_fault, zip_members
from tinyforge.data.parquet import connect, escape_glob, reading
from tinyforge.data.readers import BadRecord
from tinyforge.data.source import Document, Refusal, Source, SourceWriter, first_of, read_source, reason_of, report
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import json_value

PARQUET_COLUMN = "text"
COUNTS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UUID")
OPTIONAL = {"title": "VARCHAR", "url": "VARCHAR", "language_score": "DOUBLE"}  # kept if present
ROWS_AT_A_TIME = 1024
MOST_OF_ID = 500  # characters of a record's own id


def read_documents(paths: Sequence[str | Path], encoding: str = "utf-8") -> list[str]:
    """Read every document under `paths`, in the order given.

    paths:    .parquet files with a column `text`, .jsonl or .json files of objects with `text`, text files (any other
              suffix), or folders, which are searched recursively in sorted order, without hidden files. NULL and blank
              records are skipped, and so are blank files in a folder.
    encoding: of the text files, any name that Python knows; parquet and JSON are always UTF-8.

    Raises UserError for a path that is missing, unreadable or without text, for bytes that do not decode, for an
    unknown encoding, for a parquet file that is corrupt or has no string column `text`, and for a bad line of JSON.
    """
    return [document for path in paths for document in _read_path(Path(path), encoding)]


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of one file, .gz and .zst unpacked, without byte-order mark and with lines ending in "\n"; UserError if
    it cannot be read."""
    if os.path.isdir(path):
        raise UserError(f"{path}: got a folder, expected a file; name the files in it")
    packing = suffix if (suffix := path.suffix.lower()) in readers.PACKED else ""
    try:
        with opening(path), readers.unpacked(path, packing) as file:
            raw = readers.read_piece(file) if packing else file.read()
    except BadRecord as fault:
        raise UserError(f"{path}: {fault}") from None
    return decode_text(raw, encoding, str(path))


def decode_text(raw: bytes, encoding: str, place: str) -> str:
    """Decode bytes as `read_text` does; UserError, beginning with `place`, if that fails."""
    try:
        return _decode(raw, encoding)
    except BadRecord as fault:
        raise UserError(f"{place}: {fault}") from None


def _decode(raw: bytes, encoding: str) -> str:
    """Decode and normalise bytes; UserError for an unknown encoding, BadRecord for bytes that do not decode."""
    try:
        return _normalise(raw.decode(encoding))
    except UnicodeDecodeError as error:
        raise BadRecord(
            f"got byte 0x{raw[error.start]:02x} at offset {error.start}, expected {encoding} text; "
            + _decoding_hint(raw)
        ) from None
    except (LookupError, ValueError) as error:  # ValueError: a codec that is not for text, or a null byte in the name
        known = "no such text encoding" if isinstance(error, LookupError) else "cannot decode this"
        raise UserError(f"--encoding {encoding}: {known}; try utf-8 or latin-1") from None


def _read_path(path: Path, encoding: str) -> list[str]:
    if not path.is_dir():
        documents = _read_file(path, encoding)
        if not documents:
            raise UserError(f"{path}: is empty, expected text; give another file")
        return documents
    if (path / "corpus.json").is_file():
        raise UserError(
            f"{path} is a corpus; make token shards of it and give those: python -m data.shards --corpus "
            f"{path} --out shards"
        )
    if (path / "source.json").is_file():
        raise UserError(
            f"{path} is a source; make a corpus of it, python -m data.corpus {path} --out corpus, and of "
            "that token shards: python -m data.shards"
        )
    try:
        documents = [document for file in files_in(path) for document in _read_file(file, encoding)]
    except UserError as fault:
        raise UserError(f"{fault}; or let python -m data.local skip what it cannot read") from None
    if not documents:
        raise UserError(f"{path}: no documents in this folder, expected text or parquet files; name another")
    return documents


def _read_file(path: Path, encoding: str) -> list[str]:
    if path.suffix.lower() not in (*readers.KNOWN, *readers.PACKED, *itertools.chain(*readers.UNREAD)):
        documents = [read_text(path, encoding)]
    elif not path.is_file():
        raise UserError(f"{path}: no such file; check the path, relative to {Path.cwd()}")
    else:
        documents = list(_records(path, encoding))
    return [document for document in documents if document.strip()]


def _records(path: Path, encoding: str) -> Iterator[str]:
    try:
        for item in _documents(path, str(path), PARQUET_COLUMN, encoding):
            if isinstance(item, Refusal):
                raise UserError(f"{item.record}: {item.reason}")
            yield item.text
    except BadRecord as fault:
        raise UserError(f"{path}: {fault}") from None


def read_rows(path: Path, column: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number (from 0) of each row whose `column` is not NULL, with that text, the `OPTIONAL` columns and the `id`.

    column: its name, or a path into structs, `page.text`. Raises BadRecord for a file that is not parquet or has no
    such column of strings.
    """
    import duckdb

    # A folder named "text=1" must not become a column, and some writers declare their strings as bytes.
    source = "read_parquet($path, hive_partitioning = false, binary_as_string = true, file_row_number = true)"
    try:
        with ExitStack() as opened:
            connection = opened.enter_context(connect())
            if not is_utf8(str(path)):  # DuckDB takes no such path, but that of an open file
                path = Path("/dev/fd", str(opened.enter_context(open(path, "rb")).fileno()))
            values = {"path": escape_glob(path)}
            described = connection.execute(f"DESCRIBE SELECT * FROM {source}", values).fetchall()
            kinds = {name: kind for name, kind, *_ in described if name != "file_row_number"}
            text = _quoted(column)
            if column not in kinds and "." in column:  # a path into structs
                text = ".".join(map(_quoted, column.split(".")))
                with suppress(duckdb.BinderException):
                    kinds[column] = connection.execute(f"DESCRIBE SELECT {text} FROM {source}", values).fetchall()[0][1]
            if kinds.get(column) != "VARCHAR":
                found = ", ".join(f"{name} {kind}"[:100] for name, kind in kinds.items())
                raise BadRecord(
                    f"got columns {found}, expected a column '{column}' of strings; "
                    f"rename the column with the documents to '{column}', or use data.local --column, such as page.text"
                )
            names = [column, *(name for name, kind in OPTIONAL.items() if kinds.get(name) == kind and name != column)]
            select = [text, *map(_quoted, names[1:])]
            if kinds.get("id") in ("VARCHAR", *COUNTS) and column != "id":
                names.append("id")
                select.append("id::VARCHAR")
            rows = connection.execute(f"SELECT file_row_number, {', '.join(select)} FROM {source}", values)
            while batch := rows.fetchmany(ROWS_AT_A_TIME):
                for number, text, *rest in batch:
                    if text is not None:
                        yield number, {column: _normalise(text), **dict(zip(names[1:], rest, strict=True))}
    except duckdb.Error as error:
        reason = str(error).splitlines()[0].replace(escape_glob(path), path.name)
        raise BadRecord(f"not a readable parquet file ({reason}); download or export it again") from None


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, as JSON would have them. Raises UserError for a file that cannot be read."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path, relative to {Path.cwd()}")
    with reading(path, "download or export it again"), connect() as connection:
        rows = connection.execute("SELECT * FROM read_parquet(?, hive_partitioning = false)", [escape_glob(path)])
        names = [name for name, *_ in rows.description or ()]
        while batch := rows.fetchmany(ROWS_AT_A_TIME):
            yield from (dict(zip(names, row, strict=True)) for row in batch)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _normalise(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _decoding_hint(raw: bytes) -> str:
    if raw.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # the first begins as that of UTF-16 does
        return "its byte-order mark says UTF-32: pass --encoding utf-32"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "its byte-order mark says UTF-16: pass --encoding utf-16"
    if b"\0" in raw:
        return "it contains zero bytes, so it is not text: unpack it first if it is an archive, or leave it out"
    # What Windows calls ANSI has quotes and dashes where Latin-1 has control characters, which no text has.
    name = "cp1252" if re.search(rb"[\x80-\x9f]", raw) else "latin-1"
    return f"pass --encoding {name} (or the right one; it applies to all files) or convert this file to UTF-8"


# --- the command -----------------------------------------------------------------------------------------------------


def make_source(
    out: Path,
    inputs: Sequence[Path],
    name: str | None = None,
    licence: str = "not stated",
    column: str = PARQUET_COLUMN,
    encoding: str = "utf-8",
) -> Source:
    """Turn local files into the source folder `out`.

    inputs:   files of the formats of `readers`, .jsonl, .json, .csv and .parquet with the text under `column`, zips and
              folders of them, and data sets of the hub, as `datasets` names them.
    name:     of the source, also used in file names: letters, digits, "-" and "_". None: the folder's name.
    encoding: of the text files; JSON and parquet are UTF-8.

    A document's id is the `id` of its record. Without one it is its file, with ":" and the line (from 1) of a .jsonl,
    the item (from 0) of a .json or the row (from 0) of a table or parquet file. Records that cannot be read are listed
    in `refused` of the result. Raises UserError for an input that is missing, for an invalid name or encoding, if there
    is no document at all, and if the disk is full or not writable; an older source in `out` is then unchanged.
    """
    name = out.resolve().name if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"--name {name!r}: expected letters, digits, '-' and '_', because it is used in file names")
    for path in inputs:
        if not is_dataset(path) and not path.exists():
            raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}")
        if not is_dataset(path) and path.resolve() == out.resolve():
            raise UserError(f"--out {out} is an input too; choose another folder")
    from tqdm import tqdm

    ids: set[bytes] = set()
    with locked(out), SourceWriter(out, name, licence) as writer:
        for place, path in tqdm(_each_file(inputs, out, writer), unit=" files", disable=None, leave=False):
            try:
                for item in _documents(path, place, column, encoding):
                    if isinstance(item, Document) and not item.text.strip():
                        item = Refusal(item.id, "is empty")
                    writer.add(item if isinstance(item, Refusal) else _named_once(item, place, ids))
            except BadRecord as fault:
                writer.refuse(place, str(fault))
            writer.add_file(place, path)
        if not writer.documents:
            expected = "text, .jsonl, .csv, .parquet, .html, .warc or .zip files"
            raise UserError(f"{inputs[0]}: no documents there, expected {expected}{first_of(writer.refused)}")
    return read_source(out)


def _named_once(document: Document, place: str, ids: set[bytes]) -> Document:
    """The document, under an id that no other has: its own, else that after its file's name, and a number if needed.
    ids: 8 bytes of the hash of each so far, 80 bytes of memory."""
    again = (f"{place}:{document.id}:{count}" for count in itertools.count(2))
    for id_ in itertools.chain((document.id, f"{place}:{document.id}"), again):
        key = blake2b(id_.encode("utf-8", "backslashreplace"), digest_size=8).digest()
        if key not in ids:
            break
    ids.add(key)
    return document if id_ == document.id else replace(document, id=id_)


def _each_file(inputs: Sequence[Path], out: Path, writer: SourceWriter) -> Iterator[tuple[str, Path]]:
    """Every file under the inputs, members of archives too: its name, and a path that is valid until the next one."""
    places: set[str] = set()
    for path in inputs:
        files: Iterable[tuple[str, Path]]
        if is_dataset(path):
            files = fetch_dataset(path)
        elif path.is_dir():
            found = (file for file in files_in(path) if out.resolve() not in file.resolve().parents)
            files = ((f"{name_of(path)}/{file.relative_to(path).as_posix()}", file) for file in found)
        else:
            files = [(path.name, path)]
        for place, file in files:
            if place in places:
                writer.refuse(place, "another input has this name; rename one, or use a separate --out")
            elif not file.is_file():
                writer.refuse(place, "is a pipe or a device; give a file")
            elif not os.access(file, os.R_OK):
                writer.refuse(place, "cannot be read; check its permissions")
            elif file.suffix.lower() == ".zip":
                yield from _unpacked(file, place, writer)
            else:
                yield place, file
            places.add(place)


def _unpacked(archive: Path, place: str, writer: SourceWriter) -> Iterator[tuple[str, Path]]:
    """The members of an archive, one at a time, in a file with a name of ours: its own names are never used as
    paths."""
    try:
        members = zip_members(archive)
    except UserError as fault:
        writer.refuse(place, reason_of(fault))
        return
    with tempfile.TemporaryDirectory() as folder:
        for member in members:
            path = Path(folder, f"member{''.join(PurePosixPath(member.name).suffixes[-2:])}")
            try:
                path.write_bytes(member.read())
            except UserError as fault:
                writer.refuse(f"{place}/{member.name}", reason_of(fault))
                continue
            except OSError as error:
                raise write_fault(path, error) from None
            yield f"{place}/{member.name}", path


def _documents(path: Path, place: str, column: str, encoding: str) -> Iterator[Document | Refusal]:
    """The documents of one file, by its suffix, and its bad records; BadRecord if the whole file is bad."""
    suffix, packing = readers.kind_of(str(path))
    if suffix == ".zip":
        raise BadRecord("is an archive in an archive; unpack it first")
    if suffix == readers.PARQUET:
        for number, row in read_rows(path, column):
            yield _to_document(row, f"{place}:{number}", column)
        return
    if suffix in (readers.WORD, readers.BOOK):
        text = readers.word_text(path) if suffix == readers.WORD else readers.book_text(path)
        yield Document(id=place, text=_normalise(text), title=PurePosixPath(place).stem)
        return
    try:
        with readers.unpacked(path, packing) as file:
            yield from _of_stream(file, suffix, place, column, encoding)
    except OSError as error:
        raise BadRecord(f"cannot be read ({error.strerror or error}); check its permissions") from None


def _of_stream(file: IO[bytes], suffix: str, place: str, column: str, encoding: str) -> Iterator[Document | Refusal]:
    """The documents in a file's bytes."""
    if suffix in readers.LINES:
        for number, line in enumerate(iter(lambda: file.readline(MAX_BYTES), b""), 1):
            if len(line) == MAX_BYTES and not line.endswith(b"\n"):
                yield Refusal(f"{place}:{number}", f"more than {MAX_BYTES:,} bytes in a line; split it")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_BYTES)
            elif line.strip():
                yield _parse(line, f"{place}:{number}", column)
    elif suffix == readers.JSON:
        try:
            values = json_value(readers.read_piece(file))
        except ValueError as error:
            raise BadRecord(f"malformed JSON ({error}), expected a list of objects; fix it there") from None
        if not isinstance(values, list):
            raise BadRecord(f"got {type(values).__name__} as JSON, expected a list of objects with '{column}'")
        for number, value in enumerate(values):
            yield _to_document(value, f"{place}:{number}", column)
    elif suffix in readers.TABLES:
        try:
            for number, row in enumerate(readers.table_rows(file, suffix, encoding, column)):
                record, more = f"{place}:{number}", row.pop(None, None)
                wide = f"got {len(row) + len(more or ())} cells, expected {len(row)}; quote text with separators in it"
                yield Refusal(record, wide) if more else _to_document(row, record, column)
        except UnicodeDecodeError as error:
            got = f"got byte 0x{error.object[error.start]:02x}, expected {encoding} text"
            raise BadRecord(f"{got}; {_decoding_hint(error.object)}") from None
    elif suffix == readers.WARC:
        yield from _pages(file, place)
    elif suffix in readers.PAGES:
        title, text = readers.page_of(readers.read_piece(file, readers.PAGE_BYTES))
        yield Document(id=place, text=_normalise(text), title=title or PurePosixPath(place).stem)
    else:
        raw = readers.read_piece(file)
        text = readers.pdf_text(raw) if suffix == readers.PDF else _decode(raw, encoding)
        yield Document(id=place, text=text, title=PurePosixPath(place).stem)


def _pages(file: IO[bytes], place: str) -> Iterator[Document | Refusal]:
    """The pages of a WARC file, and the texts of a WET file."""
    for number, (url, name, charset, raw) in enumerate(readers.responses(file)):
        record = name or f"{place}:{number}"
        try:
            if raw is None:
                raise BadRecord(f"more than {readers.PAGE_BYTES:,} bytes; leave it out")
            title, text = ("", raw.decode("utf-8", "replace")) if charset == "text" else readers.page_of(raw, charset)
        except BadRecord as fault:
            yield Refusal(record, str(fault))
        else:
            yield Document(id=record, text=_normalise(text), title=title, url=url)


def _parse(line: bytes, record: str, column: str) -> Document | Refusal:
    try:
        return _to_document(json_value(line), record, column)
    except UnicodeDecodeError as error:
        return Refusal(record, f"got byte 0x{line[error.start]:02x}, expected UTF-8; JSON is always UTF-8")
    except ValueError as error:
        return Refusal(record, f"malformed JSON ({error}), expected one object per line; fix it there")


def _to_document(value: Any, record: str, column: str) -> Document | Refusal:
    """The document in a row or an object: its text under `column`, which may be a path, `page.text`, and the `OPTIONAL`
    fields and the id that it has."""
    if not isinstance(value, dict):
        return Refusal(record, f"got {type(value).__name__}, expected an object with '{column}'")
    text: Any = value.get(column)
    if column not in value:
        text = value
        for key in column.split("."):
            text = text.get(key) if isinstance(text, dict) else None
    if not isinstance(text, str):
        got = f"'{column}' of type {type(value[column]).__name__}" if column in value else f"the keys {list(value)}"
        return Refusal(record, f"got {got[:80]}, expected '{column}' with text; rename it, or use data.local --column")
    title, url, score = (value.get(name) for name in OPTIONAL)
    own = value.get("id") if column != "id" else None
    named = (isinstance(own, str) and 0 < len(own) <= MOST_OF_ID) or type(own) is int
    return Document(
        id=str(own) if named else record,
        text=_normalise(text),
        title=title if isinstance(title, str) else "",
        url=url if isinstance(url, str) else "",
        language_score=score if isinstance(score, float) else None,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.local", description=__doc__)
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="FILE_OR_FOLDER",
        help="text, .jsonl, .json, .csv, .parquet, .html, .warc, .pdf, .docx, .epub, .zip; also .gz and .zst; hf://datasets/NAME",
    )
    parser.flag("--out", Path, "folder for the source", required=True, metavar="DIR")
    parser.flag("--name", str, "of the source, also used in file names (default: the name of the folder --out)")
    parser.add_argument("--licence", default="not stated", help="licence of the texts, for the catalogue")
    parser.flag("--column", PARQUET_COLUMN, "name or path (page.text) of the text in JSON, tables and parquet")
    parser.flag("--encoding", "utf-8", "of text files")
    args = parser.parse_args(arguments)
    source = make_source(args.out, args.inputs, args.name, args.licence, args.column, args.encoding)
    return report(source, "document")


if __name__ == "__main__":
    run_command(main)
