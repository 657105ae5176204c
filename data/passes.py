"""The passes over the texts of a corpus. Each task reads some rows of one parquet file, in a worker process.

    spans = find_spans("web", paths, connection)                    # rows of a parquet file, about 16 MB of text each
    run_tasks("read", read_texts, tasks, folder, workers=2, ...)    # results in order, kept until the end

A task holds only a few documents in memory, and one vector of DuckDB's reader: 2048 rows, or a row group if that is
smaller. Its result is a file, written completely or not at all, so a killed run continues with the remaining tasks.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import socket
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyforge.data import parquet
from tinyforge.data.cleaning import boilerplate, debris, fixed, masked, without
from tinyforge.data.dedup import WordHash, Words, permutations
from tinyforge.data.files import FULL, write_json, written_whole
from tinyforge.data.filters import COLUMNS, MEASURED, Filter, rules_query
from tinyforge.data.language import languages
from tinyforge.data.parquet import OPTIONS, escape_glob, quoted, scan
from tinyforge.data.quality import bad_word_shares, load, read_bad_words
from tinyforge.data.source import COLUMNS as SOURCE_COLUMNS
from tinyforge.errors import UserError
from tinyforge.files import read_json, sha256_of

if TYPE_CHECKING:
    import duckdb

    from tinyforge.data.cluster import Nodes

SPAN_BYTES = 16 << 20  # of text in one task
_BATCH_BYTES = 1 << 19  # of text in NumPy's arrays, which take 40 times as much
_FILTER_BYTES = 1 << 21  # of text in one query
HIT = ("place", "first", "stop", "often", "again")  # of a window: what `clean_texts` is told
WINDOW_WORDS = 20  # of boilerplate; fewer are shared by chance: "Once upon a time there was a girl named Lily."
_LEAST_MEMORY = 32 << 20  # of DuckDB in a worker, without texts
_TEXT = "substring(file.text, parts.start + 1, parts.length)"
_connections = itertools.count()
_NUMBERS = ("words", "letters", "characters", "repeats", "stops", "bad_words", "quality")  # three of them whole numbers


@dataclass(frozen=True)
class Span:
    """The rows first..last of a parquet file of the source, and the bytes of their texts before compression.

    group: bytes of the largest row group among them, which DuckDB holds in memory.
    """

    source: str
    path: Path
    first: int
    last: int
    bytes: int
    group: int


@dataclass(frozen=True)
class Parts:
    """Documents of one span: number in the corpus, row in the file, where in its text (in characters) they are."""

    span: Span
    columns: dict[str, np.ndarray]  # number, row, start, length, and what the pass needs
    first: int = 0  # the number of the span's first document
    cleaned: Path | None = None  # the texts that have changed


def connect(memory: int, folder: Path, path: Path | None = None, threads: int = 1) -> duckdb.DuckDBPyConnection:
    """DuckDB within `memory` bytes, spilling to its own folder in `folder`; deterministic with one thread.

    path: of a catalogue, created if missing. DuckDB refuses the file of a run that was killed before the first pages
    were written, so a new catalogue is created under another name and renamed.
    """
    if path and not path.exists():
        with written_whole(path) as beside:
            beside.unlink(missing_ok=True)
            parquet.connect(str(beside)).close()
    # A shared folder would be overwritten by other processes, here or on another machine.
    spill = folder / f"spill-{socket.gethostname()}-{os.getpid()}-{next(_connections)}"
    config: dict[str, Any] = {"threads": threads, "memory_limit": f"{memory}B", "temp_directory": str(spill)}
    connection = parquet.connect(str(path or ":memory:"), **config)
    # Joins are executed as written, so that the small table, on the right, is the one held in memory.
    connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
    return connection


@contextmanager
def duckdb_faults(what: str) -> Iterator[None]:
    """Turn DuckDB's errors that the user can fix into a UserError about `what`."""
    import duckdb

    try:
        yield
    except duckdb.Error as error:
        reason = " ".join(str(error).split())
        if "No space left" in reason:
            raise UserError(f"{what}: {FULL}") from None
        if isinstance(error, duckdb.OutOfMemoryException):
            raise UserError(f"{what}: {reason[:200]}; raise --memory-limit, or free disk space for spilling") from None
        if re.search(r"invalid string encoding|utf-?8|unicode", reason, re.IGNORECASE):
            raise UserError(f"{what}: has text that is not UTF-8 ({reason[:120]}); make the source again") from None
        # Errors without a class of their own come from reading damaged files.
        of_files = duckdb.IOException | duckdb.ConversionException | duckdb.InvalidInputException
        if isinstance(error, of_files) or type(error) is duckdb.Error:
            raise UserError(f"{what}: {reason[:200]}; fix that and run again, complete files are kept") from None
        raise


def worker_memory(spans: Sequence[Span]) -> int:
    """The bytes of DuckDB in a worker that suffice for every pass over these spans.

    Measured with row groups of 16, 24 and 60 MB in documents of 128 KiB to 24 MB: it read, filtered, sorted and wrote
    all of them in 96, 96 and 192 MiB, and failed in 80, 80 and 160.
    """
    return _LEAST_MEMORY + 4 * max((span.group for span in spans), default=0)


def find_spans(source: str, paths: Sequence[Path], connection: duckdb.DuckDBPyConnection) -> list[Span]:
    """Spans of whole row groups, in order; UserError for a parquet file without the columns of a source."""
    spans = []
    for path in paths:
        with parquet.reading(path, "make the source again"):
            columns = connection.execute(f"DESCRIBE SELECT * EXCLUDE file_row_number FROM {scan(path)}").fetchall()
            groups = connection.execute(
                "SELECT row_group_num_rows, total_uncompressed_size FROM "
                f"parquet_metadata({quoted(escape_glob(path))}) WHERE path_in_schema = 'text' ORDER BY row_group_id"
            ).fetchall()
        found = {column: kind for column, kind, *_ in columns}
        if any(found.get(column) != kind for column, kind in SOURCE_COLUMNS.items()):
            got, want = (", ".join(f"{c} {k}" for c, k in table.items()) for table in (found, SOURCE_COLUMNS))
            raise UserError(f"{path}: got columns {got}; expected {want}; make the source again")
        first = row = size = most = 0
        for index, (rows, group_bytes) in enumerate(groups):
            row, size, most = row + rows, size + group_bytes, max(most, group_bytes)
            if row > first and (size >= SPAN_BYTES or index == len(groups) - 1):
                spans.append(Span(source, path, first, row - 1, size, most))
                first, size, most = row, 0, 0
    return spans


# --- the passes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """The arguments of every task: where to write, and the memory of DuckDB in bytes."""

    target: Path  # without its suffix
    memory: int

    def connect(self) -> duckdb.DuckDBPyConnection:
        return connect(self.memory, self.target.parent)


@dataclass(frozen=True)
class Reading:
    """The settings of reading: see `corpus.Settings`."""

    max_bytes: int
    shingle_words: int
    functions: int
    detect_language: bool
    clean: bool
    fix_text: bool
    mask_pii: bool = False
    bad_words: Path | None = None
    quality: Path | None = None

    def rewritten(self, text: str) -> tuple[str, dict[str, int]]:
        """The text with its characters fixed and masked, as asked for, and what was masked."""
        text = fixed(text) if self.fix_text else text
        return masked(text) if self.mask_pii else (text, {})


class _Measures:
    """The measures of documents, a few at a time in memory, and the file of them."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._columns: dict[str, list[int]] = {
            name: [] for name in ("row", "part", "start", "length", "bytes", "place")
        }
        self._measured: list[tuple[np.ndarray, ...]] = []
        self._signatures: list[np.ndarray] = []
        self._windows: list[tuple[np.ndarray, ...]] = []
        self._hashes: list[tuple[int, int]] = []
        self._text_hashes: list[tuple[int, int]] = []
        self._found: list[tuple[str | None, float]] = []
        self._batch: list[str] = []
        self._ends: list[int] = []  # for each text of the batch: its number of parts if it is the last of them, else 0
        self._bytes = 0
        self._text_hash = WordHash()

    def add(self, text: str, numbers: tuple[int, ...], parts: int) -> None:
        """Add a document. numbers: row, part, start, length, bytes, and its place in the span. parts: of its text, if
        it is the last of them."""
        for values, value in zip(self._columns.values(), numbers, strict=True):
            values.append(value)
        self._batch.append(text)
        self._ends.append(parts)
        self._bytes += numbers[4]
        if self._bytes >= _BATCH_BYTES:
            self._measure()

    def _measure(self) -> None:
        reading, batch = self._reading, self._batch
        words, functions = Words(batch), permutations(reading.functions)
        signatures = words.signatures(reading.shingle_words, functions)
        code = np.flatnonzero(words.code)
        of_code: dict[int, bytes] = {}
        if len(code):
            with_operators = Words([batch[index] for index in code], operators=True)
            signatures[code] = with_operators.signatures(reading.shingle_words, functions)
            of_code = dict(zip(code.tolist(), with_operators.normal_forms(), strict=True))
        repeats = words.repeats(reading.shingle_words)
        unknown = np.full(len(batch), -1.0)
        bad = bad_word_shares(words, read_bad_words(reading.bad_words)) if reading.bad_words else unknown
        quality = load(reading.quality).scores(words) if reading.quality else unknown
        self._measured.append((words.counts, words.letters, words.characters, repeats, words.stops(), bad, quality))
        self._signatures.append(signatures)
        for index, (form, count) in enumerate(zip(words.normal_forms(), self._ends, strict=True)):
            self._hashes.append(WordHash().update(of_code.get(index, form)).halves())
            self._text_hash.update(form)
            if count:
                self._text_hashes.extend([self._text_hash.halves()] * count)
                self._text_hash = WordHash()
        if reading.detect_language:
            self._found.extend(languages(batch))
        if reading.clean:
            hashes, of_text, first, stop = words.windows(WINDOW_WORDS)
            self._windows.append((hashes, of_text + len(self._hashes) - len(batch), first, stop))
        self._batch, self._ends, self._bytes = [], [], 0

    def write(self, connection: duckdb.DuckDBPyConnection, target: Path) -> int:
        """Write `target.parquet`, and `target.npy` with the signatures; returns the number of documents."""
        if self._batch:
            self._measure()
        arrays: dict[str, np.ndarray] = {name: np.array(values, np.int64) for name, values in self._columns.items()}
        for index, name in enumerate(_NUMBERS):
            empty = np.empty(0, np.int64 if index < 3 else np.float64)
            arrays[name] = np.concatenate([empty, *(entry[index] for entry in self._measured)])
        for name, pairs in (("hash", self._hashes), ("text_hash", self._text_hashes)):
            both = np.array(pairs, np.uint64).reshape(-1, 2)
            arrays[f"{name}_high"], arrays[f"{name}_low"] = both[:, 0].copy(), both[:, 1].copy()
        # Hashes are passed to DuckDB as arrays of numbers; strings would be converted one by one.
        shown = [f"format('{{:016x}}{{:016x}}', {n}_high, {n}_low) AS {n}" for n in ("hash", "text_hash")]
        numbers = "* EXCLUDE (hash_high, hash_low, text_hash_high, text_hash_low, language)"
        # Languages are numbers in a list, for the same reason.
        known = sorted({language for language, _ in self._found if language})
        places = {language: place for place, language in enumerate(known, 1)}
        count, found = len(self._hashes), self._found
        arrays["language"] = np.array([places.get(name or "", 0) for name, _ in found] or [0] * count, np.int64)
        arrays["language_share"] = np.array([share for _, share in found] or [0.0] * count)
        shown.append(f"({known!r}::VARCHAR[])[language] AS language")
        numbers += " REPLACE (if(language > 0, language_share, NULL) AS language_share, "
        numbers += "nullif(bad_words, -1) AS bad_words, nullif(quality, -1) AS quality)"
        _write(connection, arrays, f"{numbers}, {', '.join(shown)}", target)
        with written_whole(target.with_suffix(".npy")) as beside, open(beside, "wb") as file:
            np.save(file, np.concatenate([np.empty((0, self._reading.functions), np.uint32), *self._signatures]))
        return count

    def write_windows(self, connection: duckdb.DuckDBPyConnection, target: Path) -> None:
        """Write the windows: key, place (of the document in the span), first, stop."""
        empty = (np.empty(0, np.uint64), *(np.empty(0, np.int64),) * 3)
        names = ("key", "place", "first", "stop")
        columns = {name: np.concatenate(found) for name, *found in zip(names, empty, *self._windows, strict=True)}
        _write(connection, columns, "key, place, first, stop", target)


def read_texts(job: Pass, span: Span, reading: Reading) -> dict[str, Any]:
    """Cut each text into documents and measure them: `target.parquet`, `target.npy` with MinHash signatures, and with
    reading.clean the windows of their units, `target-windows.parquet`.

    Columns: row, part (from 1; 0 if the text is whole), start, length, bytes, place (in the span), words, letters,
    characters, repeats (the share of its shingles that stand in it before), stops (of its words in STOP_WORDS),
    language and language_share (NULL unless they are asked for), and hash and text_hash (of all parts of the text), 32
    hexadecimal digits each. The result has the rows that have debris, or text to fix.
    """
    measures, touched, place = _Measures(reading), set[int](), 0
    with duckdb_faults(str(span.path)), job.connect() as connection:
        query = f"SELECT file_row_number, id, text FROM {scan(span.path)} WHERE {_rows_of(span)}"
        cursor = connection.execute(query)
        while rows := cursor.fetchmany(8):
            for row, id_, text in rows:
                if id_ is None or text is None:
                    missing = "id" if id_ is None else "text"
                    raise UserError(f"{span.path}: row {row} has no {missing}; make the source again")
                for numbers, part, parts in _documents_of(row, text, reading.max_bytes, place):
                    measures.add(part, numbers, parts)
                    place += 1
                    if (reading.clean and debris(part)) or reading.rewritten(part)[0] != part:
                        touched.add(row)
        count = measures.write(connection, job.target)
        if reading.clean:
            measures.write_windows(connection, job.target.with_name(f"{job.target.name}-windows"))
    return {"documents": count, "touched": sorted(touched)}


def _documents_of(row: int, text: str, max_bytes: int, place: int) -> Iterator[tuple[tuple[int, ...], str, int]]:
    """The documents of a text: the numbers for `_Measures.add`, the text, and the parts if it is the last."""
    pieces = cut(text, max_bytes)
    for index, (start, length, size) in enumerate(pieces):
        part = index + 1 if len(pieces) > 1 else 0
        last = len(pieces) if index == len(pieces) - 1 else 0
        yield (row, part, start, length, size, place + index), text[start : start + length], last


def clean_texts(
    job: Pass, span: Span, reading: Reading, rows: np.ndarray, hits: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Cut debris and boilerplate out of the documents in `rows`, and fix their text: as `read_texts`, for these rows.

    rows: row, and the place in the span of its first document, (R, 2). hits: windows that are in many documents, or
    stand in their own before: place, first, stop, often (in very many), again (in their own). Writes also
    `target-texts.parquet` with the documents that have changed: place, text, and cuts: where in the source's text, in
    characters, what was cut began and ended.
    """
    measures, of_place = _Measures(reading), defaultdict[int, list[tuple[int, int, bool]]](list)
    repeated, private = defaultdict[int, list[tuple[int, int]]](list), Counter[str]()
    for place, first, stop, often, again in zip(*(hits[name].tolist() for name in HIT), strict=True):
        if again:
            repeated[place].append((first, stop))
        else:
            of_place[place].append((first, stop, bool(often)))
    firsts = dict(rows.tolist())
    target = job.target.with_name(f"{job.target.name}-texts")
    lines, longest = target.with_suffix(".jsonl"), 1 << 20
    with duckdb_faults(str(span.path)), job.connect() as connection, written_whole(lines) as beside:
        connection.register("chosen", {"row": np.ascontiguousarray(rows[:, 0])})
        query = f"SELECT file_row_number, text FROM {scan(span.path)} SEMI JOIN chosen ON file_row_number = chosen.row"
        with open(beside, "w", encoding="utf-8", newline="\n") as file:
            cursor = connection.execute(f"{query} WHERE {_rows_of(span)}")
            while found := cursor.fetchmany(8):
                for row, text in found:
                    for numbers, part, parts in _documents_of(row, text, reading.max_bytes, firsts[row]):
                        spans = debris(part) if reading.clean else []
                        spans += boilerplate(part, of_place.get(numbers[5], ()), repeated.get(numbers[5], ()))
                        left = without(part, spans)
                        left, found_here = reading.rewritten(left)
                        private.update(found_here)
                        measures.add(left, (*numbers[:4], len(left.encode()), numbers[5]), parts)
                        if left != part:
                            cuts = [
                                {"begin": a + numbers[2], "stop": b + numbers[2], "text": part[a:b][:500]}
                                for a, b in spans
                            ]
                            line = json.dumps({"place": numbers[5], "text": left, "cuts": cuts}, ensure_ascii=False)
                            longest = max(longest, 4 * len(line))
                            file.write(f"{line}\n")
        kinds = "{place: 'BIGINT', text: 'VARCHAR', cuts: 'STRUCT(\"begin\" BIGINT, stop BIGINT, text VARCHAR)[]'}"
        how = f"format = 'newline_delimited', columns = {kinds}, maximum_object_size = {longest}"
        with written_whole(target.with_suffix(".parquet")) as whole:
            connection.execute(
                f"COPY (FROM read_json({quoted(escape_glob(beside))}, {how})) TO {quoted(whole)} {OPTIONS}"
            )
        count = measures.write(connection, job.target)
    lines.unlink()
    return {"documents": count, "masked": dict(private)}


def cut(text: str, max_bytes: int) -> list[tuple[int, int, int]]:
    """Cut a text into parts of at most `max_bytes`: (start, length, bytes), the first two in characters.

    A shorter text is one part. A cut is at the end of a paragraph in the second half of the allowed length: of the
    candidates, the one whose next 64 bytes have the smallest CRC-32. So a cut depends only on the words around it: in
    another edition, with a longer preface, the cuts soon coincide and the parts are found as duplicates. Without a
    paragraph the cut is after the last line, else after the last blank. The concatenated parts are the text.
    """
    raw = text.encode()
    if len(raw) <= max_bytes:
        return [(0, len(text), len(raw))]
    parts, begin, start = [], 0, 0
    while begin < len(raw):
        left = len(raw) - begin
        end = len(raw)
        if left > max_bytes:  # avoids a last part of a few words
            end = _find_cut(raw, begin + max_bytes // 2, begin + min(max_bytes, left - max_bytes // 4))
        length = len(raw[begin:end].decode())
        parts.append((start, length, end - begin))
        begin, start = end, start + length
    return parts


def _find_cut(raw: bytes, low: int, high: int) -> int:
    ends = [match.end() for match in re.compile(rb"\n(?:[ \t\r]*\n)+").finditer(raw, low, high)]
    if ends := [end for end in ends if low < end < high]:  # at `high` there may be more blanks
        return min(ends, key=lambda end: (zlib.crc32(raw[end : end + 64]), end))
    for blank in (b"\n", b" "):
        if (at := raw.rfind(blank, low, high)) >= 0:
            return at + 1
    while raw[high] & 0xC0 == 0x80:  # within a character
        high -= 1
    return high


def find_rules(job: Pass, parts: Parts, filters: tuple[Filter, ...]) -> dict[str, Any]:
    """Which filters drop which document: `target.parquet` with place (in the span), rules.

    The texts are passed back to DuckDB in small batches: it processes 2048 rows at once, which can be hundreds of
    megabytes of books, times the copies that the filters make. A batch is passed as one string, with a separator that
    occurs in no text, because DuckDB converts lists from Python slowly, value by value.
    """
    import duckdb

    chosen = {"source": "$source", "number": "batch.number", "text": "batch.text"}
    chosen |= {name: f"parts.{name}" for name in MEASURED}
    chosen |= {"language": "nullif(parts.language, '')"}
    chosen |= {name: f"nullif(parts.{name}, -1)" for name in ("language_share", "bad_words", "quality")}
    columns = ", ".join(f"{chosen.get(name, f'file.{name}')} AS {name}" for name in COLUMNS)
    with duckdb_faults(str(parts.span.path)), job.connect() as connection, connection.cursor() as reader:
        reader.execute("SET enable_progress_bar = false")
        connection.register("columns", parts.columns)
        connection.execute("CREATE TEMP TABLE parts AS SELECT * FROM columns")
        described = f"SELECT file_row_number, id, title, url, language_score FROM {scan(parts.span.path)}"
        connection.execute(f"CREATE TEMP TABLE file AS {described} WHERE {_rows_of(parts.span)}")
        connection.execute("CREATE TEMP TABLE found (number BIGINT, rules VARCHAR)")
        given = "unnest(string_split($numbers, ' '))::BIGINT AS number, unnest(string_split($texts, $mark)) AS text"
        joined = f"(SELECT {given}) AS batch JOIN parts USING (number) JOIN file ON parts.row = file.file_row_number"
        documents = f"(SELECT {columns} FROM {joined})"
        for numbers, texts in _batches(reader, parts, _FILTER_BYTES):
            mark = next(chr(code) for code in range(1, 0xD800) if not any(chr(code) in text for text in texts))
            values = {"source": parts.span.source, "numbers": " ".join(map(str, numbers))}
            values |= {"texts": mark.join(texts), "mark": mark}
            try:
                connection.execute(f"INSERT INTO found {rules_query(filters, documents)}", values)
            except duckdb.DataError as error:
                reason = " ".join(str(error).split())
                name = _blame(connection, filters, documents, values)
                raise UserError(f"{name}: {reason[:200]}, in {parts.span.path}; fix its SQL") from None
        with written_whole(job.target.with_suffix(".parquet")) as beside:
            dropped = f"SELECT number - {parts.first} AS place, rules FROM found WHERE rules <> ''"
            connection.execute(f"COPY ({dropped}) TO {quoted(beside)} (FORMAT parquet)")
    return {}


def _blame(connection: duckdb.DuckDBPyConnection, filters: tuple[Filter, ...], documents: str, values: Any) -> str:
    """The first filter that fails on its own on these documents."""
    import duckdb

    measures = tuple(block for block in filters if block.kind == "measure")
    for block in filters:
        if block.kind == "filter":
            try:
                connection.execute(rules_query((*measures, block), documents), values).fetchall()
            except duckdb.DataError:
                return f"filter {block.name!r}"
    return "filters"


def find_grams(job: Pass, parts: Parts, n: int) -> dict[str, Any]:
    """The hashes of all runs of n words in these documents, each once: `target.parquet` with gram."""
    found = np.empty(0, np.uint64)
    with duckdb_faults(str(parts.span.path)), job.connect() as connection:
        for _, texts in _batches(connection, parts):
            found = np.union1d(found, Words(texts).grams(n)[0])
        _write(connection, {"gram": found}, "gram", job.target)
    return {}


def find_shared(job: Pass, parts: Parts, n: int, grams: Path) -> dict[str, Any]:
    """The runs of n words of each document that are in the sorted file `grams`: number, place (of the run's first word
    in the document), gram."""
    known = np.memmap(grams, np.uint64, "r")
    table, shift = _membership(grams, len(known))
    rows: list[tuple[np.ndarray, ...]] = []
    with duckdb_faults(str(parts.span.path)), job.connect() as connection:
        for batch, texts in _batches(connection, parts):
            found, bounds = Words(texts).grams(n)
            maybe = np.flatnonzero(table[found >> shift])
            at = np.searchsorted(known, found[maybe])
            hits = maybe[known[np.minimum(at, len(known) - 1)] == found[maybe]]
            document = np.searchsorted(bounds, hits, "right") - 1
            rows.append((np.array(batch, np.int64)[document], hits - bounds[document], found[hits]))
        empty = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint64))
        columns = {
            name: np.concatenate(values)
            for name, *values in zip(("number", "place", "gram"), empty, *rows, strict=True)
        }
        _write(connection, columns, "number, place, gram", job.target)
    return {}


def read_passages(job: Pass, parts: Parts) -> dict[str, Any]:
    """Some consecutive words of each document, `count` of them from word `place`: place (in the span), passage."""
    places: list[int] = []
    passages: list[str] = []
    where = {
        n: (p, c) for n, p, c in zip(*(parts.columns[k].tolist() for k in ("number", "place", "count")), strict=True)
    }
    with duckdb_faults(str(parts.span.path)), job.connect() as connection:
        for batch, texts in _batches(connection, parts):
            for number, form in zip(batch, Words(texts).normal_forms(), strict=True):
                place, count = where[number]
                places.append(number - parts.first)
                passages.append(b" ".join(form.split(b" ")[place : place + count]).decode())
        columns = {"place": np.array(places, np.int64), "passage": np.array(passages, object)}
        _write(connection, columns, "place, passage::VARCHAR AS passage", job.target)
    return {}


@lru_cache(maxsize=1)
def _membership(grams: Path, count: int) -> tuple[np.ndarray, np.uint64]:
    """A table over the first bits of the known grams, which saves searching for nearly all unknown ones."""
    bits = min((32 * count).bit_length(), 26)
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, bool)
    for begin in range(0, count, 1 << 20):
        table[np.memmap(grams, np.uint64, "r")[begin : begin + (1 << 20)] >> shift] = True
    return table, shift


def count_tokens(job: Pass, parts: Parts, tokenizer: Path) -> dict[str, Any]:
    """The number of tokens of each document: `target.parquet` with place (in the span), tokens."""
    from tinyforge.tokenizers import load_tokenizer

    encode = load_tokenizer(tokenizer).encode
    places, counts = [], []
    with duckdb_faults(str(parts.span.path)), job.connect() as connection:
        for batch, texts in _batches(connection, parts):
            places += [number - parts.first for number in batch]
            counts += [len(encode(text)) for text in texts]
        columns = {"place": np.array(places, np.int64), "tokens": np.array(counts, np.int64)}
        _write(connection, columns, "place, tokens", job.target)
    return {}


def write_split(job: Pass, pieces: Sequence[Parts], path: Path) -> dict[str, Any]:
    """Write the documents of some spans to one parquet file, in order of number: columns id, text."""
    path.parent.mkdir(exist_ok=True)
    id_ = "if(parts.part > 0, file.id || '#' || parts.part, file.id)"
    with duckdb_faults(str(path)), job.connect() as connection, written_whole(path) as beside:
        # Span by span: a file of val has documents of all of them, and a reader holds a row group in memory.
        connection.execute("CREATE TEMP TABLE kept (id VARCHAR, text VARCHAR)")
        for piece in pieces:
            text, joined = _join(connection, piece)
            connection.execute(f"INSERT INTO kept SELECT {id_}, {text} FROM {joined} ORDER BY parts.number")
        connection.execute(f"COPY kept TO {quoted(beside)} {OPTIONS}")
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _rows_of(span: Span) -> str:
    return f"file_row_number BETWEEN {span.first} AND {span.last}"


def _join(connection: duckdb.DuckDBPyConnection, parts: Parts) -> tuple[str, str]:
    """SQL: each part's text, and each part with its row; the parts' table is on the right, so that it is held in
    memory, not the texts. A text that was cleaned is read from the file of these."""
    connection.register("documents", parts.columns)
    rows = f"(SELECT * FROM {scan(parts.span.path)} WHERE {_rows_of(parts.span)})"
    joined, text = f"{rows} AS file JOIN documents AS parts ON file.file_row_number = parts.row", _TEXT
    if parts.cleaned:
        changed = f"(SELECT place + {parts.first} AS number, text FROM {scan(parts.cleaned)})"
        joined += f" LEFT JOIN {changed} AS cleaned ON parts.number = cleaned.number"
        text = f"coalesce(cleaned.text, {text})"
    return text, joined


def _batches(
    connection: duckdb.DuckDBPyConnection, parts: Parts, batch_bytes: int = _BATCH_BYTES
) -> Iterator[tuple[list[int], list[str]]]:
    """The documents in order, a few at a time: their numbers and texts."""
    numbers: list[int] = []
    texts: list[str] = []
    size = 0
    text, joined = _join(connection, parts)
    cursor = connection.execute(f"SELECT parts.number, {text} FROM {joined}")
    while rows := cursor.fetchmany(8):
        for number, text in rows:
            numbers.append(number)
            texts.append(text)
            size += len(text)
        if size >= batch_bytes:
            yield numbers, texts
            numbers, texts, size = [], [], 0
    if texts:
        yield numbers, texts


def _write(connection: duckdb.DuckDBPyConnection, columns: dict[str, np.ndarray], select: str, target: Path) -> None:
    connection.register("columns", columns)
    with written_whole(target.with_suffix(".parquet")) as beside:
        connection.execute(f"COPY (SELECT {select} FROM columns) TO {quoted(beside)} (FORMAT parquet)")


# --- running them ----------------------------------------------------------------------------------------------------


def run_tasks(
    stage: str,
    function: Callable[..., dict[str, Any]],
    tasks: Iterable[tuple[Any, ...]],
    folder: Path,
    workers: int,
    memory: int,
    progress: Callable[[int], None],
    nodes: Nodes | None,
) -> list[dict[str, Any]]:
    """`function(Pass(folder/stage-00000, ...), *task)` for each task; their results in order.

    Results are kept in `folder/stage-00000.json`, ...; a task that has one is not run again. workers: processes; with 1
    the tasks run in this process. nodes: machines to run on instead. progress is called with the index of each finished
    task. Raises what a task raises.
    """
    results: dict[int, dict[str, Any]] = {}

    def target(index: int) -> Path:
        return folder / f"{stage}-{index:05d}"

    def finish(index: int, result: dict[str, Any]) -> None:
        results[index] = result
        progress(index)

    def missing() -> Iterator[tuple[int, tuple[Any, ...]]]:
        for index, task in enumerate(tasks):
            try:
                done = read_json(target(index).with_suffix(".json"), "the result")
            except UserError:  # not made yet, or damaged
                yield index, task
            else:
                finish(index, done)

    if workers == 1 and not nodes:
        for index, task in missing():
            finish(index, _run(function, Pass(target(index), memory), task))
        return [results[index] for index in sorted(results)]
    running: dict[Future[dict[str, Any]], int] = {}
    pool = nodes or ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_follow_parent)

    def collect(most: int) -> None:
        """Wait until no more than `most` tasks are running."""
        while len(running) > most:
            done = nodes.wait(running) if nodes else wait(running, return_when=FIRST_COMPLETED).done
            for future in done:
                finish(running.pop(future), nodes.result(future) if nodes else future.result())

    try:
        for index, task in missing():
            running[pool.submit(_run, function, Pass(target(index), memory), task)] = index
            collect(nodes.workers if nodes else workers)  # one more is queued for the first free worker
        collect(0)
    except BrokenProcessPool:
        raise UserError(
            f'{stage}: a worker ended early, killed or in a script without `if __name__ == "__main__":`; run again to '
            "continue, with fewer --workers if memory was short"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
    return [results[index] for index in sorted(results)]


def _run(function: Callable[..., dict[str, Any]], job: Pass, task: tuple[Any, ...]) -> dict[str, Any]:
    result = function(job, *task)
    write_json(job.target.with_suffix(".json"), result)
    return result


def _follow_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and exit when the parent has ended, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
