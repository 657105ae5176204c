"""Weights of one byte: formats, bounds, the models that have them, and what decoders make of them."""

from __future__ import annotations

import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tinyforge import quantised
from tinyforge.backends import get_backend
from tinyforge.backends.meta import METER, MetaBackend
from tinyforge.errors import UserError
from tinyforge.formats import load, load_pretrained, open_model, save_pretrained
from tinyforge.frozen_model import frozen_model, matrices, quantised_copy
from tinyforge.infer import Conversation, Sampling, make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.infer.decoder_numpy import NumpyDecoder
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.nanoeuler import SPEC, Config, NanoEuler
from tinyforge.quantised import E4M3, FORMATS, Quantised, dequantise, quantise, to_e4m3
from tinyforge.quantised_groups import (
    DYNAMIC,
    NF4,
    dequantise_groups,
    dequantise_nf4,
    dequantise_scales,
    quantise_scales,
)
from tinyforge.registry import models

CONFIG = Config(
    dim=32, heads=4, kv_heads=2, layers=2, context=24, vocab=40, mtp_heads=2, hidden=50, mtp_weights=(1, 0.5)
)


def random_model(precision: str = "fp64") -> NanoEuler:
    model = NanoEuler(CONFIG, get_backend("numpy", precision, workers=1))
    model.initialise(1)
    model.buffer.values[: model.buffer.decay_end] *= 6
    return model


def heavy_tailed(shape: tuple[int, ...]) -> np.ndarray:
    """Rows of very different sizes, with numbers far beyond the others."""
    rng = np.random.default_rng(0)
    return rng.standard_t(2, shape) * np.exp(4 * rng.normal(size=(*shape[:-1], 1)))


# --- the formats


def test_e4m3_is_that_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the peer for e4m3")
    theirs = np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(E4M3, theirs, equal_nan=True)
    rng = np.random.default_rng(0)
    finite = np.sort(E4M3[np.isfinite(E4M3)])
    ties = (finite[1:] + finite[:-1]) / 2
    below_and_above = np.concatenate([np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf)])
    drawn = rng.normal(size=10**5) * np.exp(3 * rng.normal(size=10**5))
    numbers = np.concatenate([finite, ties, below_and_above, drawn])
    numbers = np.clip(numbers, -448, 448).astype(np.float32)
    expected = numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(to_e4m3(numbers), expected)


@pytest.mark.parametrize("shape", [(7, 33), (2, 5, 64), (3, 1), (0, 4), (4, 0)])
@pytest.mark.parametrize("kind", FORMATS)
def test_no_number_is_further_off_than_the_format_says(kind: str, shape: tuple[int, ...]) -> None:
    matrix = heavy_tailed(shape)
    codes, scales = quantise(matrix, kind)
    assert codes.shape == shape and scales.shape == shape[:-1] and codes.itemsize == 1
    error, s = np.abs(dequantise(codes, scales, matrix.dtype) - matrix), scales.astype(np.float64)[..., None]
    rounding = 448 * 2.0**-24 * s  # of the scale itself
    if kind == "int8":
        assert (error <= s / 2 + rounding).all() and (not error.size or (error > 0.4 * s).any() or shape[-1] == 1)
    else:
        assert (error <= np.maximum(np.abs(matrix) / 16, s * 2.0**-10) + rounding).all()
    again = quantise(dequantise(codes, scales, matrix.dtype), kind)
    assert np.array_equal(again[0], codes) and np.allclose(again[1], scales, rtol=2e-7, atol=0)


def test_quantising_again_gives_the_same_codes_and_nearly_always_the_same_scales() -> None:
    """The largest number of a row is 127 s, rounded. With S the 24 bits of s, 127 S leaves 2^30 for S from 128/127 2^23
    on and is then rounded to a multiple of 128, by at most 64. Divided by 127, only an error of 64 reaches the next S:
    64 / 127 > 1 / 2. That is a tie, S mod 128 = 64. Its neighbour is no tie, so the third scale is the second."""
    mantissas = np.arange(1 << 23, 1 << 24, 37)
    scales = (mantissas * 2.0**-30).astype(np.float32)
    codes = np.array([[127, -126, 1, 0]], np.int8).repeat(len(scales), axis=0)
    again, others = quantise(dequantise(codes, scales, np.dtype(np.float32)), "int8")
    assert np.array_equal(again, codes)
    ties = (mantissas % 128 == 64) & (127 * mantissas >= 1 << 30)
    assert np.array_equal(others != scales, ties) and 0 < ties.mean() < 1 / 128
    assert np.abs(others.view(np.int32) - scales.view(np.int32)).max() == 1  # ulp
    assert np.array_equal(quantise(dequantise(again, others, scales.dtype), "int8")[1], others)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_matrix_in_parts_is_the_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = heavy_tailed((3, 17, 33))
    whole = quantise(matrix, kind)
    monkeypatch.setattr(quantised, "AT_ONCE", 5 * 33 + 1)
    parts = quantise(matrix, kind)
    assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))
    matrix[2, 16, 32] = np.nan  # in the last part
    with pytest.raises(UserError, match="a weight is not finite, and"):
        quantise(matrix, kind)


@pytest.mark.parametrize("kind", FORMATS)
def test_ties_go_to_the_even_code(kind: str) -> None:
    row = np.array([[FORMATS[kind].top, 2.5, 3.5, -2.5, 0.5] if kind == "int8" else [448.0, 17, 19, -17, 2.0**-10]])
    codes, scales = quantise(row, kind)
    assert scales.tolist() == [1]
    expected = [127, 2, 4, -2, 0] if kind == "int8" else [448, 16, 20, -16, 0]
    assert dequantise(codes, scales, row.dtype)[0].tolist() == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_nothing_tiny_rows_and_the_largest_numbers(kind: str) -> None:
    matrix = np.array([[0.0, -0.0], [1e-45, -3e-45], [3.4e38, -3.4e38], [1e-30, 1.0]])
    found = dequantise(*quantise(matrix, kind), matrix.dtype)
    assert np.isfinite(found).all() and not found[0].any() and found[3, 1] == pytest.approx(1, rel=1e-7)
    np.testing.assert_allclose(found[2], matrix[2], rtol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(UserError, match="a weight is not finite, and int8 cannot represent it; leave out --weights or"):
        quantise(np.array([[1.0, wrong]]), "int8")
    with pytest.raises(UserError, match=r"--weights 'int3' is not a format; use one of: int8, fp8, int4"):
        quantise(np.ones((1, 1)), "int3")


def test_four_bits_are_those_of_q4_0() -> None:
    gguf = pytest.importorskip("gguf")
    rows = heavy_tailed((40, 96))
    rows[3, :32] = 0
    codes, scales = quantise(rows, "int4")
    blocks = gguf.quants.quantize(rows.astype(np.float32), gguf.GGMLQuantizationType.Q4_0).reshape(-1, 18)
    assert np.array_equal(codes.reshape(-1, 16), blocks[:, 2:])
    assert np.array_equal(scales.reshape(-1, 1), blocks[:, :2].copy().view(np.float16).astype(np.float32))
    expected = gguf.quants.dequantize(blocks.reshape(40, -1), gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(dequantise_groups(codes, scales, np.dtype(np.float32)), expected)


def test_four_bits_leave_heads_and_rows_that_are_not_whole_groups_in_eight() -> None:
    config = LlamaConfig(dim=64, heads=4, kv_heads=2, layers=1, context=30, vocab=90, hidden=50)
    model = Llama(config, get_backend("numpy", "fp32", workers=1))
    model.initialise(0)
    small = quantised_copy(model, "int4")
    block = small.blocks[0]
    kinds = {p.name: p.weights for p in small.buffer.frozen if p.weights}
    assert kinds.pop(block.mlp.down.weight.name) == kinds.pop(small.heads.weight.name) == "int8"
    assert kinds and set(kinds.values()) == {"int4"}
    stored = block.mlp.up.weight.stored
    assert stored.shape == block.mlp.up.weight.shape and stored[3:5].shape[0] == 2
    assert stored.nbytes == block.mlp.up.weight.size * 10 // 16
    assert np.array_equal(stored.reshape(-1, 64).values(), block.mlp.up.weight.value.reshape(-1, 64))
    ids = np.arange(20)[None]
    np.testing.assert_allclose(make_decoder(small).step(ids)[:, :, 0], small.logits(small.hidden(ids)), atol=1e-4)


def test_four_bits_are_for_the_cpu() -> None:
    with pytest.raises(UserError, match="--weights int4 is for numpy and cupy, got backend meta; use int8 or fp8"):
        frozen_model(partial(NanoEuler, Config(), MetaBackend("fp32")), "int4")


def test_one_scale_for_a_whole_matrix_would_be_seen() -> None:
    """The negative control of the bounds: the rows here differ in size by more than int8 can hold."""
    matrix = heavy_tailed((64, 32))
    codes, scales = quantise(matrix.reshape(1, -1), "int8")
    error = np.abs(dequantise(codes, scales, matrix.dtype).reshape(matrix.shape) - matrix)
    assert (error.max(axis=1) > np.abs(matrix).max(axis=1) / 254 * 1.01).any()


@pytest.mark.parametrize("shape", [(7, 64), (2, 5, 192)])
def test_nf4_is_the_nearest_of_its_numbers(shape: tuple[int, ...]) -> None:
    matrix = heavy_tailed(shape).astype(np.float32)
    codes, scales = quantise(matrix, "nf4")
    assert codes.shape == (*shape[:-1], shape[-1] // 2) and scales.shape == (*shape[:-1], shape[-1] // 64)
    groups = matrix.reshape(-1, 64).astype(np.float64)
    choices = NF4.astype(np.float64) * np.abs(groups).max(axis=1)[:, None, None]
    nearest = np.abs(groups[:, :, None] - choices).min(axis=2)
    found = dequantise_nf4(codes, scales, np.dtype(np.float64)).reshape(-1, 64)
    assert (np.abs(found - groups) <= nearest + 1e-7 * np.abs(groups).max(axis=1, initial=0)[:, None]).all()
    assert np.array_equal(quantise(found, "nf4")[0].reshape(-1, 32), codes.reshape(-1, 32))


def test_nf4_is_for_tuning_alone() -> None:
    with pytest.raises(UserError, match="'nf4' is not a format; use one of: int8, fp8, int4"):
        frozen_model(lambda **options: pytest.fail("built"), "nf4")


def test_nf4_of_nothing_and_of_one_number() -> None:
    matrix = np.zeros((2, 64), np.float32)
    matrix[1, 5] = -3.5
    found = dequantise_nf4(*quantise(matrix, "nf4"), np.dtype(np.float32))
    assert np.array_equal(found, matrix)
    assert [x.shape for x in quantise(matrix[:0], "nf4")] == [(0, 32), (0, 1)]


def test_nf4_has_the_codes_of_bitsandbytes() -> None:
    torch = pytest.importorskip("torch", reason="the peer is bitsandbytes, on torch")
    functional = pytest.importorskip("bitsandbytes.functional", reason="the peer of NF4 is bitsandbytes")
    matrix = np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32)
    packed, state = functional.quantize_4bit(torch.from_numpy(matrix), blocksize=64, quant_type="nf4")
    codes, scales = quantise(matrix, "nf4")
    assert np.array_equal(codes.reshape(-1), packed.numpy().reshape(-1))
    assert np.array_equal(scales.reshape(-1), state.absmax.numpy())
    theirs = functional.dequantize_4bit(packed, state).numpy()
    np.testing.assert_allclose(dequantise_nf4(codes, scales, np.dtype(np.float32)), theirs, rtol=1e-6)
    more = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
    _, state = functional.quantize_4bit(torch.from_numpy(matrix), **more)
    codes, tops, offset = quantise_scales(scales)
    assert np.array_equal(codes.reshape(-1), state.absmax.numpy().reshape(-1))
    np.testing.assert_allclose(DYNAMIC, state.state2.code.numpy(), rtol=2e-7)
    np.testing.assert_allclose(tops, state.state2.absmax.numpy(), rtol=1e-5)
    np.testing.assert_allclose(offset, state.offset.numpy(), rtol=1e-6)


def double(matrix: np.ndarray, parts: int = 1) -> Quantised:
    backend = get_backend("numpy", "fp32", workers=1)
    found = Quantised.zeros("nf4-double", matrix.shape, backend)
    step = max(1, -(-len(matrix) // parts))
    for start in range(0, len(matrix), step):
        found[start : start + step] = matrix[start : start + step]
    return found


def test_scales_of_8_bits_are_the_nearest_and_a_view_finds_its_own() -> None:
    matrix = np.random.default_rng(0).normal(size=(5, 7, 64 * 41)).astype(np.float32)  # groups of scales end in a row
    found, (codes, scales) = double(matrix, parts=3), quantise(matrix, "nf4")
    values = found.values()
    assert np.array_equal(found.codes, codes) and found.scales.dtype == np.uint8 and found.scales.shape == scales.shape
    assert found.nbytes == matrix.size // 2 + matrix.size // 64 + 4 * (-(-matrix.size // 64 // 256) + 1)
    tops, offset, start = found.second or pytest.fail("no second level")
    got = dequantise_scales(found.scales, tops, offset, start)
    choices = DYNAMIC.astype(np.float64) * tops[np.arange(scales.size) // 256][:, None] + offset
    nearest = np.abs(choices - scales.reshape(-1, 1)).min(axis=1)
    assert (np.abs(got - scales).reshape(-1) <= nearest + 1e-6).all() and nearest.max() < 0.05
    np.testing.assert_array_equal(values, dequantise_nf4(codes, got, np.dtype(np.float32)))
    for at in (3, slice(2, 4), slice(None), slice(4, 9)):
        np.testing.assert_array_equal(found[at].values(), values[at])
    np.testing.assert_array_equal(found[3][2:].values(), values[3][2:])
    np.testing.assert_array_equal(found.reshape(35, -1)[11:13].values(), values.reshape(35, -1)[11:13])
    found[1:2] = matrix[1:2]  # once more: of the other rows the rounded scales count
    assert np.abs(found.values() - values).max() < 0.05
    assert not double(np.zeros((3, 64), np.float32)).values().any() and double(matrix[:0]).values().size == 0


# --- models


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", models())
def test_every_model_has_its_matrices_in_one_byte_and_nothing_beside_them(name: str, kind: str) -> None:
    spec = models()[name]
    backend = get_backend("numpy", "fp32", workers=1)
    config = next(iter(spec.build.cases(backend, np.random.default_rng(0))))[0].config
    model = frozen_model(partial(spec.build, config, backend), kind)
    found = matrices(model)
    assert found and all(isinstance(p.stored, Quantised) for p in found)
    small = [p for p in model.buffer.frozen if p not in found]
    codes = sum(p.size + 4 * p.size // p.shape[-1] for p in found)
    assert model.buffer.nbytes == codes + sum(4 * p.size for p in small)
    assert model.buffer.count == sum(p.size for p in model.params()) and not model.buffer.values.size
    for p in found:
        value = heavy_tailed(p.shape).astype(np.float32)
        model.buffer.set_master(p, value)
        assert p.grad is None and p.value.dtype == np.float32
        assert np.array_equal(p.value, dequantise(*quantise(value, kind), np.dtype(np.float32)))


@pytest.mark.parametrize("name", models())
def test_a_model_that_is_only_read_has_its_weights_and_nothing_beside_them(name: str) -> None:
    backend = get_backend("numpy", "fp32", workers=1)
    learned, inputs = next(iter(models()[name].build.cases(backend, np.random.default_rng(0))))
    model = frozen_model(partial(models()[name].build, learned.config, backend))
    for p, own in zip(model.params(), learned.params(), strict=True):
        model.buffer.set_master(p, own.value)
        assert p.grad is None and not p.weights
    assert model.buffer.nbytes == 4 * model.buffer.count == 4 * learned.buffer.count
    assert not model.buffer.values.size and not model.buffer.grads.size
    outputs = [op.forward(*inputs) for op in (model, learned)]
    for got, expected in zip(*(found if isinstance(found, tuple) else (found,) for found in outputs), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", FORMATS)
def test_decoders_give_the_logits_of_the_model(kind: str) -> None:
    model = quantised_copy(random_model(), kind)
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab, (3, 20))
    got, expected = (decoder.step(tokens, 2) for decoder in (make_decoder(model, 3), ReferenceDecoder(model, 3)))
    assert np.abs(got - expected).max() <= 1e-10 * np.abs(expected).max()
    exact = ReferenceDecoder(random_model(), 3).step(tokens, 2)
    assert 1e-3 < np.abs(expected - exact).max() / np.abs(exact).max() < {"int8": 0.1, "fp8": 0.3}[kind]


def test_a_decoder_that_forgets_the_scales_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised_copy(random_model(), "int8")
    tokens = np.random.default_rng(2).integers(0, CONFIG.vocab, (1, 20))
    expected = ReferenceDecoder(model).step(tokens)
    monkeypatch.setattr(Quantised, "values", lambda self: self.codes.astype(self.dtype) * self.scales.mean())
    assert np.abs(NumpyDecoder(model).step(tokens) - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("kind", FORMATS)
def test_the_models_that_come_with_the_repository_still_answer(kind: str) -> None:
    assert SPEC.bundled
    texts = []
    for weights in ("", kind):
        loaded = load(SPEC.bundled, get_backend("numpy", workers=1), weights=weights)
        conversation = Conversation(loaded.model, loaded.tokenizer, loaded.template)
        asked = ("How much is 13 plus 2?", "Which is larger, 1 or 12?")
        texts.append(["".join(conversation.ask(question, Sampling(temperature=0))) for question in asked])
    assert texts[0] == texts[1] == ["13 14 15, so 15", "12"]


def test_memory_is_forecast_with_codes_and_without_gradients() -> None:
    opened = open_model(SPEC.bundled)  # type: ignore[arg-type]

    def held(weights: str = "", learned: bool = False) -> int:
        before = METER.now
        make = partial(opened.spec.build, opened.config, MetaBackend("bf16"))
        model = make() if learned else frozen_model(make, weights)
        return METER.now - before + 0 * id(model)

    count = opened.spec.build(opened.config, MetaBackend("bf16")).buffer.count
    assert held(learned=True) >= 10 * count  # a value, a master weight, a gradient
    assert 2 * count <= held() <= 2.1 * count  # tables of rotary positions too
    assert held("int8") <= 1.2 * count + 2 * opened.config.vocab * opened.config.dim


@pytest.mark.parametrize(("file", "kind"), [("run", "int4"), ("hf", "int8"), ("model.gguf", "int8")])
def test_codes_are_made_while_a_file_is_read(
    file: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tensor, the embedding, in parts: never in memory in full precision."""
    if file.endswith(".gguf"):
        pytest.importorskip("gguf")
    backend = get_backend("numpy", "fp32", workers=1)
    loaded, path = load_pretrained("storyteller", backend), tmp_path / file
    kinds = {"run": "tinyforge", "hf": "hf", "model.gguf": "gguf"}
    save_pretrained(*loaded, path, format=kinds[file])
    expected = quantised_copy(load(path, backend).model, kind)
    for module in ("tinyforge.tensors.READ_AT_ONCE", "tinyforge.formats.gguf_file.DEQUANTISED_AT_ONCE"):
        monkeypatch.setattr(module, 1 << 14)
    monkeypatch.setattr(quantised, "AT_ONCE", 1 << 14)
    opened = open_model(path)
    tracemalloc.start()
    found = opened.build(backend, weights=kind).model
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    codes, embedding = found.buffer.nbytes, 4 * found.embedding.weight.size
    assert peak < codes + 0.6 * embedding, f"{peak / 1e6:.1f} MB, codes of {codes / 1e6:.1f}"
    for p, q in zip(found.buffer.frozen, expected.buffer.frozen, strict=True):
        assert p.name == q.name and p.weights == q.weights
        if p.weights:
            assert np.array_equal(p.stored.codes, q.stored.codes) and np.array_equal(p.stored.scales, q.stored.scales)
        else:
            assert np.array_equal(p.value, q.value)


def test_dequantise_is_a_kernel_with_a_memory_of_its_numbers() -> None:
    found = quantised.dequantise.backends()  # those whose launchers a test before has loaded
    assert {"meta", "numpy"} <= {*found} <= {"cupy", "meta", "numpy", "webgpu"}
