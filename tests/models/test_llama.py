"""Llama and its kin: sizes and options. What all language models promise is in test_language_models.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.models.llama import PRESETS, Config, Llama
from tinyforge.models.llama.model import scale
from tinyforge.op import Stash
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(dim=12, heads=3, kv_heads=1, layers=2, context=40, vocab=11, hidden=10)
SUM = {"norm": "layer", "norm_bias": True, "norms": "sum", "embedding_dim": 5}


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("stories260K", 260_032),
        ("stories15M", 15_191_712),
        ("stories42M", 41_689_600),
        ("stories110M", 109_529_856),
        ("SmolLM2-135M", 134_515_008),
        ("TinyLlama-1.1B", 1_100_048_384),
        ("Qwen2.5-0.5B", 494_032_768),
    ],
)
def test_presets_have_the_published_sizes(preset: str, count: int) -> None:
    config = PRESETS[preset].override({"context": 8})  # the tables of angles are no parameters
    assert Llama(config, MetaBackend("fp32")).buffer.count == count


def test_a_config_survives_its_dictionary() -> None:
    for config in PRESETS.values():
        assert Config.from_dict(config.to_dict()) == config


def test_the_head_size_follows_dim_and_heads_unless_it_is_given() -> None:
    assert Config().override({"dim": 96}).head_dim == 12
    assert Config().override({"dim": 96, "head_dim": 10}).override({"heads": 4}).head_dim == 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dim": 65}, "dim 65 is not divisible by heads 8; give head_dim"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"head_dim": -2}, "head_dim is -2, expected at least 1"),
        ({"kv_heads": 3}, "heads 8 is not divisible by kv_heads 3"),
        ({"window": -1}, "window is -1, expected 0"),
        ({"rope_theta": -5.0}, "rope_theta is -5.0, expected a number above 0"),
        (
            {"norm": "layer", "norms": "both"},
            "norms is 'both' with a LayerNorm or parallel branches; expected 'before'",
        ),
        ({"norm_bias": True}, "norm is 'rms'; norm_bias goes with 'layer'"),
        ({"norms": "none"}, "norms is 'none'; supported: before, both, after"),
        ({"attention_softcap": -1.0}, "attention_softcap is -1.0, expected 0"),
        ({"rope_scaling": "ntk"}, "rope_scaling is 'ntk'; supported: none, linear, llama3, yarn, dynamic, longrope"),
        ({"rope_scaling": "longrope", "rope_short": [1.0]}, "rope_short has 1 factors, rope_long 0, expected one for"),
        ({"rotary_dim": 10}, "rotary_dim is 10, expected an even number up to 8"),
        ({"rope_factor": 0.5}, "rope_factor 0.5"),
        ({"rope_low_freq": 4.0}, "low below high"),
    ],
)
def test_a_bad_config_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config: .*{message}"):
        Config.from_dict(values)


def test_a_window_hides_what_lies_before_it() -> None:
    """With one layer of window 5, position t reads the tokens t - 4 to t, and no other."""
    model = Llama(TINY.override({"layers": 1, "window": 5}), FP64)
    model.initialise(seed=0)
    ids = np.arange(20)[None] % 11
    before = model.hidden(ids)
    changed = ids.copy()
    changed[0, 3] = 0
    differs = (model.hidden(changed) != before).any(axis=-1)[0]
    assert np.flatnonzero(differs).tolist() == [3, 4, 5, 6, 7]


def test_a_tied_head_is_the_embedding() -> None:
    tied, untied = Llama(TINY, FP64), Llama(TINY.override({"tied": False}), FP64)
    assert untied.buffer.count - tied.buffer.count == 11 * 12
    assert "heads.weight" not in {p.name for p in tied.buffer.params}
    tied.initialise(seed=0)
    h = np.random.default_rng(0).normal(size=(2, 12))
    np.testing.assert_allclose(tied.logits(h), h @ tied.embedding.weight.value.T, rtol=1e-14)


@pytest.mark.parametrize("values", [{"qkv_bias": True}, {"qk_norm": True}, {"window": 5}, {"norms": "both"}], ids=str)
def test_the_fused_decoders_are_for_the_plain_shape(values: dict[str, Any]) -> None:
    assert Llama(TINY.override(values), FP64).fused_weights() is None


@pytest.mark.parametrize("values", [{}, {"qk_norm": True}, {"window": 5}, SUM], ids=str)
def test_a_cache_is_filled_without_the_rest_of_the_last_layer(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what `hidden` leaves in it, in two pieces."""
    model = Llama(TINY.override(values), FP64)
    model.initialise(seed=0)
    ids = np.random.default_rng(1).integers(0, 11, (2, 30), dtype=np.int32)
    expected, cache = model.make_cache(2, 40), model.make_cache(2, 40)
    last = model.blocks[-1]
    for piece in (ids[:, :17], ids[:, 17:]):
        model.hidden(piece, cache=expected)
        with monkeypatch.context() as patched:
            for op in (last.attention.attention, last.attention.out, last.norm2, last.mlp, model.final_norm):
                patched.setattr(op, "forward", None)
            model.fill(piece, cache)
    assert cache.length == expected.length == 30
    for ours, theirs in ((cache.keys, expected.keys), (cache.values, expected.values)):
        assert np.array_equal(ours[:, :, :30], theirs[:, :, :30])


def test_norms_of_the_sum_are_recomputed_to_the_bit_and_pieces_of_a_text_agree() -> None:
    config, ids = TINY.override({**SUM, "dropout": 0.2}), np.random.default_rng(1).integers(0, 11, (2, 31))
    gradients = []
    for recompute in ("", "blocks"):
        model, stash = Llama(config, FP64, recompute=recompute), Stash(Stream(5, "dropout"))
        model.initialise(seed=0)
        model.forward(ids[:, :-1], ids[:, 1:, None], stash)
        model.backward(np.ones(1), stash)
        gradients.append(model.buffer.grads)
    assert np.array_equal(*gradients) and np.abs(gradients[0]).max() > 0
    cache = model.make_cache(2, 40)
    pieces = [model.hidden(ids[:, part], cache=cache) for part in (slice(0, 17), slice(17, 18), slice(18, 31))]
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), model.hidden(ids), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tied", [True, False])
def test_the_plain_shape_has_fused_weights(tied: bool) -> None:
    model = Llama(TINY.override({"tied": tied}), FP64)
    model.initialise(seed=0)
    fused = model.fused_weights()
    assert fused is not None and len(fused.layers) == 2 and len(fused.gains) == 5
    assert fused.lm_heads.shape == (1, 11, 12) and np.shares_memory(fused.lm_heads, model.heads.weight.value)
    assert np.shares_memory(fused.lm_heads, fused.embedding) == tied
    assert fused.cos.shape == (40, 2)
    assert scale("scale", 1.0, FP64) is None and scale("scale", 2.0, FP64) is not None
    assert Llama(TINY.override({"layers": 1}), FP64).fused_weights() is not None


def test_flop_of_a_model_small_enough_to_count_by_hand() -> None:
    # One layer, dim 4, hidden 6, one head of each kind, vocab 5, T = 3, norms included; the tied embedding once.
    config = Config(dim=4, heads=1, kv_heads=1, layers=1, context=3, vocab=5, hidden=6)
    params = 3 * 4 * 4 + 4 * 4 + 2 * 6 * 4 + 4 * 6 + 3 * 4 + 5 * 4
    for window, pairs in ((0, 1 + 2 + 3), (2, 1 + 2 + 2), (7, 6)):
        model = Llama(config.override({"window": window}), FP64)
        assert model.flop_per_token(3) * 3 == pytest.approx(6 * params * 3 + 3 * 2 * (2 * 4) * pairs, rel=1e-15)
    untied = Llama(config.override({"tied": False}), FP64)
    assert untied.flop_per_token(3) == model.flop_per_token(3)


def weighted(config: Config, **factors: float) -> np.ndarray:
    """nll of random weights, the same for every config; those whose name ends with a key times its factor."""
    model, rng = Llama(config, FP64), np.random.default_rng(0)
    for p in sorted(model.params(), key=lambda p: p.name):
        p.value[...] = rng.normal(size=p.shape) / 3 + (len(p.shape) == 1)
        for end, factor in factors.items():
            if p.name.split(".")[-2] == end:
                p.value[...] *= factor
    ids = np.random.default_rng(1).integers(0, 11, (2, 20), dtype=np.int32)
    return np.asarray(model.forward(ids[:, :-1], ids[:, 1:, None]))


UNTIED = TINY.override({"tied": False})


@pytest.mark.parametrize(
    ("option", "factors"),
    [("embedding_scale", ("embedding",)), ("residual_scale", ("out", "down")), ("logit_scale", ("heads",))],
)
@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_a_scale_is_that_of_the_weights_before_it(option: str, factors: tuple[str, ...], factor: float) -> None:
    found = weighted(UNTIED.override({option: factor}))
    np.testing.assert_allclose(found, weighted(UNTIED, **dict.fromkeys(factors, factor)), rtol=1e-12)
    assert np.abs(found - weighted(UNTIED)).max() > 1e-3


@pytest.mark.parametrize(
    "option",
    [
        *({"window": 3}, {"window": 3, "full_every": 2}, {"no_rope_every": 2}, {"rotary_dim": 2}, {"parallel": True}),
        *(
            {"norms": "after"},
            {"norm": "layer"},
            {"norm_plus_one": True},
            {"activation": "gelu_tanh"},
            {"norm_eps": 0.1},
        ),
        *({"attention_scale": 1.0}, {"attention_softcap": 1.0}, {"logit_softcap": 1.0}, {"rope_theta": 100.0}),
        {"window": 30, "full_every": 2, "local_rope_theta": 100.0},
    ],
    ids=str,
)
def test_every_option_has_an_effect(option: dict[str, Any]) -> None:
    before = dict([*option.items()][:-1])  # the last one is compared with its absence
    difference = weighted(UNTIED.override(option)) - weighted(UNTIED.override(before))
    assert np.abs(difference).max() > 1e-4
