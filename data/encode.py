"""Read and encode the texts of a corpus's parquet files, on this machine or another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from tinyforge.data.files import written_whole
from tinyforge.data.parquet import connect, quoted, reading, rows_of, scan
from tinyforge.errors import UserError, errors_in
from tinyforge.shards import TOKENIZER, separator_of
from tinyforge.tokenizers import TextTokenizer, load_tokenizer

ENCODED = ".encoded-"  # files that a task on a cluster leaves for the process that writes the shards
ROWS = 64  # documents fetched at a time


def read_texts(files: Sequence[Path], skip: int = 0, below: str | None = None) -> Iterator[str]:
    """The texts of parquet files in order, without the first `skip`; `below`: only where md5(id) is less.

    Rows are streamed on one thread, which keeps their order: the memory needed is that of one row group.
    """
    where = f"WHERE md5(id) < {quoted(below)}" if below else ""
    for file, begun in unread(files, skip):
        with reading(file, "run python -m data.corpus again"), connect(threads=1) as connection:
            connection.execute(f"SELECT text FROM {scan(file)} {where} OFFSET {begun}")
            while batch := connection.fetchmany(ROWS):
                yield from (text for (text,) in batch)


def unread(files: Sequence[Path], skip: int) -> Iterator[tuple[Path, int]]:
    """The files after the first `skip` texts, each with how many of its texts to skip."""
    for file in files:
        with reading(file, "run python -m data.corpus again"):
            rows = rows_of(file)
        if skip < rows:
            yield file, skip
        skip = max(0, skip - rows)


def load_with_separator(path: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(path)
    with errors_in(path):
        separator_of(tokenizer)
    return tokenizer


def encode_file(file: Path, skip: int, out: Path, tokenizer: str) -> Path:
    """Encode the texts of a parquet file with the tokenizer in `out`, to an npz with `ids` and each text's end,
    `ends`."""
    encoded = list(_tokenizer(out / TOKENIZER, tokenizer).encode_many(read_texts([file], skip), workers=1))
    target = out / f"{ENCODED}{file.stem}.npz"
    with written_whole(target) as beside, open(beside, "wb") as handle:
        np.savez(handle, ids=np.concatenate(encoded), ends=np.cumsum([len(ids) for ids in encoded]))
    return target


@lru_cache(maxsize=1)
def _tokenizer(path: Path, expected: str) -> TextTokenizer:
    tokenizer = load_with_separator(path)
    if tokenizer.hash() != expected:
        raise UserError(f"{path}: is not the tokenizer of this run; look for another run that writes there")
    return tokenizer
