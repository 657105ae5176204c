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

import argparse
import multiprocessing
import random
import re
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import duckdb
import numpy as np

from bench import harness
from tinyforge.backends.workers import cores
from tinyforge.data.corpus import CATALOGUE, SPLITS, Settings, build_corpus
from tinyforge.data.dedup import candidate_probability
from tinyforge.data.files import parse_bytes
from tinyforge.data.gutenberg import clean
from tinyforge.data.shards import make_shards
from tinyforge.data.source import Document, SourceWriter
from tinyforge.errors import UserError, run_command

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
        raise UserError(
            f"--data {folder}: expected gutenberg.zip and web/*.parquet in it; name the folder that has them"
        )
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


def make_sources(data: Path, folder: Path, least: int) -> list[Planted]:
    """The sources `books`, `web` and `planted` in `folder`: at least `least` bytes in all."""
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
        while size < least:
            texts = rewriter.copy(copy)
            for (id_, _), text, writer in zip(
                (*books, *pages), texts, [of_books] * len(books) + [of_web] * len(pages), strict=True
            ):
                if size < least or copy == 0:
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


def build(folder: Path, memory_limit: int, workers: int | None) -> dict[str, float]:
    """Seconds of each stage."""
    settings = Settings(val_shares=(("books", 0.03),))
    sources = [folder / name for name in ("books", "web", "planted")]
    with redirect_stdout(sys.stderr):  # stdout is for the table, or the JSON
        out = folder / "corpus"
        return build_corpus(sources, out, settings, workers=workers, memory_limit=memory_limit, show=True)


def tokenise(folder: Path, workers: int | None) -> dict[str, float]:
    """Make the corpus's token shards: learn 4096 tokens from a sample of 100 MB, encode all of it."""
    begin = time.perf_counter()
    made = make_shards(folder / "corpus", folder / "shards", workers=workers)
    seconds = time.perf_counter() - begin
    tokens = sum(getattr(source, split).tokens for source in made.shards.sources.values() for split in SPLITS)
    return {"train": seconds - made.seconds, "encode": made.seconds, "tokens": tokens}


def _in_child(results: Any, function: Callable[..., Any], *args: Any) -> None:
    results.put(function(*args))


def in_child(function: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, float]]:
    """The function's result; the peak memory and the CPU seconds of the process that ran it and of its children."""
    import resource  # not on Windows

    before, context = resource.getrusage(resource.RUSAGE_CHILDREN), multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_in_child, args=(results, function, *args))
    process.start()
    assert process.pid is not None
    peak = 0
    while process.is_alive():
        peak = max(peak, memory_of(process.pid))
        process.join(0.1)
    if process.exitcode:
        raise UserError(f"{function.__name__} ended with status {process.exitcode}; its message is above")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return results.get(), {"peak_memory": peak, "cpu_seconds": cpu}


def recall(corpus: Path, planted: list[Planted]) -> dict[str, Any]:
    """The share of the planted duplicates that were dropped as such."""
    with duckdb.connect(str(corpus / CATALOGUE), read_only=True) as catalogue:
        dropped = dict(catalogue.execute("SELECT id, dropped FROM documents WHERE source = 'planted'").fetchall())
        left = "SELECT id FROM documents WHERE source = 'web'"
        left += " AND (dropped IS NULL OR dropped NOT IN (SELECT name FROM filters))"
        standing = {id_ for (id_,) in catalogue.execute(left).fetchall()}
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


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    memory_limit = parse_bytes(args.memory_limit, "--memory-limit")
    begin = time.perf_counter()
    planted = make_sources(args.data, folder, args.bytes)
    print(f"made the text in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    seconds, used = in_child(build, folder, memory_limit, args.workers)
    with duckdb.connect(str(folder / "corpus" / CATALOGUE), read_only=True) as catalogue:
        [(documents, size, kept)] = catalogue.execute(
            "SELECT count(*), sum(bytes)::BIGINT, coalesce(sum(bytes) FILTER (dropped IS NULL), 0)::BIGINT "
            "FROM documents"
        ).fetchall()
    found: dict[str, Any] = {"bytes": size, "documents": documents, "kept_bytes": kept, "cores": cores()}
    found |= {"memory_limit": memory_limit, **used, "seconds": sum(seconds.values()), "settings": asdict(Settings())}
    found["stages"] = {name: {"seconds": s, "mb_per_s": size / s / 1e6} for name, s in seconds.items()}
    found["recall"] = recall(folder / "corpus", planted)
    found["candidates_at_threshold"] = candidate_probability(0.8, 20, 6)
    if args.tokens:
        timed, used = in_child(tokenise, folder, args.workers)
        rates = {"mb_per_s": kept / timed["encode"] / 1e6, "bytes_per_token": kept / timed["tokens"]}
        found["tokenise"] = {**timed, **rates, **used}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, "")
    p.text("--data", type=Path, required=True, help="folder with gutenberg.zip and web/*.parquet")
    p.number("--bytes", 10**9, "of text to make")
    p.text("--memory-limit", "1GB", "of the making of the corpus")
    p.shared(workers={"help": "processes (default: one a core)"})
    p.text("--work", type=Path, help="folder for the text and the corpus, kept (default: a temporary one)")
    p.add_argument("--no-tokens", dest="tokens", action="store_false", help="leave out the tokenizer")
    args = p.parse(argv)
    if not Path("/proc/self/smaps_rollup").exists():
        raise UserError("peak memory is read from /proc/PID/smaps_rollup, which this system has not; run on Linux")
    with TemporaryDirectory(prefix="corpus-bench-") as folder:
        found = measure(args, args.work or Path(folder))
    return harness.publish(found, table(found), args)


def table(found: dict[str, Any]) -> list[str]:
    kept = f"kept {found['kept_bytes'] / 1e6:,.0f} MB"
    lines = [
        f"{found['bytes'] / 1e6:,.0f} MB, {found['documents']:,} documents, {found['cores']} cores, "
        f"--memory-limit {found['memory_limit'] / 1e6:,.0f} MB; {kept}"
    ]
    rate = found["bytes"] / found["seconds"] / 1e6
    stages = found["stages"] | {"all stages": {"seconds": found["seconds"], "mb_per_s": rate}}
    lines += harness.rows("seconds:.1f | mb_per_s=MB/s:.0f", stages)
    cpu, peak = f"{found['cpu_seconds']:,.0f} s of CPU", found["peak_memory"] / 1e6
    lines.append(f"{cpu}; peak memory of all processes {peak:,.0f} MB")
    if tokens := found.get("tokenise"):
        rates = f"{tokens['mb_per_s']:.1f} MB/s, {tokens['bytes_per_token']:.2f} bytes a token"
        lines += [
            f"train BPE {tokens['train']:.1f} s, including one read of every file of the corpus",
            f"tokenise {tokens['encode']:.1f} s, {rates}, peak {tokens['peak_memory'] / 1e6:,.0f} MB",
        ]
    return lines + harness.rows("found:, | planted:, | recall:.4f", found["recall"], "planted duplicates")


if __name__ == "__main__":
    run_command(main)
