"""Training text for the recipes: the user's files, or the built-in world."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from tinyforge.data.local import read_documents
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.files import sha256_of
from tinyforge.report import count_of

WORLD = "built-in world"
BUILT_IN_DOCUMENTS = 40_000
HELD_OUT_DOCUMENTS = 1_000


def input_hashes(paths: Sequence[str]) -> list[str]:
    """The SHA-256 of every file in --data, folders included. A checkpoint keeps them, so that the model is not
    evaluated on its training data."""
    return [sha256_of(file) for file in _files(paths)]


def _files(paths: Sequence[str]) -> list[Path]:
    files = [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    return [file for file in files if file.is_file()]


def built_in_training(seed: int) -> list[str]:
    return list(documents("train", BUILT_IN_DOCUMENTS, seed))


def built_in_held_out(seed: int) -> list[str]:
    return list(documents("val", HELD_OUT_DOCUMENTS, seed))


def documents_of(paths: Sequence[str], encoding: str, seed: int) -> tuple[list[str], list[str], int]:
    """Training and held-out documents of --data, whose last tenth is held out, or else of the built-in world; and the
    number of documents, of which one may be cut into a part of both."""
    if not paths:
        print(f"corpus: built in (no --data given), {BUILT_IN_DOCUMENTS:,} documents of a small world")
        world = built_in_training(seed), built_in_held_out(seed)
        return *world, sum(map(len, world))
    files = [os.path.abspath(file) for file in _files(paths)]
    if twice := next((file for file, other in pairwise(sorted(files)) if file == other), None):
        raise UserError(f"--data: {twice} is given twice: its text would be learned and held out; name it once")
    found = read_documents(paths, encoding)
    # The cut is a position in the joined text, so that a single large file is split too.
    remaining = int(sum(map(len, found)) * 0.9)
    training, held_out = [], []
    for text in found:
        cut = min(max(remaining, 0), len(text))
        remaining -= len(text)
        training += [text[:cut]] if cut else []
        held_out += [text[cut:]] if cut < len(text) else []
    print(f"corpus: {count_of(len(found), 'document')} from {', '.join(paths)}; the last tenth of the text is held out")
    return training, held_out, len(found)
