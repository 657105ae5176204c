"""Decoding on WebGPU: decode.wgsl, launched from Python, gives the logits of the whole sequence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import Backend, get_backend
from tinyforge.errors import UserError
from tinyforge.formats import load, resolve_checkpoint
from tinyforge.frozen_model import frozen_model
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.nanoeuler import Config, NanoEuler

pytest.importorskip("wgpu", reason='the package of WebGPU is missing: pip install -e ".[webgpu]"')

from tinyforge.backends import webgpu
from tinyforge.infer import decoder_webgpu
from tinyforge.infer.decoder_webgpu import WebGPUDecoder

if not webgpu.adapters():
    pytest.skip("no adapter: apt-get install mesa-vulkan-drivers", allow_module_level=True)

CONFIG = Config(
    dim=24, heads=4, kv_heads=2, layers=2, context=150, vocab=19, mtp_heads=3, hidden=12, mtp_weights=(1, 0.5, 0.25)
)
TOKENS = np.random.default_rng(5).integers(0, CONFIG.vocab, (3, 150))


@pytest.fixture(scope="module")
def exact() -> Backend:
    try:
        return get_backend("webgpu", "fp64")
    except UserError as error:
        pytest.skip(f"no 64-bit floats to check with: {error}")


def model_on(backend: Backend, config: Config = CONFIG) -> Any:
    """A model with weights, gains included, that make a difference from place to place."""
    model = NanoEuler(config, backend)
    model.initialise(0)
    values = backend.to_numpy(model.buffer.values).copy()
    values[: model.buffer.decay_end] *= 8
    gains = values[model.buffer.decay_end :]
    gains *= np.random.default_rng(1).uniform(0.5, 1.5, gains.shape)
    model.buffer.values[...] = backend.asarray(values)
    return model


def whole(config: Config = CONFIG) -> np.ndarray:
    """NumPy's logits of all heads without a cache, (B, T, K, V)."""
    model = model_on(get_backend("numpy", "fp64", workers=1), config)
    h = model.hidden(TOKENS.astype(np.int32))
    return np.stack([model.heads.logits(h, k) for k in range(config.mtp_heads)], axis=2)


@pytest.mark.parametrize("chunks", [[150], [127, 1, 1, 1, 20], [3, 130, 17], [64, 65, 21]], ids=str)
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, heads=6, kv_heads=1, layers=3)], ids=["two", "shared"])
def test_the_cache_gives_the_logits_of_the_whole_sequence(config: Config, chunks: list[int], exact: Backend) -> None:
    decoder, parts = make_decoder(model_on(exact, config)), []
    assert isinstance(decoder, WebGPUDecoder)
    for end, size in zip(np.cumsum(chunks), chunks, strict=True):
        parts.append(decoder.step(TOKENS[:1, end - size : end], config.mtp_heads))
    expected = whole(config)[:1]
    assert decoder.lengths == [150] and np.abs(expected).max() > 1
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="row 0 holds 150 of 150 positions, no room for 1 more"):
        decoder.step([[1]])


def test_rows_go_on_as_caches_grow_and_are_copied(exact: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_webgpu, "FIRST_POSITIONS", 5)
    monkeypatch.setattr(decoder_webgpu, "READ_BYTES", 1000)  # logits of several readings
    expected, decoder = whole(), WebGPUDecoder(model_on(exact), 3)
    for row, start in enumerate((1, 40, 90)):
        found = decoder.last_logits(row, TOKENS[row, :start].tolist(), 2)
        np.testing.assert_allclose(found[0, 0], expected[row, start - 1, :2], rtol=0, atol=1e-10)
    for n, heads in ((1, 3), (4, 1), (7, 2)):
        at = list(decoder.lengths)
        found = decoder.step([TOKENS[row, i : i + n] for row, i in enumerate(at)], heads)
        for row, i in enumerate(at):
            np.testing.assert_allclose(found[row], expected[row, i : i + n, :heads], rtol=0, atol=1e-10)
    decoder.rewind([10, 0, 100])
    kept = decoder.saved(0, 4)
    assert decoder.repeat(1, 0) and decoder.lengths == [10, 10, 100]
    decoder.rewind_row(1, 4)
    decoder.restore(1, kept, 10)
    found = decoder.step_rows([1, 2], [TOKENS[0, 10:12], TOKENS[2, 100:102]])
    np.testing.assert_allclose(found[0, :, 0], expected[0, 10:12, 0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found[1, :, 0], expected[2, 100:102, 0], rtol=0, atol=1e-10)
    assert decoder.lengths == [10, 12, 102]


def test_neither_other_rows_nor_positions_change_a_bit() -> None:
    """What makes speculation and serving exact in floating point."""
    model = model_on(get_backend("webgpu", "fp32"))
    together, single = WebGPUDecoder(model, 3), WebGPUDecoder(model)
    for row in (0, 2):
        together.prefill(row, TOKENS[row, : 30 + row].tolist())
    together.prefill(1, TOKENS[1, :20].tolist())
    single.prefill(0, TOKENS[1, :20].tolist())
    found = together.step([TOKENS[row, 20:24] for row in range(3)], 3)[1]
    for i in range(4):
        assert np.array_equal(found[i], single.step([TOKENS[1, 20 + i : 21 + i]], 3)[0, 0])


def test_a_token_takes_five_launches_a_layer_and_one_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = WebGPUDecoder(model_on(get_backend("webgpu", "fp32")))
    decoder.first([1, 2, 3])
    counts = {"launch": 0, "read": 0}
    for name in counts:

        def counted(*args: Any, name: str = name, right: Any = None) -> Any:
            counts[name] += 1
            return right(*args)

        monkeypatch.setattr(decoder.device, name, partial(counted, right=getattr(decoder.device, name)))
    decoder.step([[4]])
    assert counts == {"launch": 5 * CONFIG.layers + 2, "read": 1}


LLAMA = LlamaConfig(dim=24, heads=3, kv_heads=1, layers=2, context=40, vocab=50, hidden=20, tied=True)


def frozen_llama(backend: Backend, weights: str = "", config: LlamaConfig = LLAMA) -> Any:
    model = frozen_model(partial(Llama, config, backend), weights)
    rng = np.random.default_rng(3)
    for p in model.buffer.frozen:
        model.buffer.set_master(p, rng.normal(size=p.shape) * 0.3 + p.fill)
    return model


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_int8_weights_are_read_as_codes(precision: str) -> None:
    """Tied, so that the embedding and the output head are the same codes."""
    try:
        backend = get_backend("webgpu", precision)
    except UserError as error:
        pytest.skip(f"no 64-bit floats to check with: {error}")
    model = frozen_llama(backend, "int8")
    decoder = make_decoder(model)
    assert isinstance(decoder, WebGPUDecoder)
    expected = ReferenceDecoder(frozen_llama(get_backend("numpy", "fp64", workers=1), "int8"))
    found = [each.step(TOKENS[:1, :20] + 30) for each in (decoder, expected)]
    np.testing.assert_allclose(*found, rtol=0, atol=(1e-9 if precision == "fp64" else 1e-4) * np.abs(found[1]).max())
    np.testing.assert_allclose(
        backend.to_numpy(model.embedding.weight.value), expected.model.embedding.weight.value, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda backend: model_on(backend, replace(CONFIG, hidden=10)), "multiples of 4"),
        (lambda backend: frozen_llama(backend, "fp8"), "weights in fp8, expected numbers or int8"),
        pytest.param(
            lambda backend: frozen_llama(backend, config=replace(LLAMA, head_dim=260)),
            "heads of at most 256",
            marks=pytest.mark.slow,  # attention's kernel for it takes seconds to compile
        ),
    ],
    ids=["hidden", "fp8", "wide head"],
)
def test_what_the_kernels_do_not_take_the_reference_decodes(model: Any, reason: str) -> None:
    made = model(get_backend("webgpu", "fp32"))
    with pytest.raises(UserError, match=reason):
        WebGPUDecoder(made)
    decoder = make_decoder(made)
    assert isinstance(decoder, ReferenceDecoder) and np.isfinite(decoder.step([[1, 2]])).all()
    with pytest.raises(UserError, match="is on numpy, not webgpu"):
        WebGPUDecoder(model(get_backend("numpy", "fp32")))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["", "int8"])
def test_greedy_tokens_are_numpys(weights: str) -> None:
    found = []
    for name in ("numpy", "webgpu"):
        loaded = load(resolve_checkpoint("storyteller"), get_backend(name, "fp32"), frozen=True, weights=weights)
        session = Session(loaded.model)
        session.extend(loaded.template.encode(loaded.tokenizer, [("Tell me a story about a dog.", None)]))
        sampling = Sampling(temperature=0, max_tokens=100)
        found.append([token.id for token in session.generate(sampling, loaded.template.stop_ids(loaded.tokenizer))])
    assert len(found[0]) == 100 and found[0] == found[1]
