"""Decoders: caches for some rows, and passes that append positions to them and return logits.

`Decoder` is the contract. `ReferenceDecoder` runs the model's own ops and caches: slow, for every model and backend.
The fused decoders are fast, for one shape of model, and are checked against it. `make_decoder` (choose.py) picks the
fastest that fits. docs/inference.md has the reasons and the measurements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.cache import BatchedStep, KVCache, RowView, step_numbers
from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.rng import Stream


class SampledBlock(NamedTuple):
    """Tokens that a decoder drew itself: ids (rows, m), and log p of each under the model where asked for.

    passes: how many of the m tokens each pass gave, where the decoder speculates; else each pass gives one.
    """

    ids: np.ndarray
    logprobs: np.ndarray | None
    passes: tuple[int, ...] | None = None


class SequenceStart(NamedTuple):
    """A row that starts in `Decoder.queue`: the tokens it takes first, one per pass, and how the tokens after them are
    sampled. The first sample uses the stream's next number."""

    tokens: Sequence[int]
    sampling: Sampling
    stream: Stream


class Decoder(ABC):
    """Caches of `batch` rows with up to `capacity` positions each; row i holds `lengths[i]`.

    `step` takes the next n tokens of every row and returns logits for each of them. All results are in host memory.
    Rewind a row that has ended to 0, so that it always has room. The decoder keeps the weights that the model had when
    it was made: make a new one after training. Token ids are not checked against the vocabulary.

    can_rewind: whether a row can go back to any length, as keys and values can; else only to 0. can_save: whether part
    of one row's cache can be copied into another's. most_drafts: drafts that a pass can verify. piece: positions of a
    prompt that a scheduler prefills together. together: positions at its end that `last_logits` takes faster.
    any_cut: whether a position is bitwise equal however a text is cut into passes of up to `piece` positions.
    queues_masks: whether `queue_pass` samples for the rows that a grammar binds; else the host does.
    """

    can_rewind = True
    can_save = False
    piece = 32
    together = 1
    any_cut = False
    queues_masks = False

    def __init__(self, model: CausalLM, batch: int = 1, capacity: int | None = None) -> None:
        check_causal_lm(model)
        self.config = model.config
        self.prediction_heads = model.prediction_heads
        self.batch = batch
        self.capacity = model.config.context if capacity is None else capacity
        if not 1 <= self.capacity <= model.config.context:
            raise ValueError(f"Decoder: capacity {self.capacity}, expected 1 to {model.config.context}, the context")
        self.lengths = [0] * batch
        self.most_drafts = model.prediction_heads - 1

    @abstractmethod
    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Append any number of tokens to a row, without logits."""

    def repeat(self, row: int, source: int) -> bool:
        """Copy another row into an empty one, for several replies to one prompt; returns False if it cannot."""
        return False

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        """Append tokens, (batch, n); returns the logits of heads 0 .. heads - 1, (batch, n, heads, V).

        The array belongs to the decoder, and is valid until the next call. A decoder has its own `step` or
        `step_rows`: each default calls the other.
        """
        return self.step_rows(range(self.batch), tokens, heads)

    def first(self, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        """Append tokens, one or more, to the only row; returns the logits after the last, (1, 1, heads, V), as `step`
        does."""
        return self.last_logits(0, tokens, heads)

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        """`step` for some rows, in increasing order: tokens (len(rows), n) to logits (len(rows), n, heads, V). A row's
        logits do not depend on which other rows take part, to the last bit.

        This default passes over all rows, a token at a time, and rewinds the others, which must have room for one.
        """
        places, found = list(rows), []
        for column in np.asarray(tokens).T:
            lengths, all_tokens = list(self.lengths), np.zeros((self.batch, 1), np.int64)
            all_tokens[places, 0] = column
            found.append(self.step(all_tokens, heads)[places])
            for row in places:
                lengths[row] += 1
            self.rewind(lengths)
        return np.concatenate(found, axis=1)

    def last_logits(self, row: int, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        """Append tokens, one or more, to a row; returns the logits after the last, (1, 1, heads, V), as `step` does."""
        self.prefill(row, tokens[:-1])
        return self.step_rows([row], [tokens[-1:]], heads)

    def saved(self, row: int, start: int) -> Any:
        """Where `can_save`: a copy of a row's cache from position `start` on, for `restore`; arrays in tuples and
        lists."""
        raise NotImplementedError(f"{type(self).__name__} saves no part of its cache")

    def restore(self, row: int, saved: Any, length: int) -> None:
        """Append what `saved` returned, after which the row holds `length` positions. The row must hold the same
        positions before it as the saved one did; then it is bitwise equal to what is computed here."""
        raise NotImplementedError(f"{type(self).__name__} restores no part of its cache")

    def rewind(self, lengths: Sequence[int]) -> None:
        """`rewind_row` of every row."""
        for row, (length, _) in enumerate(zip(lengths, self.lengths, strict=True)):
            self.rewind_row(row, length)

    def rewind_row(self, row: int, length: int) -> None:
        """Drop a row's positions from `length` on. Nothing is copied."""
        held = self.lengths[row]
        if not 0 <= length <= held:
            raise ValueError(f"rewind: row {row} holds {held} positions, cannot go to {length}")
        if not (self.can_rewind or length in (0, held)):
            raise ValueError(f"rewind: row {row} holds {held} positions, its cache goes to 0 only, not to {length}")
        self.lengths[row] = length

    def draws(self, sampling: Sampling) -> bool:
        """Whether the decoder samples tokens itself with this sampling: by `stream`, and with many rows by `queue`."""
        return False

    def stream(
        self, tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[SampledBlock]:
        """Blocks of new tokens for every row, up to `count` in all, without waiting for the device per token.

        tokens: those at the end of each row that are not cached, at least one. samplings[i] and streams[i]: of row i.
        The distributions are those of `sampling.choose`, the tokens not necessarily. They are the same on every run,
        whatever the other rows hold. A decoder of one row may speculate with up to `sampling.drafts` drafts. The caller
        may stop at any time, and rewinds.
        """
        raise NotImplementedError(f"{type(self).__name__} samples no tokens; sample them from the logits of step")

    def queue(self, rows: Mapping[int, SequenceStart | None], count: int) -> Callable[[], np.ndarray]:
        """Append `count` tokens to each of some rows without waiting. Returns a function that waits and gives the token
        sampled after each of them, (batch, count).

        A row with a `SequenceStart` begins with its tokens, at most `count`; a row with None continues from its last
        call. Samples mean nothing before the last token of a start, in rows that take no part, and once a cache is
        full. Rows may be rewound, prefilled and started again before the function is called. A row's samples do not
        depend on the other rows, nor on how passes are split into calls.
        """
        raise NotImplementedError(f"{type(self).__name__} samples no tokens; sample them from the logits of step")

    def queue_pass(
        self, rows: Mapping[int, SequenceStart | None]
    ) -> Callable[[Sequence[int], np.ndarray], Callable[[], np.ndarray]]:
        """`queue` for one token of each row, in two calls, so that masks are computed meanwhile. Call the function that
        it returns before the next pass is queued: it samples, and returns what `queue` does.

        Its arguments are the rows that have masks, and the masks, (rows, words) uint32: bit i of a mask says whether
        token i may be sampled. Words past the vocabulary are ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} samples no tokens; sample them from the logits of step")

    def _check_room(self, rows: Iterable[int], count: int) -> None:
        full = next((row for row in rows if self.lengths[row] + count > self.capacity), None)
        if full is not None:
            raise ValueError(
                f"Decoder: row {full} holds {self.lengths[full]} of {self.capacity} positions, no room for {count} more"
            )


class ReferenceDecoder(Decoder):
    """`model.hidden` row by row: for every model, and the reference for the other decoders.

    batched: whether a step of one token takes all rows in one pass; only for a model with `batched_steps`. Default: on
    a CUDA GPU, where launches dominate; from the second time on the pass is a CUDA graph. With NumPy it is for tests:
    there a row's last bits depend on how long the other rows are.
    """

    def __init__(
        self, model: CausalLM, batch: int = 1, capacity: int | None = None, *, batched: bool | None = None
    ) -> None:
        super().__init__(model, batch, capacity)
        self.model = model
        self.caches: list[Any] = []
        self.steps: StepGraphs | None = None
        wanted = model.backend.name == "cupy" if batched is None else batched
        if wanted and getattr(model, "batched_steps", False):
            # One place more than a row can hold, see `step_numbers`.
            whole: Any = model.make_cache(batch, self.capacity + 1)
            self.caches = [RowView(whole, row) for row in range(batch)]
            self.steps = StepGraphs(model, whole)
        self.caches = self.caches or [model.make_cache(1, self.capacity) for _ in range(batch)]
        self.can_rewind = all(cache.can_rewind for cache in self.caches)
        self.can_save = all(hasattr(cache, "saved") for cache in self.caches)
        if not self.can_rewind:
            self.most_drafts = 0  # a rejected one could not be taken back

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        self._check_room([row], len(tokens))
        if len(tokens):
            self._extend(row, tokens)

    def first(self, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        self._check_room([0], len(tokens))
        return self._logits(self._extend(0, tokens)[:, -1:], heads)

    def step_rows(self, rows: Sequence[int], tokens: Any, heads: int = 1) -> np.ndarray:
        self._check_room(rows, len(tokens[0]))
        if self.steps is not None and len(tokens[0]) == 1:
            h = self.steps.hidden(list(rows), np.asarray(tokens)[:, 0], np.array(self.lengths))
            for row in rows:
                self.caches[row].advance(1)
                self.lengths[row] += 1
            return self._logits(h.reshape(self.batch, 1, -1), heads)[list(rows)]
        return np.concatenate(
            [self._logits(self._extend(row, new), heads) for row, new in zip(rows, tokens, strict=True)]
        )

    def _logits(self, h: Array, heads: int) -> np.ndarray:
        """Of final hidden states, (B, n, C), (B, n, heads, V)."""
        backend = self.model.backend
        logits = np.stack([backend.to_numpy(self.model.logits(h, k)) for k in range(heads)], axis=2)
        return logits.astype(backend.master_dtype, copy=False)

    def rewind_row(self, row: int, length: int) -> None:
        super().rewind_row(row, length)
        if self.can_rewind:
            self.caches[row].rewind(length)
        elif length < self.caches[row].length:
            self.caches[row] = self.model.make_cache(1, self.capacity)

    def _extend(self, row: int, tokens: Sequence[int]) -> Array:
        """Append to one row; returns the final hidden states of the new positions, (1, n, C)."""
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


BUCKET = 256
"""A graph of a step serves texts up to a multiple of so many positions."""


class StepGraphs:
    """Passes over the next token of each row of a cache, `BatchedStep`: on a CUDA GPU as graphs, if the model can.

    Then a pass outside of a graph takes the products that graphs take, so the results are bitwise equal.
    """

    def __init__(self, model: CausalLM, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        # Not in FP8, whose weights are rounded where they change.
        self.by_graph, self.graphs = model.backend.name == "cupy" and not model.backend.fp8, None
        self.room, self.launches = 0, dict[int, Callable[[], None] | None]()
        self.numbers: Any = None  # by graphs, all passes read these, and write `h`
        self.h: Any = None

    def hidden(self, rows: Sequence[int], tokens: np.ndarray, lengths: np.ndarray) -> Array:
        """Append a token to some of the rows, which hold `lengths`; returns the final hidden states of all rows, (1, B,
        C), which mean nothing for the others."""
        self.cache.make_room(int(lengths.max()) + 1)
        room, backend = self.cache.keys.shape[2], self.model.backend
        given, takes_part = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), bool)
        given[rows], takes_part[rows] = tokens, True
        numbers = step_numbers(given, lengths, takes_part, room)
        most = int(lengths[rows].max()) + 1
        if not self.by_graph:
            return self._pass(backend.asarray(numbers), most)
        if self.graphs is None:
            self.graphs, self.numbers = backend.graphs(), backend.asarray(numbers)
        graphs: Any = self.graphs
        if room != self.room:  # the cache has other arrays
            self.room, self.launches = room, {}
        backend.put(self.numbers, numbers)
        most = min(-(-most // BUCKET) * BUCKET, room)

        def work() -> None:
            h = self._pass(self.numbers, most)
            if self.h is None:
                self.h = h.copy()
            self.h[...] = h

        try:
            if most not in self.launches:
                graphs.run(work)
                self.launches[most] = None
            else:
                launch = self.launches[most] = self.launches[most] or graphs.capture(work)
                launch()
        except UserError:  # this model waits or uploads in a pass
            self.by_graph, self.graphs = False, None
            return self._pass(self.numbers, most)
        return self.h

    def _pass(self, numbers: Array, most: int) -> Array:
        step = BatchedStep(self.cache, numbers, most)
        return self.model.hidden(step.ids, cache=step)
