"""The tutorial-sized model: it learns a made-up language as well as that language can be learned."""

from __future__ import annotations

import inspect
import math

import numpy as np

from models.char_mlp import model as source
from models.char_mlp.model import CharMLP
from tinyforge import Stash, Stream, get_backend

CONTEXT = 3
WORDS = ("tin ", "ton ", "tan ", "noon ")


def windows(words: int) -> tuple[np.ndarray, np.ndarray]:
    """`words` words in random order, as (N, CONTEXT) ids and the id that follows each."""
    text = "".join(WORDS[int(u * len(WORDS))] for u in Stream(0, "text").uniform((words,)))
    letters = sorted(set(text))
    ids = np.array([letters.index(c) for c in text], np.int32)
    return np.lib.stride_tricks.sliding_window_view(ids[:-1], CONTEXT), ids[CONTEXT:]


def test_it_learns_a_small_language() -> None:
    ids, targets = windows(300)
    backend = get_backend("numpy", "fp32", workers=1)
    model = CharMLP(vocab=int(ids.max()) + 1, context=CONTEXT, dim=6, hidden=24, backend=backend)
    model.buffer.initialise(Stream(0, "init"))

    def loss() -> float:
        return float(model.forward(ids, targets).mean())

    start, draw, stash = loss(), Stream(0, "batches"), Stash()
    for _ in range(400):
        batch = (draw.uniform((32,)) * len(ids)).astype(int)
        model.buffer.grads[...] = 0
        model.forward(ids[batch], targets[batch], stash)
        model.backward(np.full(1, 1 / len(batch)), stash)
        model.buffer.values -= 0.3 * model.buffer.grads
    assert abs(start - math.log(6)) < 0.1  # untrained, it knows nothing of the six letters
    # Which word comes next is chance, worth ln 4 nats; given the last three letters all the rest is certain.
    # So the entropy is ln 4 over the mean length of a word.
    entropy = math.log(len(WORDS)) / (sum(map(len, WORDS)) / len(WORDS))
    assert loss() < 1.25 * entropy


def test_it_stays_short() -> None:
    assert len(inspect.getsource(source).splitlines()) < 100
