"""Prompts as graphs, where nothing is captured: what a graph would repeat is a function called again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.backends.as_graphs import AsGraphs
from tinyforge.backends import get_backend
from tinyforge.infer.cuda.prompts import LONGEST, MOST, Prompts, RowCache, padded_length
from tinyforge.models.nanoeuler import Config, NanoEuler

CONFIG = Config(dim=24, heads=4, kv_heads=2, layers=2, context=700, vocab=19, mtp_heads=1, hidden=10, mtp_weights=(1,))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> NanoEuler:
    model = NanoEuler(CONFIG, get_backend("numpy", "fp64", workers=1))
    model.initialise(0)
    monkeypatch.setattr(model.backend, "graphs", AsGraphs, raising=False)
    return model


def ids_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab, count).tolist()


def row(seed: int = 9) -> Any:
    """Keys and values of a row that has been used."""
    return np.random.default_rng(seed).standard_normal((2, 2, 2, CONFIG.context, 6))


def check(model: NanoEuler, ids: list[int], keys: np.ndarray, values: np.ndarray) -> None:
    """Of the first positions, next to the model's own cache."""
    expected, count = model.make_cache(1, CONFIG.context), len(ids)
    model.hidden(np.array([ids]), cache=expected)
    for ours, theirs in ((keys, expected.keys), (values, expected.values)):
        np.testing.assert_allclose(ours[:, :, :count], theirs[:, 0, :count].swapaxes(1, 2), rtol=0, atol=1e-12)


def last_stream(model: NanoEuler, ids: list[int]) -> np.ndarray:
    """What the last layer reads at the last token, (C,)."""
    return model.fill(np.array([ids]), model.make_cache(1, CONFIG.context))[0, -1]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_prompt_is_the_same_each_time(in_place: bool, model: NanoEuler) -> None:
    """Other prompts of other lengths that are filled up to the same one, and pieces after 256 positions. Graphs that
    work on the row itself need no row of their own."""
    prompts, only = Prompts(model, CONFIG.context, in_place=in_place), row()
    for seed, count in enumerate((300, 320, 257, 311, 299)):
        ids, (keys, values) = ids_of(seed, count), only if in_place else row(seed)
        for piece, past in ((ids[:256], 0), (ids[256:], 256)):
            stream = prompts.append(piece, keys, values, past)
            np.testing.assert_allclose(stream, last_stream(model, ids[: past + len(piece)]), rtol=0, atol=1e-12)
        check(model, ids, keys, values)
    assert isinstance(prompts.graphs, AsGraphs)
    assert prompts.graphs.done == ["run"] * 2 + ["capture", "replay"] * 2 + ["replay"] * 4
    assert hasattr(prompts, "keys") == (not in_place)


def test_a_wrong_past_is_seen(model: NanoEuler) -> None:
    """The control of the test above: a graph that reads another row's positions gives other keys."""
    prompts, ids = Prompts(model, CONFIG.context), ids_of(0, 300)
    keys, values = row()
    for _ in range(2):
        prompts.append(ids[256:], keys, values, 256)
    with pytest.raises(AssertionError):
        check(model, ids, keys, values)


@pytest.mark.parametrize(("past", "count"), [(0, 5), (0, 700), (256, 444), (512, 188), (699, 1), (100, 30)])
def test_room_to_the_last_position(model: NanoEuler, past: int, count: int) -> None:
    """No prompt is filled up beyond the row, and what stands before it stays."""
    prompts, ids, (keys, values) = Prompts(model, CONFIG.context), ids_of(0, past + count), row()
    if past:
        model.hidden(np.array([ids[:past]]), cache=RowCache(model.backend, keys, values, 0))
    for _ in range(4):
        prompts.append(ids[past:], keys, values, past)
        check(model, ids, keys, values)
    assert bool(prompts.graphs) == (past % 256 == 0)


def test_a_model_that_cannot_fill(model: NanoEuler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(type(model).__mro__[1], "fill")
    prompts, ids, (keys, values) = Prompts(model, CONFIG.context), ids_of(0, 30), row()
    for _ in range(4):
        assert prompts.append(ids, keys, values, 0) is None
        check(model, ids, keys, values)


def test_what_has_no_graph(model: NanoEuler) -> None:
    """More kinds than `MOST`: the last ones are computed as before."""
    prompts, (keys, values) = Prompts(model, CONFIG.context), row()
    prompts._times = {(0, -n): 3 for n in range(MOST)}
    for seed in range(4):
        prompts.append(ids_of(seed, 30), keys, values, 0)
        check(model, ids_of(seed, 30), keys, values)
    assert prompts.graphs is None


def test_lengths() -> None:
    lengths = sorted({padded_length(n) for n in range(1, LONGEST + 1)})
    assert lengths == [*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 4097, 512)]
    assert all(n <= padded_length(n) < max(n + 64, 1.25 * n) for n in range(1, LONGEST + 1))
