"""Source folders: documents of one origin, with their provenance.

    with SourceWriter(Path("books"), "gutenberg", licence="public domain in the USA") as writer:
        writer.add(Document(id="84", title="Frankenstein", url="https://www.gutenberg.org/ebooks/84", text="..."))
    read_source(Path("books"))  ->  Source(name="gutenberg", documents=1, parquet=(Path("books/documents-..."),), ...)

A folder holds `documents-00000.parquet`, ... with the columns `id, title, url, language_score, text`, and
`source.json`, which is written last: a folder without it is incomplete and is not read. Neither contains a date or a
path of this machine, and DuckDB writes parquet with one thread, so the same input gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tinyforge.data.files import check_file, check_name, make_folder, write_fault, write_json, writing
from tinyforge.data.parquet import connect, copy_to_parquet, escape_glob, quoted
from tinyforge.errors import UserError
from tinyforge.files import json_value, replace, sha256_of, shown, sync
from tinyforge.invocation import as_typed
from tinyforge.report import count_of
from tinyforge.terminal import one_line

FORMAT = "tinyforge-source"
VERSION = 1
MANIFEST = "source.json"
SHOWN = 20  # refused records that a command prints
FILE_BYTES = 16 << 20  # of text in one parquet file, which is held in memory until it is written
COLUMNS = {"id": "VARCHAR", "title": "VARCHAR", "url": "VARCHAR", "language_score": "DOUBLE", "text": "VARCHAR"}


@dataclass(frozen=True)
class Document:
    """A text and where it comes from. Unknown fields are "", an unknown score is None."""

    id: str  # unique in its source
    text: str
    title: str = ""
    url: str = ""
    language_score: float | None = None  # confidence of the language classifier, 0..1


@dataclass(frozen=True)
class InputFile:
    """A file that documents came from: URL or name, size, and SHA-256 (None if only parts of it were read)."""

    url: str
    bytes: int
    sha256: str | None

    @classmethod
    def of(cls, url: str, path: Path) -> InputFile:
        return cls(_writable(url), path.stat().st_size, sha256_of(path))


@dataclass(frozen=True)
class Refusal:
    """A record that was left out, and why."""

    record: str
    reason: str


@dataclass(frozen=True)
class Source:
    """The contents of `source.json` of a complete source folder."""

    folder: Path
    name: str
    licence: str
    documents: int
    bytes: int  # of text, in UTF-8
    parquet: tuple[Path, ...]
    refused: tuple[Refusal, ...]
    sha256: str  # of source.json, and so of everything in the folder
    inputs: tuple[str, ...] = ()  # SHA-256 of the files that the documents came from, where they were read as a whole


def _writable(text: str) -> str:
    """A file name may contain bytes that are not UTF-8, which Python represents as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


class SourceWriter:
    """Writes a source folder, completely or not at all.

    Files are written under other names and renamed when the block ends without an error; until then an older source in
    the same folder stays as it was. Every method raises UserError if the disk is full or not writable.
    """

    def __init__(self, folder: Path, name: str, licence: str) -> None:
        self.folder = folder
        self.name = name
        self.licence = licence
        self.refused: list[Refusal] = []
        self.documents = 0
        self.bytes = 0
        self._files: list[InputFile] = []
        self._rows: list[Document] = []
        self._row_bytes = 0
        self._parts: list[tuple[Path, int, str]] = []  # not yet renamed: path, bytes, sha256
        make_folder(folder)

    def add(self, document: Document | Refusal) -> None:
        """Add a document, or count a refusal.

        A text with half of a surrogate pair is not valid UTF-8 and is refused. In an id, a title or a URL, as a file's
        name may have it, such a character is escaped.
        """
        if isinstance(document, Refusal):
            self.refuse(document.record, document.reason)
            return
        try:
            size = len(document.text.encode())
        except UnicodeEncodeError:
            self.refuse(document.id, "contains half of a surrogate pair, so it is not text")
            return
        id_, title, url = map(_writable, (document.id, document.title, document.url))
        document = Document(id_, document.text, title, url, document.language_score)
        self._rows.append(document)
        self._row_bytes += size
        self.documents += 1
        self.bytes += size
        if self._row_bytes >= FILE_BYTES:
            self._flush()

    def add_parquet(self, path: Path, documents: int, size: int) -> None:
        """Add a parquet file that has the columns of a source: `documents` rows with `size` bytes of text."""
        self._flush()
        part = self._next_part()
        with writing(part):
            shutil.copyfile(path, part)
        self._finish(part)
        self.documents += documents
        self.bytes += size

    def add_input(self, url: str, size: int, sha256: str | None) -> None:
        """Record a file that documents came from, in the order of use."""
        self._files.append(InputFile(_writable(url), size, sha256))

    def add_file(self, url: str, path: Path) -> None:
        """As `add_input`, for a file that is on this machine."""
        self._files.append(InputFile.of(url, path))

    def refuse(self, record: str, reason: str) -> None:
        """Count a record that is left out."""
        self.refused.append(Refusal(_writable(record), _writable(reason)))

    def __enter__(self) -> SourceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
                self._publish()
        finally:
            for part, _, _ in self._parts:
                with suppress(OSError):
                    part.unlink(missing_ok=True)

    def _next_part(self) -> Path:
        return self.folder / f".documents-{len(self._parts):05d}.parquet.part"

    def _flush(self) -> None:
        if not self._rows:
            return
        part = self._next_part()
        write_documents(part, self._rows)
        self._finish(part)
        self._rows, self._row_bytes = [], 0

    def _finish(self, part: Path) -> None:
        try:
            sync(part)
            self._parts.append((part, part.stat().st_size, sha256_of(part)))
        except OSError as error:
            part.unlink(missing_ok=True)
            raise write_fault(part, error) from None

    def _publish(self) -> None:
        """Rename the parts. source.json is removed first and written last, so a mixture never looks complete."""
        names = [f"documents-{i:05d}.parquet" for i in range(len(self._parts))]
        with writing(self.folder):
            (self.folder / MANIFEST).unlink(missing_ok=True)
            sync(self.folder)
            for (part, _, _), name in zip(self._parts, names, strict=True):
                replace(part, self.folder / name)
            for stale in (*self.folder.glob("documents-*.parquet"), *self.folder.glob(".documents-*")):
                if stale.name not in names:
                    stale.unlink()
            sync(self.folder)
        write_manifest(
            self.folder,
            self.name,
            self.licence,
            self._files,
            self.refused,
            documents=self.documents,
            bytes=self.bytes,
            parquet=[
                {"file": name, "bytes": size, "sha256": digest}
                for name, (_, size, digest) in zip(names, self._parts, strict=True)
            ],
        )


def write_manifest(
    folder: Path, name: str, licence: str, files: Sequence[InputFile], refused: Sequence[Refusal], **rest: Any
) -> None:
    """Write `source.json`: the head that all sources share, then `rest`, then what was refused."""
    head = {"format": FORMAT, "version": VERSION, "name": name, "licence": licence}
    inputs = {"files": [asdict(file) for file in files]}
    write_json(folder / MANIFEST, head | inputs | rest | {"refused": [asdict(refusal) for refusal in refused]})


def write_documents(path: Path, rows: Sequence[Document]) -> None:
    """Write documents to one parquet file. UserError if the disk is full or `path` is not writable.

    They go through a file of JSON lines, which DuckDB reads at 200 MB/s; strings from Python at 5 MB/s.
    """
    lines = path.with_suffix(".jsonl")
    longest = 1 << 20
    try:
        with writing(path), open(lines, "w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                line = json.dumps(vars(row), ensure_ascii=False)
                longest = max(longest, 4 * len(line))  # a character has 4 bytes at most
                file.write(f"{line}\n")
        kinds = ", ".join(f"{name}: '{kind}'" for name, kind in COLUMNS.items())
        how = f"format = 'newline_delimited', columns = {{{kinds}}}, maximum_object_size = {longest}"
        with connect(threads=1) as connection:
            copy_to_parquet(connection, f"SELECT * FROM read_json({quoted(escape_glob(lines))}, {how})", path)
    finally:
        with suppress(OSError):
            lines.unlink(missing_ok=True)


def read_source(folder: Path, verify: bool = False) -> Source:
    """Read source.json of a complete source folder.

    Raises UserError, naming the folder or the file, for an incomplete folder (no source.json), for another format or
    version, for a parquet file that is missing or has another size, and with `verify` another SHA-256.
    """
    path = folder / MANIFEST
    check_name(path)
    try:
        raw = path.read_bytes()
        found = json_value(raw)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no {MANIFEST}, so this is not a complete source; run the command that makes it (again), for "
            f"files of yours python -m data.local {shlex.quote(str(folder))} --out sources"
        ) from None
    except NotADirectoryError:
        raise UserError(
            f"{folder}: is a file, expected the folder of a source; make one: python -m data.local "
            f"{shlex.quote(str(folder))} --out sources"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); make the source again") from None
    got = (found.get("format"), found.get("version")) if isinstance(found, dict) else (type(found).__name__, None)
    if got != (FORMAT, VERSION):
        raise UserError(
            f"{path}: got format {shown(got[0])}, version {shown(got[1])}, expected '{FORMAT}', "
            f"{VERSION}; make it again"
        )
    if "instructions" in found:
        file = found["instructions"].get("file") if isinstance(found["instructions"], dict) else None
        raise UserError(
            f"{folder}: contains instructions, expected documents; train on them with recipes/sft.py --data "
            f"{folder / str(file)}"
        )
    try:
        own = {"name": str, "licence": str, "documents": int, "bytes": int}
        _check_types(found, own)
        for entry in found["refused"]:
            _check_types(entry, {"record": str, "reason": str})
        for entry in found["parquet"]:
            _check_types(entry, {"file": str, "bytes": int, "sha256": str})
            if entry["file"] != os.path.basename(entry["file"]):
                raise TypeError(f"the file {entry['file']!r} is in another folder")
            digest = entry["sha256"] if verify else None
            check_file(folder / entry["file"], entry["bytes"], digest, MANIFEST, "make the source again")
        inputs = [entry["sha256"] for entry in found.get("files", ()) if entry.get("sha256")]
        if not all(isinstance(digest, str) for digest in inputs):
            raise TypeError("a SHA-256 in files is not a string")
        return Source(
            folder=folder,
            **{name: found[name] for name in own},
            parquet=tuple(folder / entry["file"] for entry in found["parquet"]),
            refused=tuple(Refusal(**entry) for entry in found["refused"]),
            sha256=hashlib.sha256(raw).hexdigest(),
            inputs=tuple(inputs),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not the manifest of a source ({error!r}); make the source again") from None


def _check_types(entry: Any, expected: dict[str, type]) -> None:
    for name, kind in expected.items():
        if type(entry[name]) is not kind:
            raise TypeError(f"{name} is {shown(entry[name])}")


def reason_of(fault: UserError) -> str:
    """The error without the path it begins with: source.json contains no path of this machine."""
    return str(fault).partition(": ")[2] or str(fault)


def first_of(refused: Sequence[Refusal]) -> str:
    """The end of an error's line: the first record that was left out, and why."""
    return f"; {refused[0].record}: {refused[0].reason}" if refused else ""


def print_refused(refused: Sequence[Refusal]) -> None:
    """Print some of the records that were left out; source.json lists all of them."""
    for refusal in refused[:SHOWN]:
        print(one_line(f"refused: {refusal.record}: {refusal.reason}"))
    if len(refused) > SHOWN:
        print(f"refused: {len(refused) - SHOWN:,} more; source.json lists them all")


def report(source: Source, one: str, many: str = "", passing: str = "", flags: str = "--out corpus") -> int:
    """Print what a source holds, as `count_of` words it, and what comes next, data.corpus with `flags`; the exit
    status, 1 if a record was left out for any reason but `passing`."""
    print(
        f"{count_of(source.documents, one, many)}, {source.bytes:,} bytes of text in {source.folder}; "
        f"{len(source.refused)} refused"
    )
    print_refused(source.refused)
    print(as_typed(f"next: python -m data.corpus {shlex.quote(str(source.folder))} {flags}"))
    return int(any(refusal.reason != passing for refusal in source.refused))
