r"""Interpolated modified Kneser-Ney smoothing, an n-gram model in NumPy.

    model = KneserNey(train_tokens, vocab=4096, order=5)
    nats = -model.log_probs(held_out_tokens)

With h the last n - 1 tokens, h' the same without the oldest, and c a count,

    p_n(w | h) = max(c(hw) - D(c(hw)), 0) / c(h) + gamma(h) p_{n-1}(w | h'),    p_0(w) = 1 / vocab,

where c(h) = sum_w c(hw), and gamma(h) = sum_w D(c(hw)) / c(h) gives the discounted mass to the shorter context. At the
highest order c counts occurrences. At lower orders it counts the distinct preceding tokens: "Francisco" is frequent but
follows one word only, so it is a poor guess in an unknown context. The discounts of each order come from the number n_k
of its n-grams with count k:

    Y = n_1 / (n_1 + 2 n_2),    D(k) = k - (k + 1) Y n_{k+1} / n_k  for k = 1, 2 and, for all above, k = 3.

There are no parameters to train or to tune.

Sources: Kneser, Ney, "Improved backing-off for m-gram language modeling" (1995); Chen, Goodman, "An empirical study of
smoothing techniques for language modeling" (1999), section 3, for the three discounts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class _Order(NamedTuple):
    """The n-grams of one length. An n-gram's key is (number of its first n - 1 tokens) * vocab + last token, its
    number the place of its key; so a key has 64 bits whatever n is, and those with one context lie side by side."""

    keys: Ids  # sorted
    discounted: Floats  # of each n-gram: (c - D) / c(h)
    gamma: Floats  # of each context; 1 where the text ended after it


class KneserNey:
    """p(token | the `order` - 1 tokens before), learned from one stream of ids in [0, vocab).

    Memory: some 140 bytes a token of the stream while counting (5-grams). Raises UserError for a stream that
    is empty.
    """

    def __init__(self, tokens: npt.NDArray[np.integer], vocab: int, order: int = 5) -> None:
        if not len(tokens):
            raise UserError("Kneser-Ney: got no tokens to count, expected some; give a longer text")
        self.vocab = vocab
        stream = tokens.astype(np.int64)
        # numbers[n][j] is the number of the n-gram that starts at token j; the empty one is everywhere.
        numbers: list[Ids] = [np.zeros(len(stream) + 1, np.int64)]
        keys: list[Ids] = [np.zeros(1, np.int64)]
        counts: list[Ids] = [np.zeros(1, np.int64)]
        for n in range(1, min(order, len(stream)) + 1):
            found, first, number, count = np.unique(
                numbers[-1][:-1] * vocab + stream[n - 1 :], return_index=True, return_inverse=True, return_counts=True
            )
            # Each n-gram is one more token seen before its last n - 1 ones.
            counts[-1] = np.bincount(numbers[-1][first + 1], minlength=len(keys[-1]))
            keys.append(found)
            counts.append(count)
            numbers.append(number)
        self._orders = [
            _smooth(keys[n], counts[n], contexts=len(keys[n - 1]), vocab=vocab) for n in range(1, len(keys))
        ]

    def log_probs(self, tokens: npt.NDArray[np.integer]) -> Floats:
        """ln p of each token given those before it, the first ones given as many as there are. Shape: (N,)."""
        stream = tokens.astype(np.int64)
        p = np.full(len(stream), 1.0 / self.vocab)
        number = np.zeros(len(stream) + 1, np.int64)  # of the n-gram that starts here, -1 if it was never seen
        for n, order in enumerate(self._orders, start=1):
            context = number[: len(stream) - n + 1]
            key = context * self.vocab + stream[n - 1 :]
            place = np.minimum(np.searchsorted(order.keys, key), len(order.keys) - 1)
            seen = (context >= 0) & (order.keys[place] == key)
            # A context that was never seen leaves the shorter one's word.
            gamma = np.where(context >= 0, order.gamma[context], 1.0)
            p[n - 1 :] = np.where(seen, order.discounted[place], 0.0) + gamma * p[n - 1 :]
            number = np.where(seen, place, -1)
        return np.log(p)


def _smooth(keys: Ids, counts: Ids, contexts: int, vocab: int) -> _Order:
    context = keys // vocab
    removed: Floats = np.minimum(_discounts(counts)[np.minimum(counts, 3)], counts)
    # The first tokens of the stream have none before them: a count of lower order can be zero.
    total = np.bincount(context, counts, contexts)
    share = np.divide(1.0, total, out=np.zeros(contexts), where=total > 0)
    gamma = np.where(total > 0, np.bincount(context, removed, contexts) * share, 1.0)
    return _Order(keys, (counts - removed) * share[context], gamma)


def _discounts(counts: Ids) -> Floats:
    """D(0..3). A text too small to have n-grams of each count gets the plain half of absolute discounting."""
    n = np.bincount(np.minimum(counts, 5), minlength=6).astype(np.float64)
    if not n[1:5].all():
        return np.array([0.0, 0.5, 0.5, 0.5])
    y = n[1] / (n[1] + 2 * n[2])
    return np.array([0.0, *(np.clip(k - (k + 1) * y * n[k + 1] / n[k], 0.0, k) for k in (1, 2, 3))])
