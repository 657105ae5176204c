"""Embeddings of texts: one vector for each."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.infer.decoder_numpy import NumpyDecoder

SLICE = 64
"""Positions of a pass of a decoder. Between passes the caller may do other work."""
POOLING = Path("1_Pooling") / "config.json"
"""Where sentence-transformers says how a model's states become a vector."""


def is_encoder(model: Any) -> bool:
    """Whether a model gives vectors of texts, and no text."""
    return hasattr(model, "encode") and not hasattr(model, "make_cache")


def takes_first(folder: Path) -> bool:
    """Whether the model in a folder is made for the state of the first token, not for the mean of all. UserError for
    another way."""
    if not (folder / POOLING).is_file():
        return False
    content = read_json(folder / POOLING, "the pooling's configuration")
    modes = [key for key, given in content.items() if key.startswith("pooling_mode_") and given is True]
    if modes not in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        raise UserError(f"{folder / POOLING}: {', '.join(modes) or 'no mode'}; supported: the mean, or the first token")
    return modes == ["pooling_mode_cls_token"]


def embeddings(
    model: Any, texts: Sequence[Sequence[int]], first: bool = False, decoder: Any = None
) -> Generator[None, None, np.ndarray]:
    """The mean of each text's final hidden states, scaled to length 1: returns (texts, C) float32.

    v = m / |m|, m = 1/T sum_t h_t; with first, m = h_1. Yields after each text of an encoder, and after each pass of a
    decoder over SLICE positions. texts: token ids, at least one each, and at most the model's context; an encoder's
    with [CLS] and [SEP]. decoder: the model's own, where there is one; a `NumpyDecoder` is faster than the model.
    """
    if isinstance(decoder, NumpyDecoder):
        model = decoder
    found = []
    for ids in texts:
        total = yield from (_encoded if is_encoder(model) else _decoded)(model, ids, first)
        found.append(total / max(float(np.linalg.norm(total)), 1e-30))
    return np.stack(found).astype(np.float32)


def _encoded(model: Any, ids: Sequence[int], first: bool) -> Generator[None, None, np.ndarray]:
    h = model.backend.to_numpy(model.encode(model.backend.asarray(np.asarray([ids], np.int32))))[0]
    yield
    vector: np.ndarray = h.astype(np.float64)[: 1 if first else None].sum(axis=0)
    return vector


def _decoded(model: Any, ids: Sequence[int], first: bool) -> Generator[None, None, np.ndarray]:
    read = model.alone(len(ids)).states if isinstance(model, NumpyDecoder) else _Reader(model, len(ids)).states
    total = np.zeros(())
    for start in range(0, len(ids), SLICE):
        total = total + read(ids[start : start + SLICE]).astype(np.float64).sum(axis=0)
        yield
    return total


class _Reader:
    """The final hidden states of a text by the model's own ops, as `NumpyDecoder.states` gives them."""

    def __init__(self, model: Any, capacity: int) -> None:
        self.model, self.cache = model, model.make_cache(1, capacity)

    def states(self, ids: Sequence[int]) -> np.ndarray:
        backend = self.model.backend
        h = self.model.hidden(backend.asarray(np.asarray([ids], np.int32)), cache=self.cache)
        found: np.ndarray = backend.to_numpy(h)[0]
        return found
