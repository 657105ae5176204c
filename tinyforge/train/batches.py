"""Batches as pure functions of (seed, step): no loader state to save, and a resumed run reads the same data."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

import numpy as np

from tinyforge.errors import UserError
from tinyforge.ops.attention import Documents
from tinyforge.rng import Stream, permute
from tinyforge.train.objectives import Batch


class Tokens(Protocol):
    """A sequence of ids: a NumPy array, or `tinyforge.shards.TokenSequence`."""

    def __len__(self) -> int: ...
    def __getitem__(self, where: slice, /) -> np.ndarray: ...


def shifted_targets(tokens: np.ndarray, length: int, heads: int) -> np.ndarray:
    """tokens: (B, length + up to heads) to targets: (B, length, heads); targets[b, t, k] = tokens[b, t + 1 + k].

    Past the end of `tokens` the target is -1.
    """
    targets = np.full((len(tokens), length, heads), -1, np.int32)
    for k in range(heads):
        known = tokens[:, 1 + k : 1 + k + length]
        targets[:, : known.shape[1], k] = known
    return targets


@dataclass(frozen=True)
class DocumentMask:
    """Keeps attention within documents. separator: the id between two of them. restart: positions restart in each.

    The separator is the first token of the document after it: a document's first words are then predicted without
    seeing the document before, and the last token of a document still predicts the separator.
    """

    separator: int
    restart: bool

    def documents(self, ids: np.ndarray) -> Documents:
        return Documents(starts_of(ids == self.separator), self.restart)


def starts_of(begins: np.ndarray) -> np.ndarray:
    """begins: (B, T), whether a token begins a document; the first of a row always does. Returns (B, T) int32: where in
    the row each token's document begins."""
    return np.maximum.accumulate(np.where(begins, np.arange(begins.shape[1]), 0), axis=1).astype(np.int32)


def _windows_batch(rows: Sequence[np.ndarray], seq_len: int, heads: int, mask: DocumentMask | None) -> Batch:
    """Windows of up to seq_len + heads ids; where a row is shorter, targets are -1."""
    tokens = np.full((len(rows), seq_len + heads), -1, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    documents = mask.documents(tokens[:, :seq_len]) if mask else None
    return Batch(np.maximum(tokens[:, :seq_len], 0), shifted_targets(tokens, seq_len, heads), documents=documents)


def _draw_offset(stream: Stream, length: int, windows: int, seq_len: int) -> int:
    """Where the first of an epoch's windows begins."""
    room = max(1, min(seq_len, length - windows * seq_len))
    return int(stream.uniform() * room)


class Batches(Protocol):
    def batch(self, index: int, size: int) -> Batch: ...


def micro_batches(data: Batches, rows: int, count: int) -> Callable[[int], list[Batch]]:
    """A function for a run: from a step's number to its `count` micro-batches of `rows` sequences."""
    return lambda step: [data.batch(step * count + i, rows) for i in range(count)]


class PackedTokens:
    """One long stream of documents cut into windows of `seq_len`.

    Each epoch shifts the cuts by a random offset and visits the windows in a random order, both drawn from the seed.
    mask: keeps documents apart; without it a token sees everything before it in its window.
    """

    def __init__(self, tokens: Tokens, seq_len: int, heads: int, seed: int, mask: DocumentMask | None = None) -> None:
        if len(tokens) < seq_len + 1:
            raise UserError(
                f"corpus: {len(tokens)} tokens, one training sequence takes {seq_len + 1}; "
                f"give more text or a smaller --seq-len"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.heads = heads
        self.seed = seed
        self.mask = mask
        self.windows = max(1, len(tokens) // seq_len - 1)
        self._epoch = -1

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` windows."""
        rows = []
        for number in range(index * size, (index + 1) * size):
            epoch, position = divmod(number, self.windows)
            self._enter(epoch)
            start = self._offset + self._order[position] * self.seq_len
            rows.append(self.tokens[start : start + self.seq_len + self.heads])
        return _windows_batch(rows, self.seq_len, self.heads, self.mask)

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            stream = Stream(self.seed, f"windows/{epoch}")
            self._offset = _draw_offset(stream, len(self.tokens), self.windows, self.seq_len)
            self._order = stream.permutation(self.windows)
            self._epoch = epoch

    def in_order(self, size: int, limit: int) -> Iterator[Batch]:
        """Up to `limit` tokens from the start, each predicted once: for evaluation."""
        last = min(limit, len(self.tokens) - 1)
        starts = range(0, last, self.seq_len)
        for i in range(0, len(starts), size):
            # The id behind a window is its last target; later heads have no target there.
            rows = [self.tokens[s : min(s + self.seq_len, last) + 1] for s in starts[i : i + size]]
            yield _windows_batch(rows, self.seq_len, self.heads, self.mask)


class ContinuedTokens:
    """One long stream of documents in `rows` parts of equal length, read side by side: each row of a batch continues
    where it ended in the batch before, so that a model can carry its state from one to the next.

    Each epoch shifts the parts by a random offset, drawn from the seed, and its first batch resets the state.
    """

    def __init__(self, tokens: Tokens, seq_len: int, heads: int, seed: int, rows: int) -> None:
        self.windows = (len(tokens) - heads) // (rows * seq_len)  # of each part
        if self.windows < 1:
            raise UserError(
                f"corpus: {len(tokens)} tokens, {rows} rows of {seq_len} take {rows * seq_len + heads}; give more "
                "text, a smaller --seq-len or a smaller --batch-size"
            )
        self.tokens, self.seq_len, self.heads, self.seed, self.rows = tokens, seq_len, heads, seed, rows

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch. size: must be `rows`."""
        if size != self.rows:
            raise ValueError(f"ContinuedTokens: a batch of {size} rows, made for {self.rows}")
        epoch, window = divmod(index, self.windows)
        part = self.windows * self.seq_len
        room = len(self.tokens) - self.heads - self.rows * part + 1
        first = int(Stream(self.seed, f"windows/{epoch}").uniform() * room) + window * self.seq_len
        starts = (first + row * part for row in range(self.rows))
        found = _windows_batch(
            [self.tokens[start : start + self.seq_len + self.heads] for start in starts], self.seq_len, self.heads, None
        )
        return replace(found, stream=0, anew=window == 0)


class _Source:
    """The windows of one source of a mixture: as `PackedTokens`, but it never draws a whole epoch's order at once.

    10^11 tokens are 200 million windows. Drawing an order of all of them takes over a minute and gigabytes; `permute`
    takes half a microsecond per window, `BLOCK` at a time because most of a small call is overhead.
    """

    BLOCK = 4096

    def __init__(self, name: str, tokens: Tokens, seq_len: int, heads: int, seed: int) -> None:
        if len(tokens) < seq_len + 1:
            raise UserError(
                f"source {name}: {len(tokens):,} tokens to train on, one training sequence takes {seq_len + 1:,}; "
                "leave it out (--mix names the sources to read), or use a smaller --seq-len"
            )
        self.name, self.tokens, self.seq_len, self.heads, self.seed = name, tokens, seq_len, heads, seed
        self.windows = max(1, len(tokens) // seq_len - 1)
        self._made = (-1, -1)

    def row(self, number: int) -> np.ndarray:
        """The source's number-th window since the start of the run, up to seq_len + heads ids."""
        epoch, position = divmod(number, self.windows)
        block, place = divmod(position, self.BLOCK)
        if self._made != (epoch, block):
            stream = Stream(self.seed, f"windows/{self.name}/{epoch}")
            self._offset = _draw_offset(stream, len(self.tokens), self.windows, self.seq_len)
            wanted = np.arange(block * self.BLOCK, min((block + 1) * self.BLOCK, self.windows))
            order = permute(wanted, self.windows, stream.fork("order"))
            self._starts = (self._offset + order * self.seq_len).tolist()
            self._made = (epoch, block)
        start = self._starts[place]
        return self.tokens[start : start + self.seq_len + self.heads]


class MixedTokens:
    """Several sources, each cut into windows of `seq_len` with epochs of its own, mixed by weight.

    sources: ids by name. weights: positive, by the same names; only their ratios count. Nothing is sampled: for any n,
    a source of share w has n w of the first n windows, to within K - 1, K being the number of sources. mask: as in
    `PackedTokens`. Raises UserError for a source too short for one window.
    """

    def __init__(
        self,
        sources: Mapping[str, Tokens],
        weights: Mapping[str, Fraction],
        seq_len: int,
        heads: int,
        seed: int,
        mask: DocumentMask | None = None,
    ) -> None:
        self.seq_len, self.heads, self.mask = seq_len, heads, mask
        self.sources = [_Source(name, tokens, seq_len, heads, seed) for name, tokens in sources.items()]
        # Integers: the position of a window far into a run must be exact.
        unit = math.lcm(*(Fraction(weights[s.name]).denominator for s in self.sources))
        self.weights = [int(weights[s.name] * unit) for s in self.sources]

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` windows."""
        rows = []
        for number in range(index * size, (index + 1) * size):
            source, place = self.locate(number)
            rows.append(self.sources[source].row(place))
        return _windows_batch(rows, self.seq_len, self.heads, self.mask)

    def locate(self, number: int) -> tuple[int, int]:
        """The source of the run's window `number`, and how many windows of that source came before.

        Of the first n windows, floor(n w0 / W) are from source 0, spaced as evenly as the steps of Bresenham's line.
        The remaining windows are divided in the same way between source 1 and the rest, and so on.
        """
        left = sum(self.weights)
        for source, weight in enumerate(self.weights):
            before = number * weight // left
            if (number + 1) * weight // left > before:
                return source, before
            number -= before
            left -= weight
        raise AssertionError("the last source takes every window that is left")

    def epochs(self, windows: int) -> dict[str, float]:
        """The epochs of each source in the first `windows` windows."""
        total = sum(self.weights)
        return {s.name: windows * w / total / s.windows for s, w in zip(self.sources, self.weights, strict=True)}


class Examples:
    """Prompts with replies, packed into rows one after the other, like the turns of a conversation.

    Targets are -1 on the prompts: only the replies and their ends are learned. The first example of a row has nothing
    before it, the others follow earlier ones, so that a model learns both first and later questions. Each epoch packs
    the examples in another order. A row has at most `seq_len` + 1 tokens.

    restart: None, or each example sees only itself, and restart says whether its positions restart too.
    """

    def __init__(
        self,
        examples: Sequence[tuple[list[int], int]],
        seq_len: int,
        heads: int,
        seed: int,
        restart: bool | None = None,
    ) -> None:
        if not examples:
            raise UserError("no example left to train on; check that the records have replies and fit --seq-len")
        self.examples = examples
        self.seq_len = seq_len
        self.heads = heads
        self.seed = seed
        self.restart = restart
        self._ends: dict[int, list[int]] = {}  # by batch size: the number of batches up to the end of each epoch
        self._dealt: tuple[int, list[list[int]]] = (-1, [])

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` rows, or of fewer if an epoch has fewer."""
        ends = self._ends.setdefault(size, [])
        while not ends or ends[-1] <= index:
            ends.append((ends[-1] if ends else 0) + self.batches_in(len(ends), size))
        epoch = bisect_right(ends, index)
        first = size * (index - (ends[epoch - 1] if epoch else 0))
        return self.pad([[self.examples[i] for i in row] for row in self._rows(epoch)[first : first + size]])

    def batches_in(self, epoch: int, size: int) -> int:
        """How many batches of `size` rows an epoch has; one, of fewer rows, if it has fewer than `size`."""
        return max(1, len(self._rows(epoch)) // size)

    def _rows(self, epoch: int) -> list[list[int]]:
        """The rows of an epoch. Rows left over at its end, too few for a batch, differ from epoch to epoch."""
        if self._dealt[0] != epoch:
            rows: list[list[int]] = []
            room = 0
            for i in Stream(self.seed, f"examples/{epoch}").permutation(len(self.examples)).tolist():
                length = len(self.examples[i][0])
                if length > room:
                    rows.append([])
                    room = self.seq_len + 1
                rows[-1].append(i)
                room -= length
            self._dealt = (epoch, rows)
        return self._dealt[1]

    def pad(self, rows: Sequence[Sequence[tuple[list[int], int]]]) -> Batch:
        """Rows of examples as one batch, padded to the longest."""
        longest = max(sum(len(ids) for ids, _ in row) for row in rows)
        tokens = np.full((len(rows), longest), -1, np.int32)
        answers, begins = tokens.copy(), np.zeros(tokens.shape, bool)
        for r, row in enumerate(rows):
            start = 0
            for ids, prompt in row:
                stop = start + len(ids)
                tokens[r, start:stop] = ids
                begins[r, start] = True
                answers[r, start + prompt : stop] = ids[prompt:]
                start = stop
        documents = None if self.restart is None else Documents(starts_of(begins[:, :-1]), self.restart)
        return Batch(
            np.maximum(tokens[:, :-1], 0), shifted_targets(answers, longest - 1, self.heads), documents=documents
        )


class Shuffled:
    """Examples of a set, in another order in each epoch; make(rows, stream) makes a batch of the examples `rows`.

    stream: the batch's random numbers, a function of the seed and the batch's number alone.
    """

    def __init__(self, count: int, seed: int, make: Callable[[np.ndarray, Stream], Batch]) -> None:
        self.count, self.seed, self.make = count, seed, make
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` examples; one that crosses the end of an epoch goes on with the next."""
        rows = [self._row(number) for number in range(index * size, (index + 1) * size)]
        return self.make(np.array(rows), Stream(self.seed, f"batch/{index}"))

    def _row(self, number: int) -> int:
        epoch, position = divmod(number, self.count)
        if self._order[0] != epoch:
            self._order = epoch, Stream(self.seed, f"examples/{epoch}").permutation(self.count)
        return int(self._order[1][position])


def check_ids(tokens: np.ndarray, vocab: int) -> None:
    """Raise UserError for ids outside [0, vocab): ops do not check them."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab):
        raise UserError(
            f"token id {int(tokens.max() if tokens.max() >= vocab else tokens.min())} is outside the vocabulary of "
            f"{vocab}; the tokenizer does not belong to this model"
        )


def fingerprint(tokens: np.ndarray) -> str:
    """SHA-256 of the token stream: a resumed run must have the same."""
    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()
