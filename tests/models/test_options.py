"""The options of NanoEuler: each in training, with a cache, in packed rows, recomputed, in parts, and exported."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.models.test_nanoeuler import Weightless
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler, hf
from tinyforge.op import Stash
from tinyforge.ops.attention import Documents

FP64 = get_backend("numpy", "fp64", workers=1)
TINY: dict[str, Any] = {"dim": 16, "heads": 4, "kv_heads": 2, "layers": 4, "context": 24, "vocab": 11, "hidden": 10}
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 3, "full_every": 2},
    "half RoPE": {"rotary_dim": 2},
    "fixed scale": {"qk_scale": "fixed", "attention_scale": 0.8},
    "learned scale": {"qk_scale": "learned"},
    "relu2": {"gated": False, "activation": "relu2"},
    "x0": {"mix_first": True, "embedding_norm": True},
    "softcap": {"logit_softcap": 2.0},
    "smear": {"smear": 5},
    "values": {"value_every": 2, "value_gate": 5},
    "zero outputs": {"zero_outputs": True},
}
ALL = {name: value for given in OPTIONS.values() for name, value in given.items()}
EVERY = {**OPTIONS, "all": ALL}


def made(options: dict[str, Any], std: float = 0.1, **how: Any) -> NanoEuler:
    model = NanoEuler(Config.from_dict(TINY | options), FP64, **how)
    rng = np.random.default_rng(1)
    for p in model.buffer.params:
        model.buffer.set_master(p, p.fill + std * rng.normal(size=p.shape))
    return model


def batch(rows: int = 2, length: int = 13) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 11, (rows, length)), rng.integers(-1, 11, (rows, length, 4))


def step(model: NanoEuler, ids: np.ndarray, targets: np.ndarray, **inputs: Any) -> np.ndarray:
    stash = Stash()
    model.forward(ids, targets, stash, **inputs)
    model.backward(np.array([1.0, 0.5, 0.25, 0.125]), stash)
    assert not len(stash)
    return model.buffer.grads


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_an_option_changes_the_model_and_a_cache_does_not(options: dict[str, Any]) -> None:
    ids, targets = batch()
    model, plain = made(options), made({})
    if set(options) != {"zero_outputs"}:
        assert np.abs(model.forward(ids, targets) - plain.forward(ids, targets)).max() > 1e-4
    whole, cache = model.hidden(ids), model.make_cache(2, 24)
    pieces = [model.hidden(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7), (7, 13))]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, rtol=1e-12, atol=1e-12)
    cap, z = options.get("logit_softcap", 0), whole @ model.heads.weight.value[0].T
    np.testing.assert_allclose(model.logits(whole), cap * np.tanh(z / cap) if cap else z, rtol=1e-12, atol=1e-14)
    cache.rewind(6)
    np.testing.assert_allclose(model.hidden(ids[:, 6:], cache=cache), whole[:, 6:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_recomputed_blocks_give_the_same_bits_and_parts_of_a_batch_its_sum(options: dict[str, Any]) -> None:
    ids, targets = batch(4)
    found = step(made(options), ids, targets)
    again = made(options, recompute="blocks")
    assert np.array_equal(step(again, ids, targets), found)
    model = made(options)
    parts = [step(model.replica(), ids[rows], targets[rows]) for rows in (slice(0, 1), slice(1, 4))]
    np.testing.assert_allclose(parts[0] + parts[1], found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_documents_of_a_row_do_not_see_each_other(options: dict[str, Any]) -> None:
    """The gradients of a packed row are the sum of those of its documents: RoPE's shift changes nothing."""
    ids, targets = batch(1, 13)
    model, bounds = made(options), (0, 5, 6, 13)
    starts = np.repeat(bounds[:-1], np.diff(bounds))[None]
    packed = step(model.replica(), ids, targets, documents=Documents(starts))
    alone = [
        step(model.replica(), *(x[:, a:b] for x in (ids, targets))) for a, b in zip(bounds, bounds[1:], strict=False)
    ]
    np.testing.assert_allclose(packed, sum(alone), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("zero outputs", "window", "half RoPE")])
def test_no_other_format_gets_a_model_that_it_lacks(name: str) -> None:
    named = next(iter(EVERY[name]))
    with pytest.raises(UserError, match=f"no Hugging Face architecture has .*{named}"):
        hf.write_config(Config.from_dict(TINY | EVERY[name]))


@pytest.mark.parametrize("options", EVERY.values(), ids=EVERY)
def test_a_fused_decoder_is_refused_where_it_lacks_the_option(options: dict[str, Any]) -> None:
    has = set(options) <= {"rotary_dim", "zero_outputs"}
    assert (made(options).fused_weights() is not None) == has


def test_the_ids_are_sorted_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sorts, sort = made({"value_every": 1, "value_gate": 4}), [], np.argsort
    monkeypatch.setattr(np, "argsort", lambda *given, **how: sorts.append(given) or sort(*given, **how))
    step(model, *batch())
    assert len(sorts) == 1


def test_zero_outputs_start_as_the_identity() -> None:
    model = NanoEuler(Config.from_dict(TINY | {"zero_outputs": True}), FP64)
    model.initialise(seed=0)
    ids, _ = batch()
    assert np.array_equal(model.trunk(ids).x, model.embedding.forward(ids))


def test_the_presets_have_no_option() -> None:
    for name in ("small", "base", "large"):
        assert not PRESETS[name].trunk.options() and not PRESETS[name].zero_outputs


def test_the_fast_preset_has_what_paid_at_the_size_of_base() -> None:
    config = PRESETS["fast"]
    model = NanoEuler(config, Weightless("fp32", workers=1))
    values = 8192 * 256 * 6
    assert values == 12_582_912 and model.buffer.count - values == 116_412_853
    has = ("learned scale", "x0", "smear")
    assert config.trunk.options().keys() == {"value_every"}.union(*(OPTIONS[name] for name in has))


def test_an_option_that_cannot_be_is_a_one_line_error() -> None:
    for values, message in (
        ({"activation": "relu2"}, "a gate with activation 'relu2'; set gated=false"),
        ({"qk_scale": "free"}, "qk_scale is 'free'; supported: none, fixed, learned"),
        ({"value_every": 2, "value_gate": 17}, "value_gate is 17, expected 1 to dim, 16"),
        ({"smear": 17}, "smear is 17, expected 0 .none. to dim, 16"),
        ({"rotary_dim": 3}, "rotary_dim is 3, expected an even number"),
    ):
        with pytest.raises(UserError, match=message):
            Config.from_dict(TINY | values)


def test_fp8_has_the_options_that_its_layers_have_and_names_the_others() -> None:
    """Its gradients are those of float32 but for the rounding of 3 bits."""
    sizes = TINY | {"dim": 32, "hidden": 32, "context": 32}
    has = ("window", "half RoPE", "fixed scale", "x0", "smear", "values", "zero outputs")
    config = Config.from_dict(sizes | {name: value for given in has for name, value in OPTIONS[given].items()})
    ids, targets = batch(2, 16)
    found = []
    for precision in ("fp32", "fp8"):
        backend = get_backend("numpy", precision, workers=1)
        model = NanoEuler(config, backend)
        rng = np.random.default_rng(1)
        for p in model.buffer.params:
            model.buffer.set_master(p, p.fill + 0.1 * rng.normal(size=p.shape))
        model.buffer.publish()
        found.append(np.array(step(model, ids, targets)))
    assert np.linalg.norm(found[0] - found[1]) < 0.1 * np.linalg.norm(found[0])
    with pytest.raises(UserError, match="the layers in FP8 have no activation, gated; use bf16 or fp32"):
        NanoEuler(Config.from_dict(sizes | OPTIONS["relu2"]), get_backend("numpy", "fp8", workers=1))
