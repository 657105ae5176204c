"""Make a corpus of 1 GB of text: the rate of every stage, the peak memory, and how many planted duplicates are found.

    python bench/corpus.py --data DIR                          1 GB, a few minutes
    python bench/corpus.py --data DIR --bytes 50000000         less
    python bench/corpus.py --data DIR --json result.json       everything as one JSON object

DIR holds gutenberg.zip (books as Project Gutenberg publishes them) and web/*.parquet (columns id, text). They are
repeated until there is enough; in each copy all but the 200 most frequent words are exchanged for others of about the
same frequency, so that the copies have few 5-word shingles in common and the filters see text like the original. Then
documents are planted: exact duplicates (other case, white space and punctuation) and near-duplicates (one word in 160,
80 or 40 exchanged), whose Jaccard similarity is computed exactly.

Peak memory is the sum over this run's process and its children of the proportional set size (each page once, also where
processes share it), sampled ten times a second, and page cache is not in it. It is measured in a child process, so that
the making of the text has no part in it.
"""

from __future__ import annotations

import multiprocessing
import random
import re
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import duckdb
import numpy as np

from tinyforge.backends.workers import cores
from tinyforge.data.corpus import CATALOGUE, SPLITS, Settings, build_corpus
from tinyforge.data.dedup import candidate_probability
from tinyforge.data.files import parse_bytes
from tinyforge.data.gutenberg import clean
from tinyforge.data.shards import make_shards
from tinyforge.data.source import Document, SourceWriter
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.report import add_json_flag, check_before, publish

KEPT_WORDS = 200  # of the most frequent, which stay: the filters look for some of them
NEIGHBOURS = 50  # ranks by which a word may be moved
PLANTED = 1000  # of each kind
CHANGE_ONE_IN = (160, 80, 40)  # words, in a planted near-duplicate
PIECES = re.compile(r"\w+|\W+")


@dataclass(frozen=True)
class Planted:
    """A duplicate of the document `original` of the source `web`. similarity: exact Jaccard of 5-word shingles."""

    id: str
    original: str
    kind: str
    similarity: float


def read_originals(folder: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(id, text) of the books and of the web pages, exact duplicates removed."""
    if not (folder / "gutenberg.zip").is_file() or not list((folder / "web").glob("*.parquet")):
        raise UserError(f"--data {folder}: wanted gutenberg.zip and web/*.parquet in it; name the folder that has them")
    with zipfile.ZipFile(folder / "gutenberg.zip") as archive:
        bodies = {name: clean(archive.read(name)).body for name in sorted(archive.namelist()) if name.endswith(".txt")}
    books = [(Path(name).stem, body) for name, body in bodies.items() if body]
    with duckdb.connect() as connection:
        pages = connection.execute(f"SELECT id, text FROM '{folder}/web/*.parquet' ORDER BY id, text").fetchall()
    return books, list({text: (f"{id_}.{n}", text) for n, (id_, text) in enumerate(pages)}.values())


class Rewriter:
    """Texts as numbers of their pieces (words and what is between them), and copies with other words."""

    def __init__(self, texts: list[str]) -> None:
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(PIECES.findall(text))
        self.pieces = [piece for piece, _ in counts.most_common()]
        number = {piece: index for index, piece in enumerate(self.pieces)}
        self.texts = [np.array([number[piece] for piece in PIECES.findall(text)], np.int32) for text in texts]
        words = [index for index, piece in enumerate(self.pieces) if piece[0].isalpha()]
        self.words = np.array(words[KEPT_WORDS:])

    def copy(self, seed: int) -> Iterator[str]:
        """Every text with its words exchanged; copy 0 is the original."""
        table = np.array(self.pieces, object)
        if seed:
            shift = np.random.default_rng(seed).uniform(0, NEIGHBOURS, len(self.words))
            table[self.words[np.argsort(np.arange(len(self.words)) + shift)]] = table[self.words].copy()
        for pieces in self.texts:
            yield "".join(table[pieces].tolist())


def shingles(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"[^\W_]+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(len(words) - n + 1, 1))}


def plant(id_: str, text: str, kind: str, rng: random.Random) -> tuple[Document, Planted]:
    if kind == "exact":
        changed = text.upper().replace(" ", "  ").replace(",", " ;")
    else:
        pieces = PIECES.findall(text)
        words = [index for index, piece in enumerate(pieces) if piece[0].isalpha()]
        for index in rng.sample(words, max(len(words) // rng.choice(CHANGE_ONE_IN), 1)):
            pieces[index] = "q" + pieces[index][::-1]
        changed = "".join(pieces)
    a, b = shingles(text, Settings.shingle_words), shingles(changed, Settings.shingle_words)
    planted = Planted(f"{kind} of {id_}", id_, kind, len(a & b) / len(a | b))
    return Document(planted.id, changed), planted


def make_sources(data: Path, folder: Path, wanted: int) -> list[Planted]:
    """The sources `books`, `web` and `planted` in `folder`: some `wanted` bytes in all."""
    books, pages = read_originals(data)
    rewriter = Rewriter([text for _, text in (*books, *pages)])
    rng = random.Random(0)
    found: list[Planted] = []
    size = copy = 0
    with (
        SourceWriter(folder / "books", "books", "public domain") as of_books,
        SourceWriter(folder / "web", "web", "see the source") as of_web,
        SourceWriter(folder / "planted", "planted", "see the source") as of_planted,
    ):
        planted = min(PLANTED, len(pages) // 4)
        candidates = set(rng.sample([id_ for id_, text in pages if len(text) > 1000], 2 * planted))
        while size < wanted:
            texts = rewriter.copy(copy)
            for (id_, _), text, writer in zip(
                (*books, *pages), texts, [of_books] * len(books) + [of_web] * len(pages), strict=True
            ):
                if size < wanted or copy == 0:
                    writer.add(Document(f"{id_}/{copy}", text))
                    size += len(text.encode())
                if copy == 0 and writer is of_web and id_ in candidates:
                    document, entry = plant(f"{id_}/0", text, ("exact", "near")[len(found) % 2], rng)
                    of_planted.add(document)
                    found.append(entry)
                    size += len(document.text.encode())
            copy += 1
    return found


def memory_of(pid: int) -> int:
    """Proportional set size of a process and its children, in bytes, without pages of files."""
    total = 0
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += int(line.split()[1]) << 10
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
    except (OSError, ValueError):
        pass  # it has ended meanwhile
    return total


class PeakMemory:
    """Samples a process tree until it is stopped."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak = pid, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.1):
            self.peak = max(self.peak, memory_of(self.pid))

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak


def build(results: Any, folder: Path, memory_limit: int, workers: int | None) -> None:
    """What is measured, in a process of its own."""
    settings = Settings(val_shares=(("books", 0.03),))
    sources = [folder / name for name in ("books", "web", "planted")]
    out = folder / "corpus"
    with redirect_stdout(sys.stderr):  # stdout is for the table, or the JSON
        results.put(build_corpus(sources, out, settings, workers=workers, memory_limit=memory_limit, show=True))


def tokenise(folder: Path, workers: int | None) -> dict[str, float]:
    """Make the corpus's token shards: learn 4096 tokens from a sample of 100 MB, encode all of it."""
    begin = time.perf_counter()
    made = make_shards(folder / "corpus", folder / "shards", workers=workers)
    seconds = time.perf_counter() - begin
    tokens = sum(getattr(source, split).tokens for source in made.shards.sources.values() for split in SPLITS)
    return {"train": seconds - made.seconds, "encode": made.seconds, "tokens": tokens}


def _tokenise_in_child(results: Any, folder: Path, workers: int | None) -> None:
    results.put(tokenise(folder, workers))


def in_child(function: Any, *args: Any) -> tuple[Any, int, float]:
    """What the function puts; the peak memory and the CPU seconds of the process that ran it and of its children."""
    import resource  # not on Windows

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=function, args=(results, *args))
    process.start()
    assert process.pid is not None
    memory = PeakMemory(process.pid)
    process.join()
    peak = memory.stop()
    if process.exitcode:
        raise UserError(f"{function.__name__} ended with status {process.exitcode}; its message is above")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return results.get(), peak, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def recall(corpus: Path, planted: list[Planted]) -> dict[str, Any]:
    """The share of the planted duplicates that were dropped as such."""
    with duckdb.connect(str(corpus / CATALOGUE), read_only=True) as catalogue:
        dropped = dict(catalogue.execute("SELECT id, dropped FROM documents WHERE source = 'planted'").fetchall())
        standing = {
            id_
            for (id_,) in catalogue.execute(
                "SELECT id FROM documents WHERE source = 'web' AND (dropped IS NULL OR dropped NOT IN "
                "(SELECT name FROM filters))"
            ).fetchall()
        }
    found: dict[str, Any] = {}
    for key, kind, low, high in (
        ("exact", "exact", 1.0, 1.1),
        ("J >= 0.9", "near", 0.9, 1.1),
        ("0.8 <= J < 0.9", "near", 0.8, 0.9),
        ("J < 0.8", "near", 0.0, 0.8),
    ):
        chosen = [p for p in planted if p.kind == kind and low <= p.similarity < high and p.original in standing]
        hits = sum((dropped.get(p.id) or "").endswith("-duplicate") for p in chosen)
        found[key] = {"planted": len(chosen), "found": hits, "recall": hits / max(len(chosen), 1)}
    return found


def main() -> int:
    parser = Parser(description="Time the making of a corpus.")
    parser.add_argument("--data", type=Path, required=True, help="folder with gutenberg.zip and web/*.parquet")
    parser.add_argument("--bytes", type=int, default=10**9, help="of text to make (default 1e9)")
    parser.add_argument("--memory-limit", default="1GB")
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--work", type=Path, help="folder for the text and the corpus, kept (default: a temporary one)")
    parser.add_argument("--no-tokens", dest="tokens", action="store_false", help="leave out the tokenizer")
    add_json_flag(parser)
    args = parser.parse_args()
    check_before(args.json)
    if not Path("/proc/self/smaps_rollup").exists():
        raise UserError("peak memory is read from /proc/PID/smaps_rollup, which this system has not; run on Linux")
    memory_limit = parse_bytes(args.memory_limit, "--memory-limit")
    folder = args.work or Path(tempfile.mkdtemp(prefix="corpus-bench-"))
    try:
        begin = time.perf_counter()
        planted = make_sources(args.data, folder, args.bytes)
        print(f"made the text in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        seconds, peak, cpu = in_child(build, folder, memory_limit, args.workers)
        with duckdb.connect(str(folder / "corpus" / CATALOGUE), read_only=True) as catalogue:
            [(documents, size, kept)] = catalogue.execute(
                "SELECT count(*), sum(bytes)::BIGINT, coalesce(sum(bytes) FILTER (dropped IS NULL), 0)::BIGINT "
                "FROM documents"
            ).fetchall()
        found: dict[str, Any] = {
            "bytes": size,
            "documents": documents,
            "kept_bytes": kept,
            "cores": cores(),
            "memory_limit": memory_limit,
            "peak_memory": peak,
            "cpu_seconds": cpu,
            "stages": {name: {"seconds": s, "mb_per_s": size / s / 1e6} for name, s in seconds.items()},
            "seconds": sum(seconds.values()),
            "recall": recall(folder / "corpus", planted),
            "settings": asdict(Settings()),
            "candidates_at_threshold": candidate_probability(0.8, 20, 6),
        }
        if args.tokens:
            timed, peak, cpu = in_child(_tokenise_in_child, folder, args.workers)
            found["tokenise"] = {
                **timed,
                "mb_per_s": kept / timed["encode"] / 1e6,
                "bytes_per_token": kept / timed["tokens"],
                "peak_memory": peak,
                "cpu_seconds": cpu,
            }
    finally:
        if not args.work:
            shutil.rmtree(folder, ignore_errors=True)
    publish(found, render(found), args.json)
    return 0


def render(found: dict[str, Any]) -> str:
    lines = [
        f"{found['bytes'] / 1e6:,.0f} MB, {found['documents']:,} documents, {found['cores']} cores, "
        f"--memory-limit {found['memory_limit'] / 1e6:,.0f} MB; "
        f"kept {found['kept_bytes'] / 1e6:,.0f} MB"
    ]
    for name, stage in found["stages"].items():
        lines.append(f"  {name:14} {stage['seconds']:8.1f} s {stage['mb_per_s']:8.0f} MB/s")
    lines.append(
        f"  {'all stages':14} {found['seconds']:8.1f} s {found['bytes'] / found['seconds'] / 1e6:8.0f} MB/s, "
        f"{found['cpu_seconds']:,.0f} s of CPU"
    )
    lines.append(f"  peak memory of all processes {found['peak_memory'] / 1e6:,.0f} MB")
    if tokens := found.get("tokenise"):
        lines.append(f"  {'train BPE':14} {tokens['train']:8.1f} s, with a look at every file of the corpus")
        lines.append(
            f"  {'tokenise':14} {tokens['encode']:8.1f} s {tokens['mb_per_s']:8.1f} MB/s, "
            f"{tokens['bytes_per_token']:.2f} bytes a token, "
            f"peak {tokens['peak_memory'] / 1e6:,.0f} MB"
        )
    for kind, result in found["recall"].items():
        lines.append(f"  planted {kind:14} {result['found']:,} of {result['planted']:,} found ({result['recall']:.4f})")
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
