"""Batches as pure functions of (seed, step): no loader state to save, and a resumed run reads the same data."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

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


def _windows_batch(
    rows: Sequence[np.ndarray],
    seq_len: int,
    heads: int,
    mask: DocumentMask | None,
    bounds: Sequence[tuple[int, int]] | None = None,
) -> Batch:
    """Windows of up to seq_len + heads ids; where a row is shorter, targets are -1. bounds: of each row, the first
    position whose targets count, and the one after the last."""
    tokens = np.full((len(rows), seq_len + heads), -1, np.int32)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = row
    documents = mask.documents(tokens[:, :seq_len]) if mask else None
    targets = shifted_targets(tokens, seq_len, heads)
    for number, (first, stop) in enumerate(bounds or ()):
        targets[number, :first] = targets[number, stop:] = -1
    return Batch(np.maximum(tokens[:, :seq_len], 0), targets, documents=documents)


class Cuts:
    """Where the windows of an epoch lie in a text of `length` ids.

    Every id but the first is a target once an epoch. The cuts are shifted in each epoch, so the first and the last
    window have fewer targets, and as context the ids next to them, which are targets of other windows.

    full: as in runs of earlier versions, every window has seq_len targets, and up to 2 seq_len ids at the two ends of
    the text are left out. count: windows of an epoch.
    """

    def __init__(self, length: int, seq_len: int, full: bool = False) -> None:
        self._targets, self._seq_len = length - 1, seq_len
        if full:
            self.count = max(1, length // seq_len - 1)
            self._least, self._room = 0, max(1, min(seq_len, length - self.count * seq_len))
            return
        self.count = -(-self._targets // seq_len)
        spare = self.count * seq_len - self._targets  # targets that the first and the last window lack together
        if self.count > 1 and spare < seq_len // 2:  # too few shifts
            self.count, spare = self.count + 1, spare + seq_len
        self._least, most = -min(spare, seq_len - 1), -max(0, spare - seq_len + 1)
        self._room = most - self._least + 1

    def shift(self, stream: Stream) -> int:
        """Where an epoch's first window begins; below 0, it lacks that many targets."""
        return self._least + int(stream.uniform() * self._room)

    def place(self, shift: int, window: int) -> tuple[int, tuple[int, int]]:
        """The first id of a window, and the bounds of the positions whose targets count."""
        begin = shift + window * self._seq_len
        first, stop = max(begin, 0), min(begin + self._seq_len, self._targets)
        start = max(0, min(first, self._targets - self._seq_len))
        return start, (first - start, stop - start)


class Batches(Protocol):
    def batch(self, index: int, size: int) -> Batch: ...


Where = int | range
"""The number of a step, or the numbers of its micro-batches, counted over the run."""


def micro_batches(data: Batches, rows: int, count: int) -> Callable[[Where], list[Batch]]:
    """A function for a run: from a step's number to its `count` micro-batches of `rows` sequences, or from the numbers
    of micro-batches to these."""

    def batches(where: Where) -> list[Batch]:
        numbers = where if isinstance(where, range) else range(where * count, (where + 1) * count)
        return [data.batch(number, rows) for number in numbers]

    return batches


class PackedTokens:
    """One long stream of documents cut into windows of `seq_len`.

    Each epoch shifts the cuts by a random offset and visits the windows in a random order, both drawn from the seed.
    mask: keeps documents apart; without it a token sees everything before it in its window. full: see `Cuts`.
    """

    def __init__(
        self, tokens: Tokens, seq_len: int, heads: int, seed: int, mask: DocumentMask | None = None, full: bool = False
    ) -> None:
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
        self._cuts = Cuts(len(tokens), seq_len, full)
        self.windows = self._cuts.count
        self._epoch = -1

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` windows."""
        rows, bounds = [], []
        for number in range(index * size, (index + 1) * size):
            epoch, position = divmod(number, self.windows)
            self._enter(epoch)
            start, bound = self._cuts.place(self._shift, int(self._order[position]))
            rows.append(self.tokens[start : start + self.seq_len + self.heads])
            bounds.append(bound)
        return _windows_batch(rows, self.seq_len, self.heads, self.mask, bounds)

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            stream = Stream(self.seed, f"windows/{epoch}")
            self._shift = self._cuts.shift(stream)
            self._order = stream.permutation(self.windows)
            self._epoch = epoch

    def in_order(self, size: int, limit: int) -> Iterator[Batch]:
        """Up to `limit` tokens from the start, each predicted once: for evaluation."""
        last = min(limit, len(self.tokens) - 1)
        starts = range(0, last, self.seq_len)
        for i in range(0, len(starts), size):
            # The id after a window is its last target; later heads have no target there.
            rows = [self.tokens[s : min(s + self.seq_len, last) + 1] for s in starts[i : i + size]]
            yield _windows_batch(rows, self.seq_len, self.heads, self.mask)


class ContinuedTokens:
    """One long stream of documents in `rows` parts of equal length, read side by side: each row of a batch continues
    where it ended in the batch before, so that a model can carry its state from one to the next.

    Each epoch begins the parts at a random place, drawn from the seed, goes from the end of the text on to its
    beginning, and resets the state with its first batch. Every id but the first is a target once an epoch. full: as in
    runs of earlier versions, up to rows * seq_len ids at the two ends are left out instead.
    """

    def __init__(self, tokens: Tokens, seq_len: int, heads: int, seed: int, rows: int, full: bool = False) -> None:
        windows = (len(tokens) - heads) // (rows * seq_len)
        if windows < 1:
            raise UserError(
                f"corpus: {len(tokens)} tokens, {rows} rows of {seq_len} take {rows * seq_len + heads}; give more "
                "text, a smaller --seq-len or a smaller --batch-size"
            )
        self._part = windows * seq_len if full else -(-len(tokens) // rows)
        self.windows = -(-self._part // seq_len)  # of each part
        self._room = len(tokens) - heads - rows * self._part + 1 if full else len(tokens)
        self.tokens, self.seq_len, self.heads, self.seed, self.rows = tokens, seq_len, heads, seed, rows

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch. size: must be `rows`."""
        if size != self.rows:
            raise ValueError(f"ContinuedTokens: a batch of {size} rows, made for {self.rows}")
        epoch, window = divmod(index, self.windows)
        length, first = len(self.tokens), int(Stream(self.seed, f"windows/{epoch}").uniform() * self._room)
        read = np.arange(self.rows)[:, None] * self._part + window * self.seq_len + np.arange(self.seq_len + self.heads)
        tokens = np.take(self.tokens[:], first + read, mode="wrap").astype(np.int32)
        targets = shifted_targets(tokens, self.seq_len, self.heads)
        read = read[:, : self.seq_len]
        parts_end = np.minimum(np.arange(1, self.rows + 1)[:, None] * self._part, length)
        after = (first + read) % length + 1
        known = (read < parts_end)[..., None] & (after[..., None] + np.arange(self.heads) < length)
        return Batch(tokens[:, : self.seq_len], np.where(known, targets, -1), stream=0, reset_state=window == 0)


class _Source:
    """The windows of one source of a mixture: as `PackedTokens`, but it never draws a whole epoch's order at once.

    10^11 tokens are 200 million windows. Drawing an order of all of them takes over a minute and gigabytes; `permute`
    takes half a microsecond per window, `BLOCK` at a time because most of a small call is overhead.
    """

    BLOCK = 4096

    def __init__(self, name: str, tokens: Tokens, seq_len: int, heads: int, seed: int, full: bool) -> None:
        if len(tokens) < seq_len + 1:
            raise UserError(
                f"source {name}: {len(tokens):,} tokens to train on, one training sequence takes {seq_len + 1:,}; "
                "leave it out (--mix names the sources to read), or use a smaller --seq-len"
            )
        self.name, self.tokens, self.seq_len, self.heads, self.seed = name, tokens, seq_len, heads, seed
        self._cuts = Cuts(len(tokens), seq_len, full)
        self.windows = self._cuts.count
        self._made = (-1, -1)

    def row(self, number: int) -> tuple[np.ndarray, tuple[int, int]]:
        """The source's number-th window since the start of the run, up to seq_len + heads ids, and the bounds of its
        targets."""
        epoch, position = divmod(number, self.windows)
        block, place = divmod(position, self.BLOCK)
        if self._made != (epoch, block):
            stream = Stream(self.seed, f"windows/{self.name}/{epoch}")
            self._shift = self._cuts.shift(stream)
            expected = np.arange(block * self.BLOCK, min((block + 1) * self.BLOCK, self.windows))
            self._order = permute(expected, self.windows, stream.fork("order")).tolist()
            self._made = (epoch, block)
        start, bound = self._cuts.place(self._shift, self._order[place])
        return self.tokens[start : start + self.seq_len + self.heads], bound


class MixedTokens:
    """Several sources, each cut into windows of `seq_len` with epochs of its own, mixed by weight.

    sources: ids by name. weights: positive, by the same names; only their ratios count. Nothing is sampled: for any n,
    a source of share w has n w of the first n windows, to within K - 1, K being the number of sources. mask and full
    as in `PackedTokens`. Raises UserError for a source too short for one window.
    """

    def __init__(
        self,
        sources: Mapping[str, Tokens],
        weights: Mapping[str, Fraction],
        seq_len: int,
        heads: int,
        seed: int,
        mask: DocumentMask | None = None,
        full: bool = False,
    ) -> None:
        self.seq_len, self.heads, self.mask = seq_len, heads, mask
        self.sources = [_Source(name, tokens, seq_len, heads, seed, full) for name, tokens in sources.items()]
        # Integers: the position of a window far into a run must be exact.
        unit = math.lcm(*(Fraction(weights[s.name]).denominator for s in self.sources))
        self.weights = [int(weights[s.name] * unit) for s in self.sources]

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` windows."""
        places = map(self.locate, range(index * size, (index + 1) * size))
        rows, bounds = zip(*(self.sources[source].row(place) for source, place in places), strict=True)
        return _windows_batch(rows, self.seq_len, self.heads, self.mask, bounds)

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


@dataclass(eq=False)
class Examples:
    """Prompts with replies, packed into rows one after the other, like the turns of a conversation.

    Targets are -1 on the prompts: only the replies and their ends are learned. The first example of a row has nothing
    before it, the others follow earlier ones, so that a model learns both first and later questions. Each epoch packs
    the examples in another order. A row has at most `seq_len` + 1 tokens.

    restart: None, or each example sees only itself, and restart says whether its positions restart too.
    """

    examples: Sequence[tuple[list[int], int]]
    seq_len: int
    heads: int
    seed: int
    restart: bool | None = None

    def __post_init__(self) -> None:
        if not self.examples:
            raise UserError("no example left to train on; check that the records have replies and fit --seq-len")
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


class Replayed:
    """Batches whose first rows are text and whose others are examples, so that what was learned from the text is not
    forgotten.

    rows: how many rows of a batch are text. taught: a teacher has a share in them, and none in the examples.
    """

    def __init__(self, examples: Examples, text: Batches, rows: int, taught: bool) -> None:
        self.examples, self.text, self.rows, self.taught = examples, text, rows, taught

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` rows, or of fewer if the examples have fewer; padded to the longest."""
        parts = self.text.batch(index, self.rows), self.examples.batch(index, size - self.rows)
        longest = max(part.ids.shape[1] for part in parts)
        ids, targets, starts = [], [], []
        for part in parts:
            more = (0, 0), (0, longest - part.ids.shape[1])
            ids.append(np.pad(part.ids, more))
            targets.append(np.pad(part.targets, (*more, (0, 0)), constant_values=-1))
            if part.documents:
                starts.append(np.pad(part.documents.starts, more, mode="edge"))
        documents = parts[0].documents and Documents(np.concatenate(starts), parts[0].documents.restart)
        taught = self.rows if self.taught else None
        return Batch(np.concatenate(ids), np.concatenate(targets), documents=documents, taught=taught)


class Shuffled:
    """Examples of a set, in another order in each epoch; make(rows, stream) makes a batch of the examples `rows`.

    stream: the batch's random numbers, a function of the seed and the batch's number alone.
    """

    def __init__(self, count: int, seed: int, make: Callable[[np.ndarray, Stream], Any]) -> None:
        self.count, self.seed, self.make = count, seed, make
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, np.int64))

    def batch(self, index: int, size: int) -> Any:
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
