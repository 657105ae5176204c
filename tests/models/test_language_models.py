"""What every language model of the zoo promises: tiny ones of each kind, with every option, through the same tests."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.infer.causal_lm import check_causal_lm
from tinyforge.models import gpt2, llama, lstm, mamba, moe, nanoeuler
from tinyforge.op import Stash
from tinyforge.rng import Stream

FP64 = get_backend("numpy", "fp64", workers=1)
GPT2 = gpt2.Config(dim=12, heads=3, layers=2, context=140, vocab=11, dropout=0.25)
LLAMA = llama.Config(dim=12, heads=4, kv_heads=2, head_dim=6, layers=2, context=140, vocab=11, hidden=10, tied=False)
# Without the router's losses forward gives the likelihoods alone, as the tests below want them.
MOE = moe.Config(
    dim=16,
    heads=4,
    kv_heads=2,
    layers=2,
    context=140,
    vocab=11,
    hidden=6,
    experts=5,
    mtp_heads=3,
    mtp_weights=(1, 1, 1),
    balance=0.0,
    router_z=0.0,
)
LLAMA3: dict[str, Any] = {"rope_scaling": "llama3", "rope_factor": 4.0, "original_context": 12, "rope_theta": 50.0}
GEMMA: dict[str, Any] = {"norms": "both", "norm_plus_one": True, "activation": "gelu_tanh", "embedding_scale": 3.5}
GEMMA |= {"attention_scale": 0.3, "window": 5, "full_every": 2}
GRANITE: dict[str, Any] = {"embedding_scale": 3.0, "residual_scale": 0.3, "logit_scale": 0.4, "attention_scale": 0.3}
GRANITE |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "no_rope_every": 2}
KINDS: dict[str, tuple[Any, Any]] = {
    "nanoeuler": (
        nanoeuler.NanoEuler,
        nanoeuler.Config(
            dim=16, heads=4, kv_heads=2, layers=2, context=140, vocab=11, mtp_heads=3, hidden=10, mtp_weights=(1, 1, 1)
        ),
    ),
    "gpt2": (gpt2.GPT2, GPT2),
    "gpt2-char": (gpt2.GPT2, GPT2.override({"bias": False})),
    "llama": (llama.Llama, LLAMA),
    "llama-tied": (llama.Llama, LLAMA.override({"tied": True, "rope_scaling": "linear", "rope_factor": 3.0})),
    "llama-qwen2": (llama.Llama, LLAMA.override({"qkv_bias": True})),
    "llama-qwen3": (llama.Llama, LLAMA.override({"qk_norm": True, **LLAMA3})),
    "llama-mistral": (llama.Llama, LLAMA.override({"window": 5})),
    "llama-gemma2": (llama.Llama, LLAMA.override({**GEMMA, "attention_softcap": 1.5, "logit_softcap": 2.0})),
    "llama-gemma3": (llama.Llama, LLAMA.override({**GEMMA, "qk_norm": True, "local_rope_theta": 50.0})),
    "llama-olmo2": (llama.Llama, LLAMA.override({"norms": "after", "qk_norm": True, "qk_norm_width": True})),
    "llama-granite": (llama.Llama, LLAMA.override(GRANITE)),
    "llama-cohere": (llama.Llama, LLAMA.override({"norm": "layer", "norm_bias": True, "parallel": True})),
    "moe": (moe.MoE, MOE),
    "moe-mixtral": (moe.MoE, MOE.override({"mtp_heads": 1, "window": 5, "active": 1})),
    "mamba": (mamba.Mamba, mamba.Config(dim=12, layers=2, state=3, context=140, vocab=11)),
    "lstm": (lstm.LSTMModel, lstm.Config(dim=12, layers=2, context=140, vocab=11, dropout=0.25)),
    "lstm-reset": (lstm.LSTMModel, lstm.Config(dim=12, layers=2, context=140, vocab=11, reset=3)),
}
EVERY = pytest.mark.parametrize("kind", KINDS)
RECURRENT = ("mamba", "lstm", "lstm-reset")  # their state forgets nothing, and they start in ways of their own


def tiny(kind: str, seed: int = 0, **options: Any) -> Any:
    """A random model, its weights larger than at the start of training, so that every part of it counts."""
    model = KINDS[kind][0](KINDS[kind][1], FP64, **options)
    model.initialise(seed)
    rng = np.random.default_rng(seed)
    for p in model.buffer.params:
        p.value += 0.2 * rng.normal(size=p.shape)
    return model


def batch(model: Any, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = rng.integers(-1, 11, (rows, length, model.prediction_heads), dtype=np.int32)
    return rng.integers(0, 11, (rows, length), dtype=np.int32), targets


def same(kind: str, got: np.ndarray, expected: np.ndarray) -> bool:
    """Bit for bit. With experts, how many tokens share one's product is up to all of them, and so is the rounding."""
    return np.allclose(got, expected, rtol=1e-12, atol=1e-14) if "moe" in kind else np.array_equal(got, expected)


@EVERY
def test_it_can_generate(kind: str) -> None:
    assert check_causal_lm(tiny(kind))


@EVERY
@pytest.mark.parametrize("length", [9, 140])
def test_no_position_sees_the_future(kind: str, length: int) -> None:
    """A changed token leaves every bit before it and changes its own position; 140 is more than a tile."""
    model = tiny(kind)
    ids, _ = batch(model, 2, length)
    before = model.hidden(ids)
    for t in {1, length // 2, length - 1}:
        changed = ids.copy()
        changed[:, t] = (ids[:, t] + 1) % 11
        after = model.hidden(changed)
        assert same(kind, after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(axis=-1).all()


@EVERY
def test_gradients_do_not_come_from_the_future_either(kind: str) -> None:
    """Of the loss at position 0 alone, no gradient depends on later tokens."""
    model = tiny(kind)
    targets = np.full((1, 9, model.prediction_heads), -1, np.int32)
    targets[0, 0] = 10
    grads = []
    for ids in (np.arange(9), np.array([0, 5, 5, 5, 5, 2, 2, 10, 10])):
        stash = Stash()
        model.forward(ids[None], targets, stash)
        model.buffer.grads[...] = 0
        model.backward(np.ones(model.prediction_heads), stash)
        grads.append(model.buffer.grads.copy())
    assert same(kind, *grads) and grads[0].any()


@EVERY
def test_a_cache_gives_the_same_as_the_whole_text(kind: str) -> None:
    """In pieces of any size, also after a rewind where there is one."""
    model = tiny(kind)
    ids, _ = batch(model, 2, 60)
    expected = model.hidden(ids)
    cache = model.make_cache(2, 60)
    parts = [model.hidden(part, cache=cache) for part in np.split(ids, [1, 2, 20, 40], axis=1)]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=1e-10, atol=1e-12)
    assert cache.length == 60 and cache.can_rewind == (kind not in RECURRENT)
    if not cache.can_rewind:
        with pytest.raises(ValueError, match="holds 60 positions and cannot drop any, asked to keep 17"):
            cache.rewind(17)
        return
    cache.rewind(17)
    np.testing.assert_allclose(model.hidden(ids[:, 17:], cache=cache), expected[:, 17:], rtol=1e-10, atol=1e-12)


@EVERY
def test_logits_are_those_that_the_loss_is_of(kind: str) -> None:
    model = tiny(kind)
    ids, targets = batch(model, 2, 7)
    nll = model.forward(ids, targets)
    assert nll.shape == targets.shape
    for k in range(model.prediction_heads):
        z = model.logits(model.hidden(ids), k)
        picked = np.take_along_axis(z, np.maximum(targets[..., k, None], 0), axis=-1)[..., 0]
        expected = np.where(targets[..., k] < 0, 0, np.log(np.exp(z).sum(axis=-1)) - picked)
        np.testing.assert_allclose(nll[..., k], expected, rtol=1e-12, atol=1e-14)


@EVERY
def test_shards_of_a_batch_add_up_to_the_batch(kind: str) -> None:
    """Replicas read the model's weights and own their gradients: the sum over shards is the whole step."""
    model = tiny(kind)
    ids, targets = batch(model, 4, 12)
    scale, stash = np.full(model.prediction_heads, 0.3), Stash()
    nll = model.forward(ids, targets, stash)
    model.backward(scale, stash)
    replicas, parts = [model.replica() for _ in range(2)], []
    for replica, rows in zip(replicas, (slice(0, 1), slice(1, 4)), strict=True):
        parts.append(replica.forward(ids[rows], targets[rows], stash))
        replica.backward(scale, stash)
    np.testing.assert_allclose(np.concatenate(parts), nll, rtol=1e-12)
    summed = replicas[0].buffer.grads + replicas[1].buffer.grads
    np.testing.assert_allclose(summed, model.buffer.grads, rtol=1e-9, atol=1e-12)
    assert replicas[0].recompute == model.recompute


@EVERY
def test_ops_lists_each_in_the_order_of_forward(kind: str) -> None:
    """What looks for the first NaN walks this list."""
    order: list[str] = []

    class Watched(Stash):
        def push(self, owner: Any, *saved: Any) -> None:
            order.append(owner.name)
            super().push(owner, *saved)

    model = tiny(kind)
    model.forward(*batch(model, 1, 3), Watched(Stream(0, "noise")))
    assert order == [op.name for op in model.ops()] and len(set(order)) == len(order)


def traced(model: Any) -> tuple[np.ndarray, int, int]:
    """A step's gradient, the bytes that forward keeps for backward, and the number of tokens."""
    ids, targets = batch(model, 2, 131)
    model.forward(ids, targets)  # what is made once, and kept: masks
    stash = Stash(Stream(0, "noise"))
    tracemalloc.start()
    nll = model.forward(ids, targets, stash)
    # Of arrays: Python's own objects come and go.
    arrays = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)])
    kept = sum(trace.size for trace in arrays.traces)
    tracemalloc.stop()
    model.backward(np.ones_like(nll), stash)
    assert len(stash) == 0
    return model.buffer.grads.copy(), kept, ids.size


@EVERY
def test_recomputation_gives_the_same_bits_from_less_memory(kind: str) -> None:
    (plain, kept, tokens), (again, less, _) = (traced(tiny(kind, recompute=what)) for what in ("", "norms"))
    assert np.array_equal(plain, again)
    config = KINDS[kind][1]
    # A layer, whose results are not kept, in float64. RMSNorm keeps its result and not its input: nothing to recompute.
    norms = {"gpt2": 2, "gpt2-char": 2}.get(kind, 0)
    assert kept - less == pytest.approx(config.layers * tokens * 8 * config.dim * norms, rel=0.03, abs=1000)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mamba", *RECURRENT)])
def test_blocks_that_are_run_again_give_the_same_bits_and_keep_their_input(kind: str) -> None:
    found = []
    for recompute, layers in (("", 2), ("blocks", 2), ("blocks", 4)):
        model = KINDS[kind][0](KINDS[kind][1].override({"layers": layers}), FP64, recompute=recompute)
        model.initialise(0)
        found.append(traced(model))
    (plain, _, tokens), (again, kept, _), (_, more, _) = found
    assert np.array_equal(plain, again)
    inputs = 2 * tokens * 8 * KINDS[kind][1].dim  # of two more layers
    assert more - kept == pytest.approx(inputs, abs=8_000)


def test_a_block_that_is_not_run_again_is_found() -> None:
    """A seeded fault: backward that skips it meets another op's record."""
    model = KINDS["llama"][0](KINDS["llama"][1], FP64, recompute="blocks")
    model.initialise(0)
    ids, targets = batch(model, 2, 5)
    stash = Stash()
    nll = model.forward(ids, targets, stash)
    model.layers = model.blocks
    with pytest.raises(RuntimeError, match="popped the record of blocks.1"):
        model.backward(np.ones_like(nll), stash)


@EVERY
def test_only_matrices_decay_and_they_come_first(kind: str) -> None:
    model = tiny(kind)
    model.buffer.values[: model.buffer.decay_end] = 7
    for p in model.buffer.params:
        matrix = len(p.shape) > 1 and not p.name.endswith("a_log")  # a rate of decay is no weight of a sum
        assert bool((p.value == 7).all()) == p.decay == matrix, p.name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in RECURRENT])
def test_the_start_is_gpt2s(kind: str) -> None:
    """N(0, 0.02), projections into the stream divided by sqrt(2 layers), gains 1, biases 0: about log(V) nats."""
    model = KINDS[kind][0](KINDS[kind][1].override({"dim": 96, "vocab": 300}), FP64)
    model.initialise(seed=0)
    for p in model.buffer.params:
        if len(p.shape) == 1:
            plus_one = getattr(model.config, "norm_plus_one", False)
            assert (p.value == (0 if p.name.endswith("bias") or plus_one else 1)).all(), p.name
        else:
            into_residual = p.name.endswith(("out.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * model.config.layers) if into_residual else 0.02
            assert p.value.std() == pytest.approx(std, rel=4 / math.sqrt(2 * p.size)), p.name
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 300, (2, 64)), rng.integers(0, 300, (2, 64, model.prediction_heads))
    assert model.forward(ids, targets).mean() == pytest.approx(math.log(300), rel=0.03)
