"""The tutorial-sized model: it learns a made-up language as well as that language can be learned, and generates."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest

from tinyforge import Stream, get_backend
from tinyforge.infer import Sampling, generate
from tinyforge.models.char_mlp import CharMLP, Config
from tinyforge.models.char_mlp import model as source
from tinyforge.optim import AdamW
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import NextTokens

CPU = get_backend("numpy", "fp64", workers=1)
WORDS = ("tin ", "ton ", "tan ", "noon ")


def ids_of(words: int) -> np.ndarray:
    """`words` words in random order."""
    text = "".join(WORDS[int(u * len(WORDS))] for u in Stream(0, "text").uniform((words,)))
    letters = sorted(set(text))
    return np.array([letters.index(c) for c in text], np.int32)


def random_model(window: int) -> CharMLP:
    model = CharMLP(Config(context=40, vocab=5, window=window, dim=3, hidden=6), CPU)
    model.initialise(seed=window)
    model.buffer.values *= 3
    return model


def test_it_learns_a_small_language() -> None:
    ids, backend = ids_of(300), get_backend("numpy", "fp32", workers=1)
    model = CharMLP(Config(context=32, vocab=int(ids.max()) + 1, window=3, dim=6, hidden=24), backend)
    model.initialise(0)
    data, optimizer = PackedTokens(ids, 32, 1, seed=0), AdamW(model.buffer, backend)
    parallel = DataParallel(model, backend, NextTokens())

    def loss() -> float:
        return float(model.forward(ids[None, :-1], ids[None, 1:, None]).mean())

    start = loss()
    for step in range(120):
        parallel.gradients([data.batch(step, 4)])
        optimizer.step(1e-2, optimizer.clip(1.0)[1])
    assert abs(start - math.log(6)) < 0.1  # untrained, it knows nothing of the six letters
    # Which word comes next is chance, worth ln 4 nats; given the last three letters all the rest is certain.
    # So the entropy is ln 4 over the mean length of a word.
    entropy = math.log(len(WORDS)) / (sum(map(len, WORDS)) / len(WORDS))
    assert loss() < 1.25 * entropy


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_token_sees_its_window_and_nothing_else(window: int) -> None:
    model, ids = random_model(window), np.arange(12)[None] % 5
    assert model.windows(ids)[0, 4].tolist() == [*[5] * max(0, window - 5), *ids[0, max(0, 5 - window) : 5].tolist()]
    changed = ids.copy()
    changed[0, 3] = (ids[0, 3] + 1) % 5
    differs = np.abs(model.hidden(ids) - model.hidden(changed)).max(axis=(0, 2)) > 0
    assert np.flatnonzero(differs).tolist() == list(range(3, min(12, 3 + window)))


@pytest.mark.parametrize("window", [1, 3, 8])
def test_with_a_cache_it_computes_the_same(window: int) -> None:
    """In pieces of any length, and again after a rewind."""
    model, ids = random_model(window), np.random.default_rng(0).integers(0, 5, (2, 20))
    whole, cache = model.hidden(ids), model.make_cache(2, 20)
    for start, stop in ((0, 1), (1, 2), (2, 9), (9, 10), (10, 20)):
        assert np.array_equal(model.hidden(ids[:, start:stop], cache=cache), whole[:, start:stop])
    cache.rewind(6)
    assert cache.length == 6 and cache.can_rewind
    assert np.array_equal(model.hidden(ids[:, 6:20], cache=cache), whole[:, 6:20])


def test_what_a_cache_saved_can_be_read_again() -> None:
    model, ids = random_model(3), np.random.default_rng(0).integers(0, 5, (2, 20))
    cache, other = model.make_cache(2, 20), model.make_cache(2, 20)
    whole = model.hidden(ids, cache=cache)
    assert model.embedding.weight.shape == (5 + 1, 3) and np.array_equal(cache.saved(4), ids[:, 4:])
    model.hidden(ids[:, :4], cache=other)
    other.restore(cache.saved(4))
    other.rewind(15)
    assert np.array_equal(model.hidden(ids[:, 15:], cache=other), whole[:, 15:])


def test_it_generates() -> None:
    model, prompt = random_model(3), [1, 2]
    expected = list(prompt)
    for _ in range(10):
        expected.append(int(np.argmax(model.logits(model.hidden(np.array([expected]))[0, -1]))))
    assert list(generate(model, prompt, Sampling(temperature=0.0, max_tokens=10))) == expected[2:]


def test_it_stays_short() -> None:
    assert len(inspect.getsource(source).splitlines()) < 130
