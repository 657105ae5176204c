"""Decoders: caches of some rows, and the pass that extends them by some positions and gives their logits.

`Decoder` is the contract. `ReferenceDecoder` runs the model's own ops with the model's own caches: every model, every
backend, slow. The fused decoders, which compute one shape of model fast, are checked against it. `make_decoder`
(choose.py) takes the fastest that fits. docs/inference.md has the reasons and the measurements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.rng import Stream


class Drawn(NamedTuple):
    """Tokens drawn by a decoder itself: ids (rows, m), and log p of each under the model where asked for.

    passes: where the decoder speculates, how many of the m tokens each pass gave; else a pass gives one.
    """

    ids: np.ndarray
    logprobs: np.ndarray | None
    passes: tuple[int, ...] | None = None


class Start(NamedTuple):
    """A row of `Decoder.queue`: the tokens that it takes first, one a pass, and how it draws those that follow; the
    first of them with the next number of the stream."""

    tokens: Sequence[int]
    sampling: Sampling
    stream: Stream


class Decoder(ABC):
    """Caches of `batch` rows, each of up to `capacity` positions; `lengths[i]` of row i hold tokens.

    A pass of `step` takes the next n tokens of every row and returns logits for each of them. All results are in host
    memory. Rows that have ended are kept out of the way by rewinding them to 0. The weights are those of the model when
    the decoder was made: make a new one after training. Tokens are trusted to be below the vocabulary's size.

    can_rewind: whether a row can go back to any length, as a cache of keys and values can; else it goes back to 0 only.
    can_save: whether parts of a row's cache can be put into another row's. most_drafts: drafts that a pass can check.
    piece: positions of a prompt that a scheduler computes together.
    """

    can_rewind = True
    can_save = False
    piece = 32

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None) -> None:
        check_causal_lm(model)
        self.config = model.config
        self.prediction_heads = model.prediction_heads
        self.batch = batch
        self.capacity = model.config.context if capacity is None else capacity
        if not 1 <= self.capacity <= model.config.context:
            raise ValueError(f"Decoder: capacity {self.capacity}, wants 1 to {model.config.context}, the context")
        self.lengths = [0] * batch
        self.most_drafts = model.prediction_heads - 1

    @abstractmethod
    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Append any number of tokens to a row; no logits."""

    def repeat(self, row: int, source: int) -> bool:
        """Give an empty row what another one holds: several replies to one prompt. Whether the decoder can."""
        return False

    @abstractmethod
    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        """Append tokens: (batch, n) to the rows; returns logits (batch, n, heads, V), of heads 0 .. heads - 1.

        The array belongs to the decoder: it is good until the next call.
        """

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        """As `step` for some of the rows, each once and in increasing order: tokens (len(rows), n) to logits
        (len(rows), n, heads, V). What a row gives does not depend on which others take part, to the last bit.

        Here: a pass over all rows, of which the others are set back. They must have room for it.
        """
        lengths, all_tokens = list(self.lengths), np.zeros((self.batch, len(tokens[0])), np.int64)
        all_tokens[list(rows)] = tokens
        logits = self.step(all_tokens, heads)[list(rows)]
        chosen = set(rows)
        self.rewind([new if row in chosen else old
                     for row, (new, old) in enumerate(zip(self.lengths, lengths, strict=True))])  # fmt: skip
        return logits

    def saved(self, row: int, start: int) -> Any:
        """Where `can_save`: a copy of what a row's cache holds from position `start` on, for `restore`; arrays in
        tuples and lists."""
        raise NotImplementedError(f"{type(self).__name__} saves no part of its cache")

    def restore(self, row: int, saved: Any, length: int) -> None:
        """Append what `saved` gave, so that the row holds `length` positions. The row holds the same positions before
        it as the other one did, and so the same bits as if they had been computed here."""
        raise NotImplementedError(f"{type(self).__name__} restores no part of its cache")

    def rewind(self, lengths: Sequence[int]) -> None:
        """`rewind_row` of every row."""
        for row, (length, _) in enumerate(zip(lengths, self.lengths, strict=True)):
            self.rewind_row(row, length)

    def rewind_row(self, row: int, length: int) -> None:
        """Drop the positions of a row from `length` on. Nothing is copied."""
        held = self.lengths[row]
        if not 0 <= length <= held:
            raise ValueError(f"rewind: row {row} holds {held} positions, cannot go to {length}")
        if not (self.can_rewind or length in (0, held)):
            raise ValueError(f"rewind: row {row} holds {held} positions, its cache goes to 0 only, not to {length}")
        self.lengths[row] = length

    def draws(self, sampling: Sampling) -> bool:
        """Whether `stream` is offered, for this kind of sampling, and of many rows `queue`."""
        return False

    def stream(
        self, tokens: Sequence[int], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[Drawn]:
        """For a decoder that draws where its cache lies: blocks of up to `count` new tokens for every row, without a
        wait per token.

        tokens: the last token of each row, not yet in the cache. samplings[i] and streams[i] draw the tokens of row i:
        from the same distributions as `sampling.choose`, not necessarily the same tokens, and the same ones every time,
        whatever the other rows have. A decoder of one row may use drafts, as many as its sampling allows at most. The
        caller stops when it likes, and rewinds.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no tokens itself; draw them from the logits of step")

    def queue(self, rows: Mapping[int, Start | None], count: int) -> Callable[[], np.ndarray]:
        """For a decoder of many rows that draws: append `count` tokens to each of some rows, without a wait. Returns a
        function that waits; it gives what was drawn behind each token, (batch, count).

        None is a row that goes on from the last call, with what it drew there; else it starts, with at most `count`
        tokens. What a row draws before the last token it was given means nothing, and so does all of the rows that take
        no part, and what follows once a cache is full. Rows may be rewound, filled and started again before
        the function is called. What a row draws does not depend on the others, nor on how passes are cut into calls.
        """
        raise NotImplementedError(f"{type(self).__name__} draws no tokens itself; draw them from the logits of step")

    def _check_room(self, rows: Iterable[int], count: int) -> None:
        full = next((row for row in rows if self.lengths[row] + count > self.capacity), None)
        if full is not None:
            raise ValueError(
                f"Decoder: row {full} holds {self.lengths[full]} of {self.capacity} positions, no room for {count} more"
            )


class ReferenceDecoder(Decoder):
    """`model.hidden` row by row, each with a cache of its own: for every model, and what others are checked against."""

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None) -> None:
        super().__init__(model, batch, capacity)
        self.model = model
        self.caches = [model.make_cache(1, self.capacity) for _ in range(batch)]
        self.can_rewind = all(cache.can_rewind for cache in self.caches)
        self.can_save = all(hasattr(cache, "saved") for cache in self.caches)
        if not self.can_rewind:
            self.most_drafts = 0  # one that falls could not be taken back

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        if len(tokens):
            self._extend(row, tokens)

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        return self.step_rows(range(self.batch), tokens, heads)

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        model, parts = self.model, []
        self._check_room(rows, len(tokens[0]))
        for row, new in zip(rows, tokens, strict=True):
            h = self._extend(row, new)
            logits = [model.backend.to_numpy(model.logits(h, k)) for k in range(heads)]
            parts.append(np.stack(logits, axis=2))
        return np.concatenate(parts).astype(model.backend.master_dtype, copy=False)

    def rewind_row(self, row: int, length: int) -> None:
        super().rewind_row(row, length)
        if self.can_rewind:
            self.caches[row].rewind(length)
        elif length < self.caches[row].length:
            self.caches[row] = self.model.make_cache(1, self.capacity)

    def _extend(self, row: int, tokens: Sequence[int]) -> Array:
        """Append to one row; returns the final stream of the new positions, (1, n, C)."""
        ids = self.model.backend.asarray(np.asarray([tokens]))
        try:
            h = self.model.hidden(ids, cache=self.caches[row])
        except BaseException:
            if not self.can_rewind:  # Ctrl-C may have come between two layers' states
                self.caches[row], self.lengths[row] = self.model.make_cache(1, self.capacity), 0
            raise
        self.lengths[row] = self.caches[row].length
        return h

    def saved(self, row: int, start: int) -> Any:
        return self.caches[row].saved(start)

    def restore(self, row: int, saved: Any, length: int) -> None:
        self.caches[row].restore(saved)
        self.lengths[row] = self.caches[row].length
