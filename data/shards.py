"""Tokenise a corpus folder into token shards: the last step before pretraining.

    python -m data.shards --corpus corpus --out shards                       trains a tokenizer of 4096 ids
    python -m data.shards --corpus corpus --out shards --tokenizer FILE      or uses an existing one
    python -m data.shards --corpus corpus --out shards --ray 10.0.0.1:6379   encodes on the machines of a Ray cluster
    python recipes/pretrain.py --data shards

Every document of corpus/train and corpus/val becomes its ids and <|endoftext|>, in the order of the corpus. The same
command resumes a run that was stopped, even by kill -9: complete shards are kept, and the result has the same bytes as
that of an uninterrupted run. docs/shards.md describes the format.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyforge.backends.workers import cores
from tinyforge.data.cluster import Nodes, check_address, open_nodes
from tinyforge.data.encode import ENCODED, encode_file, load_with_separator, read_texts, unread
from tinyforge.data.files import check_file, locked
from tinyforge.data.source import MANIFEST as SOURCE_MANIFEST
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import LOCK, parse_json, read_json, sha256_of
from tinyforge.invocation import as_typed
from tinyforge.report import count_of
from tinyforge.shards import (
    MANIFEST,
    SHARD_TOKENS,
    SPLITS,
    TOKENIZER,
    Part,
    ShardFile,
    Shards,
    ShardWriter,
    Source,
    TokenSequence,
    bytes_per_id,
    describe,
    open_shards,
    read_header,
    separator_of,
    shard_name,
    write_json,
    write_manifest,
)
from tinyforge.tokenizers import TextTokenizer, Tokenizer
from tinyforge.tokenizers.bpe import TooLittleText

CORPUS = "corpus.json"
UNFINISHED = ".unfinished.json"  # the settings of an unfinished run, which must be the same to continue it
VOCAB_SIZE = 4096
SAMPLE_BYTES = 100_000_000
SCAN = 1 << 24  # ids processed at a time


Encode = Callable[[Sequence[Path], int], Iterator[npt.NDArray[Any]]]
"""(files, texts to skip) -> the ids of each text, in order."""


# --- the corpus -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorpusSource:
    """A source of a corpus folder. files, documents, bytes: by split."""

    name: str
    licence: str
    files: dict[str, list[Path]]
    documents: dict[str, int]
    bytes: dict[str, int]
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Corpus:
    """A corpus folder whose files match its corpus.json. sha256: of corpus.json."""

    sources: list[CorpusSource]
    sha256: str


def read_corpus(folder: Path) -> Corpus:
    """Read corpus.json, and check the size and SHA-256 of the parquet files that it lists.

    Raises UserError for an incomplete folder, another format, and a file that is missing, altered or outside.
    """
    path = folder / CORPUS
    remedy = "make the corpus again with python -m data.corpus"
    try:
        raw = path.read_bytes()
    except OSError as error:
        if (folder / SOURCE_MANIFEST).exists():
            own = shlex.quote(str(folder))
            raise UserError(
                f"{folder} is a source; make a corpus of it: python -m data.corpus {own} --out corpus"
            ) from None
        raise UserError(
            f"{path}: cannot be read ({error.strerror}), so the corpus is incomplete; {remedy}, or give another "
            "--corpus"
        ) from None
    try:
        content = parse_json(raw, path, "the corpus", fix=remedy, can_be_written=True)
        if (content["format"], content["version"]) != ("tinyforge-corpus", 1):
            raise UserError(
                f"{path}: got format {content['format']!r} version {content['version']!r}, expected "
                f"'tinyforge-corpus' version 1; {remedy}"
            )
        listed = {str(f["file"]): (int(f["bytes"]), str(f["sha256"])) for f in content["files"]}
        sources = [_corpus_source(folder, entry, listed) for entry in content["sources"]]
        if len({source.name for source in sources}) < len(sources):
            raise ValueError("two sources with one name")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not as data.corpus writes it ({type(error).__name__}: {error}); {remedy}") from None

    def check(file: Path) -> None:
        check_file(file, *listed[file.relative_to(folder).as_posix()], CORPUS, remedy)

    files = [file for source in sources for split in SPLITS for file in source.files[split]]
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(check, files))
    if not any(source.documents["train"] for source in sources):
        raise UserError(f"{path}: no documents to train on; {remedy} from more text")
    return Corpus(sources, sha256_of(path))


def _corpus_source(folder: Path, entry: dict[str, Any], listed: dict[str, tuple[int, str]]) -> CorpusSource:
    name = str(entry["name"])
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise ValueError(f"source name {name!r} expects letters, digits, '_', '.' and '-'")
    # The pattern includes the number, so that "web" does not match the files of "web-new".
    files = {s: sorted(f for f in listed if re.fullmatch(rf"{s}/{re.escape(name)}-\d+\.parquet", f)) for s in SPLITS}
    return CorpusSource(
        name,
        str(entry["licence"]),
        {s: [folder / file for file in files[s]] for s in SPLITS},
        {s: int(entry[s]["documents"]) for s in SPLITS},
        {s: int(entry[s]["bytes"]) for s in SPLITS},
        tuple(map(str, entry.get("inputs", ()))),
    )


# --- from texts to shards ---------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """The shards, the bytes of text that this run encoded, and its seconds."""

    shards: Shards
    bytes: int
    seconds: float


def make_shards(
    corpus: Path,
    out: Path,
    vocab_size: int = VOCAB_SIZE,
    tokenizer: Path | None = None,
    shard_tokens: int = SHARD_TOKENS,
    sample_bytes: int = SAMPLE_BYTES,
    workers: int | None = None,
    progress: bool = False,
    at_most: bool = False,
    single_digits: bool = False,
    ray: str | None = None,
) -> Made:
    """Write the token shards of a corpus folder; continues an interrupted run with the same settings.

    tokenizer: a file to use; without one a tokenizer of `vocab_size` ids is trained on all training text, or if that is
    larger on a sample of about `sample_bytes`, chosen by the hash of each document's id. at_most: where the text is too
    small for so many ids, take as many as it can give. single_digits: no id that is trained holds more than one digit.
    workers: processes that encode (None: all cores); the result does not depend on it. ray: address of a Ray cluster,
    whose machines encode, or "local". Raises UserError for bad input, a folder with other contents or that another run
    writes to, and a full disk.
    """
    if workers is not None and ray:
        raise UserError("--workers counts processes of this machine, and with --ray the cluster says how many; drop it")
    if ray:
        check_address(ray)
    given = None if tokenizer is None else load_with_separator(tokenizer)
    found = read_corpus(corpus)
    options = {"at_most": at_most, "single_digits": single_digits}
    trained = {"vocab_size": vocab_size, "sample_bytes": sample_bytes} | {k: True for k, on in options.items() if on}
    settings = {
        "corpus_sha256": found.sha256,
        "shard_tokens": shard_tokens,
        "tokenizer": trained if given is None else given.hash(),
    }
    with locked(out):
        if (out / MANIFEST).exists():
            _check_settings(out / MANIFEST, settings)
            (out / UNFINISHED).unlink(missing_ok=True)  # left by a kill between the two writes
            return Made(open_shards([out], progress), 0, 0.0)
        _begin(out, settings)
        if given is None and (out / TOKENIZER).exists():
            chosen = load_with_separator(out / TOKENIZER)
        else:
            chosen = given or _train(found, vocab_size, sample_bytes, at_most, single_digits, workers, progress)
            chosen.save(out / TOKENIZER)
        from tqdm import tqdm

        start = time.perf_counter()
        total = sum(source.bytes[split] for source in found.sources for split in SPLITS)
        with (
            open_nodes(ray, out.absolute(), [corpus.absolute()]) as nodes,
            tqdm(total=total, desc="encoding", unit="B", unit_scale=True, disable=not progress) as bar,
        ):
            if nodes:
                encode: Encode = partial(_encode_on, nodes, out.absolute(), chosen.hash())
            else:
                encode = partial(_encode_here, chosen, workers)
            sources, encoded = [], 0
            for source in found.sources:
                parts = {}
                for split in SPLITS:
                    parts[split], size = _encode(source, split, out, chosen, shard_tokens, encode, bar)
                    encoded += size
                sources.append(Source(source.name, source.licence, **parts, inputs=source.inputs))
        write_manifest(out, chosen, sources, settings)
        (out / UNFINISHED).unlink()
        return Made(Shards([out]), encoded, time.perf_counter() - start)


def _begin(out: Path, settings: dict[str, Any]) -> None:
    """Remove half-written files of a killed run; refuse a folder with other contents.

    Settings may change as long as neither a tokenizer nor a shard was written.
    """
    written = [path for path in out.iterdir() if path.name not in (LOCK, UNFINISHED)]
    written = [path for path in written if not path.name.startswith((".partial-", ENCODED))]
    if (out / UNFINISHED).exists():
        if written:
            _check_settings(out / UNFINISHED, settings)
    elif written:
        raise UserError(f"--out: {out} has other files and no unfinished shards; choose another folder")
    for begun in (".partial-*", f"{ENCODED}*"):
        for stale in out.glob(begun):
            stale.unlink()
    write_json(out / UNFINISHED, {"settings": settings})


def _check_settings(path: Path, settings: dict[str, Any]) -> None:
    try:
        there = dict(read_json(path, "the settings")["settings"])
    except (UserError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove the folder {path.parent} and run again") from None
    for key, value in settings.items():
        if there.get(key) != value:
            raise UserError(
                f"--out: {path.parent} has shards with {key} {there.get(key)!r}, expected {value!r}; give the "
                "same settings, or another --out"
            )


def _train(
    corpus: Corpus,
    vocab_size: int,
    sample_bytes: int,
    at_most: bool,
    single_digits: bool,
    workers: int | None,
    progress: bool,
) -> Tokenizer:
    total = sum(source.bytes["train"] for source in corpus.sources)
    share = min(1.0, sample_bytes / max(1, total))
    below = None if share == 1.0 else f"{int(share * 16**8):08x}"
    texts = (text for source in corpus.sources for text in read_texts(source.files["train"], below=below))
    first = next(texts, None)
    if first is None:
        raise UserError(f"--sample-bytes: {sample_bytes:,} of {total:,} bytes contain no whole document; give more")
    train = partial(Tokenizer.train, progress=progress, workers=workers, single_digits=single_digits)
    try:
        return train(chain([first], texts), vocab_size, exact=not at_most)
    except TooLittleText as error:
        raise UserError(f"{error.fault}; give more text, or pass --at-most, or --vocab-size {error.size}") from None


def _encode(
    source: CorpusSource, split: str, out: Path, tokenizer: TextTokenizer, shard_tokens: int, encode: Encode, bar: Any
) -> tuple[Part, int]:
    """Encode one split of one source, resuming an earlier run; returns it and the bytes of text that were encoded."""
    end = np.array([tokenizer.specials[separator_of(tokenizer)]], np.dtype(f"u{bytes_per_id(tokenizer.vocab_size)}"))
    kept, complete = _kept_shards(out, source.name, split, tokenizer, shard_tokens)
    documents, size, begun = _count([out / file.file for file in kept], tokenizer)
    before = size
    bar.update(size)
    writer = ShardWriter(out, source.name, split, tokenizer, shard_tokens, kept)
    if not complete:
        for ids in encode(source.files[split], documents):
            # The first ids of the document at the boundary are already in the files that were kept.
            ids = np.concatenate([ids, end])[begun:]
            writer.append(ids)
            length = int(tokenizer.byte_lengths[ids].sum())
            documents, size, begun = documents + 1, size + length, 0
            bar.update(length)
    files = writer.close()
    if documents != source.documents[split]:
        raise UserError(
            f"{source.name}: got {documents:,} documents of {split}, {CORPUS} says {source.documents[split]:,}; make "
            f"the corpus again with python -m data.corpus, and remove {out}"
        )
    return Part(documents, sum(f.tokens for f in files), size, files), size - before


def _encode_here(
    tokenizer: TextTokenizer, workers: int | None, files: Sequence[Path], skip: int
) -> Iterator[npt.NDArray[Any]]:
    return tokenizer.encode_many(read_texts(files, skip), workers=workers)


def _encode_on(nodes: Nodes, out: Path, tokenizer: str, files: Sequence[Path], skip: int) -> Iterator[npt.NDArray[Any]]:
    """The ids of each document, in order. Each file is encoded by one task, which writes them to a file of its own."""
    tasks = [(file.absolute(), begun, out, tokenizer) for file, begun in unread(files, skip)]
    for made in nodes.map_in_order(encode_file, tasks):
        with np.load(made, mmap_mode=None, allow_pickle=False) as arrays:
            ids, ends = arrays["ids"], arrays["ends"]
        made.unlink()
        yield from np.split(ids, ends[:-1])


def _kept_shards(
    out: Path, source: str, split: str, tokenizer: TextTokenizer, shard_tokens: int
) -> tuple[list[ShardFile], bool]:
    """The complete shards of an earlier run, and whether there are no more: the last shard is shorter than the
    others."""
    kept: list[ShardFile] = []
    complete = False
    while not complete and (path := out / shard_name(source, split, len(kept))).exists():
        try:
            header = read_header(path)
        except UserError:
            break
        expected = (tokenizer.hash(), sum(file.tokens for file in kept))
        if (header.tokenizer_hash, header.first) != expected or header.tokens > shard_tokens:
            break
        kept.append(describe(path))
        complete = header.tokens < shard_tokens
    names = {file.file for file in kept}
    for path in out.iterdir():
        if path.name not in names and re.fullmatch(rf"{re.escape(source)}-{split}-\d+\.bin", path.name):
            path.unlink()
    return kept, complete


def _count(paths: Sequence[Path], tokenizer: TextTokenizer) -> tuple[int, int, int]:
    """Of complete shards: documents that end in them, bytes of text, ids of the unfinished document."""
    ids = TokenSequence(paths)
    end = tokenizer.specials[separator_of(tokenizer)]
    documents = size = after = 0
    for start in range(0, len(ids), SCAN):
        chunk = ids[start : start + SCAN]
        ends = np.flatnonzero(chunk == end)
        documents += len(ends)
        size += int(tokenizer.byte_lengths[chunk].sum())
        after = len(chunk) - 1 - int(ends[-1]) if len(ends) else after + len(chunk)
    return documents, size, after


# --- the command ------------------------------------------------------------------------------------------------------


def table(shards: Shards) -> str:
    """Documents, tokens and bytes per token of every source and split."""
    rows = [f"{'source':<20} {'split':<6} {'documents':>12} {'tokens':>15} {'bytes of text':>17} {'bytes/token':>11}"]
    for source in shards.sources.values():
        for split in SPLITS:
            part = getattr(source, split)
            ratio = f"{part.bytes / part.tokens:.3f}" if part.tokens else "-"
            rows.append(
                f"{source.name:<20} {split:<6} {part.documents:>12,} {part.tokens:>15,} {part.bytes:>17,} {ratio:>11}"
            )
    return "\n".join(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m data.shards", description=__doc__)
    parser.flag("--corpus", Path, "a folder made by data.corpus", required=True, metavar="DIR")
    parser.flag("--out", Path, "folder of the shards", required=True, metavar="DIR")
    parser.flag("--vocab-size", int, f"ids of the tokenizer to train (default: {VOCAB_SIZE})", metavar="N")
    parser.flag("--at-most", False, "accept fewer ids if there is too little text")
    parser.flag(
        "--single-digits",
        False,
        "train a tokenizer in which no id holds more than one digit; makes sums easier to learn",
    )
    parser.flag("--tokenizer", Path, "tokenizer.json to use instead of training one", metavar="FILE")
    parser.flag("--sample-bytes", SAMPLE_BYTES, "bytes of text to train the tokenizer on, at most", 1, metavar="N")
    parser.flag("--shard-tokens", SHARD_TOKENS, "ids per file", 1, metavar="N")
    parser.flag("--workers", int, "processes that encode (default: one per core)", 1, metavar="N")
    parser.flag(
        "--ray", str, "encode on the Ray cluster at HOST:PORT; local starts Ray on this machine", metavar="ADDRESS"
    )
    args = parser.parse_args(argv)
    if args.tokenizer and (args.vocab_size or args.single_digits):
        flag = "--vocab-size" if args.vocab_size else "--single-digits"
        raise UserError(f"{flag} is for training a tokenizer, and --tokenizer names one; give one or the other")
    args.vocab_size = args.vocab_size or VOCAB_SIZE
    made = make_shards(**vars(args), progress=sys.stderr.isatty())
    print(table(made.shards))
    if made.bytes:
        rate = made.bytes / made.seconds / 1e6
        print(
            f"encoded {made.bytes:,} bytes in {made.seconds:.1f} s, {rate:.1f} MB/s "
            + (f"on {args.ray}" if args.ray else f"with {count_of(args.workers or cores(), 'worker')}")
        )
    else:
        print(f"{args.out}: these shards were already complete; every file was checked")
    print(as_typed(f"next: python recipes/pretrain.py --data {shlex.quote(str(args.out))}"))
    return 0


if __name__ == "__main__":
    run_command(main)
