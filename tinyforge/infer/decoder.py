"""Decoders: caches of some rows, and the pass that extends them by some positions and gives their logits.

`Decoder` is the contract; `ReferenceDecoder` runs the model's own ops with the model's own caches: every model, every
backend, slow. The fused decoders are checked against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.nanoeuler.model import NanoEuler
from tinyforge.infer.sampling import Sampling
from tinyforge.rng import Stream


class Drawn(NamedTuple):
    """Tokens drawn by a decoder itself: ids (rows, m), and log p of each under the model where asked for.

    passes: where the decoder speculates, how many of the m tokens each pass gave; else a pass gives one.
    """

    ids: np.ndarray
    logprobs: np.ndarray | None
    passes: tuple[int, ...] | None = None


class Decoder(ABC):
    """Caches of `batch` rows, each of up to `capacity` positions; `lengths[i]` of row i hold tokens.

    A pass of `step` takes the next n tokens of every row and returns logits for each of them. All results are in host
    memory. Rows that have ended are kept out of the way by rewinding them to 0. The weights are those of the model when
    the decoder was made: make a new one after training. Tokens are trusted to be below the vocabulary's size.
    """

    def __init__(self, model: NanoEuler, batch: int = 1, capacity: int | None = None) -> None:
        self.config = model.config
        self.batch = batch
        self.capacity = model.config.context if capacity is None else capacity
        if not 1 <= self.capacity <= model.config.context:
            raise ValueError(f"Decoder: capacity {self.capacity}, wants 1 to {model.config.context}, the context")
        self.lengths = [0] * batch
        self.most_drafts = model.config.mtp_heads - 1
        """Drafts that a pass can check."""

    @abstractmethod
    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Append any number of tokens to a row; no logits."""

    @abstractmethod
    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        """Append tokens: (batch, n) to the rows; returns logits (batch, n, heads, V), of heads 0 .. heads - 1.

        The array belongs to the decoder: it is good until the next call.
        """

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget the positions of row i from lengths[i] on. Nothing is copied."""
        for row, (new, old) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not 0 <= new <= old:
                raise ValueError(f"rewind: row {row} holds {old} positions, cannot go to {new}")
        self.lengths = list(lengths)

    def draws(self, sampling: Sampling) -> bool:
        """Whether `stream` is offered, for this kind of sampling."""
        return False

    def stream(
        self, tokens: Sequence[int], sampling: Sampling, streams: Sequence[Stream], count: int
    ) -> Iterator[Drawn]:
        """For a decoder that draws where its cache lies: blocks of up to `count` new tokens for every row, without a
        wait per token.

        tokens: the last token of each row, not yet in the cache. streams[i] draws the tokens of row i: from the same
        distributions as `sampling.draw`, not necessarily the same tokens, and the same ones every time. A decoder of
        one row may use drafts, as many as sampling allows at most. The caller stops when it likes, and rewinds.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no tokens itself; draw them from the logits of step")

    def _check_room(self, rows: Iterable[int], count: int) -> None:
        full = next((row for row in rows if self.lengths[row] + count > self.capacity), None)
        if full is not None:
            raise ValueError(
                f"Decoder: row {full} holds {self.lengths[full]} of {self.capacity} positions, no room for {count} more"
            )


class ReferenceDecoder(Decoder):
    """`NanoEuler.hidden`, row by row, with attention reading the cache: the reference for other decoders."""

    def __init__(self, model: NanoEuler, batch: int = 1, capacity: int | None = None) -> None:
        super().__init__(model, batch, capacity)
        self.model = model
        c = model.config
        shape = (c.layers, batch, self.capacity, c.kv_heads, c.head_dim)
        self.keys, self.values = model.backend.empty(shape), model.backend.empty(shape)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        if len(tokens):
            self._extend(row, tokens)

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        model, parts = self.model, []
        self._check_room(range(self.batch), len(tokens[0]))
        for row, new in enumerate(tokens):
            h = self._extend(row, new)
            logits = [model.backend.to_numpy(model.heads.logits(h, k)) for k in range(heads)]
            parts.append(np.stack(logits, axis=2))
        return np.concatenate(parts).astype(model.backend.master_dtype, copy=False)

    def _extend(self, row: int, tokens: Sequence[int]) -> Any:
        """Append to one row; returns the final-normed stream of the new positions, (1, n, C)."""
        model, c, past = self.model, self.config, self.lengths[row]
        ids = model.backend.asarray(np.asarray([tokens]))
        end = past + ids.shape[1]

        def attend(layer: int, qkv: Any) -> Any:
            keys, values = (cache[layer, row : row + 1, :end] for cache in (self.keys, self.values))
            keys[:, past:] = qkv[:, :, c.heads : c.heads + c.kv_heads]
            values[:, past:] = qkv[:, :, c.heads + c.kv_heads :]
            return model.blocks[layer].attention.decode(qkv[:, :, : c.heads], keys, values)

        h = model.hidden(ids, offset=past, attend=attend)
        self.lengths[row] = end
        return h
