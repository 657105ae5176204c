"""GPT-2: its sizes, its dropout. What all language models promise is in test_language_models.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.models.gpt2 import GPT2, PRESETS, Config
from tinyforge.op import Stash
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(dim=12, heads=3, layers=2, context=9, vocab=11, dropout=0.25)


# OpenAI's sizes as transformers counts them; nanoGPT prints 10.65 M for the first, without positions.
@pytest.mark.parametrize(
    ("preset", "count"), [("char", 10_646_784 + 256 * 384), ("124m", 124_439_808), ("355m", 354_823_168)]
)
def test_presets_have_the_published_sizes(preset: str, count: int) -> None:
    assert GPT2(PRESETS[preset], MetaBackend("fp32")).buffer.count == count


def test_the_character_model_is_nanogpts() -> None:
    c = PRESETS["char"]
    assert (c.layers, c.heads, c.dim, c.context, c.dropout, c.bias) == (6, 6, 384, 256, 0.2, False)


def nll(model: GPT2, noise: Stream | None) -> tuple[np.ndarray, np.ndarray]:
    """Losses and gradients of one pass."""
    stash = Stash(noise)
    ids = np.arange(9)[None] % 11
    found = model.forward(ids, (ids[..., None] + 1) % 11, stash)
    model.buffer.grads[...] = 0
    model.backward(np.ones(1), stash)
    assert len(stash) == 0
    return found, model.buffer.grads.copy()


def test_dropout_is_decided_by_the_noise() -> None:
    model = GPT2(TINY, FP64)
    model.initialise(seed=0)
    still, once, again, other = (nll(model, noise) for noise in (None, *(Stream(s, "step") for s in (0, 0, 1))))
    assert np.array_equal(once[0], again[0]) and np.array_equal(once[1], again[1])
    assert not np.array_equal(once[0], other[0]) and not np.array_equal(once[0], still[0])
    ids = np.arange(9)[None] % 11
    assert np.array_equal(still[0], model.forward(ids, (ids[..., None] + 1) % 11))  # inference drops nothing


def test_every_dropout_of_a_pass_has_a_mask_of_its_own() -> None:
    rates = {op.name: getattr(op, "dropout", getattr(op, "rate", None)) for op in GPT2(TINY, FP64).ops()}
    assert [rate for rate in rates.values() if rate is not None] == [TINY.dropout] * (1 + 3 * TINY.layers)


def test_gradients_are_right_under_dropout_too() -> None:
    """A directional check of the whole model while masks are drawn: the same noise gives the same masks."""
    model, noise = GPT2(TINY, FP64), Stream(3, "step")
    model.initialise(seed=0)
    rng = np.random.default_rng(0)
    model.buffer.values += 0.2 * rng.normal(size=model.buffer.values.shape)
    _, grads = nll(model, noise)
    start, direction, h = model.buffer.values.copy(), rng.normal(size=grads.shape), 1e-4
    losses = []
    for step in (-2, -1, 1, 2):
        model.buffer.values[...] = start + step * h * direction
        losses.append(nll(model, noise)[0].sum())
    numeric = (losses[0] - 8 * losses[1] + 8 * losses[2] - losses[3]) / (12 * h)
    assert (grads * direction).sum() == pytest.approx(numeric, rel=1e-8)


def test_flop_of_a_model_small_enough_to_count_by_hand() -> None:
    # One layer, dim 4, one head, vocab 5, T = 3; positions are added, not multiplied; biases and norms counted.
    config = Config(dim=4, heads=1, layers=1, context=3, vocab=5)
    block = 4 * 12 + 12 + 4 * 4 + 4 + 2 * 8 + 4 * 16 + 16 + 16 * 4 + 4
    scores_and_values = 2 * (2 * 4) * (1 + 2 + 3)
    expected = 6 * (block + 8 + 5 * 4) * 3 + 3 * scores_and_values
    assert GPT2(config, FP64).flop_per_token(3) * 3 == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dim": 13}, "dim 13 is not divisible by heads 12; use dim 12"),
        ({"dropout": 1.0}, "dropout is 1.0, expected 0 to below 1"),
        ({"dropout": "much"}, "dropout is 'much', expected a number"),
        ({"layers": 0}, "layers is 0, expected at least 1"),
    ],
)
def test_a_bad_config_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config: .*{message}"):
        Config.from_dict(values)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="positions"):
        GPT2(TINY, FP64).hidden(np.zeros((1, 10), np.int32))
