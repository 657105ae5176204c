"""Batches as pure functions of (seed, step): nothing to save, and a resumed run reads what it would have read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from tinyforge.errors import UserError
from tinyforge.rng import Stream
from tinyforge.train.sharded import Batch


def shifted_targets(tokens: np.ndarray, length: int, heads: int) -> np.ndarray:
    """tokens: (B, length + up to heads) to targets: (B, length, heads); targets[b, t, k] = tokens[b, t + 1 + k].

    Past the end of `tokens` the target is -1.
    """
    padded = np.pad(tokens, ((0, 0), (0, max(0, length + heads - tokens.shape[1]))), constant_values=-1)
    return np.stack([padded[:, 1 + k : 1 + k + length] for k in range(heads)], axis=-1).astype(np.int32)


class PackedTokens:
    """One long stream of documents cut into windows of `seq_len`.

    Each epoch shifts the cuts by a random offset and visits the windows in a random order, both drawn from the seed.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int, heads: int, seed: int) -> None:
        if len(tokens) < seq_len + 1:
            raise UserError(
                f"corpus: {len(tokens)} tokens, one training sequence takes {seq_len + 1}; "
                f"give more text or a smaller --seq-len"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.heads = heads
        self.seed = seed
        self.windows = max(1, len(tokens) // seq_len - 1)
        self._epoch = -1

    def batch(self, index: int, size: int) -> Batch:
        """The index-th batch of `size` windows."""
        rows = []
        for number in range(index * size, (index + 1) * size):
            epoch, position = divmod(number, self.windows)
            self._enter(epoch)
            start = self._offset + self._order[position] * self.seq_len
            row = self.tokens[start : start + self.seq_len + self.heads]
            rows.append(np.pad(row, (0, self.seq_len + self.heads - len(row)), constant_values=-1))
        tokens = np.stack(rows).astype(np.int32)
        return Batch(np.maximum(tokens[:, : self.seq_len], 0), shifted_targets(tokens, self.seq_len, self.heads))

    def _enter(self, epoch: int) -> None:
        if epoch != self._epoch:
            stream = Stream(self.seed, f"windows/{epoch}")
            room = max(1, min(self.seq_len, len(self.tokens) - self.windows * self.seq_len))
            self._offset = int(stream.uniform() * room)
            self._order = stream.permutation(self.windows)
            self._epoch = epoch

    def in_order(self, size: int, limit: int) -> Iterator[Batch]:
        """Up to `limit` tokens from the start, each predicted once: for evaluation."""
        tokens = self.tokens[: limit + 1].astype(np.int32)
        starts = list(range(0, len(tokens) - 1, self.seq_len))
        for i in range(0, len(starts), size):
            rows = [tokens[s : s + self.seq_len + 1] for s in starts[i : i + size]]
            block = np.stack([np.pad(r, (0, self.seq_len + 1 - len(r)), constant_values=-1) for r in rows])
            yield Batch(np.maximum(block[:, : self.seq_len], 0), shifted_targets(block, self.seq_len, self.heads))


class Examples:
    """Prompts with replies, one example a row, targets -1 on the prompt: only the reply and its end are learned.

    To waste little on padding, each epoch's random order is sorted by length within pools of `POOL` batches.
    """

    POOL = 16

    def __init__(self, examples: Sequence[tuple[list[int], int]], heads: int, seed: int) -> None:
        if not examples:
            raise UserError("no example left to train on; check that the records have replies and fit --seq-len")
        self.examples = examples
        self.heads = heads
        self.seed = seed
        self._epoch = -1

    def batch(self, index: int, size: int) -> Batch:
        per_epoch = max(1, len(self.examples) // size)
        epoch, position = divmod(index, per_epoch)
        if epoch != self._epoch:
            self._batches, self._epoch = self._arrange(epoch, size), epoch
        return self.pad([self.examples[i] for i in self._batches[position]])

    def _arrange(self, epoch: int, size: int) -> list[np.ndarray]:
        stream = Stream(self.seed, f"examples/{epoch}")
        order = stream.permutation(len(self.examples))
        lengths = np.array([len(ids) for ids, _ in self.examples])
        batches: list[np.ndarray] = []
        for start in range(0, len(order), size * self.POOL):
            pool = order[start : start + size * self.POOL]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            batches += [pool[i : i + size] for i in range(0, len(pool), size)]
        if len(batches) > 1 and len(batches[-1]) < size:
            batches.pop()  # the ragged end of the epoch; another order next time
        return [batches[i] for i in stream.permutation(len(batches))]

    def pad(self, chosen: Sequence[tuple[list[int], int]]) -> Batch:
        longest = max(len(ids) for ids, _ in chosen)
        tokens = np.full((len(chosen), longest), -1, np.int32)
        answers = tokens.copy()
        for row, (ids, prompt) in enumerate(chosen):
            tokens[row, : len(ids)] = ids
            answers[row, prompt : len(ids)] = ids[prompt:]
        return Batch(np.maximum(tokens[:, :-1], 0), shifted_targets(answers, longest - 1, self.heads))


def check_ids(tokens: np.ndarray, vocab: int) -> None:
    """Refuse ids outside [0, vocab): ops do not look."""
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab):
        raise UserError(
            f"token id {int(tokens.max() if tokens.max() >= vocab else tokens.min())} is outside the vocabulary of "
            f"{vocab}; the tokenizer does not belong to this model"
        )


def fingerprint(tokens: np.ndarray) -> str:
    """SHA-256 of the token stream: a resumed run must read the same one."""
    return hashlib.sha256(np.ascontiguousarray(tokens).tobytes()).hexdigest()
