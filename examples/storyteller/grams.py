"""Runs of words, as hashes: which of them a text has from another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tinyforge.data.dedup import Words


def grams_of(texts: Iterable[str], n: int) -> Iterator[np.ndarray]:
    """The hashes of the runs of n words in the texts, as `Words.grams` has them, about a megabyte of text at a time."""
    batch, size = list[str](), 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > 1 << 20:
            yield Words(batch).grams(n)[0]
            batch, size = [], 0
    if batch:
        yield Words(batch).grams(n)[0]


def gram_shares(texts: Sequence[str], n: int, known: np.ndarray) -> np.ndarray:
    """The share of each text's runs of n words whose hashes are among `known`, (D,); 0 for a text without words."""
    grams, bounds = Words(texts).grams(n)
    found = np.concatenate([[0], np.cumsum(np.isin(grams, known))])
    return (found[bounds[1:]] - found[bounds[:-1]]) / np.maximum(np.diff(bounds), 1)
