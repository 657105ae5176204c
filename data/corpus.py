"""From sources to a corpus: filtered, deduplicated, split and decontaminated, with a catalogue of every document.

    python -m data.corpus books/ web/ --out corpus          # folders that data.gutenberg, data.local, ... made
    python -m data.corpus books/ web/ --out corpus --decontaminate eval/       # nothing of these evaluation sets
    python -m data.corpus books/ web/ --out corpus --ray 10.0.0.1:6379         # on the machines of a Ray cluster
    python -m data.corpus report corpus                     # what was kept and what was dropped, and why
    build_corpus([Path("books"), Path("web")], Path("corpus"), Settings(val_share=0.02))

The stages, in this order: `read` cuts long texts into documents and measures them, `clean` cuts out what
many documents share, `filter` applies the SQL of data/filters.sql, `dedup` keeps the first of equal and of nearly equal
documents, `decontaminate` drops train documents that repeat val's text or that of evaluation sets, `write` writes
parquet. docs/data.md explains each. Every stage ends in one transaction of the catalogue, so a killed run continues
where it stopped, and ends with the same bytes as one that was not killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinyforge.backends.workers import cores
from tinyforge.data import cleaning, corpus_report, language, passes
from tinyforge.data.cleaning import PRIVATE, REPEATED
from tinyforge.data.cluster import Nodes, check_address, open_nodes
from tinyforge.data.corpus_report import CATALOGUE
from tinyforge.data.dedup import Words, band_keys, components, estimate
from tinyforge.data.evaluation import TASKS, MissingSet, Set, find_sets, read_set, text_of
from tinyforge.data.files import locked, make_folder, parse_bytes, write_json, writing, written_whole
from tinyforge.data.filters import DEFAULT_FILTERS, MEASURED, Filter, check_filters, read_filters
from tinyforge.data.kept import Kept, key_of
from tinyforge.data.parquet import connect as connect_to_files
from tinyforge.data.parquet import scan
from tinyforge.data.passes import Parts, Reading, Span
from tinyforge.data.quality import load, read_bad_words
from tinyforge.data.source import Source, read_source
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json, sha256_of, shown, sync
from tinyforge.invocation import as_typed
from tinyforge.report import count_of
from tinyforge.shards import SPLITS
from tinyforge.terminal import printable

if TYPE_CHECKING:
    import duckdb

FORMAT = "tinyforge-corpus"
VERSION = 1
MANIFEST = "corpus.json"
SPLIT_HASH = {"text": "text_hash", "part": "hash"}  # of Settings.split_by: the column that decides the split
MOST_BANDS = 256  # a band's number has one byte
MOST_WORDS = 1000  # of a run; documents rarely have so many in common, and NumPy's integers end somewhere
_FILE_BYTES = 16 << 20  # of text in one parquet file, which is sorted in memory
_WORKER_MEMORY = 192 << 20  # for DuckDB in a worker, unless a row group takes more or the user has chosen the workers
_LEAST_MEMORY = 2 * _WORKER_MEMORY
_JOIN_BYTES = 96  # per row of a join over bands, with its hash table and window
_MOST_EXAMPLES = 1000  # of boilerplate, in the catalogue
_CHUNK = 1 << 14  # documents or pairs whose signatures are in memory at a time


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _setting(default: Any, help: str, least: float = 0, most: float = math.inf) -> Any:
    """A field of `Settings` with the help of its flag, and the bounds of a number."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True)
class Settings:
    """The settings that determine the documents of a corpus, each a flag. Workers and memory are not among them: they
    change no byte. val_shares: (source, share), for exceptions from val_share."""

    val_share: float = _setting(0.01, "share of the documents in val; SOURCE=SHARE for one source", 0, 1)
    val_shares: tuple[tuple[str, float], ...] = ()
    split_by: str = _setting("text", "put whole texts in val, or parts if there are few texts")
    max_bytes: int = _setting(1 << 17, "cut longer texts into parts, each a document, in bytes", 1024)
    shingle_words: int = _setting(5, "words in a shingle of MinHash", 1, MOST_WORDS)
    bands: int = _setting(20, "of MinHash; two documents are compared if one agrees", 1, MOST_BANDS)
    rows: int = _setting(6, "MinHash functions in a band", 1, MOST_BANDS)
    similarity: float = _setting(0.8, "estimated Jaccard similarity from which documents are near-duplicates", 0, 1)
    gram_words: int = _setting(13, "words in a gram of decontamination", 1, MOST_WORDS)
    common_grams: int = _setting(10, "ignore grams that stand in more train documents: boilerplate", 1)
    max_overlap: float = _setting(
        0.1,
        "drop a train document with a larger share of its grams in val, and 2 gram-words - 1 words of val in a row",
        *(0, 1),
    )
    detect_language: bool = _setting(False, "measure each document's language, and keep English (needs the extra data)")
    boilerplate: int = _setting(
        10, "cut text that this many documents of a source share, and debris of markup; 0: cut nothing"
    )
    fix_text: bool = _setting(
        False, "undo mojibake, write Unicode as NFC, drop zero-width characters (needs the extra data)"
    )
    mask_pii: bool = _setting(False, "put [EMAIL], [IP], [PHONE] in place of addresses and telephone numbers")

    def __post_init__(self) -> None:
        if self.split_by not in SPLIT_HASH:
            raise UserError(f"--split-by is {self.split_by!r}, expected {' or '.join(SPLIT_HASH)}")
        numbers = {_flag(f.name): (getattr(self, f.name), f) for f in fields(self) if type(f.default) in (int, float)}
        own = {f"--val-share {source}": (share, fields(self)[0]) for source, share in self.val_shares}
        for flag, (value, f) in {**numbers, **own}.items():
            least, most = f.metadata["least"], f.metadata["most"]
            if not least <= value <= most:
                raise UserError(f"{flag} is {value}, expected {least} {f'to {most}' if most < math.inf else 'or more'}")


@dataclass
class _Build:
    """One run: its arguments, and the state that its stages share."""

    out: Path
    sources: list[Source]
    settings: Settings
    filters: tuple[Filter, ...]
    tokenizer: Path | None
    workers: int
    memory: int
    show: bool
    catalogue: duckdb.DuckDBPyConnection
    spans: list[Span]
    kept: Kept
    reading: Reading
    evaluation: Sequence[Set] = ()
    nodes: Nodes | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> Path:
        return self.out / ".work"

    @property
    def no_bar(self) -> bool | None:
        """tqdm's `disable`: None shows bars on a terminal only."""
        return None if self.show else True

    def run(self, stage: str, function: Callable[..., dict[str, Any]], tasks: Any, sizes: Sequence[int]) -> list[dict]:
        """Run the tasks of a stage in the workers; the bar counts bytes of text."""
        from tqdm import tqdm

        with tqdm(total=sum(sizes), desc=stage, unit="B", unit_scale=True, disable=self.no_bar, leave=False) as bar:
            share = self.memory // 2 // self.workers

            def finish(index: int) -> None:
                bar.update(sizes[index])
                if self.nodes:
                    bar.set_postfix_str(count_of(len(self.nodes.alive()), "machine"), refresh=False)

            return passes.run_tasks(stage, function, tasks, self.work, self.workers, share, finish, self.nodes)

    def result(self, stage: str, index: int, suffix: str = ".parquet") -> Path:
        return self.work / f"{stage}-{index:05d}{suffix}"

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.catalogue.execute(sql, values).fetchall()


def build_corpus(
    sources: Sequence[Path],
    out: Path,
    settings: Settings | None = None,
    filters: Path = DEFAULT_FILTERS,
    tokenizer: Path | None = None,
    workers: int | None = None,
    memory_limit: int = 10**9,
    show: bool = False,
    decontaminate: Sequence[Path] = (),
    ray: str | None = None,
    bad_words: Path | None = None,
    quality: Path | None = None,
) -> dict[str, float]:
    """Build the corpus folder `out` from source folders, or finish one begun with the same sources and settings.

    tokenizer:    a tokenizer's file; tokens are then counted too, which means encoding every document.
    workers:      processes; None: one per core, but no more than memory_limit has room for.
    memory_limit: bytes, for all processes of a machine together.
    show:         print each stage's rate, with a bar while it runs.
    decontaminate: files of evaluation sets, as recipes/evaluate.py --task-data reads them: a train document that has
                   gram_words words in a row of one of their items is dropped.
    ray:          address of a Ray cluster, whose machines read, filter, measure and write; or "local". The bytes are
                   the same.

    bad_words:    a file of words and phrases, one a line, for the filter of that name.
    quality:      a classifier of data.quality, for the filter of that name.

    Returns the seconds of each stage that was run, nothing if the corpus is already there. The first of several
    duplicates is kept, in the order of the sources given. Raises UserError for a faulty source, naming it, for filters
    with wrong SQL, and if disk space or memory does not suffice.
    """
    settings = settings or Settings()
    if memory_limit < _LEAST_MEMORY:
        raise UserError(f"--memory-limit is {memory_limit:,} bytes, expected {_LEAST_MEMORY:,} (384MiB) or more")
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}, expected 1 or more")
    if workers is not None and ray:
        raise UserError("--workers counts processes of this machine, and with --ray the cluster says how many; drop it")
    if ray:
        check_address(ray)
        # Every machine finds them, wherever a process starts.
        sources, out, filters = [path.absolute() for path in sources], out.absolute(), filters.absolute()
        tokenizer, quality = tokenizer and tokenizer.absolute(), quality and quality.absolute()
        bad_words = bad_words and bad_words.absolute()
    read = _read_sources(sources, out, settings)
    blocks = read_filters(filters)
    if tokenizer is not None:
        from tinyforge.tokenizers import load_tokenizer

        load_tokenizer(tokenizer)  # fail now, not after minutes
    if settings.detect_language:
        language.check_installed()
    if settings.fix_text:
        cleaning.check_installed()
    if bad_words:
        read_bad_words(bad_words)
    if quality:
        load(quality)
    evaluation = _evaluation_sets(decontaminate, show)
    manifest = _head(read, settings, filters, tokenizer, evaluation)
    of_files = {"bad_words_sha256": bad_words, "quality_sha256": quality}
    manifest["settings"] |= {name: sha256_of(file) for name, file in of_files.items() if file}
    with locked(out):
        work = out / ".work"
        if _is_whole(out, manifest):
            shutil.rmtree(work, ignore_errors=True)
            return {}
        if not _same_key(work / "key.json", manifest):
            shutil.rmtree(work, ignore_errors=True)
            make_folder(work)
            write_json(work / "key.json", manifest)
        for left in work.glob("spill-*"):
            shutil.rmtree(left, ignore_errors=True)
        path = work / CATALOGUE
        spans = _find_spans(read)
        room = _room(spans, memory_limit, workers)
        reading = _reading(read, settings, bad_words, quality)
        keys = {s.name: key_of(s.sha256, manifest["settings"], reading.max_bytes) for s in read}
        kept = Kept(out, work, spans, keys)
        with (
            open_nodes(ray, work, [source.folder for source in read], room) as nodes,
            passes.duckdb_faults(str(path)),
            passes.connect(memory_limit // 2, work, path, cores()) as catalogue,
        ):
            workers = nodes.per_node if nodes else workers or max(1, min(cores(), room))
            check_filters(catalogue, blocks)
            build = _Build(
                out,
                read,
                settings,
                blocks,
                tokenizer,
                workers,
                memory_limit,
                show,
                catalogue,
                spans,
                kept,
                reading,
                evaluation,
                nodes,
            )
            _run_stages(build)
            files = _write_files(build)
            _keep(build)
            _describe(build, manifest)
        _publish(build, manifest, files, filters)
    return build.seconds


def _read_sources(folders: Sequence[Path], out: Path, settings: Settings) -> list[Source]:
    """The sources, their files checked against their hashes. UserError for names that cannot be told apart or used."""
    if not folders:
        raise UserError("no source folder is given; make one, for instance with python -m data.local")
    if out.resolve() in (same := {folder.resolve(): folder for folder in folders}):
        raise UserError(f"--out {out} is the source {same[out.resolve()]} too; choose another folder")
    read = [read_source(folder, verify=True) for folder in folders]
    names = [source.name for source in read]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"source {name!r} is given twice; name each folder once, or make one with another name")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,99}", name):
            raise UserError(
                f"source {shown(name)}: expected at most 100 letters, digits, '-', '_' and '.'; make "
                f"it with another name"
            )
    for name, _ in settings.val_shares:
        if name not in names:
            raise UserError(f"--val-share {name}: no such source; there are {', '.join(names)}")
    return read


def _find_spans(sources: list[Source]) -> list[Span]:
    with connect_to_files() as connection:
        return [span for source in sources for span in passes.find_spans(source.name, source.parquet, connection)]


def _room(spans: list[Span], memory_limit: int, workers: int | None) -> int:
    """The workers that half of the memory is enough for. UserError if it is not for one, or for those asked for."""
    least = passes.worker_memory(spans)
    if memory_limit // 2 // (workers or 1) < least:
        asked = f"--workers {workers}, " if workers else ""
        raise UserError(
            f"--memory-limit is {memory_limit:,} bytes, expected {max(_LEAST_MEMORY, 2 * least * (workers or 1)):,} or "
            f"more: {asked}and a row group of the sources has {max(span.group for span in spans):,} bytes of text"
        )
    return memory_limit // 2 // max(least, _WORKER_MEMORY) or 1


def _evaluation_sets(paths: Sequence[Path], show: bool) -> list[Set]:
    """All evaluation sets in the files, of any version; UserError if there is none."""
    if not paths:
        return []
    sets, files = [], find_sets(paths)
    for name in TASKS:
        try:
            sets.append(read_set(name, files, any_version=True))
        except MissingSet:
            continue
    if not sets:
        raise UserError(
            f"--decontaminate: no evaluation set in {', '.join(map(str, paths))}; docs/evaluation.md lists the files"
        )
    if show:
        print(f"evaluation sets kept out of the corpus: {', '.join(found.name for found in sets)}")
    return sets


def _head(
    read: list[Source], settings: Settings, filters: Path, tokenizer: Path | None, evaluation: Sequence[Set]
) -> dict[str, Any]:
    """The part of corpus.json that is known in advance: sources and settings, which identify the corpus."""
    made = json.loads(json.dumps(asdict(settings)))
    made["filters_sha256"] = sha256_of(filters)
    made["tokenizer_sha256"] = sha256_of(tokenizer) if tokenizer else None
    if evaluation:
        made["evaluation_sets"] = {found.name: found.sha256 for found in evaluation}
    return {
        "format": FORMAT,
        "version": VERSION,
        "sources": [{"name": s.name, "licence": s.licence, "source_sha256": s.sha256} for s in read],
        "settings": made,
    }


def _is_whole(out: Path, head: dict[str, Any]) -> bool:
    """Whether `out` already has exactly this corpus."""
    try:
        found = read_json(out / MANIFEST, "the corpus")
        made_of = [{k: s[k] for k in ("name", "licence", "source_sha256")} for s in found["sources"]]
        files = [(out / entry["file"], entry["bytes"]) for entry in found["files"]]
        return (
            found | {"sources": made_of, "files": None} == head | {"files": None}
            and all(path.is_file() and path.stat().st_size == size for path, size in files)
            and (out / CATALOGUE).is_file()
        )
    except (OSError, UserError, KeyError, TypeError):
        return False


def _same_key(path: Path, head: dict[str, Any]) -> bool:
    """Whether the files of a killed run belong to this corpus."""
    try:
        return path.is_file() and read_json(path, "the key") == head
    except UserError:
        return False


# --- the stages ------------------------------------------------------------------------------------------------------


def _run_stages(build: _Build) -> None:
    build.catalogue.execute("CREATE TABLE IF NOT EXISTS stages (name VARCHAR)")
    done = {name for (name,) in build.query("SELECT name FROM stages")}
    stages = {"read": _read, "clean": _clean, "filter": _filter, "dedup": _dedup, "decontaminate": _decontaminate}
    if build.tokenizer is not None:
        stages["tokens"] = _count_tokens
    for name, stage in stages.items():
        if name not in done:
            with _timed(build, name):
                build.catalogue.begin()
                stage(build)
                build.catalogue.execute("INSERT INTO stages VALUES (?)", [name])
                build.catalogue.commit()
    build.catalogue.execute("CHECKPOINT")


@contextmanager
def _timed(build: _Build, stage: str) -> Iterator[None]:
    """Time a stage; its rate counts all text of the sources, kept or dropped."""
    begin = time.perf_counter()
    yield
    seconds = build.seconds[stage] = time.perf_counter() - begin
    size = sum(source.bytes for source in build.sources) / 1e6
    if build.show:
        print(f"{stage:14} {size:,.0f} MB in {seconds:,.1f} s, {size / seconds:,.0f} MB/s", flush=True)


def _reading(sources: Sequence[Source], s: Settings, bad_words: Path | None, quality: Path | None) -> Reading:
    most = s.max_bytes
    if sum(source.documents for source in sources) == 1:  # so that both splits get something
        most = min(most, max(1024, sum(source.bytes for source in sources) // 8))
    switches = s.detect_language, s.boilerplate > 0, s.fix_text, s.mask_pii
    return Reading(most, s.shingle_words, s.bands * s.rows, *switches, bad_words, quality)


def _read(build: _Build) -> None:
    """Cut and measure every text; the catalogue gets its documents, numbered in the order of the sources."""
    build.kept.restore("read", _numbered(range(len(build.spans))))
    results = build.run(
        "read", passes.read_texts, ((span, build.reading) for span in build.spans), [span.bytes for span in build.spans]
    )
    build.catalogue.execute(
        "CREATE TABLE documents (number BIGINT, source VARCHAR, licence VARCHAR, id VARCHAR, title VARCHAR, "
        "url VARCHAR, bytes BIGINT, words BIGINT, letters BIGINT, characters BIGINT, repeats DOUBLE, "
        "stops DOUBLE, bad_words DOUBLE, quality DOUBLE, "
        "tokens BIGINT, "
        "language_score DOUBLE, language VARCHAR, language_share DOUBLE, hash VARCHAR, text_hash VARCHAR, "
        "split VARCHAR, dropped VARCHAR, rules VARCHAR, cluster BIGINT, "
        "val_overlap DOUBLE, passage VARCHAR, cut_bytes BIGINT, "
        "span INTEGER, part BIGINT, row BIGINT, start BIGINT, length BIGINT)"
    )
    build.catalogue.execute(
        "CREATE TABLE spans (span INTEGER, file VARCHAR, first BIGINT, task INTEGER)"
    )  # task: that cleaned it
    licences = {source.name: source.licence for source in build.sources}
    first = 0
    for index, (span, result) in enumerate(zip(build.spans, results, strict=True)):
        build.query(
            "INSERT INTO documents BY NAME SELECT parts.* EXCLUDE (file_row_number, place), ? AS source, "
            "? AS licence, ? AS span, ? + parts.place AS number, file.title, file.url, file.language_score, "
            "if(part > 0, file.id || '#' || part, file.id) AS id "
            f"FROM {scan(build.result('read', index))} AS parts JOIN {scan(span.path)} AS file "
            "ON parts.row = file.file_row_number ORDER BY number",
            span.source,
            licences[span.source],
            index,
            first,
        )
        build.query("INSERT INTO spans VALUES (?, ?, ?, NULL)", index, span.path.name, first)
        first += result["documents"]


def _clean(build: _Build) -> None:
    """Cut out boilerplate and debris, measure again what has changed, and split."""
    db, s = build.catalogue, build.settings
    db.execute("CREATE TABLE cuts (number BIGINT, begin BIGINT, stop BIGINT)")
    db.execute("CREATE TABLE boilerplate (source VARCHAR, documents BIGINT, example VARCHAR)")
    db.execute("CREATE TABLE masked (kind VARCHAR, count BIGINT)")
    if s.boilerplate or s.fix_text or s.mask_pii:
        chosen: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
        for source in build.sources:
            if source.name in build.kept.known:  # cleaned already
                chosen |= dict.fromkeys(build.kept.spans_of("clean", source.name), (np.empty((0, 2), np.int64), {}))
            else:
                spans = [i for i, span in enumerate(build.spans) if span.source == source.name]
                chosen |= _find_boilerplate(build, spans)
        build.kept.restore("clean", _numbered(chosen))
        tasks = ((build.spans[span], build.reading, *found) for span, found in chosen.items())
        results = build.run("clean", passes.clean_texts, tasks, [build.spans[span].bytes for span in chosen])
        for kind in PRIVATE:
            build.query(
                "INSERT INTO masked VALUES (?, ?)", kind, sum(result["masked"].get(kind, 0) for result in results)
            )
        db.execute("CREATE TEMP TABLE shown (source VARCHAR, number BIGINT, text VARCHAR)")
        for task, span in enumerate(chosen):
            _take_cleaned(build, task, span)
        db.execute(
            "INSERT INTO boilerplate SELECT source, count(DISTINCT number), text FROM shown GROUP BY source, text "
            f"HAVING count(DISTINCT number) >= {max(2, s.boilerplate)} ORDER BY 2 DESC, 3 LIMIT {_MOST_EXAMPLES}"
        )
        db.execute("DROP TABLE shown")
    split_hash, shares = SPLIT_HASH[s.split_by], dict(s.val_shares)
    for source in build.sources:
        # The split depends on the words alone: 52 bits of the hash of the text, or of the part, as a fraction.
        build.query(
            f"UPDATE documents SET split = if(('0x' || {split_hash}[1:13])::BIGINT / (1::BIGINT << 52) < ?, 'val', "
            "'train') WHERE source = ?",
            shares.get(source.name, s.val_share),
            source.name,
        )


def _find_boilerplate(build: _Build, spans: list[int]) -> dict[int, tuple[np.ndarray, dict[str, np.ndarray]]]:
    """The rows of these spans, of one source, that have something to clean, and their windows in many documents."""
    db, s = build.catalogue, build.settings
    found: dict[int, tuple[np.ndarray, dict[str, np.ndarray]]] = {}
    db.execute("CREATE TEMP TABLE common (key UBIGINT, often BOOLEAN)")
    windows = {index: scan(build.result("read", index, "-windows.parquet")) for index in spans}
    if s.boilerplate and spans:
        union = " UNION ALL ".join(f"SELECT key, place, {index} AS span FROM {windows[index]}" for index in spans)
        [(count,)] = build.query("SELECT count(*) FROM documents WHERE list_contains(?, span)", spans)
        db.execute(
            f"INSERT INTO common SELECT key, count(*) >= {max(s.boilerplate, count / 20)} FROM (SELECT DISTINCT key, "
            f"place, span FROM ({union}) SEMI JOIN (SELECT key FROM ({union}) GROUP BY key HAVING count(*) >= "
            f"{s.boilerplate}) AS often USING (key)) GROUP BY key HAVING count(*) >= {s.boilerplate}"
        )
    for index in spans:
        read = scan(build.result("read", index))
        hits: dict[str, np.ndarray] = {name: np.empty(0, np.int64) for name in passes.HIT}
        if s.boilerplate:
            own = f"FROM {windows[index]} SEMI JOIN (SELECT place FROM {read} WHERE repeats > {REPEATED}) USING (place)"
            query = (
                f"SELECT place, first, stop, often, false AS again FROM {windows[index]} JOIN common USING (key) "
                f"UNION ALL SELECT place, first, stop, false, true {own} "
                "QUALIFY row_number() OVER (PARTITION BY place, key ORDER BY first) > 1 ORDER BY ALL"
            )
            hits = {name: np.asarray(values) for name, values in db.execute(query).fetchnumpy().items()}
        touched = read_json(build.result("read", index, ".json"), "the result")["touched"]
        db.register("touched", {"row": np.array(touched, np.int64)})
        db.register("hit", {"place": np.unique(hits["place"])})
        rows = db.execute(
            f"SELECT row, min(place) AS first FROM {read} WHERE row IN (SELECT row FROM touched UNION ALL "
            f"SELECT row FROM {read} WHERE place IN (FROM hit)) GROUP BY row ORDER BY row"
        ).fetchnumpy()
        db.unregister("touched")
        db.unregister("hit")
        if len(rows["row"]):
            found[index] = np.stack([np.asarray(rows["row"]), np.asarray(rows["first"])], 1), hits
    db.execute("DROP TABLE common")
    return found


def _take_cleaned(build: _Build, task: int, span: int) -> None:
    """Copy the measures of the documents that a task cleaned, and what it cut, into the catalogue."""
    names = (*(name for name in MEASURED if name != "bytes"), "hash", "text_hash")
    [(first,)] = build.query("SELECT first FROM spans WHERE span = ?", span)
    build.query("UPDATE spans SET task = ? WHERE span = ?", task, span)
    build.query(
        f"UPDATE documents SET {', '.join(f'{name} = found.{name}' for name in names)}, bytes = found.bytes, "
        "cut_bytes = nullif(greatest(documents.bytes - found.bytes, 0), 0) "
        f"FROM {scan(build.result('clean', task))} AS found WHERE documents.number = ? + found.place",
        first,
    )
    texts = scan(build.result("clean", task, "-texts.parquet"))
    db = build.catalogue
    unnested = f"SELECT place + {first} AS number, unnest(cuts, recursive := true) FROM {texts}"
    db.execute(f'INSERT INTO cuts SELECT number, "begin", stop FROM ({unnested})')
    build.query(f"INSERT INTO shown SELECT ?, number, text FROM ({unnested})", build.spans[span].source)


def _parts(build: _Build, span: int, where: str, columns: Mapping[str, str] | None = None, join: str = "") -> Parts:
    """The documents of a span that `where` selects, with the place of their text and these columns, names and SQL, of
    `documents` or the table `join`."""
    names = dict.fromkeys(("number", "row", "start", "length")) | dict(columns or {})
    select = ", ".join(f"{sql or name} AS {name}" for name, sql in names.items())
    table = f"documents JOIN {join} USING (number)" if join else "documents"
    found = build.catalogue.execute(f"SELECT {select} FROM {table} WHERE span = {span} AND {where} ORDER BY number")
    values = {name: np.asarray(array) for name, array in found.fetchnumpy().items()}
    [(first, task)] = build.query("SELECT first, task FROM spans WHERE span = ?", span)
    cleaned = None if task is None else build.result("clean", task, "-texts.parquet")
    return Parts(build.spans[span], values, first, cleaned)


def _run_on_parts(
    build: _Build,
    stage: str,
    function: Callable[..., Any],
    where: str,
    *rest: Any,
    columns: Mapping[str, str] | None = None,
    join: str = "",
) -> dict[int, Path]:
    """Run a pass over the selected documents, span by span; returns the parquet file that it made of each span."""
    of_spans = f"FROM documents WHERE {where} GROUP BY span ORDER BY span"
    sizes = dict(build.query(f"SELECT span, sum(bytes)::BIGINT {of_spans}"))
    tasks = ((_parts(build, span, where, columns, join), *rest) for span in sizes)
    build.run(stage, function, tasks, list(sizes.values()))
    return {span: build.result(stage, index) for index, span in enumerate(sizes)}


def _update(build: _Build, files: Mapping[int, Path], assignment: str) -> None:
    """Copy columns of the files of the spans, as `found`, to the documents at these places."""
    for span, file in files.items():
        build.query(
            f"UPDATE documents SET {assignment} FROM {scan(file)} AS found WHERE number = found.place + "
            "(SELECT first FROM spans WHERE span = ?)",
            span,
        )


def _numbered(spans: Iterable[int]) -> dict[int, int]:
    """The task of each span in a pass over these spans."""
    return {span: task for task, span in enumerate(spans)}


def _keep(build: _Build) -> None:
    """Keep what the passes over single documents have found."""
    every = _numbered(range(len(build.spans)))
    build.kept.begin()
    for stage in ("read", "filter", *(["tokens"] if build.tokenizer else [])):
        build.kept.save(stage, every)
    build.kept.save("clean", dict(build.query("SELECT span, task FROM spans WHERE task IS NOT NULL")))
    build.kept.finish()


def _filter(build: _Build) -> None:
    columns = {name: name for name in MEASURED}
    columns |= {"language": "coalesce(language, '')"}
    columns |= {
        name: f"coalesce({name}, -1)" for name in ("language_share", "bad_words", "quality")
    }  # NumPy has no NULL
    build.kept.restore("filter", _numbered(range(len(build.spans))))
    files = _run_on_parts(build, "filter", passes.find_rules, "true", build.filters, columns=columns)
    _update(build, files, "rules = found.rules, dropped = split_part(found.rules, ',', 1)")


def _dedup(build: _Build) -> None:
    """Drop equal documents, then nearly equal ones, among those that no filter dropped."""
    db = build.catalogue
    db.execute(
        "CREATE TEMP TABLE equal AS SELECT number, first FROM (SELECT number, min(number) OVER same AS first, "
        "count(*) OVER same AS size FROM documents WHERE dropped IS NULL WINDOW same AS (PARTITION BY hash)) "
        "WHERE size > 1"
    )
    db.execute("UPDATE documents SET cluster = first FROM equal WHERE documents.number = equal.number")
    db.execute("UPDATE documents SET dropped = 'exact-duplicate' WHERE dropped IS NULL AND cluster < number")
    signatures = _Signatures([build.result("read", index, ".npy") for index in range(len(build.spans))])
    for first, task in build.query("SELECT first, task FROM spans WHERE task IS NOT NULL ORDER BY span"):
        places = db.execute(f"SELECT place FROM {scan(build.result('clean', task))} ORDER BY place").fetchnumpy()
        signatures.replace(first + np.asarray(places["place"]), build.result("clean", task, ".npy"))
    signatures.cut = np.asarray(
        db.execute("SELECT number FROM documents WHERE cut_bytes > 0 ORDER BY number").fetchnumpy()["number"]
    )
    a, b = _near_pairs(build, signatures)
    nodes, firsts = components(a, b)
    db.register("found", {"number": nodes, "first": firsts})
    db.execute("CREATE TEMP TABLE near AS SELECT number, first FROM found")
    db.unregister("found")
    # An exact duplicate joins the cluster of its original.
    db.execute("UPDATE documents SET cluster = first FROM near WHERE coalesce(cluster, documents.number) = near.number")
    db.execute("UPDATE documents SET dropped = 'near-duplicate' WHERE dropped IS NULL AND cluster < number")
    db.execute("DROP TABLE equal")
    db.execute("DROP TABLE near")


def _near_pairs(build: _Build, signatures: _Signatures) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of documents whose estimated similarity is high enough, among those with a band in common."""
    db = build.catalogue
    db.execute("CREATE TEMP TABLE found (a BIGINT, b BIGINT)")
    _find_candidates(build, signatures)
    db.execute(
        "CREATE TEMP TABLE pairs AS SELECT a, b, row_number() OVER (ORDER BY a, b) AS n FROM (SELECT DISTINCT a, b "
        "FROM found)"
    )
    db.execute("DROP TABLE found")
    near: list[np.ndarray] = [np.empty((2, 0), np.int64)]
    [(count,)] = build.query("SELECT count(*) FROM pairs")
    for begin in range(1, count + 1, _CHUNK):
        rows = db.execute(f"SELECT a, b FROM pairs WHERE n BETWEEN {begin} AND {begin + _CHUNK - 1} ORDER BY n")
        a, b = pairs = np.stack(list(rows.fetchnumpy().values()))
        alike = estimate(signatures.take(a), signatures.take(b))
        # A copy in another source, where few documents share what was cut here, still has it.
        one = np.flatnonzero(np.isin(a, signatures.cut) != np.isin(b, signatures.cut))
        before = estimate(signatures.take(a[one], uncut=True), signatures.take(b[one], uncut=True))
        alike[one] = np.maximum(alike[one], before)
        near.append(pairs[:, alike >= build.settings.similarity])
    db.execute("DROP TABLE pairs")
    a, b = np.concatenate(near, 1)
    # Code with the same words and other operators is another program; the hash of a text has words alone.
    db.register("near", {"a": np.ascontiguousarray(a), "b": np.ascontiguousarray(b)})
    found = db.execute(
        "SELECT a, b FROM near JOIN documents AS x ON x.number = a JOIN documents AS y ON y.number = b "
        "WHERE NOT (x.text_hash = y.text_hash AND x.hash <> y.hash AND x.part = 0 AND y.part = 0) ORDER BY a, b"
    ).fetchnumpy()
    db.unregister("near")
    return np.asarray(found["a"]), np.asarray(found["b"])


def _find_candidates(build: _Build, signatures: _Signatures) -> None:
    """Insert into `found` the pairs of documents with a band in common.

    In a bucket (documents with the same key in a band) each is compared with the first and with its predecessor, not
    with all: a bucket of n has 2 n pairs instead of n^2 / 2, and a cluster is still connected.

    A bucket lies within a band, and within the keys of one remainder. So the join takes as few bands, and as few keys,
    at a time as fit into memory.
    """
    from tqdm import tqdm

    db, s = build.catalogue, build.settings
    kept = db.execute("SELECT number FROM documents WHERE dropped IS NULL ORDER BY number").fetchnumpy()["number"]
    cut = kept[np.isin(kept, signatures.cut)]
    groups = list(_slices(s.bands, len(kept) + len(cut), build.memory))
    for bands, slice_, slices in tqdm(groups, desc="bands", disable=build.no_bar, leave=False):
        db.execute("CREATE TEMP TABLE bands (band UTINYINT, key UBIGINT, number BIGINT)")
        chunks = [
            (some[i : i + _CHUNK], uncut)
            for some, uncut in ((kept, False), (cut, True))
            for i in range(0, len(some), _CHUNK)
        ]
        for numbers, uncut in chunks:
            columns = slice(bands.start * s.rows, bands.stop * s.rows)
            keys = band_keys(signatures.take(numbers, uncut)[:, columns], len(bands), s.rows).reshape(-1)
            chosen = np.flatnonzero(keys % np.uint64(slices) == slice_) if slices > 1 else slice(None)
            chunk = {
                "band": np.tile(np.array(bands, np.uint8), len(numbers))[chosen],
                "key": keys[chosen],
                "number": np.repeat(numbers, len(bands))[chosen],
            }
            db.register("chunk", chunk)
            db.execute("INSERT INTO bands SELECT band, key, number FROM chunk")
            db.unregister("chunk")
        db.execute(
            "INSERT INTO found "
            "WITH shared AS (SELECT band, key FROM bands GROUP BY band, key HAVING count(*) > 1), "
            "buckets AS (SELECT number, min(number) OVER bucket AS first, lag(number) OVER bucket AS previous "
            "FROM bands JOIN shared USING (band, key) WINDOW bucket AS (PARTITION BY band, key ORDER BY number)) "
            "SELECT DISTINCT a, number AS b FROM (SELECT first AS a, number FROM buckets UNION ALL "
            "SELECT previous AS a, number FROM buckets) WHERE a < number"
        )
        db.execute("DROP TABLE bands")


def _slices(bands: int, documents: int, memory: int) -> Iterator[tuple[range, int, int]]:
    """The bands of each join, the number of a slice of their keys, and the number of slices."""
    most = max(1, memory // 4 // _JOIN_BYTES)  # rows
    at_once = min(bands, max(1, most // max(1, documents)))
    slices = -(-documents // most) if at_once == 1 else 1
    for first in range(0, bands, at_once):
        for slice_ in range(max(1, slices)):
            yield range(first, min(bands, first + at_once)), slice_, max(1, slices)


class _Signatures:
    """The MinHash signatures of all documents, memory-mapped from the files of the read stage.

    cut: the numbers, in ascending order, of those that cleaning has made shorter; they have two signatures.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._files = [np.load(path, mmap_mode="r") for path in paths]
        self._bounds = np.cumsum([0, *(len(file) for file in self._files)])
        self._newer: list[tuple[np.ndarray, np.ndarray]] = []
        self.cut = np.empty(0, np.int64)

    def replace(self, numbers: np.ndarray, path: Path) -> None:
        """Take the signatures of these documents, in ascending order, from another file."""
        self._newer.append((numbers, np.load(path, mmap_mode="r")))

    def take(self, numbers: np.ndarray, uncut: bool = False) -> np.ndarray:
        """(D,) -> (D, bands * rows). uncut: of what is cut, as it was before."""
        out = np.empty((len(numbers), self._files[0].shape[1]), np.uint32)
        files = np.searchsorted(self._bounds, numbers, "right") - 1
        for file in np.unique(files):
            chosen = files == file
            out[chosen] = self._files[file][numbers[chosen] - self._bounds[file]]
        for newer, signatures in self._newer:
            at = np.minimum(np.searchsorted(newer, numbers), len(newer) - 1)
            chosen = newer[at] == numbers
            if uncut:
                chosen &= ~np.isin(numbers, self.cut)
            out[chosen] = signatures[at[chosen]]
        return out


def _hold_out_one(build: _Build) -> None:
    """If val is expected but empty, as in a small corpus, move to it what a slightly larger share would: a text, or if
    every text is more than a tenth of the corpus, a part. Does nothing if only one part is left."""
    s, kept = build.settings, "dropped IS NULL"
    shares = dict(s.val_shares)
    expected = [source.name for source in build.sources if shares.get(source.name, s.val_share)]
    [(size, count, val)] = build.query(
        f"SELECT coalesce(sum(bytes), 0)::BIGINT, count(*), count(*) FILTER (split = 'val') FROM documents WHERE {kept}"
    )
    if val or count < 2 or not expected:
        return
    for column, most in ((SPLIT_HASH[s.split_by], size // 10), (SPLIT_HASH["part"], size // 2)):
        found = build.query(
            f"SELECT {column} FROM documents WHERE {kept} AND list_contains(?, source) GROUP BY {column} "
            f"HAVING sum(bytes) <= {most} ORDER BY {column} LIMIT 1",
            expected,
        )
        if found:
            build.query(f"UPDATE documents SET split = 'val' WHERE {column} = ?", *found[0])
            return


def _decontaminate(build: _Build) -> None:
    """Drop train documents that share too much with val, recording the share of each that shares any; then those that
    share anything with an evaluation set."""
    s = build.settings
    _hold_out_one(build)
    kept = "dropped IS NULL AND split = '{}'"
    found = _run_on_parts(build, "grams", passes.find_grams, kept.format("val"), s.gram_words)
    grams = build.work / "val-grams.u64"
    with written_whole(grams) as beside, open(beside, "wb") as file:
        # By their first bits, so that only one slice at a time is in memory.
        [(count,)] = build.query(f"SELECT coalesce(sum(words), 0)::BIGINT FROM documents WHERE {kept.format('val')}")
        bits = max(4, (count * _JOIN_BYTES // (build.memory // 4)).bit_length())
        for slice_ in range(1 << bits if found else 0):
            union = " UNION ALL ".join(
                f"SELECT gram FROM {scan(path)} WHERE gram >> {64 - bits} = {slice_}" for path in found.values()
            )
            values = build.catalogue.execute(f"SELECT DISTINCT gram FROM ({union}) ORDER BY gram").fetchnumpy()["gram"]
            np.asarray(values, np.uint64).tofile(file)
    if grams.stat().st_size:
        found = _run_on_parts(build, "shared", passes.find_shared, kept.format("train"), s.gram_words, grams)
        _drop_shared(build, found, "contaminated", s.common_grams)
    if build.evaluation:
        _drop_evaluation_sets(build)


def _drop_shared(build: _Build, files: Mapping[int, Path], reason: str, common: int | None = None) -> None:
    """Drop the documents with shared runs of words, which the files list, and record the longest passage of each.

    common: the runs in more documents than this say nothing. Of the others a document may have a share, `max_overlap`,
    or, up to three times that, any number that never makes a passage: pages written by one template share many short
    runs between their names and numbers, while a copy has long ones. None: a single run suffices.
    """
    db, s = build.catalogue, build.settings
    if not files:
        return
    union = " UNION ALL ".join(f"SELECT number, place, gram FROM {scan(file)}" for file in files.values())
    db.execute(f"CREATE TEMP TABLE shared AS {union}")
    rare = "SELECT number, place FROM shared"
    if common is not None:
        db.execute(
            "CREATE TEMP TABLE common AS SELECT gram FROM shared GROUP BY gram "
            f"HAVING count(*) > {common} AND count(DISTINCT number) > {common}"
        )
        rare += " WHERE gram NOT IN (FROM common)"
    # Consecutive places, less their rank, are one number: a passage.
    db.execute(
        "CREATE TEMP TABLE passages AS SELECT number, max({'runs': runs, 'place': -place}) AS longest, "
        "sum(runs)::BIGINT AS rare FROM (SELECT number, min(place) AS place, count(*) AS runs FROM (SELECT number, "
        f"place, place - row_number() OVER (PARTITION BY number ORDER BY place) AS passage FROM ({rare})) "
        "GROUP BY number, passage) GROUP BY number"
    )
    dropped = "true"
    if common is not None:
        db.execute(
            "UPDATE documents SET val_overlap = rare / (greatest(words - ?, 1) - coalesce(ignored, 0)) "
            "FROM (FROM passages LEFT JOIN (SELECT number, count(*) AS ignored FROM shared WHERE gram IN (FROM common) "
            "GROUP BY number) USING (number)) AS found WHERE documents.number = found.number",
            [s.gram_words - 1],
        )
        db.execute("DROP TABLE common")
        dropped = (
            f"val_overlap > {s.max_overlap} AND (val_overlap > {3 * s.max_overlap} "
            f"OR longest.runs >= least({s.gram_words}, greatest(words - {s.gram_words - 1}, 1)))"
        )
    db.execute(
        "UPDATE documents SET dropped = ? FROM passages WHERE documents.number = passages.number AND "
        f"documents.dropped IS NULL AND {dropped}",
        [reason],
    )
    db.execute("DROP TABLE shared")
    of_passages = {"place": "-longest.place", "count": f"longest.runs + {s.gram_words - 1}"}
    read = _run_on_parts(
        build, f"{reason}-passages", passes.read_passages, f"dropped = '{reason}'", columns=of_passages, join="passages"
    )
    db.execute("DROP TABLE passages")
    _update(build, read, "passage = found.passage")


def _drop_evaluation_sets(build: _Build) -> None:
    n = build.settings.gram_words
    grams = np.empty(0, np.uint64)
    for found in build.evaluation:
        texts = [text_of(item) for item in found.items]
        for begin in range(0, len(texts), _CHUNK):
            grams = np.union1d(grams, Words(texts[begin : begin + _CHUNK]).grams(n)[0])
    if len(grams):
        path = build.work / "evaluation-grams.u64"
        with written_whole(path) as beside:
            grams.tofile(beside)
        chosen = "dropped IS NULL AND split = 'train'"
        _drop_shared(build, _run_on_parts(build, "evaluation", passes.find_shared, chosen, n, path), "evaluation-set")


def _count_tokens(build: _Build) -> None:
    build.kept.restore("tokens", _numbered(range(len(build.spans))))
    files = _run_on_parts(build, "tokens", passes.count_tokens, "true", build.tokenizer)
    _update(build, files, "tokens = found.tokens")


# --- what is written -------------------------------------------------------------------------------------------------


def _write_files(build: _Build) -> list[dict[str, Any]]:
    """The parquet files of both splits, as corpus.json lists them."""
    planned = list(_plan_files(build))
    with writing(build.out):
        (build.out / MANIFEST).unlink(missing_ok=True)  # from here on the older corpus is invalid
        sync(build.out)

    def tasks() -> Iterator[tuple[list[Parts], Path]]:
        for path, where, _ in planned:
            spans = build.query(f"SELECT DISTINCT span FROM documents WHERE {where} ORDER BY span")
            yield [_parts(build, span, where, {"part": "part"}) for (span,) in spans], build.out / path

    for index, (path, _, _) in enumerate(planned):
        if not (build.out / path).is_file():  # the task has a result, but the file was removed
            build.result("write", index, ".json").unlink(missing_ok=True)
    with _timed(build, "write"):
        results = build.run("write", passes.write_split, tasks(), [size for *_, size in planned])
    return [{"file": path, **result} for (path, _, _), result in zip(planned, results, strict=True)]


def _plan_files(build: _Build) -> Iterator[tuple[str, str, int]]:
    """Each file's path, the condition that selects its documents, and their bytes."""
    for source in build.sources:
        for split in SPLITS:
            chosen = f"dropped IS NULL AND source = '{source.name}' AND split = '{split}'"
            ranges = build.query(
                "SELECT file, min(number), max(number), sum(bytes)::BIGINT FROM (SELECT number, bytes, "
                f"(sum(bytes) OVER (ORDER BY number) - bytes)::BIGINT // {_FILE_BYTES} AS file FROM documents "
                f"WHERE {chosen}) GROUP BY file ORDER BY file"
            )
            for index, (_, first, last, size) in enumerate(ranges):
                path = f"{split}/{source.name}-{index:05d}.parquet"
                yield path, f"{chosen} AND number BETWEEN {first} AND {last}", size


def _describe(build: _Build, manifest: dict[str, Any]) -> None:
    """The tables of sources, filters and settings, and the counts of each source in corpus.json."""
    db = build.catalogue
    db.begin()
    db.execute(
        "CREATE OR REPLACE TABLE sources (name VARCHAR, licence VARCHAR, documents BIGINT, bytes BIGINT, "
        "refused BIGINT, source_sha256 VARCHAR, folder VARCHAR)"
    )
    for source in build.sources:
        values = (source.name, source.licence, source.documents, source.bytes, len(source.refused), source.sha256)
        build.query(
            "INSERT INTO sources VALUES (?, ?, ?, ?, ?, ?, ?)", *values, os.path.relpath(source.folder, build.out)
        )
    db.execute("CREATE OR REPLACE TABLE filters (name VARCHAR, kind VARCHAR, sql VARCHAR, explanation VARCHAR)")
    for block in build.filters:
        build.query("INSERT INTO filters VALUES (?, ?, ?, ?)", block.name, block.kind, block.sql, block.explanation)
    db.execute("CREATE OR REPLACE TABLE settings (name VARCHAR, value VARCHAR)")
    for name, value in manifest["settings"].items():
        build.query("INSERT INTO settings VALUES (?, ?)", name, json.dumps(value))
    db.commit()
    db.execute("CHECKPOINT")
    inputs = {source.name: list(source.inputs) for source in build.sources}
    for entry in manifest["sources"]:
        entry["inputs"] = inputs[entry["name"]]  # so that a model knows which files it has learned from
        for split in SPLITS:
            [(documents, size)] = build.query(
                "SELECT count(*), coalesce(sum(bytes), 0)::BIGINT FROM documents WHERE source = ? AND split = ? "
                "AND dropped IS NULL",
                entry["name"],
                split,
            )
            entry[split] = {"documents": documents, "bytes": size}


def _publish(build: _Build, manifest: dict[str, Any], files: list[dict[str, Any]], filters: Path) -> None:
    """Put the catalogue in place, write the report, remove files of other corpora, and write corpus.json last."""
    out = build.out
    names = {entry["file"] for entry in files}
    with writing(out):
        # A copy: until corpus.json exists, a rerun starts from the catalogue in the work folder.
        with written_whole(out / CATALOGUE) as beside:
            shutil.copyfile(build.work / CATALOGUE, beside)
        with written_whole(out / "filters.sql") as beside:
            shutil.copyfile(filters, beside)
        for split in SPLITS:
            (out / split).mkdir(exist_ok=True)
            for path in (out / split).iterdir():
                if f"{split}/{path.name}" not in names:
                    path.unlink()
        corpus_report.write_report(out)
        write_json(out / MANIFEST, manifest | {"files": files})
        shutil.rmtree(build.work)


# --- the command -----------------------------------------------------------------------------------------------------


def _parse_shares(values: Sequence[str]) -> tuple[float, tuple[tuple[str, float], ...]]:
    shares: dict[str, float] = {}
    for value in values:
        name, _, number = value.rpartition("=")
        try:
            if name in shares:
                raise UserError(f"--val-share: {name or 'a share for all'} is given twice; give it once")
            shares[name] = float(number)
        except ValueError:
            raise UserError(f"--val-share is {value!r}, expected a number such as 0.01, or SOURCE=0.05") from None
    return shares.pop("", Settings.val_share), tuple(shares.items())


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["report"]:
        return corpus_report.main(arguments[1:])
    parser = Parser(
        prog="python -m data.corpus",
        description="Filter, deduplicate, split and decontaminate the documents of source folders. "
        "`python -m data.corpus report CORPUS` prints what was kept and dropped.",
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SOURCE_DIR", help="of data.gutenberg, for instance")
    parser.flag("--out", Path, "the corpus", required=True, metavar="DIR")
    for f in (f for f in fields(Settings) if f.metadata):
        what = f.metadata["help"]
        if f.name == "val_share":
            parser.flag("--val-share", [], f"{what} (default: {f.default})", metavar="SHARE")
        else:
            parser.flag(_flag(f.name), f.default, what, metavar="|".join(SPLIT_HASH) if f.name == "split_by" else None)
    parser.flag("--bad-words", Path, "drop what has many of these words, one a line", metavar="FILE")
    parser.flag("--quality", Path, "a classifier of data.quality; drop what is below 0.5", metavar="FILE")
    tasks = "evaluation sets, as for evaluate.py --task-data, to keep out of the training text"
    parser.flag("--decontaminate", [], tasks, type=Path, metavar="PATH")
    parser.flag("--filters", Path, "quality filters in SQL", default=DEFAULT_FILTERS, metavar="FILE")
    parser.flag("--tokenizer", Path, "count tokens too", metavar="FILE")
    parser.flag("--workers", int, "processes (default: one per core, if memory allows)")
    parser.flag("--memory-limit", "1GB", "for all of them together", metavar="BYTES")
    parser.flag(
        "--ray", str, "run on the Ray cluster at HOST:PORT; local starts Ray on this machine", metavar="ADDRESS"
    )
    given = vars(parser.parse_args(arguments))
    share, shares = _parse_shares(given.pop("val_share"))
    settings = Settings(share, shares, **{f.name: given.pop(f.name) for f in fields(Settings) if f.name in given})
    memory_limit, out = parse_bytes(given.pop("memory_limit"), "--memory-limit"), given["out"]
    if not build_corpus(settings=settings, memory_limit=memory_limit, show=True, **given):
        print(f"{out}: already built from these sources with these settings")
    print(printable((out / "report.md").read_text(encoding="utf-8")))
    print(as_typed(f"next: python -m data.shards --corpus {shlex.quote(str(out))} --out shards"))
    return 0


if __name__ == "__main__":
    run_command(main)
