"""The LSTM: its sizes, its state from batch to batch, and the end of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.models.lstm import PRESETS, Config, LSTMModel
from tinyforge.op import Stash
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)


def tiny(**values: Any) -> LSTMModel:
    model = LSTMModel(Config(dim=6, layers=2, context=20, vocab=7).override(values), FP64)
    model.initialise(seed=0)
    return model


@pytest.mark.parametrize(("preset", "count"), [("char", 208_780), ("wide", 4_264_960)])
def test_presets_have_the_stated_sizes(preset: str, count: int) -> None:
    c = PRESETS[preset]
    assert 2 * c.vocab * c.dim + c.layers * (8 * c.dim * c.dim + 4 * c.dim) == count
    assert LSTMModel(c, MetaBackend("fp32")).buffer.count == count


def test_forget_gates_begin_open() -> None:
    for layer in tiny().layers:
        assert layer.bias.value.reshape(4, -1).tolist() == [[0] * 6, [1] * 6, [0] * 6, [0] * 6]


def test_windows_with_the_state_carried_are_the_whole_text() -> None:
    model, ids = tiny(), np.random.default_rng(0).integers(0, 7, (3, 12))
    state = np.zeros(model.state_shape(3))
    parts = [model.hidden(part, state=state) for part in np.split(ids, [1, 5], axis=1)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), model.hidden(ids), rtol=1e-12, atol=1e-14)


def test_the_gradient_ends_at_the_window() -> None:
    """Truncated backpropagation: as if the carried state were a constant."""
    model, ids = tiny(), np.random.default_rng(0).integers(0, 7, (3, 12))
    targets, state = (ids[:, 6:, None] + 1) % 7, np.zeros(model.state_shape(3))
    model.hidden(ids[:, :6], state=state)
    start, grads = state.copy(), []
    for _ in range(2):
        stash, carried = Stash(), start.copy()
        nll = model.forward(ids[:, 6:], targets, stash, state=carried)
        model.buffer.grads[...] = 0
        model.backward(np.ones(1), stash)
        grads.append(model.buffer.grads.copy())
    assert np.array_equal(*grads) and not np.array_equal(carried, start)
    direction, losses, values = np.random.default_rng(1).normal(size=grads[0].shape), [], model.buffer.values.copy()
    for step in (-2, -1, 1, 2):
        model.buffer.values[...] = values + step * 1e-4 * direction
        losses.append(model.forward(ids[:, 6:], targets, state=start.copy()).sum())
    numeric = (losses[0] - 8 * losses[1] + 8 * losses[2] - losses[3]) / 12e-4
    assert (grads[0] * direction).sum() == pytest.approx(numeric, rel=1e-8)
    assert nll.shape == (3, 6, 1)


def test_a_reset_begins_anew_also_at_the_end_of_a_window() -> None:
    model = tiny(reset=2)
    text = np.array([[4, 1, 2, 5, 3, 3]])
    expected = model.hidden(text[:, 3:])  # what follows the reset, alone
    np.testing.assert_allclose(model.hidden(text)[:, 3:], expected, rtol=1e-12, atol=1e-14)
    for cut in (2, 3, 4):
        state = np.zeros(model.state_shape(1))
        parts = [model.hidden(part, state=state) for part in np.split(text, [cut], axis=1)]
        np.testing.assert_allclose(np.concatenate(parts, axis=1)[:, 3:], expected, rtol=1e-12, atol=1e-14)
    assert np.abs(tiny().hidden(text)[:, 3:] - expected).max() > 1e-3


def test_a_state_is_a_hidden_and_a_cell_vector_and_a_reset_may_be_the_first_token() -> None:
    model = tiny(reset=0)
    assert model.state_shape(5) == (len(model.layers), 2, 5, 6)
    text = np.array([[4, 1, 0, 5, 3]])
    np.testing.assert_allclose(model.hidden(text)[:, 3:], model.hidden(text[:, 3:]), rtol=1e-12, atol=1e-14)


def test_dropout_is_between_layers_and_decided_by_the_noise() -> None:
    model = tiny(dropout=0.5)
    ids = np.arange(7)[None]
    still, once, again = (model.hidden(ids, Stash(noise)) for noise in (None, Stream(1, "a"), Stream(1, "a")))
    assert np.array_equal(once, again) and not np.array_equal(once, still)
    assert np.array_equal(still, model.hidden(ids))
    assert [op.name for op in model.ops() if hasattr(op, "rate")] == ["layers.0.dropout", "layers.1.dropout", "dropout"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dropout": 1.0}, "dropout is 1.0, expected 0 to below 1"),
        ({"layers": 0}, "layers is 0, expected at least 1"),
        ({"reset": 512}, "reset is 512, expected an id below vocab 512, or -1 for none"),
    ],
)
def test_a_bad_config_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config: {message}"):
        Config.from_dict(values)
