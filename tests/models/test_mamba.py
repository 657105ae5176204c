"""Mamba: its sizes, its start, its state. What all language models promise is in test_language_models.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.infer import Sampling, Session, generate
from tinyforge.models.mamba import PRESETS, Config, Mamba
from tinyforge.models.mamba.model import STEP_MAX, STEP_MIN

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(dim=6, layers=2, state=3, context=200, vocab=11)


def tiny() -> Mamba:
    model = Mamba(TINY, FP64)
    model.initialise(seed=0)
    return model


# Those of state-spaces/mamba-130m-hf and mamba-370m-hf.
@pytest.mark.parametrize(("preset", "count"), [("char", 209_836), ("130m", 129_135_360), ("370m", 371_516_416)])
def test_presets_have_the_published_sizes(preset: str, count: int) -> None:
    assert Mamba(PRESETS[preset], MetaBackend("fp32")).buffer.count == count


def test_it_starts_with_the_published_rates_and_steps() -> None:
    for block in tiny().blocks:
        np.testing.assert_allclose(np.exp(block.mixer.scan.a_log.value), np.tile([1.0, 2.0, 3.0], (12, 1)))
        steps = np.log1p(np.exp(block.mixer.scan.bias.value))
        assert (steps >= STEP_MIN).all() and (steps <= STEP_MAX).all() and steps.max() / steps.min() > 3


def test_what_generation_keeps_does_not_grow() -> None:
    model = tiny()
    cache = model.make_cache(1, 10)
    sizes = []
    for count in (1, 5, 100):
        model.hidden(np.zeros((1, count), np.int32), cache=cache)
        sizes.append(sum(a.nbytes for pair in cache.states for a in pair))
    assert sizes[0] == sizes[1] == sizes[2] and cache.length == 106


def test_a_changed_prompt_is_read_again_from_its_beginning() -> None:
    """The state cannot go back: a session makes a new one, and the text is the same."""
    model, sampling = tiny(), Sampling(temperature=0, max_tokens=8)
    session = Session(model)
    for prompt in ([1, 2, 3, 4, 5], [1, 2, 9, 4], [1, 2, 9, 4, 7, 7]):
        session.set_tokens(prompt)
        assert [token.id for token in session.generate(sampling)] == list(generate(model, prompt, sampling))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state": 65}, "state is 65, expected at most 64"),
        ({"rank": -1}, "rank is -1, expected at least 1, or 0 for a sixteenth of dim"),
        ({"taps": 0}, "taps is 0, expected at least 1"),
    ],
)
def test_a_bad_config_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config: {message}"):
        Config.from_dict(values)


def test_flop_of_a_model_small_enough_to_count_by_hand() -> None:
    model = Mamba(Config(dim=4, layers=1, state=2, context=3, vocab=5), FP64)
    # embedding as head, norms, in 16 x 4, conv 8 x 4 + 8, select 5 x 8, step 8 x 1, a_log 16, skip, bias, out 4 x 8
    weights = 20 + 8 + 64 + 40 + 40 + 8 + 16 + 8 + 8 + 32
    assert model.flop_per_token(3) == 6 * weights + 3 * 6 * 8 * 2
