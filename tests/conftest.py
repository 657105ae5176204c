"""What tests of several packages share."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.world import documents
from tinyforge.text import Tokenizer
from tinyforge.text.shards import SEPARATOR, Part, ShardWriter, Source, write_manifest

# A script's background job ignores Ctrl-C, and so do all programs that it starts: also those whose answer is tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_shards() -> Callable[..., None]:
    return _make_shards


def _make_shards(folder: Path, tokenizer: Tokenizer, counts: dict[str, tuple[int, int]], seed: int = 0) -> None:
    """A folder of small shards; counts: training and held-out documents by source."""
    folder.mkdir()
    tokenizer.save(folder / "tokenizer.json")
    sources = []
    for name, (train, val) in counts.items():
        parts = {}
        for split, count in (("train", train), ("val", val)):
            writer = ShardWriter(folder, name, split, tokenizer, shard_tokens=701)
            texts = list(documents(split, count, seed + len(name)))
            for text in texts:
                writer.append(np.array([*tokenizer.encode(text), tokenizer.specials[SEPARATOR]]))
            files = writer.close()
            parts[split] = Part(count, sum(f.tokens for f in files), sum(len(t.encode()) for t in texts), files)
        sources.append(Source(name, "", **parts))
    write_manifest(folder, tokenizer, sources, {})


@pytest.fixture
def write_examples() -> Callable[[Path, Path], None]:
    return _write_examples


def _write_examples(page: Path, folder: Path) -> None:
    """The files that a page of docs/ shows: blocks that begin with a comment of the file's name."""
    shown = re.findall(r"^```\w+\n((?:#|//) (\w+\.(?:py|cu))\n.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    for text, name in shown:
        (folder / name).write_text(text, encoding="utf-8")
