"""Rounding to FP8, and the products of --precision fp8 on NumPy, which rounds as the GPU does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import fp8_dtype, get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.errors import UserError
from tinyforge.kernel import bind
from tinyforge.models.llama.config import Config as LlamaConfig
from tinyforge.models.llama.model import Llama
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import FP8Linear, FP8LinearSwiGLU, FP8SwiGLULinear, Linear, LinearSwiGLU, SwiGLULinear
from tinyforge.ops.fp8 import (
    E4M3,
    E5M2,
    Scaled,
    fp8_weight_of,
    largest_scale,
    quantise_rows,
    quantise_transposed,
    quantise_weights,
    rounded,
    swiglu_bwd_fp8,
)
from tinyforge.ops.fp8_rmsnorm import FP8AddRMSNorm
from tinyforge.ops.swiglu import swiglu_bwd
from tinyforge.params import with_buffer
from tinyforge.registry import find_model
from tinyforge.train.plan import plan_step

pytest.importorskip("ml_dtypes", reason="the formats of --precision fp8 on NumPy")
FP8 = get_backend("numpy", "fp8", workers=1)
FP32 = get_backend("numpy", "fp32", workers=1)


@pytest.mark.parametrize(("kind", "mantissa", "lowest", "largest"), [(E4M3, 3, -6, 448.0), (E5M2, 2, -14, 57344.0)])
def test_numbers_round_to_the_nearest_of_the_format(kind: str, mantissa: int, lowest: int, largest: float) -> None:
    """Compared with the formula: steps of 2^(e - mantissa), e at least `lowest`; ties to even; saturating."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=20000) * np.exp(rng.normal(size=20000) * 5)).astype(np.float32)
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, lowest) - mantissa)
    expected = np.clip(np.round(x / step) * step, -largest, largest)
    assert np.array_equal(rounded(x, kind, FP8).astype(np.float64), expected)
    ties = np.array([1 + 2.0 ** -(mantissa + 1), 1 + 3 * 2.0 ** -(mantissa + 1)], np.float32)
    assert rounded(ties, kind, FP8).astype(float).tolist() == [1.0, 1 + 2.0 ** (1 - mantissa)]
    assert np.isnan(rounded(np.float32([np.nan]), kind, FP8).astype(float)).all()
    assert rounded(np.float32([np.inf, -1e30]), kind, FP8).astype(float).tolist() == [largest, -largest]


def test_a_row_has_the_scale_of_its_largest_number() -> None:
    x = np.float32([[1, -896, 3], [0, 0, 0], [1e-30, 2e-30, -4.48e-28]])
    codes, scale = bind((quantise_rows,), FP8, "test").quantise_rows(x)
    np.testing.assert_allclose(scale, [2, 1, 1e-30], rtol=1e-6)
    assert codes.astype(float)[0].tolist() == [0.5, -448, 1.5] and not codes.astype(float)[1].any()
    assert np.abs(codes.astype(float) * scale[:, None] - x).max(axis=1) == pytest.approx([0, 0, 0], abs=1e-3)


PAIRS: Any = [
    (FP8Linear, Linear, (48, 32), 32),
    (FP8LinearSwiGLU, LinearSwiGLU, (64, 32), 32),
    (FP8SwiGLULinear, SwiGLULinear, (32, 48), 96),
]


@pytest.mark.parametrize(("kind", "reference", "shape", "width"), PAIRS)
def test_an_op_is_its_reference_but_for_the_rounding(kind: Any, reference: Any, shape: Any, width: int) -> None:
    """The relative error of rounding to e4m3 and e5m2 is at most 1/16 and 1/8. With errors spread evenly its root mean
    square is 0.026 and 0.052, and that of a product of one of each 0.058."""
    found = []
    for one, backend in ((kind, FP8), (reference, FP32)):
        rng = np.random.default_rng(1)
        op = with_buffer(one(Param("w", shape, std=1.0), backend), backend, rng)
        stash, x = Stash(), rng.normal(size=(2, 50, width)).astype(np.float32)
        y = op.forward(x, stash)
        dx = op.backward(rng.normal(size=y.shape).astype(np.float32), stash)
        found.append((y, dx, op.weight.grad.copy()))
    for got, expected in zip(*found, strict=True):
        assert np.linalg.norm(got - expected) < 0.07 * np.linalg.norm(expected)
    exact = [np.array_equal(got, expected) for got, expected in zip(*found, strict=True)]
    # Of y, dx and dW, those in FP8 differ:
    assert (
        exact
        == {
            FP8Linear: [False, True, True],
            FP8LinearSwiGLU: [False, False, False],
            FP8SwiGLULinear: [True, False, True],
        }[kind]
    )


def test_an_input_that_is_quantised_already_gives_the_same_bits() -> None:
    rng = np.random.default_rng(2)
    op = with_buffer(FP8Linear(Param("w", (16, 32), std=1.0), FP8), FP8, rng)
    x = rng.normal(size=(3, 32)).astype(np.float32)
    scaled = Scaled(x, *op.quantise(x))
    assert np.array_equal(op.forward(x), op.forward(scaled))


def gradients(backend: Any, config: Config, recompute: Any = "") -> tuple[float, np.ndarray]:
    rng = np.random.default_rng(3)
    model = NanoEuler(config, backend, recompute=recompute)
    model.initialise(0)
    ids = rng.integers(0, config.vocab, (2, 32))
    targets = rng.integers(0, config.vocab, (2, 32, config.mtp_heads))
    stash = Stash()
    nll = model.forward(backend.asarray(ids), backend.asarray(targets), stash)
    model.backward(np.full(nll.shape, 1 / nll.size, np.float32), stash)
    assert not len(stash)
    return float(nll.mean()), model.buffer.grads.copy()


def test_a_models_gradients_are_near_those_without_rounding_and_the_same_when_recomputed() -> None:
    loss, grads = gradients(FP8, PRESETS["small"])
    wanted_loss, expected = gradients(FP32, PRESETS["small"])
    assert 0 < abs(loss - wanted_loss) < 2e-3
    assert 0.01 < np.linalg.norm(grads - expected) / np.linalg.norm(expected) < 0.1
    for way in ("norms", "blocks"):
        again = gradients(FP8, PRESETS["small"], way)
        assert again[0] == loss and np.array_equal(again[1], grads)


def test_with_dropout_the_gradient_is_quantised_after_it() -> None:
    loss, grads = gradients(FP8, PRESETS["small"].override({"dropout": 0.2}))
    assert np.isfinite(loss) and np.isfinite(grads).all()


@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 16), (33, 24), (0, 8)])
def test_transposed_rows(shape: tuple[int, ...]) -> None:
    """Columns as lines, zeros up to a multiple of 16; one scale, the largest of the rows'."""
    k = bind((quantise_rows, largest_scale, quantise_transposed, swiglu_bwd_fp8), FP8, "test")
    rng = np.random.default_rng(4)
    x = rng.normal(size=shape).astype(np.float32)
    scale = k.largest_scale(k.quantise_rows(x)[1])
    assert scale == pytest.approx([np.abs(x).max() / 448] if x.size else [1])
    for e5m2, error in ((False, 2**-4), (True, 2**-3)):
        codes, transposed = k.quantise_transposed(x, scale, e5m2)
        rows = x.reshape(-1, shape[-1])
        assert transposed.shape == (shape[-1], -(-len(rows) // 16) * 16) and (codes is None) != e5m2
        back = transposed.astype(np.float32).T * scale
        assert not back[len(rows) :].any()
        assert (np.abs(back[: len(rows)] - rows) <= error * np.abs(rows) + scale * 2**-9).all()
        assert codes is None or np.array_equal(codes.reshape(rows.shape), transposed.T[: len(rows)])
    gu, dy = rng.normal(size=(*shape[:-1], 2 * shape[-1])).astype(np.float32), x.copy()
    codes, transposed = k.swiglu_bwd_fp8(None, dy, gu, scale)
    expected, wanted_transposed = k.quantise_transposed(swiglu_bwd(None, dy, gu), scale, True)
    assert np.array_equal(codes.astype(float), expected.astype(float))
    assert np.array_equal(transposed.astype(float), wanted_transposed.astype(float))


def test_changed_weights_are_quantised_before_they_are_used() -> None:
    config = PRESETS["small"]
    model = NanoEuler(config, FP8)
    model.initialise(0)
    ids = np.arange(8, dtype=np.int32)[None]
    before = model.hidden(ids)
    model.buffer.masters *= 2
    model.buffer.publish()
    after = model.hidden(ids)
    fresh = NanoEuler(config, FP8)
    fresh.buffer.masters[...] = model.buffer.masters
    fresh.buffer.publish()
    assert not np.array_equal(before, after) and np.array_equal(after, fresh.hidden(ids))


def test_small_weights_use_the_whole_range() -> None:
    weight, odd = Param("weight", (8, 16), fill=0.0), Param("odd", (12, 16), fill=0.0)
    weight.value = np.float32([[0.004, -0.002] * 8] * 8)
    k = bind((quantise_weights,), FP8, "test")
    out = fp8_weight_of(weight, FP8, codes=True)
    k.quantise_weights([out], [weight.value])
    assert float(out.scale[0]) == pytest.approx(0.004 / 448)
    np.testing.assert_allclose(out.codes.astype(np.float32) * out.scale, weight.value, rtol=2**-4)
    with pytest.raises(UserError, match="a multiple of 8, here 12"):
        fp8_weight_of(odd, FP8, codes=True)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_norm_quantises_what_it_computes_again_as_before(scaled: bool) -> None:
    op = with_buffer(FP8AddRMSNorm(Param("gain", (16,), fill=1.0), FP8, scaled=scaled), FP8, np.random.default_rng(0))
    x = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    (_, first), again = op.forward(x, None), op.normed(x)
    assert isinstance(first, Scaled) == isinstance(again, Scaled) == scaled
    for one, two in zip(first if scaled else [first], again if scaled else [again], strict=True):
        assert np.array_equal(one.astype(float), two.astype(float))


def test_what_fp8_cannot_do_is_an_error_of_one_line() -> None:
    with pytest.raises(UserError, match=r"gate_up.weight is \(40, 64\); .* here 40, .*; use bf16 or fp32"):
        NanoEuler(PRESETS["small"].override({"dim": 64, "hidden": 20}), FP8)
    with pytest.raises(UserError, match="add no bias, and qkv has one"):
        Llama(LlamaConfig(dim=64, heads=4, kv_heads=2, layers=1, context=8, vocab=32, hidden=16, qkv_bias=True), FP8)
    with pytest.raises(UserError, match="GPT-2 has no products in FP8; use bf16 or fp32, or one of"):
        plan_step(find_model("gpt2"), find_model("gpt2").presets["124m"], "fp8", 1, 8)
    with pytest.raises(UserError, match="adapters have no products in FP8"):
        Adapted(lambda **kw: NanoEuler(PRESETS["small"], FP8, **kw), Adapters(2, 4.0))


def test_a_model_without_products_in_fp8_computes_as_in_the_masters_precision() -> None:
    spec = find_model("moe")
    name = next(iter(spec.presets))
    ids, hs = np.arange(6, dtype=np.int32)[None], []
    for backend in (FP8, FP32):
        model = spec.build(spec.presets[name], backend)
        model.initialise(0)
        hs.append(model.hidden(ids))
    assert np.array_equal(*hs)


def test_memory_is_a_copy_of_the_weights_in_fp8_and_what_is_rounded_now() -> None:
    """Both layouts of gate|up, one of qkv and of down; no codes of activations are kept for backward."""
    spec, config = find_model("nanoeuler"), PRESETS["base"]
    plans = [plan_step(spec, config, precision, 4, 512) for precision in ("bf16", "fp8")]
    queries = (config.heads + 2 * config.kv_heads) * config.head_dim
    copies = config.layers * config.dim * (queries + 2 * 2 * config.hidden + config.hidden)
    granules = config.layers * 3 * 512  # the scales
    assert plans[1].weights - plans[0].weights == copies + granules
    rows = config.layers * 4 * 512 * 4  # the scale of each row of norm2's
    assert plans[1].saved == plans[0].saved + rows
    assert MetaBackend("fp8").fp8


def test_the_formats_need_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(UserError, match="needs? the package ml_dtypes"):
        fp8_dtype(E4M3)


def test_every_op_names_its_reference() -> None:
    for kind, reference, _, _ in PAIRS:
        assert issubclass(kind, Op) and f"the reference is {reference.__name__}" in kind.__doc__
