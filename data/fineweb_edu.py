"""A slice of FineWeb-Edu, read straight from its published parquet files.

    python -m data.fineweb_edu --out web                         # 1 GB of text of the 10-billion-token sample
    python -m data.fineweb_edu --out web --bytes 50MB --min-score 4
    python -m data.fineweb_edu --out web --files sample/10BT/000_00000.parquet --rows 1000

DuckDB reads the files over HTTP: their footers, and only the row groups and columns that the filters and the budget
need. The budget is divided evenly among the files, because they cover different crawls; what one file cannot supply is
left to the files after it. The slice of each published file is kept in DIR/raw, so a killed run resumes after the last
complete one.

FineWeb-Edu: Penedo et al., "The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale" (2024).
"""

from __future__ import annotations

import importlib.util
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tinyforge.data import parquet
from tinyforge.data.download import CONNECTIONS, Downloader, FetchError, Patience
from tinyforge.data.files import locked, make_folder, parse_bytes, write_json, written_whole
from tinyforge.data.hub import HOST, Published, file_url, list_files
from tinyforge.data.parquet import copy_to_parquet, escape_glob, quoted
from tinyforge.data.source import Source, SourceWriter, first_of, read_source, report
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json, sha256_of
from tinyforge.report import count_of
from tinyforge.terminal import one_line

REPOSITORY = "HuggingFaceFW/fineweb-edu"
FOLDER = "sample/10BT"
LICENCE = "ODC-BY 1.0, and Common Crawl's terms of use"
COLUMNS = {
    "text": "VARCHAR",
    "id": "VARCHAR",
    "url": "VARCHAR",
    "language": "VARCHAR",
    "language_score": "DOUBLE",
    "token_count": "BIGINT",
    "score": "DOUBLE",
}
DEFAULT_BYTES = 10**9
REPEATED = "the same id as an earlier document"
# HTTP statuses in DuckDB's errors for a file that is not available.
_MISSING = re.compile(r"\b(404|410|403|401)\b")


@dataclass(frozen=True)
class Filter:
    """Which documents to take. Each field is compared with a column before any text is fetched."""

    language: str = "en"
    min_language_score: float = 0.65  # FineWeb's own bound
    min_score: float = 3.0  # the classifier's, 0 (none) to 5 (highly educational); FineWeb-Edu starts at 2.5
    min_tokens: int = 64  # by GPT-2's tokenizer, which the column counts
    max_tokens: int = 100_000


@dataclass(frozen=True)
class _Slice:
    """The slice of one published file and the request it was taken for: the record next to the slice's parquet file."""

    url: str
    bytes: int  # of the published file
    sha256: str | None  # the publisher's
    wanted: dict[str, Any]
    documents: int
    text_bytes: int
    slice_sha256: str
    refused: list[tuple[str, str]]


def make_source(
    out: Path,
    bytes: int | None = None,
    rows: int | None = None,
    filter: Filter | None = None,
    folder: str = FOLDER,
    files: Sequence[str] | None = None,
    base_url: str = HOST,
    patience: Patience | None = None,
) -> Source:
    """Take a slice of FineWeb-Edu into the source folder `out`.

    bytes, rows: the budget, of text in UTF-8 or of documents; neither: 1 GB. Documents are taken in file order as long
                 as they fit.
    folder:      of the repository, whose files are used; `files` names them one by one instead.

    A file that is not parquet or lacks a column is listed in `refused` of the result; so is a document whose id was
    seen before. Raises UserError if there is no document at all, if the httpfs extension cannot be loaded, and for
    errors of the network and the disk; a later run continues after the last complete file.
    """
    patience = patience or Patience()
    filter = filter or Filter()
    if bytes is None and rows is None:
        bytes = DEFAULT_BYTES
    raw = out / "raw"
    with locked(out), SourceWriter(out, "fineweb_edu", LICENCE) as writer:
        if files is None:
            published = list_files(Downloader(patience), base_url, REPOSITORY, folder, raw)
            published = [file for file in published if file.path.endswith(".parquet")]
            if not published:
                raise UserError(f"{folder}: no parquet files in this folder of {REPOSITORY}; check --folder")
        else:
            published = [Published(name, file_url(base_url, REPOSITORY, name)) for name in dict.fromkeys(files)]
        make_folder(raw)
        earlier: list[Path] = []
        left = bytes if bytes is not None else rows or 0
        for i, file in enumerate(published):
            share = left // (len(published) - i)
            wanted = asdict(filter) | {"unit": "bytes" if bytes is not None else "rows", "budget": share}
            path = raw / f"slice-{i:05d}.parquet"
            try:
                taken = _recorded(path, file, wanted) or _take(path, file, wanted, earlier, patience)
            except _BadFile as fault:
                writer.refuse(file.path, str(fault))
                continue
            writer.add_input(taken.url, taken.bytes, taken.sha256)
            for record, reason in taken.refused:
                writer.refuse(record, reason)
            if taken.documents:
                writer.add_parquet(path, taken.documents, taken.text_bytes)
            earlier.append(path)
            left -= taken.text_bytes if bytes is not None else taken.documents
            line = f"{file.path}: {count_of(taken.documents, 'document')}, {taken.text_bytes:,} bytes of text"
            print(one_line(line), flush=True)
        if not writer.documents:
            first = first_of(writer.refused)
            files = count_of(len(published), "file")
            raise UserError(f"no document in {files} passed{first}; widen the filters or the budget")
    return read_source(out)


class _BadFile(Exception):
    """A published file that cannot be used, and retrying would not help."""


def _recorded(path: Path, file: Published, wanted: dict[str, Any]) -> _Slice | None:
    """The existing slice, if it is complete and was taken from the same file for the same request."""
    try:
        taken = _Slice(**read_json(path.with_suffix(".json"), "the slice"))
        same = (taken.url, taken.wanted) == (file.url, wanted) and taken.sha256 == file.sha256
        counts = all(type(n) is int and n >= 0 for n in (taken.bytes, taken.documents, taken.text_bytes))
        refused = all(isinstance(text, str) for pair in taken.refused for text in pair)
        return taken if same and counts and refused and sha256_of(path) == taken.slice_sha256 else None
    except (OSError, UserError, TypeError):
        return None


def _take(path: Path, file: Published, wanted: dict[str, Any], earlier: list[Path], patience: Patience) -> _Slice:
    """One slice, retried after a transient failure with a new connection, since the file may have changed."""
    import duckdb

    for attempt in range(1, patience.attempts + 1):
        try:
            with connect(patience, path.with_name("spill")) as connection:
                return _take_once(connection, path, file, wanted, earlier)
        except duckdb.Error as error:
            reason = " ".join(str(error).split())
            if isinstance(error, duckdb.HTTPException) and _MISSING.search(reason):
                raise _BadFile(f"cannot be downloaded ({reason})") from None
            if not isinstance(error, (duckdb.HTTPException, duckdb.IOException)):
                raise _BadFile(f"not a readable parquet file ({reason})") from None
        if attempt < patience.attempts:
            time.sleep(patience.backoff * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
    raise FetchError(f"{file.url}: {reason}; check the network, and run again: it resumes with this file")


def _take_once(connection: Any, path: Path, file: Published, wanted: dict[str, Any], earlier: list[Path]) -> _Slice:
    """Read row groups in order until the budget is filled, then write what fits."""
    size = _check_columns(connection, file)
    groups = connection.execute(
        "SELECT any_value(row_group_num_rows), sum(total_uncompressed_size) FILTER (path_in_schema = 'text') "
        "FROM parquet_metadata($url) GROUP BY row_group_id ORDER BY row_group_id",
        {"url": file.url},
    ).fetchall()
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE slice (row BIGINT, id VARCHAR, url VARCHAR, language_score DOUBLE, text VARCHAR)"
    )
    connection.execute("CREATE OR REPLACE TEMP TABLE earlier (id VARCHAR)")
    if earlier:
        names = [escape_glob(name) for name in earlier]
        connection.execute("INSERT INTO earlier SELECT id FROM read_parquet($names)", {"names": names})
    measure = "strlen(text)" if wanted["unit"] == "bytes" else "1"
    begin, have = 0, 0
    while groups and have < wanted["budget"]:
        end, expected = begin, 0
        while groups and expected < wanted["budget"] - have:  # as many groups as would suffice if all rows passed
            rows, text_bytes = groups.pop(0)
            end += rows
            expected += text_bytes if wanted["unit"] == "bytes" else rows
        connection.execute(
            "INSERT INTO slice SELECT file_row_number, id, url, language_score, text "
            "FROM read_parquet($file, file_row_number = true) "
            "WHERE file_row_number >= $begin AND file_row_number < $end "
            "AND language = $language AND language_score >= $min_language_score AND score >= $min_score "
            "AND token_count >= $min_tokens AND token_count <= $max_tokens AND text IS NOT NULL AND id IS NOT NULL",
            {"file": file.url, "begin": begin, "end": end}
            | {name: value for name, value in wanted.items() if name not in ("unit", "budget")},
        )
        begin = end
        have = connection.execute(f"SELECT coalesce(sum({measure}), 0) FROM slice").fetchone()[0]
    repeated = (
        "SELECT row, id FROM slice WHERE id IN (SELECT id FROM earlier) "
        "UNION SELECT row, id FROM slice QUALIFY row_number() OVER (PARTITION BY id ORDER BY row) > 1"
    )
    fits = (
        f"SELECT *, sum({measure}) OVER (ORDER BY row) AS so_far FROM slice "
        f"WHERE row NOT IN (SELECT row FROM ({repeated})) QUALIFY so_far <= {wanted['budget']:d}"
    )
    connection.execute(f"CREATE OR REPLACE TEMP TABLE kept AS {fits}")
    last = connection.execute("SELECT coalesce(max(row), -1) FROM kept").fetchone()[0]
    refused = connection.execute(
        f"SELECT id FROM ({repeated}) WHERE row <= $last ORDER BY row", {"last": last}
    ).fetchall()
    documents, text_bytes = connection.execute("SELECT count(*), coalesce(sum(strlen(text)), 0) FROM kept").fetchone()
    rows_in_order = "SELECT id, '' AS title, coalesce(url, '') AS url, language_score, text FROM kept ORDER BY row"
    connection.execute("SET threads = 1")  # one writer, so that the same rows give the same bytes
    with written_whole(path) as beside:
        copy_to_parquet(connection, rows_in_order, beside)
    connection.execute(f"SET threads = {CONNECTIONS}")
    taken = _Slice(
        file.url,
        file.bytes if file.bytes is not None else size,
        file.sha256,
        wanted,
        documents,
        int(text_bytes),
        sha256_of(path),
        [(record, REPEATED) for (record,) in refused],
    )
    write_json(path.with_suffix(".json"), asdict(taken))
    return taken


def _check_columns(connection: Any, file: Published) -> int:
    """The size of the file; _BadFile unless it has the needed columns."""
    described = connection.execute("DESCRIBE SELECT * FROM read_parquet($url)", {"url": file.url}).fetchall()
    found = {name: kind for name, kind, *_ in described}
    for name, kind in COLUMNS.items():
        if found.get(name) != kind:
            has = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise _BadFile(
                f"got columns {has}, expected '{name}' of type {kind}; its layout is not that of FineWeb-Edu"
            )
    size: int = connection.execute(
        "SELECT file_size_bytes FROM parquet_file_metadata($url)", {"url": file.url}
    ).fetchone()[0]
    return size


def connect(patience: Patience, spill: Path) -> Any:
    """A DuckDB connection that reads over HTTP and spills into the folder `spill`. UserError if its httpfs extension
    cannot be loaded.

    The extension comes from the package duckdb-extension-httpfs if that is installed, so that it is available offline,
    else from DuckDB's own repository.
    """
    import duckdb

    connection = parquet.connect(threads=CONNECTIONS, temp_directory=str(spill))
    try:
        if (extension := _packaged_extension(duckdb.__version__)) is not None:
            connection.execute(f"LOAD {quoted(extension)}")
        else:
            connection.execute("INSTALL httpfs")
            connection.execute("LOAD httpfs")
    except duckdb.Error as error:
        connection.close()
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"duckdb {duckdb.__version__}: its httpfs extension cannot be loaded ({reason}); "
            f"pip install duckdb-extension-httpfs=={duckdb.__version__}"
        ) from None
    connection.execute(f"SET http_timeout = {max(int(patience.timeout), 1)}")
    connection.execute(f"SET http_retry_wait_ms = {int(patience.backoff * 1000)}")
    return connection


def _packaged_extension(version: str) -> Path | None:
    spec = importlib.util.find_spec("duckdb_extension_httpfs")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "extensions" / f"v{version}" / "httpfs.duckdb_extension"
    return path if path.is_file() else None


def main(arguments: Sequence[str] | None = None) -> int:
    defaults = Filter()
    parser = Parser(prog="python -m data.fineweb_edu", description=__doc__)
    parser.flag("--out", Path, "folder for the source", required=True, metavar="DIR")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--bytes", metavar="N", help="text to take, such as 50MB or 1GB (default 1GB)")
    budget.add_argument("--rows", type=int, metavar="N", help="documents to take")
    parser.flag("--folder", FOLDER, f"of the repository {REPOSITORY}")
    parser.flag("--files", str, "files of the repository, instead of a folder", nargs="+", metavar="PATH")
    parser.flag("--language", defaults.language, "language of the documents")
    parser.flag("--min-language-score", defaults.min_language_score, "0 to 1", metavar="X")
    parser.flag("--min-score", defaults.min_score, "educational score, 0 to 5", metavar="X")
    parser.flag("--min-tokens", defaults.min_tokens, "length in GPT-2's tokens", metavar="N")
    parser.flag("--max-tokens", defaults.max_tokens, "length in GPT-2's tokens", metavar="N")
    parser.flag("--base-url", HOST, "a mirror", metavar="URL")
    parser.bounds["--rows"] = 1, math.inf
    given = vars(parser.parse_args(arguments))
    filter = Filter(**{f.name: given.pop(f.name) for f in fields(Filter)})
    given["bytes"] = parse_bytes(given["bytes"], "--bytes") if given["bytes"] else None
    return report(make_source(filter=filter, **given), "document", passing=REPEATED)


if __name__ == "__main__":
    run_command(main)
