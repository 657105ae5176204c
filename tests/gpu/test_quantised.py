"""Weights of one byte on the GPU: every code, prompts by a graph, a batch."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import get_backend
from tinyforge.formats import load
from tinyforge.frozen_model import quantised_copy
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.models.nanoeuler import SPEC, Config, NanoEuler
from tinyforge.op import Stash
from tinyforge.quantised import FORMATS, GROUPS, KINDS, Quantised
from tinyforge.rng import Stream

pytestmark = pytest.mark.gpu

CONFIG = Config(dim=128, heads=4, kv_heads=2, layers=2, context=160, vocab=301, hidden=150)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("columns", [64, 61])
def test_every_code_is_the_number_that_it_is_on_the_host(kind: str, precision: str, columns: int) -> None:
    rng = np.random.default_rng(0)
    codes = np.arange(64 * columns).astype(np.uint8)
    codes[codes & 127 == 127] = 1  # not a number
    codes = codes.view(FORMATS[kind].dtype).reshape(2, 32, columns)
    scales = np.exp(rng.normal(size=(2, 32))).astype(np.float32)

    def values(name: str) -> np.ndarray:
        backend = get_backend(name, precision if name == "cupy" or precision != "bf16" else "fp32")
        found = Quantised(kind, backend.asarray(codes, codes.dtype), backend.asarray(scales, scales.dtype), backend)
        return backend.to_numpy(found.values())

    got, expected = values("cupy"), values("numpy")
    rounded = expected.astype(get_backend("cupy", precision).dtype).astype(got.dtype)
    assert got.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("kind", ["nf4", "int4"])
def test_four_bits_are_what_they_are_on_the_host(kind: str, precision: str) -> None:
    rng = np.random.default_rng(0)
    codes = rng.permutation(np.arange(3 * 5 * 96) % 256).astype(np.uint8).reshape(3, 5, 96)
    scales = np.exp(rng.normal(size=(3, 5, 192 // GROUPS[kind]))).astype(np.float32)

    def values(name: str) -> np.ndarray:
        backend = get_backend(name, precision if name == "cupy" or precision != "bf16" else "fp32")
        found = Quantised(kind, backend.asarray(codes, codes.dtype), backend.asarray(scales, scales.dtype), backend)
        return backend.to_numpy(found.values())

    got, expected = values("cupy"), values("numpy")
    rounded = expected.astype(get_backend("cupy", precision).dtype).astype(got.dtype)
    assert got.shape == (3, 5, 192) and got.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_scales_of_8_bits_are_what_they_are_on_the_host(precision: str) -> None:
    """Of a view too, whose first group is in the middle of one of scales."""
    matrix, found = np.random.default_rng(0).normal(size=(35, 64 * 41)).astype(np.float32), []
    for name in ("cupy", "numpy"):
        backend = get_backend(name, precision if name == "cupy" or precision != "bf16" else "fp32")
        stored = Quantised.zeros("nf4-double", matrix.shape, backend)
        stored[...] = matrix
        found.append([backend.to_numpy(part.values()) for part in (stored, stored[11:30])])
    for got, expected in zip(*found, strict=True):
        rounded = expected.astype(get_backend("cupy", precision).dtype).astype(got.dtype)
        assert got.tobytes() == rounded.tobytes()


@pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_on_nf4_is_that_on_the_dequantised_matrices(precision: str, kind: str) -> None:
    """The same bits: the product reads the same numbers."""
    found = []
    backend = get_backend("cupy", precision)
    models = [
        Adapted(partial(NanoEuler, CONFIG.override({"hidden": 192}), backend), Adapters(4, 8.0, 0.1, weights=weights))
        for weights in (kind, "")
    ]
    rng = np.random.default_rng(3)
    for p, own in zip(models[1].buffer.frozen, models[0].buffer.frozen, strict=True):
        models[0].buffer.set_master(own, 0.1 * rng.normal(size=own.shape) + own.fill)
        models[1].buffer.set_master(p, backend.to_numpy(own.value))
    ids = backend.asarray(rng.integers(0, CONFIG.vocab, (3, 40), dtype=np.int32))
    targets = backend.asarray(rng.integers(0, CONFIG.vocab, (3, 40, CONFIG.mtp_heads), dtype=np.int32))
    for model in models:
        model.buffer.initialise(Stream(0, "init"))
        for p in model.buffer.params:
            p.value[...] += backend.asarray(0.1, p.value.dtype)
        stash = Stash(Stream(1, "noise"))
        nll = model.forward(ids, targets, stash)
        model.backward(backend.asarray(np.full(CONFIG.mtp_heads, 1e-2), backend.master_dtype), stash)
        found.append((backend.to_numpy(nll).tobytes(), backend.to_numpy(model.buffer.grads)))
    assert found[0][0] == found[1][0] and found[0][1].any()
    np.testing.assert_array_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_same_bits_by_a_graph(kind: str) -> None:
    model = quantised_copy(trained_like("bf16"), kind)
    decoder, tokens = make_decoder(model), np.random.default_rng(1).integers(0, CONFIG.vocab, 120).tolist()
    found = []
    for _ in range(5):
        decoder.rewind([0])
        decoder.prefill(0, tokens[:-1])
        found.append(decoder.step([tokens[-1:]]).tobytes())
    assert len(set(found)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_has_the_logits_of_the_model(kind: str) -> None:
    model = quantised_copy(trained_like("fp32"), kind)
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab, (20, 9))
    decoders = [make_decoder(model, 20), ReferenceDecoder(model, 20)]
    got, expected = (decoder.step(tokens) for decoder in decoders)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_trained_models_greedy_text_is_that_of_the_cpu(kind: str) -> None:
    from tinyforge.infer import Sampling, generate

    assert SPEC.bundled
    texts = []
    for backend in (get_backend("numpy"), get_backend("cupy", "fp32")):
        loaded = load(SPEC.bundled, backend, weights=kind)
        prompts = ["What is 3 plus 4?", "Which is larger, 1 or 12?", "Tom has a red ball. Where is"]
        asked = [loaded.tokenizer.encode(prompt) for prompt in prompts]
        texts.append([list(generate(loaded.model, ids, Sampling(temperature=0, max_tokens=40))) for ids in asked])
    assert texts[0] == texts[1]


def trained_like(precision: str) -> NanoEuler:
    model = NanoEuler(CONFIG, get_backend("cupy", precision))
    model.initialise(3)
    model.buffer.masters[: model.buffer.decay_end] *= 4
    model.buffer.publish()
    return model
