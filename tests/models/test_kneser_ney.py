"""The n-gram baseline against a slow dictionary version, and as a probability."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.models.kneser_ney.model import KneserNey

VOCAB = 7


def stream(count: int, seed: int = 0) -> np.ndarray:
    """Ids with structure: a random walk, so that some contexts are frequent and some never come."""
    steps = np.random.default_rng(seed).choice([0, 1, 1, 1, 2, 3], count)
    return np.cumsum(steps) % VOCAB


def slow_probability(tokens: list[int], context: tuple[int, ...], word: int, highest: int) -> float:
    """The formula of the module's docstring, with n = len(context) + 1, by counting everything again."""
    n = len(context) + 1

    def counts(size: int) -> Counter[tuple[int, ...]]:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        if size == highest:
            return Counter(grams)
        longer = {tuple(tokens[i : i + size + 1]) for i in range(len(tokens) - size)}
        return Counter(gram[1:] for gram in longer)

    c = counts(n)
    lower = slow_probability(tokens, context[1:], word, highest) if n > 1 else 1 / VOCAB
    n_k = Counter(c.values())
    if all(n_k[k] for k in (1, 2, 3, 4)):
        y = n_k[1] / (n_k[1] + 2 * n_k[2])
        d = {k: min(max(k - (k + 1) * y * n_k[k + 1] / n_k[k], 0), k) for k in (1, 2, 3)}
    else:
        d = {1: 0.5, 2: 0.5, 3: 0.5}
    following = {gram[-1]: count for gram, count in c.items() if gram[:-1] == context and count > 0}
    total = sum(following.values())
    if not total:
        return lower
    gamma = sum(d[min(count, 3)] for count in following.values()) / total
    own = following.get(word, 0)
    return (own - d[min(own, 3)] if own else 0.0) / total + gamma * lower


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [3, 20, 300])
def test_it_is_the_formula(order: int, length: int) -> None:
    tokens, held_out = stream(length), stream(40, seed=1)
    found = KneserNey(tokens, VOCAB, order).log_probs(held_out)
    highest = min(order, length)
    for i, value in enumerate(found):
        context = tuple(held_out[max(0, i - highest + 1) : i].tolist())
        expected = slow_probability(tokens.tolist(), context, int(held_out[i]), highest)
        assert value == pytest.approx(math.log(expected), abs=1e-12)


def test_it_is_a_probability() -> None:
    model = KneserNey(stream(500), VOCAB, order=4)
    for context in ([0, 1, 2], [6, 0, 0], [5, 5, 5], [3]):
        last = [model.log_probs(np.array([*context, word]))[-1] for word in range(VOCAB)]
        assert np.exp(last).sum() == pytest.approx(1.0, abs=1e-12)


def test_a_longer_context_helps_where_there_is_structure() -> None:
    tokens, held_out = stream(20_000), stream(2_000, seed=1)
    nats = [-KneserNey(tokens, VOCAB, order).log_probs(held_out).mean() for order in (1, 2, 3)]
    entropy = -(3 / 6 * math.log(3 / 6) + 3 * (1 / 6) * math.log(1 / 6))  # of a step of the walk
    assert nats[0] > 1.9  # every id is as frequent as any other
    assert nats[1] == pytest.approx(entropy, rel=0.03)
    assert nats[2] < nats[0]


def test_no_tokens() -> None:
    with pytest.raises(UserError, match="no tokens to count"):
        KneserNey(np.array([], np.int64), VOCAB)
