"""BERT: how its weights begin, and what its config refuses. Parity is in tests/formats/test_encoders.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge import get_backend
from tinyforge.errors import UserError
from tinyforge.models.bert import BERT, Config, hf
from tinyforge.models.bert.model import sines


def test_one_place_on_is_one_linear_map_for_all_places() -> None:
    table = sines(40, 12)
    turn = np.zeros((12, 12))
    for i, angle in enumerate(10000.0 ** (-np.arange(0, 12, 2) / 12)):
        turn[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    np.testing.assert_allclose(table[:-1] @ turn.T, table[1:], atol=1e-14)
    assert (table**2).mean() == pytest.approx(0.02**2)
    assert sines(3, 5).shape == (3, 5)


def test_positions_begin_as_sines_and_projections_small() -> None:
    model = BERT(Config(dim=60, heads=2, layers=8, hidden=80, context=30, vocab=90), get_backend("numpy", "fp64"))
    model.initialise(0)
    std = {p.name: float(p.value.std()) for p in model.params()}
    np.testing.assert_array_equal(model.positions.weight.value, sines(30, 60))
    for name in ("out", "down"):
        assert std[f"blocks.3.{name}.weight"] == pytest.approx(0.02 / 4, rel=0.05)
    for name in ("blocks.3.qkv.weight", "blocks.3.up.weight", "embedding.weight"):
        assert std[name] == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"masked": 0.0}, "masked is 0.0, expected a share between 0 and 1"),
        ({"masked": 1.0}, "masked is 1.0, expected a share between 0 and 1"),
        ({"dropout": 1.0}, "dropout is 1.0, expected 0 to below 1"),
        ({"attention_dropout": -0.1}, "attention_dropout is -0.1, expected 0 to below 1"),
    ],
)
def test_config_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Config().override(change)


def test_the_two_dropouts_and_the_share_of_hidden_words() -> None:
    config = Config(dropout=0.2, attention_dropout=0.3)
    assert hf.read_config(hf.write_config(config)) == config
    assert [Config(masked=share).input_shapes(3, 40)[-1] for share in (0.15, 0.25, 0.001)] == [(3, 6), (3, 10), (3, 1)]
