"""Decoders: the cache gives what the whole sequence would, in every position, for every head, however it is cut."""

from __future__ import annotations

import os
import sys
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend, machine_code
from tinyforge.backends.machine_code import missing
from tinyforge.frozen_model import frozen_model, quantised_copy
from tinyforge.infer import cpu_code
from tinyforge.infer.causal_lm import logits
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.decoder import Decoder, ReferenceDecoder
from tinyforge.infer.decoder_compiled import CompiledDecoder
from tinyforge.infer.decoder_cpu import CPUDecoder
from tinyforge.infer.decoder_numpy import (
    SMALL_KERNELS,
    SMALL_ROWS,
    NumpyDecoder,
    blocks_of,
    multiply_packed,
    pack,
    product_rows,
)
from tinyforge.infer.sampling import Sampling
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.models.nanoeuler.config import PRESETS

CONFIG = Config(
    dim=24, heads=4, kv_heads=2, layers=2, context=150, vocab=19, mtp_heads=3, hidden=10, mtp_weights=(1, 0.5, 0.25)
)
ALONE = replace(CONFIG, heads=3, kv_heads=3)  # every query head has its own keys
SHARED = replace(CONFIG, heads=6, kv_heads=1, layers=3)
CHUNKS = [[150], [1] * 150, [127, 1, 1, 1, 20], [128, 1, 21], [100, 50], [3, 130, 17], [15, 1, 1, 63, 65, 5]]
needs_numba = pytest.mark.skipif(bool(missing()), reason=missing())
COMPILED = pytest.param(CompiledDecoder, marks=needs_numba)
once = pytest.mark.parametrize("group", [1], indirect=True, ids=[""])  # no packed product is in the test
FUSED = [NumpyDecoder, COMPILED]
KINDS = [ReferenceDecoder, *FUSED]


@pytest.fixture(autouse=True, params=[1, SMALL_ROWS], ids=["vectors", "four rows"])
def group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rows of a product, of either kind of CPU."""
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.product_rows", lambda: request.param)
    return int(request.param)


def model_of(config: Config, precision: str = "fp64") -> NanoEuler:
    """A model with weights, gains included, that make a difference from place to place."""
    model = NanoEuler(config, get_backend("numpy", precision, workers=1))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 8
    gains = model.buffer.values[model.buffer.decay_end :]
    gains *= np.random.default_rng(1).uniform(0.5, 1.5, gains.shape).astype(gains.dtype)
    return model


def tokens_of(config: Config, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, config.vocab, (rows, length))


def whole(model: NanoEuler, tokens: np.ndarray) -> np.ndarray:
    """Logits of all heads without a cache, (B, T, K, V)."""
    h = model.hidden(tokens.astype(np.int32))
    return np.stack([model.heads.logits(h, k) for k in range(model.config.mtp_heads)], axis=2)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("config", [CONFIG, ALONE, SHARED], ids=["grouped", "alone", "shared"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_gives_the_logits_of_the_whole_sequence(
    kind: type[Decoder], config: Config, chunks: list[int]
) -> None:
    """Across the tiles of attention (64 and 128 without a cache, 16 with one), and to the end of the context."""
    model, tokens = model_of(config), tokens_of(config, 1, 150)
    decoder, parts = kind(model), []
    for end, size in zip(np.cumsum(chunks), chunks, strict=True):
        parts.append(decoder.step(tokens[:, end - size : end], config.mtp_heads).copy())
    expected = whole(model, tokens)
    assert decoder.lengths == [150] and np.abs(expected).max() > 1
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("chunks", [[149], [1, 2, 3, 143], [16, 100, 33], [17, 32, 5, 64]], ids=str)
@pytest.mark.parametrize("config", [CONFIG, ALONE, SHARED], ids=["grouped", "alone", "shared"])
@pytest.mark.parametrize("scale", [1.0, 12.0], ids=["small scores", "large scores"])
@pytest.mark.parametrize("kind", FUSED)
def test_a_prompt_leaves_the_keys_and_values_of_the_whole_sequence(
    kind: type[CPUDecoder], config: Config, chunks: list[int], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is cut, in blocks and tiles with and without a rest, on both sides of SAFE_SCORE."""
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.PREFILL_ROWS", 32)
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.QUERY_TILE", 12)
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.KEY_TILE", 20)
    monkeypatch.setattr("tinyforge.infer.decoder_compiled.AT_ONCE", 50)
    model, tokens = model_of(config), tokens_of(config, 1, 150)
    model.buffer.values[: model.buffer.decay_end] *= scale
    decoder, end = kind(model), sum(chunks)
    for last, size in zip(np.cumsum(chunks), chunks, strict=True):
        decoder.prefill(0, tokens[0, last - size : last].tolist())
    expected = whole(model, tokens)
    logits = decoder.step(tokens[:, end : end + 1], config.mtp_heads)
    np.testing.assert_allclose(logits[0, 0], expected[0, end], rtol=0, atol=1e-10 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("prompts", [[1, 2, 37, 110], [150], [149, 1]], ids=str)
@pytest.mark.parametrize("config", [CONFIG, ALONE, replace(CONFIG, layers=1)], ids=["grouped", "alone", "one layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_behind_a_prompt(kind: type[Decoder], config: Config, prompts: list[int]) -> None:
    """Of all heads, one prompt after the other; the last one fills the cache."""
    model, tokens = model_of(config), tokens_of(config, 1, 150)
    decoder, expected = kind(model), whole(model, tokens)
    for end, size in zip(np.cumsum(prompts), prompts, strict=True):
        logits = decoder.first(tokens[0, end - size : end].tolist(), config.mtp_heads)
        assert decoder.lengths == [end]
        np.testing.assert_allclose(logits[0, 0], expected[0, end - 1], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="holds 150 of 150 positions, no room for"):
        decoder.first([1, 2])


def test_threads_that_share_a_prompt_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.PREFILL_ROWS", 16)
    alone, tokens = NumpyDecoder(model_of(CONFIG, "fp32")), tokens_of(CONFIG, 1, 150)[0].tolist()
    alone.prefill(0, tokens)
    for workers in (2, 3, 16):
        model = NanoEuler(CONFIG, get_backend("numpy", "fp32", workers))
        model.buffer.values[:] = model_of(CONFIG, "fp32").buffer.values
        shared = NumpyDecoder(model)
        shared.prefill(0, tokens)
        assert np.array_equal(shared.keys, alone.keys) and np.array_equal(shared.values, alone.values)


@pytest.mark.parametrize("kind", FUSED)
def test_a_cache_that_grows_changes_no_bit(kind: type[CPUDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of(CONFIG, "fp32"), tokens_of(CONFIG, 3, 150)

    def run() -> list[np.ndarray]:
        decoder, found = kind(model, 3), []
        for row, start in enumerate((1, 40, 90)):
            decoder.prefill(row, tokens[row, :start].tolist())
        for at in range(90, 135):
            found.append(decoder.step(tokens[:, at : at + 1]).copy())
        kept = decoder.saved(2, 0)
        decoder.rewind([0, 0, 135])
        decoder.restore(1, kept, 135)
        assert decoder.repeat(0, 1)
        return [*found, decoder.step(tokens[:, 135:140]).copy()]

    expected = run()
    monkeypatch.setattr("tinyforge.infer.decoder_cpu.FIRST_POSITIONS", 5)
    assert all(np.array_equal(*pair) for pair in zip(run(), expected, strict=True))


@pytest.mark.parametrize("kind", FUSED)
def test_a_long_context_costs_what_is_used_of_it(kind: type[CPUDecoder]) -> None:
    config = LlamaConfig(dim=64, heads=4, kv_heads=2, layers=4, context=131_072, vocab=50, hidden=32)
    kind(Llama(replace(config, context=9), get_backend("numpy", "fp32")))  # what the first one imports
    tracemalloc.start()
    decoder = kind(Llama(config, get_backend("numpy", "fp32")))
    decoder.first(list(range(40)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20  # all positions of the cache would be 260 MB, and those of the angles 17


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_mostly_decodes_reads_its_weights_from_the_decoder(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(dim=128, heads=4, kv_heads=2, layers=3, context=64, vocab=600, hidden=300, tied=tied)
    backend = get_backend("numpy", "fp32")
    frozen, rng = frozen_model(partial(Llama, config, backend)), np.random.default_rng(3)
    for p in frozen.buffer.frozen:
        frozen.buffer.set_master(p, rng.normal(size=p.shape) * 0.1 + p.fill)
    frozen.blocks[1].norm2.op.weight.value[7] = 0  # erases a column, which need not come back
    plain, ids = NumpyDecoder(frozen), np.array([[1, 2, 3]])
    expected, passed, nbytes = plain.first([1, 2, 3]).copy(), logits(frozen, ids), frozen.buffer.nbytes
    weights = {p.name: p.value.copy() for p in frozen.buffer.frozen}
    weights[frozen.blocks[1].mlp.up.weight.name][:, 7] = 0
    frozen.mostly_decodes = True
    monkeypatch.setattr("tinyforge.infer.choose.missing", lambda: "not installed")
    found = make_decoder(frozen)
    assert isinstance(found, NumpyDecoder) and found.shared_head == tied
    np.testing.assert_allclose(found.first([1, 2, 3]), expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(logits(frozen, ids), passed, rtol=0, atol=1e-5 * np.abs(passed).max())
    again = make_decoder(frozen).first([1, 2, 3])
    np.testing.assert_allclose(again, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    for p in frozen.buffer.frozen:
        np.testing.assert_allclose(p.value, weights[p.name], rtol=3e-7, atol=0, err_msg=p.name)
    packed = {p.name for p in frozen.buffer.frozen if p.weights}
    assert len(packed) == 3 * 4 + (not tied) and frozen.buffer.nbytes == nbytes
    if sys.platform == "linux":
        flat = frozen.buffer.frozen_values
        released = sum(not part.any() for part in np.split(flat[: flat.size // 1024 * 1024], flat.size // 1024))
        assert released * 1024 * 4 > 0.9 * sum(p.stored.nbytes for p in frozen.buffer.frozen if p.weights)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_unequal_lengths_go_on_side_by_side(kind: type[Decoder]) -> None:
    model, tokens = model_of(CONFIG), tokens_of(CONFIG, 3, 140)
    expected = whole(model, tokens)
    decoder = kind(model, 3)
    starts = [0, 17, 130]
    for row, start in enumerate(starts):
        decoder.prefill(row, tokens[row, :start].tolist())
    for n, heads in ((1, 3), (4, 3), (1, 1), (3, 2), (1, 1)):
        new = np.stack([tokens[row, at : at + n] for row, at in enumerate(decoder.lengths)])
        at = list(decoder.lengths)
        logits = decoder.step(new, heads)
        assert logits.shape == (3, n, heads, CONFIG.vocab)
        for row in range(3):
            np.testing.assert_allclose(logits[row], expected[row, at[row] : at[row] + n, :heads], rtol=0, atol=1e-10)
    assert decoder.lengths == [start + 10 for start in starts]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rewound_row_forgets(kind: type[Decoder]) -> None:
    """What lay after the new end, other tokens, leaves no trace; the other row keeps all of its own."""
    model, tokens = model_of(CONFIG), tokens_of(CONFIG, 2, 60)
    expected = whole(model, tokens)
    decoder = kind(model, 2)
    decoder.prefill(0, tokens[0, :20].tolist())
    decoder.prefill(0, tokens_of(CONFIG, 1, 100)[0].tolist())
    decoder.prefill(1, tokens[1, :50].tolist())
    decoder.rewind([20, 50])
    logits = decoder.step(np.stack([tokens[0, 20:24], tokens[1, 50:54]]))
    np.testing.assert_allclose(logits[0, :, 0], expected[0, 20:24, 0], rtol=0, atol=1e-10)
    np.testing.assert_allclose(logits[1, :, 0], expected[1, 50:54, 0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", FUSED)
def test_float32_stays_near_float64(kind: type[CPUDecoder]) -> None:
    tokens = tokens_of(CONFIG, 1, 150)
    exact = whole(model_of(CONFIG), tokens)
    logits = kind(model_of(CONFIG, "fp32")).step(tokens, 3)
    assert np.abs(logits - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", FUSED)
def test_scores_that_would_overflow_an_exponential_do_not(kind: type[CPUDecoder]) -> None:
    """float32's exp overflows at 89; these scores are in the hundreds, and SwiGLU's gates are too."""
    model = model_of(CONFIG, "fp32")
    model.buffer.values[: model.buffer.decay_end] *= 12
    tokens = tokens_of(CONFIG, 1, 40)
    with np.errstate(all="raise", under="ignore"):
        logits = kind(model).step(tokens, 3)
    expected = whole(model, tokens)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", FUSED)
def test_several_positions_at_once_give_the_bits_of_one_after_the_other(
    kind: type[CPUDecoder], n: int, precision: str
) -> None:
    """What makes speculation exact in floating point: each product adds up a row in the same order, see `pack`."""
    model = model_of(PRESETS["small"], precision)
    tokens = tokens_of(model.config, 1, 120)
    several, single = kind(model), kind(model)
    for at in range(0, 120, n):
        logits = several.step(tokens[:, at : at + n], 4).copy()
        for i in range(n):
            assert np.array_equal(logits[:, i], single.step(tokens[:, at + i : at + i + 1], 4)[:, 0]), at + i


@pytest.mark.parametrize(
    ("rows", "columns", "block"),
    [
        (344, 128, 344),
        (4096, 768, 64),
        (80, 3000, 80),
        (96, 4000, 48),
        (128, 5000, 32),
        (97, 5000, 97),
        (5, 400_000, 5),
    ],
)
def test_packed_weights_multiply_as_the_plain_ones(rows: int, columns: int, block: int, group: int) -> None:
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(2, rows, columns)), rng.normal(size=(4, columns))
    packed = pack(weight)
    assert packed.shape == (2, rows // block, 1, columns, block)
    out = np.empty((2, 4, rows))
    multiply_packed(x.reshape(4 // group, group, columns), packed, out=blocks_of(out, packed, group))
    np.testing.assert_allclose(out, x @ weight.swapaxes(1, 2), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kernels", ["", "Haswell", "Zen", *SMALL_KERNELS])
def test_four_rows_are_multiplied_where_openblas_has_a_kernel_for_them(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.blas_kernels", lambda: kernels)
    assert product_rows() == (SMALL_ROWS if kernels in SMALL_KERNELS else 1)


@pytest.mark.parametrize("kind", FUSED)
def test_a_token_allocates_nothing(kind: type[CPUDecoder]) -> None:
    """Views and a few small objects come and go; no array does, and nothing stays."""
    decoder = kind(model_of(PRESETS["small"], "fp32"))

    def tokens(count: int) -> None:
        for token in range(count):
            decoder.step([[token]], 4)

    def measured() -> tuple[int, int]:
        """Bytes at the most, and those that stayed."""
        decoder.rewind([0])
        tracemalloc.start()
        try:
            tokens(5)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            tokens(30)
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return peak - before, after - before

    # A new process keeps some 110 bytes of each of its first 2,000 calls by ctypes, in Python's lists of freed objects.
    for _ in range(75):
        decoder.rewind([0])
        tokens(40)
    found = [measured() for _ in range(3)]  # another thread of the process may allocate in one of them
    # 3,912 bytes of views at the most, some 700 more in a process that has run other tests; logits would be 2,048.
    assert min(peak for peak, _ in found) < 5000 and min(stays for _, stays in found) < 1024, found


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_refuses_what_it_has_no_room_for(kind: type[Decoder]) -> None:
    model = model_of(CONFIG)
    decoder = kind(model, 2, 10)
    decoder.prefill(1, [1] * 10)
    decoder.prefill(0, [])
    with pytest.raises(ValueError, match="row 1 holds 10 of 10 positions, no room for 1 more"):
        decoder.step([[1], [1]])
    with pytest.raises(ValueError, match="no room for 11"):
        decoder.prefill(0, [1] * 11)
    assert decoder.lengths == [0, 10]
    with pytest.raises(ValueError, match="row 0 holds 0 positions, cannot go to 3"):
        decoder.rewind([3, 3])
    with pytest.raises(ValueError, match="capacity 151, expected 1 to 150"):
        kind(model, 1, 151)
    assert not decoder.draws(Sampling())
    assert isinstance(make_decoder(model), CPUDecoder)


def test_scores_of_a_prompt_are_shifted_where_an_exponential_would_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = model_of(CONFIG, "fp32"), tokens_of(CONFIG, 1, 41)
    model.buffer.values[: model.buffer.decay_end] *= 12

    def last_logits() -> np.ndarray:
        decoder = NumpyDecoder(model)
        decoder.prefill(0, tokens[0, :-1].tolist())
        return decoder.step(tokens[:, -1:], 3)[0, 0]

    expected = whole(model, tokens)[0, -1]
    with np.errstate(all="raise", under="ignore"):
        np.testing.assert_allclose(last_logits(), expected, rtol=0, atol=1e-2 * np.abs(expected).max())
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.SAFE_SCORE", 1e9)
    with np.errstate(all="ignore"):
        assert not np.isfinite(last_logits()).all()


@pytest.mark.parametrize("kind", FUSED)
def test_states_are_the_model_s(kind: type[CPUDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinyforge.infer.decoder_numpy.PREFILL_ROWS", 16)
    model, tokens = model_of(CONFIG), tokens_of(CONFIG, 1, 90)
    expected = model.hidden(tokens)[0]
    shared = kind(model, 3)
    shared.prefill(1, [5, 6, 7])
    alone = shared.alone(90)
    found = [alone.states(tokens[0, at:end].tolist()) for at, end in ((0, 1), (1, 40), (40, 90))]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=1e-10)
    assert alone.lengths == [90] and shared.lengths == [0, 3, 0]


@pytest.mark.parametrize("kind", [ReferenceDecoder, NumpyDecoder, COMPILED])
def test_the_last_logits_of_several_positions_are_those_of_a_pass(kind: type[Decoder]) -> None:
    model, tokens = model_of(CONFIG), tokens_of(CONFIG, 1, 70)[0].tolist()
    for n in (1, 2, 4, 5, 8, 31, 32, 33):
        passes, last = kind(model, 3), kind(model, 3)
        for decoder in (passes, last):
            decoder.prefill(1, tokens[:20])
        expected = passes.step_rows([1], [tokens[20 : 20 + n]], 2)[:, -1:].copy()
        found = last.last_logits(1, tokens[20 : 20 + n], 2)
        assert found.shape == (1, 1, 2, CONFIG.vocab) and last.lengths == [0, 20 + n, 0]
        if n <= last.together:
            assert np.array_equal(found, expected), n
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)
        after = [decoder.step_rows([1], [tokens[60:62]], 1).copy() for decoder in (passes, last)]
        np.testing.assert_allclose(after[0], after[1], rtol=0, atol=1e-10)


@needs_numba
@pytest.mark.parametrize("config", [CONFIG, ALONE, SHARED], ids=["grouped", "alone", "shared"])
def test_compiled_float64_is_the_numpy_decoder_s(config: Config) -> None:
    model, tokens = model_of(config), tokens_of(config, 2, 150)
    pair = CompiledDecoder(model, 2), NumpyDecoder(model, 2)
    for at, end in ((0, 70), (70, 71), (71, 75), (75, 76), (76, 150)):
        found, expected = (decoder.step(tokens[:, at:end], 3).copy() for decoder in pair)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@needs_numba
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("weights", "precision"),
    [
        *[(weights, "fp32") for weights in ("int8", "fp8", "int4")],
        ("fp8", "fp64"),
        # Compiled for these tests alone.
        *[pytest.param(weights, "fp64", marks=pytest.mark.slow) for weights in ("int8", "int4")],
    ],
)
def test_codes_are_multiplied_as_they_are_stored(weights: str, precision: str, tied: bool) -> None:
    """As the NumPy decoder multiplies the dequantised numbers; every code of a format occurs."""
    dim, hidden = (96, 160) if weights == "int4" else (72, 77)  # whole groups
    config = LlamaConfig(dim=dim, heads=6, kv_heads=2, layers=2, context=80, vocab=301, hidden=hidden, tied=tied)
    model = Llama(config, get_backend("numpy", precision))
    model.initialise(0)
    model.buffer.values[: model.buffer.decay_end] *= 4
    small, tokens = quantised_copy(model, weights), tokens_of(config, 3, 30)
    codes = small.heads.weight.stored.codes
    every = np.delete(np.arange(256), [127, 255]).astype(np.uint8)  # but the two that are NaN in fp8
    codes.reshape(-1)[: len(every)] = every.view(codes.dtype)
    found, expected = CompiledDecoder(small, 3), NumpyDecoder(small, 3)
    assert any(array is codes or array.base is codes for array in found._matrices)  # memory once
    exact = 1e-12 if precision == "fp64" and weights == "fp8" else 1e-5
    for at, end in ((0, 10), (10, 11), (11, 13), (13, 30)):
        logits = expected.step(tokens[:, at:end])
        np.testing.assert_allclose(found.step(tokens[:, at:end]), logits, rtol=0, atol=exact * np.abs(logits).max())
    prompt = tokens_of(config, 1, 50)[0].tolist()
    logits, exact = expected.last_logits(1, prompt).copy(), 1e-12 if precision == "fp64" else 1e-5
    np.testing.assert_allclose(found.last_logits(1, prompt), logits, rtol=0, atol=exact * np.abs(logits).max())


@needs_numba
@once
def test_a_prompt_on_a_cpu_with_narrow_registers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without them a sum is added up in the same order: code of the other kind of CPU than this one, of which
    what no register's width decides is left out."""
    from tinyforge.infer import cpu_instructions, cpu_kernels

    def prompts_alone(weight: str, real: Any) -> Any:
        prompt = cpu_kernels.prompts_of(cpu_instructions.stored_as(weight), real)
        return lambda sizes, addresses: prompt(sizes, addresses)

    def passed() -> list[np.ndarray]:
        decoder = CompiledDecoder(model)
        decoder.last_logits(0, tokens)
        return [decoder._x[len(tokens) - 1], *decoder.saved(0, 0)]  # the stream of the last position

    model, tokens = model_of(CONFIG, "fp32"), tokens_of(CONFIG, 1, 130)[0].tolist()
    expected, answer = passed(), not machine_code.has_wide_vectors()
    monkeypatch.setattr(cpu_kernels, "functions", prompts_alone)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("tinyforge.infer.decoder_compiled.load", cpu_code.load.__wrapped__)
    asked = []
    for module in ("backends.instructions", "infer.cpu_prompts"):
        ask = lambda module=module: asked.append(module) or answer  # noqa: E731
        monkeypatch.setattr(f"tinyforge.{module}.has_wide_vectors", ask)
    for found, same in zip(passed(), expected, strict=True):
        assert np.array_equal(found, same) and np.abs(found).min() > 0
    assert {*asked} == {"backends.instructions", "infer.cpu_prompts"} and len(list(tmp_path.rglob("*.o"))) == 1


@needs_numba
@once
def test_a_row_s_bits_do_not_depend_on_other_rows() -> None:
    model, tokens = quantised_copy(model_of(PRESETS["small"], "fp32"), "int8"), tokens_of(PRESETS["small"], 7, 60)
    together, alone = CompiledDecoder(model, 7), CompiledDecoder(model)
    for row in range(7):
        together.prefill(row, tokens[row, : 5 * row].tolist())
    logits = together.step([tokens[row, 5 * row : 5 * row + 3] for row in range(7)], 4).copy()
    for row in range(7):
        alone.rewind([0])
        found = [alone.step([[token]], 4)[0, 0].copy() for token in tokens[row, : 5 * row + 3]]
        assert np.array_equal(logits[row], found[-3:])


@needs_numba
@once
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_prompt_s_bits_do_not_depend_on_its_pieces(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on what its pieces pad: the panels of positions and the tiles of keys begin elsewhere."""
    model, tokens = model_of(CONFIG, precision), tokens_of(CONFIG, 1, 150)[0].tolist()
    expected = CompiledDecoder(model)
    expected.prefill(0, tokens)
    for cuts, at_once in (([40, 73, 110], 256), ([75], 256), ([], 50)):
        monkeypatch.setattr("tinyforge.infer.decoder_compiled.AT_ONCE", at_once)
        found = CompiledDecoder(model)
        found.prefill(0, [3] * 140)
        found.rewind([0])
        for start, end in zip([0, *cuts], [*cuts, 150], strict=True):
            found.prefill(0, tokens[start:end])
        for got, whole in zip(found.saved(0, 0), expected.saved(0, 0), strict=True):
            assert np.array_equal(got, whole) and np.abs(whole).min() > 0


@needs_numba
@once
def test_machine_code_is_kept_and_a_damaged_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.infer import cpu_kernels

    cpu_code.load("float32", "float32")
    known = machine_code.folder() / f"float32-float32-{cpu_code._digest('float32', 'float32')[:32]}.o"
    code, made = machine_code._kept(known), []
    assert code
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    monkeypatch.setattr(cpu_kernels, "build", lambda *names: made.append(names) or code)
    for _ in range(2):
        cpu_code.load.__wrapped__("float32", "float32")
    (kept,) = machine_code.folder().iterdir()
    assert made == [("float32", "float32")] and kept.is_relative_to(tmp_path)
    kept.write_bytes(kept.read_bytes()[:-1])
    cpu_code.load.__wrapped__("float32", "float32")
    assert len(made) == 2
    for age in range(9):  # of other versions
        old = kept.with_name(f"float32-float32-{age}.o")
        old.touch()
        os.utime(old, (1e9 - age, 1e9 - age))
    kept.unlink()
    cpu_code.load.__wrapped__("float32", "float32")
    held = {file.name for file in kept.parent.iterdir()}
    assert held == {kept.name, *(f"float32-float32-{age}.o" for age in range(machine_code.KEPT - 1))}
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))  # a file: nothing can be kept
    assert callable(cpu_code.load.__wrapped__("float32", "float32")) and len(made) == 4


def test_without_numba_or_with_one_that_fails_numpy_decodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(CONFIG)
    monkeypatch.setattr("tinyforge.infer.choose.missing", lambda: "numba is not installed")
    assert type(make_decoder(model)) is NumpyDecoder and not capsys.readouterr().err

    def fail(*names: str) -> None:
        raise ImportError("numba needs NumPy 1.0 or less")

    monkeypatch.setattr("tinyforge.infer.choose.missing", lambda: "")
    monkeypatch.setattr("tinyforge.infer.decoder_compiled.load", fail)
    monkeypatch.setattr("tinyforge.infer.choose._noted", set())
    assert [type(make_decoder(model)) for _ in range(2)] == [NumpyDecoder] * 2
    said = capsys.readouterr().err
    assert said.count("note: decoding with NumPy: numba fails: numba needs NumPy 1.0 or less") == 1


@needs_numba
@once
def test_the_compiled_decoder_is_chosen_where_numba_is_installed() -> None:
    assert type(make_decoder(model_of(CONFIG))) is CompiledDecoder
    assert type(make_decoder(quantised_copy(model_of(CONFIG, "fp32"), "int8"), 2)) is CompiledDecoder
