"""Adapters on whole models: gradients, what is frozen, what is shared by workers, and the weights of fused decoders."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.gradcheck import TOLERANCE, check
from tinyforge.infer import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.models.char_mlp import SPEC as CHAR_MLP
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import SPEC as LLAMA_SPEC
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.lstm import Config as LSTMConfig
from tinyforge.models.lstm import LSTMModel
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import Config as NanoEulerConfig
from tinyforge.models.nanoeuler import NanoEuler
from tinyforge.op import Stash
from tinyforge.optim import AdamW
from tinyforge.params import UNPLACED, Param, ParamBuffer
from tinyforge.quantised import FOR_TUNING, GROUPS
from tinyforge.rng import Stream
from tinyforge.train.plan import plan_step

FP64 = get_backend("numpy", "fp64", workers=1)
SETTINGS = Adapters(rank=3, alpha=5.0, dropout=0.2)
LLAMA = LlamaConfig(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=10)
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (Llama, LLAMA),
    "qwen3": (Llama, LLAMA.override({"qk_norm": True, "tied": False, "layers": 1})),
    "gpt2": (GPT2, GPT2Config(dim=12, heads=3, layers=1, context=9, vocab=11, dropout=0.3)),
    "nanoeuler": (
        NanoEuler,
        NanoEulerConfig(
            dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, mtp_heads=2, hidden=10, mtp_weights=(1, 1)
        ),
    ),
    "char_mlp": (CHAR_MLP.build, CHAR_MLP.config(context=9, vocab=11)),
}


def adapted(name: str, settings: Adapters = SETTINGS) -> Any:
    kind, config = MODELS[name]
    model = Adapted(partial(kind, config, FP64), settings)
    rng = np.random.default_rng(1)
    for p in (*model.buffer.frozen, *model.buffer.params):
        model.buffer.set_master(p, 0.2 * rng.normal(size=p.shape) + p.fill)
    return model


def batch(model: Any) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.integers(0, 11, (2, 9)), rng.integers(-1, 11, (2, 9, model.prediction_heads))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_adapters_and_of_nothing_else(name: str) -> None:
    model = adapted(name)
    errors = check(model, batch(model), np.random.default_rng(0))
    assert set(errors) == {p.name for p in model.buffer.params} and len(errors) == 2 * len(model.adapters) > 0
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}
    assert all(p.grad is None for p in model.buffer.frozen)


@pytest.mark.parametrize("name", MODELS)
def test_at_the_start_it_is_the_base(name: str) -> None:
    """B is 0; and dropout on the adapters' input changes nothing then."""
    kind, config = MODELS[name]
    base = kind(config, FP64)
    base.initialise(0)
    model = Adapted(partial(kind, config, FP64), SETTINGS)
    for p in base.buffer.params:
        model.buffer.set_master(next(q for q in model.buffer.frozen if q.name == p.name), p.value)
    model.buffer.initialise(Stream(0, "adapters"))
    ids, targets = batch(model)
    assert np.array_equal(model.forward(ids, targets), base.forward(ids, targets))
    assert all(p.value.any() == p.name.endswith("lora_a") for p in model.buffer.params)
    assert model.buffer.count == base.buffer.count + sum(p.size for p in model.buffer.params)


def test_what_is_frozen_has_weights_and_nothing_else() -> None:
    model = adapted("llama", Adapters(2, 4.0, 0.0, ("qkv", "down")))
    assert list(model.adapters) == ["blocks.0.qkv", "blocks.0.down", "blocks.1.qkv", "blocks.1.down"]
    learned = 2 * (2 * 16 + 32 * 2 + 2 * 10 + 16 * 2)  # A and B of qkv, (32, 16), and of down, (16, 10)
    assert sum(p.size for p in model.buffer.params) == learned
    optimizer = AdamW(model.buffer, FP64)
    for flat in (model.buffer.values, model.buffer.grads, optimizer.m, optimizer.v):
        assert learned <= flat.size < learned + 32 * 8
    frozen = model.buffer.frozen_values.copy()
    ids, targets = batch(model)
    for step in range(3):
        model.buffer.grads[...] = 0
        stash = Stash(Stream(step, "noise"))
        model.forward(ids, targets, stash)
        model.backward(np.ones(1), stash)
        optimizer.step(1e-2, optimizer.clip(1.0)[1])
    assert np.array_equal(model.buffer.frozen_values, frozen)


def test_a_replica_reads_the_weights_and_owns_its_gradients() -> None:
    model = adapted("gpt2")
    other = model.replica()
    assert other.buffer.values is model.buffer.values and other.buffer.frozen_values is model.buffer.frozen_values
    assert other.buffer.grads is not model.buffer.grads
    ids, targets = batch(model)
    stash = Stash(Stream(1, "noise"))
    assert np.array_equal(other.forward(ids, targets, stash), model.forward(ids, targets, Stash(Stream(1, "noise"))))
    other.backward(np.ones(1), stash)
    assert other.buffer.grads.any() and not model.buffer.grads.any()


@pytest.mark.parametrize("name", ["llama", "nanoeuler"])
def test_a_fused_decoder_sees_the_merged_weights(name: str) -> None:
    model = adapted(name)
    before = model.buffer.frozen_values.copy()
    ids = batch(model)[0][0].tolist()
    found = []
    for decoder in (NumpyDecoder(model), ReferenceDecoder(model)):
        decoder.prefill(0, ids[:-2])
        found.append(decoder.step(np.array([ids[-2:]])))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12, atol=1e-12)
    merged = model.fused_weights()
    layer, op = merged.layers[1], model.adapters["blocks.1.qkv"]
    np.testing.assert_allclose(layer.qkv, op.weight.value + 5 / 3 * op.b.value @ op.a.value, rtol=1e-12, atol=1e-14)
    assert np.array_equal(model.buffer.frozen_values, before)
    assert np.shares_memory(op.weight.value, model.buffer.frozen_values)  # it is in its place again


QLORA = LLAMA.override({"dim": 64, "hidden": 10})


def qlora(weights: str) -> Any:
    model = Adapted(partial(Llama, QLORA, FP64), replace(SETTINGS, weights=weights))
    rng = np.random.default_rng(1)
    for p in (*model.buffer.frozen, *model.buffer.params):
        model.buffer.set_master(p, 0.2 * rng.normal(size=p.shape) + p.fill)
    return model


@pytest.mark.parametrize("weights", FOR_TUNING)
def test_gradients_are_those_of_the_dequantised_weights(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to a model that has the dequantised numbers as its weights, and with tiles of a few rows."""
    small, plain = qlora(weights), qlora("")
    kinds = {p.name: p.weights for p in small.buffer.frozen if p.weights}
    assert len(kinds) == 8 and set(kinds.values()) == {weights, *(["int8"] if weights in GROUPS else [])}
    assert not small.heads.weight.weights
    for p, own in zip(plain.buffer.frozen, small.buffer.frozen, strict=True):
        assert p.name == own.name
        plain.buffer.set_master(p, own.value)
    found = []
    for model, tile in ((plain, 1 << 20), (small, 1 << 20), (small, 3 * 64)):
        monkeypatch.setattr("tinyforge.quantised.TILE", tile)
        stash = Stash(Stream(3, "noise"))
        model.buffer.clear_grads()
        nll = model.forward(*batch(model), stash)
        model.backward(np.ones(1), stash)
        found.append((nll, model.buffer.grads.copy()))
    for nll, grads in found[1:]:
        np.testing.assert_allclose(nll, found[0][0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(grads, found[0][1], rtol=1e-11, atol=1e-12)
    errors = check(small, batch(small), np.random.default_rng(0), directions=1)
    assert {name: error for name, error in errors.items() if not error <= TOLERANCE} == {}


def test_codes_are_shared_and_never_merged_for_a_decoder() -> None:
    model = qlora("nf4")
    worker = model.replica()
    assert np.array_equal(worker.hidden(batch(model)[0]), model.hidden(batch(model)[0]))
    for p, own in zip(worker.buffer.frozen, model.buffer.frozen, strict=True):
        assert p.stored is own.stored if own.weights else np.shares_memory(p.value, own.value)
    assert model.fused_weights() is None and isinstance(make_decoder(model), ReferenceDecoder)


def test_the_forecast_counts_the_codes() -> None:
    """What --plan says of the weights, and of the matrix that is dequantised at a time."""
    config = LlamaConfig(dim=256, heads=4, kv_heads=2, layers=4, context=32, vocab=64, hidden=640)
    step = partial(plan_step, LLAMA_SPEC, config, "bf16", 1, 32)
    whole, small, double = (step(adapters=replace(SETTINGS, weights=weights)) for weights in ("", "nf4", "nf4-double"))
    matrices = 4 * (256 * (4 + 2 * 2) * 64 + 256 * 256 + 3 * 256 * 640)
    assert whole.weights - small.weights == matrices * 2 - matrices * 9 // 16
    # A byte for four; the numbers of the scales' scales are fewer than 128 a matrix, and 512 bytes are taken.
    assert small.weights - double.weights == matrices // 64 * 3 - 4 * 4 * 512
    assert 0 < small.peak - small.weights - (whole.peak - whole.weights) <= 2 * 2 * 256 * 640
    assert small.peak < whole.peak


def test_a_target_that_is_not_there() -> None:
    with pytest.raises(UserError, match="is called 'gate'; known: qkv, out, gate_up, down$"):
        adapted("llama", Adapters(2, 4.0, 0.0, ("qkv", "gate")))
    with pytest.raises(UserError, match="is called 'gate_up'; known: qkv, out, up, down$"):
        adapted("gpt2", Adapters(2, 4.0, 0.0, ("gate_up",)))


def test_a_model_without_linear_maps() -> None:
    with pytest.raises(UserError, match="--lora: the model has no linear maps but its head; leave it out"):
        Adapted(partial(LSTMModel, LSTMConfig(dim=4, layers=1, vocab=9), FP64), Adapters(2, 4.0))


def test_maps_in_branches_and_in_their_ops_are_found() -> None:
    """An op's name leaves out the branch that holds it: model.blocks[0].attention.qkv is blocks.0.qkv."""
    config = MoEConfig(dim=12, heads=3, kv_heads=1, layers=1, context=9, vocab=11, hidden=10, experts=3)
    assert list(Adapted(partial(MoE, config, FP64), SETTINGS).adapters) == ["blocks.0.qkv", "blocks.0.out"]
    model = Adapted(partial(MoE, config, FP64), replace(SETTINGS, targets=("qkv", "out", "gate")))
    assert list(model.adapters) == ["blocks.0.qkv", "blocks.0.out", "blocks.0.experts.gate"]
    block = model.blocks[0]
    assert [block.attention.qkv, block.attention.out, block.mlp.experts.gate] == list(model.adapters.values())


def test_an_op_whose_name_is_not_its_path() -> None:
    class Renamed(Llama):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.blocks[0].attention.qkv.name = "blocks.5.qkv"

    with pytest.raises(UserError, match="Renamed: blocks.5.qkv is not the path of that op in the model"):
        Adapted(partial(Renamed, LLAMA, FP64), SETTINGS)


def test_a_buffer_without_memory_places_nothing() -> None:
    p = Param("p", (3,))
    ParamBuffer([p], FP64, UNPLACED)
    with pytest.raises(RuntimeError, match="Param p has no value yet"):
        p.value  # noqa: B018
