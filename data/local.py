"""Documents from local files: plain text, folders of it, and parquet.

    read_documents(["book.txt", "notes/", "web.parquet"])  ->  list[str], one entry per document

A text file is one document, and so is each row of a parquet file. Nothing is cleaned beyond what every reader
needs: the byte-order mark goes, and each line ends in "\n".
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from pathlib import Path

from tinyforge.errors import UserError

PARQUET_COLUMN = "text"


def read_documents(paths: Sequence[str | Path], encoding: str = "utf-8") -> list[str]:
    """Read every document under `paths`, in the order given.

    paths:    text files (any suffix but .parquet), .parquet files with a column `text`, or folders, which are
              searched recursively in sorted order, without hidden files. NULL and blank rows of a parquet
              file are skipped, and so are blank files in a folder.
    encoding: of the text files, any name that Python knows; parquet is always UTF-8.

    Raises UserError for a path that is missing, unreadable or without text, for bytes that do not decode, for
    an unknown encoding, and for a parquet file that is corrupt or has no column `text` of strings.
    """
    return [document for path in paths for document in _read_path(Path(path), encoding)]


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of one file, without byte-order mark, lines ending in "\n"; UserError if it cannot be read."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path, relative to {Path.cwd()}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: got a folder, wanted a file; name the files in it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    try:
        return _normalise(raw.decode(encoding))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: got byte 0x{raw[error.start]:02x} at offset {error.start}, wanted {encoding} text; "
            + _decoding_hint(raw)
        ) from None
    except LookupError:
        raise UserError(f"--encoding {encoding}: no such text encoding; try utf-8 or latin-1") from None


def _read_path(path: Path, encoding: str) -> list[str]:
    if not path.is_dir():
        documents = _read_file(path, encoding)
        if not documents:
            raise UserError(f"{path}: is empty, wanted text; give another file")
        return documents
    documents = [document for file in _files_in(path) for document in _read_file(file, encoding)]
    if not documents:
        raise UserError(f"{path}: no documents in this folder, wanted text or parquet files; name another")
    return documents


def _files_in(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def _read_file(path: Path, encoding: str) -> list[str]:
    documents = _read_parquet(path) if path.suffix.lower() == ".parquet" else [read_text(path, encoding)]
    return [document for document in documents if document.strip()]


def _read_parquet(path: Path) -> list[str]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; check the path, relative to {Path.cwd()}")
    import duckdb

    # A folder named "text=1" must not become a column, and some writers mark their strings as mere bytes.
    source = "read_parquet($path, hive_partitioning = false, binary_as_string = true)"
    values = {"path": _escape_glob(str(path))}
    try:
        with duckdb.connect() as connection:
            columns = connection.execute(f"DESCRIBE SELECT * FROM {source}", values).fetchall()
            if not any(name == PARQUET_COLUMN and kind == "VARCHAR" for name, kind, *_ in columns):
                found = ", ".join(f"{name} {kind}" for name, kind, *_ in columns)
                raise UserError(
                    f"{path}: got columns {found}, wanted a column '{PARQUET_COLUMN}' of strings; "
                    f"rename the one that holds the documents to '{PARQUET_COLUMN}'"
                )
            rows = connection.execute(
                f"SELECT {PARQUET_COLUMN} FROM {source} WHERE {PARQUET_COLUMN} IS NOT NULL", values
            ).fetchall()
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not a readable parquet file ({reason}); get or export it again") from None
    return [_normalise(text) for (text,) in rows]


def _escape_glob(path: str) -> str:
    """DuckDB expands `*`, `?` and `[` in a path; a class of one character stands for that character alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in path)


def _normalise(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _decoding_hint(raw: bytes) -> str:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "its byte-order mark says UTF-16: pass --encoding utf-16"
    if b"\0" in raw:
        return "it holds zero bytes, so it is no text: unpack it first if it is an archive, or leave it out"
    return "pass --encoding latin-1 (or the right one; it goes for all files) or convert this file to UTF-8"
