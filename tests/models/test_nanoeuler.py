"""NanoEuler: its sizes, its start, what it may see, and how several of it share one set of weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.numpy_backend import NumpyBackend
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.op import Stash

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=140, vocab=11, mtp_heads=3, hidden=10, mtp_weights=(1, 0.5, 0.5)
)


def tiny(seed: int = 0) -> NanoEuler:
    model = NanoEuler(TINY, FP64)
    model.initialise(seed)
    return model


def batch(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = rng.integers(-1, TINY.vocab, (rows, length, TINY.mtp_heads), dtype=np.int32)
    return rng.integers(0, TINY.vocab, (rows, length), dtype=np.int32), targets


class Weightless(NumpyBackend):
    """Every buffer is one zero read at every place: a model of any size is built in no memory."""

    def shared_zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Any:
        return np.broadcast_to(self.dtype.type(0), shape)


@pytest.mark.parametrize(
    ("preset", "count"),
    [("small", 1_053_824), ("base", 116_417_280), ("large", 267_428_864), ("xl", 830_559_744), ("2b", 1_971_488_768)],
)
def test_presets_have_the_published_sizes(preset: str, count: int) -> None:
    config = PRESETS[preset]
    model = NanoEuler(config, Weightless("fp32", workers=1))
    assert model.buffer.count == count
    # The same from the shapes in the table of sizes: embedding and heads, then a block, then the norms.
    kv = config.kv_heads * config.dim // config.heads
    block = config.dim * (2 * config.dim + 2 * kv + 3 * config.hidden)
    tables = (1 + config.mtp_heads) * config.vocab * config.dim
    assert count == tables + config.layers * block + (2 * config.layers + 1) * config.dim


def test_the_start_is_gpt2s() -> None:
    """N(0, 0.02), the projections into the residual stream divided by sqrt(2 layers), gains 1."""
    config = PRESETS["small"]
    model = NanoEuler(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(seed=0)
    into_residual = [p for p in model.buffer.params if p.name.endswith(("out.weight", "down.weight"))]
    assert len(into_residual) == 2 * config.layers
    for p in model.buffer.params:
        if "norm" in p.name:
            assert (p.value == 1).all() and not p.decay, p.name
        else:
            std = 0.02 / math.sqrt(2 * config.layers) if p in into_residual else 0.02
            assert p.value.std() == pytest.approx(std, rel=4 / math.sqrt(2 * p.size)), p.name
            assert abs(p.value.mean()) < 4 * std / math.sqrt(p.size), p.name
            assert p.decay, p.name
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 512, (2, 64)), rng.integers(0, 512, (2, 64, 4))
    np.testing.assert_allclose(model.forward(ids, targets).mean(axis=(0, 1)), math.log(512), rtol=0.02)


def test_the_seed_decides_the_start() -> None:
    assert np.array_equal(tiny(1).buffer.values, tiny(1).buffer.values)
    assert not np.array_equal(tiny(1).buffer.values, tiny(2).buffer.values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dim": 130}, "dim 130 is not divisible by heads 4; use dim 128"),
        ({"dim": 2}, "dim 2 is not divisible by heads 4; use dim 4"),
        ({"dim": 12}, "head size 3 .* is odd"),
        ({"kv_heads": 3}, "heads 4 is not divisible by kv_heads 3"),
        ({"layers": 0}, "layers is 0, expected at least 1"),
        ({"width": 128}, "unknown key 'width'; known: context, vocab, dim"),
        ({"mtp_weights": (1.0, 0.5)}, "mtp_weights has 2 numbers for 4 heads"),
        ({"mtp_weights": (0.0, 1, 1, 1)}, "positive first"),
        ({"mtp_weights": (1.0, -1, 1, 1)}, "no negative number"),
    ],
)
def test_a_bad_config_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config: .*{message}") as caught:
        Config.from_dict(values)
    assert "\n" not in str(caught.value)


def test_a_config_survives_its_dictionary() -> None:
    for config in (*PRESETS.values(), TINY):
        assert Config.from_dict(config.to_dict()) == config
    assert Config().override({"mtp_heads": 2}).mtp_weights == (1.0, 0.5)


@pytest.mark.parametrize("length", [9, 140])
def test_no_position_sees_the_future(length: int) -> None:
    """A changed token leaves every bit before it and changes its own position; 140 is more than a tile."""
    model = tiny()
    ids, _ = batch(2, length)
    before = model.hidden(ids)
    for t in {1, length // 2, length - 1}:
        changed = ids.copy()
        changed[:, t] = (ids[:, t] + 1) % TINY.vocab
        after = model.hidden(changed)
        assert np.array_equal(after[:, :t], before[:, :t])
        assert (after[:, t:] != before[:, t:]).any(axis=-1).all()


def test_gradients_do_not_come_from_the_future_either() -> None:
    """The loss at position 0 alone reaches the embedding through token 0 alone."""
    model, stash = tiny(), Stash()
    ids = np.arange(9, dtype=np.int32)[None]
    targets = np.full((1, 9, 3), -1, np.int32)
    targets[0, 0] = 5
    model.forward(ids, targets, stash)
    model.backward(np.ones(3), stash)
    assert model.embedding.weight.grad.any(axis=-1).tolist() == [True] + [False] * 10


def test_shards_of_a_batch_add_up_to_the_batch() -> None:
    """Replicas read the model's weights and own their gradients: the sum over shards is the whole step."""
    model = tiny()
    ids, targets = batch(4, 12)
    scale, stash = np.array([0.03, 0.02, 0.01]), Stash()
    nll = model.forward(ids, targets, stash)
    model.backward(scale, stash)
    replicas = [model.replica() for _ in range(2)]
    parts = []
    for replica, rows in zip(replicas, (slice(0, 1), slice(1, 4)), strict=True):
        parts.append(replica.forward(ids[rows], targets[rows], stash))
        replica.backward(scale, stash)
    np.testing.assert_allclose(np.concatenate(parts), nll, rtol=1e-12)
    summed = replicas[0].buffer.grads + replicas[1].buffer.grads
    np.testing.assert_allclose(summed, model.buffer.grads, rtol=1e-10, atol=1e-14)


def test_a_replica_sees_updates_of_the_weights() -> None:
    model = tiny()
    replica = NanoEuler(TINY, FP64, values=model.buffer.values)
    ids, targets = batch(1, 5)
    before = replica.forward(ids, targets)
    model.embedding.weight.value += 0.1
    after = replica.forward(ids, targets)
    assert np.array_equal(after, model.forward(ids, targets)) and not np.array_equal(after, before)
    replica.buffer.grads += 1
    assert not model.buffer.grads.any()


def test_flop_of_a_model_small_enough_to_count_by_hand() -> None:
    # One layer, dim 4, hidden 6, one head of each kind, vocab 5, one output head, T = 3, no embedding, norms included.
    config = Config(dim=4, heads=1, kv_heads=1, layers=1, context=3, vocab=5, mtp_heads=1, hidden=6, mtp_weights=(1.0,))
    without_embedding = 3 * 4 * 4 + 4 * 4 + 2 * 6 * 4 + 4 * 6 + 3 * 4 + 5 * 4
    scores_and_values = 2 * (2 * 4) * (1 + 2 + 3)
    assert NanoEuler(config, FP64).flop_per_token(3) * 3 == 6 * without_embedding * 3 + 3 * scores_and_values
