"""Products in FP8 on a GPU, and the kernels that quantise for them, against NumPy's rounding to the same formats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import dtype_of, fp8_dtype, get_backend
from tinyforge.kernel import bind
from tinyforge.ops.fp8 import (
    E4M3,
    E5M2,
    FP8Weight,
    largest_scale,
    quantise_rows,
    quantise_transposed,
    quantise_weights,
    rounded,
    swiglu_bwd_fp8,
)
from tinyforge.ops.fp8_rmsnorm import rmsnorm_scaled_bwd, rmsnorm_scaled_fwd
from tinyforge.ops.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

cp = pytest.importorskip("cupy", reason="needs CuPy")
gemm = pytest.importorskip("tinyforge.backends.gemm", reason="needs CuPy")

CPU = get_backend("numpy", "fp8", workers=1)
SHAPES = (
    (8, 16, 16),
    (1, 272, 64),
    (200, 32, 80),
    (130, 1104, 208),
    (777, 528, 336),
    (2100, 1040, 144),
    (768, 768, 4112),
)
BF16 = "bfloat16"


@pytest.fixture
def gpu() -> Any:
    from tinyforge.backends.cupy_backend import has_wgmma

    if not has_wgmma():
        pytest.skip("needs a Hopper GPU")
    return get_backend("cupy", "fp8")


def on_gpu(x: np.ndarray, kind: str = BF16) -> Any:
    return cp.asarray(x.astype(dtype_of(kind) if kind == BF16 else kind))


def wide(x: Any) -> np.ndarray:
    found: np.ndarray = cp.asnumpy(x).astype(np.float32)
    return found


def numbers(x: Any, kind: str = E4M3) -> np.ndarray:
    """The numbers of an array of FP8 bytes."""
    found: np.ndarray = cp.asnumpy(x).view(fp8_dtype(kind))
    return found


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a.astype(np.float32), b.astype(np.float32), equal_nan=True))


@pytest.mark.parametrize("shape", [(1, 8), (5, 1), (3, 2, 768), (9, 1000), (64, 4096), (0, 16), (7, 129)])
def test_rows_are_quantised_as_on_the_cpu(shape: tuple[int, ...], gpu: Any) -> None:
    rng = np.random.default_rng(0)
    host = rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)) * 4)
    if host.size:
        host.reshape(-1, shape[-1])[0] = 0
    x = on_gpu(host)
    k, theirs = bind((quantise_rows,), gpu, "test"), bind((quantise_rows,), CPU, "test")
    codes, scale = k.quantise_rows(x)
    expected, wanted_scale = theirs.quantise_rows(wide(x))
    assert same(wide(scale), wanted_scale)
    assert same(numbers(codes), expected)


def test_what_is_not_finite_stays_so(gpu: Any) -> None:
    x = np.ones((3, 768), np.float32)
    x[0, 5], x[1, 700] = np.nan, np.inf
    codes, scale = bind((quantise_rows,), gpu, "test").quantise_rows(on_gpu(x))
    back = numbers(codes).astype(np.float32) * wide(scale)[:, None]
    assert np.isnan(back[0, 5]) and not np.isfinite(back[1, 700]) and np.isfinite(back[2]).all()


@pytest.mark.parametrize("shape", [(7, 768), (300, 128), (3, 1024), (5, 33), (9, 4096)])
def test_norms_quantise_what_they_write(shape: tuple[int, int], gpu: Any) -> None:
    rng = np.random.default_rng(1)
    x, dy, more = (on_gpu(rng.normal(size=shape)) for _ in range(3))
    weight = on_gpu(1 + 0.1 * rng.normal(size=shape[1]))
    kernels = (rmsnorm_fwd, rmsnorm_scaled_fwd, rmsnorm_bwd, rmsnorm_scaled_bwd, quantise_rows)
    k = bind(kernels, gpu, "test")
    y, rstd = k.rmsnorm_fwd(x, weight, 1e-5)
    scaled, codes, scale, again = k.rmsnorm_scaled_fwd(x, weight, 1e-5)
    assert same(wide(y), wide(scaled)) and same(wide(rstd), wide(again))
    found = [(scaled, codes, scale)]
    for residual in (None, more):
        sums = [cp.zeros(shape[1], np.float32) for _ in range(2)]
        dx = k.rmsnorm_bwd(sums[0], dy, weight, y, rstd, residual)
        found.append(k.rmsnorm_scaled_bwd(sums[1], dy, weight, y, rstd, residual))
        assert np.abs(wide(dx) - wide(found[-1][0])).max() <= 2**-7 * np.abs(wide(dx)).max()
        assert np.allclose(wide(sums[0]), wide(sums[1]), rtol=1e-5, atol=1e-5)
    for written, codes, scale in found:
        expected, wanted_scale = k.quantise_rows(written)
        assert same(wide(scale), wide(wanted_scale))
        assert same(numbers(codes), numbers(expected))


def test_weights_are_quantised_as_on_the_cpu(gpu: Any) -> None:
    rng = np.random.default_rng(2)
    shapes = ((1280, 768), (16, 8), (8, 16), (336, 64), (96, 200))
    weights = [on_gpu(rng.normal(size=shape) * size) for size, shape in enumerate(shapes)]  # the first are all 0
    ways = ((True, True), (False, True), (True, False), (True, True), (False, True))
    outs = [
        FP8Weight(
            *(
                cp.empty(shape, np.uint8) if way else None
                for shape, way in zip((x.shape, x.shape[::-1]), expected, strict=True)
            ),
            cp.empty(1, np.float32),
        )
        for x, expected in zip(weights, ways, strict=True)
    ]
    bind((quantise_weights,), gpu, "test").quantise_weights(outs, weights)
    for out, weight in zip(outs, weights, strict=True):
        kind = fp8_dtype(E4M3)
        expected = FP8Weight(np.empty(weight.shape, kind), np.empty(weight.shape[::-1], kind), np.empty(1, np.float32))
        bind((quantise_weights,), CPU, "test").quantise_weights([expected], [wide(weight)])
        assert same(wide(out.scale), expected.scale)
        assert out.codes is None or same(numbers(out.codes), expected.codes)
        assert out.transposed is None or same(numbers(out.transposed), expected.transposed)


def cases() -> Iterator[Any]:
    for product in gemm.FP8_PRODUCTS:
        for variant in gemm.compiled(product):
            yield pytest.param(product, variant, id=f"{product}-{variant}".replace(" ", ""))


@pytest.mark.parametrize(("product", "variant"), list(cases()))
def test_every_variant_is_the_product(product: str, variant: Any, gpu: Any) -> None:
    """Compared with the product of the same codes in float64. The tensor cores keep some 14 bits of a sum."""
    adds = product == "FP8_WEIGHT"
    for seed, (m, n, k) in enumerate(SHAPES):
        rng = np.random.default_rng(seed)
        e5m2 = product in ("FP8_E5M2", "FP8_WEIGHT")
        a = rounded(rng.normal(size=(m, k)).astype(np.float32), E5M2 if e5m2 else E4M3, CPU)
        b = rounded(rng.normal(size=(n, k)).astype(np.float32), E4M3, CPU)
        scales, weight_scale = np.exp(rng.normal(size=1 if adds else m)).astype(np.float32), np.array([0.3], np.float32)
        expected = a.astype(np.float64) @ b.astype(np.float64).T * scales[:, None] * 0.3 + adds
        given = [cp.asarray(x) for x in (a.view(np.uint8), b.view(np.uint8), scales, weight_scale)]
        for band, splits in ((1, 1), (8, 3)):
            found = []
            for _ in range(2):
                y, hidden = gemm.gemm_fp8(
                    product,
                    *given,
                    cp.ones((m, n), np.float32) if adds else dtype_of(BF16),
                    variant=replace(variant, band=band, splits=splits if adds else 1),
                )
                found.append([None if x is None else cp.asnumpy(x) for x in (y, hidden)])
            for x, again in zip(*found, strict=True):
                assert x is None or np.array_equal(x.view(np.uint8), again.view(np.uint8)), "not the same bits twice"
            y, hidden = found[0]
            near(y, expected)
            if hidden is not None:
                near(hidden, swiglu_fwd(y.astype(np.float64)))


@pytest.mark.parametrize("shape", [(1, 8), (7, 24), (130, 768), (3, 50, 96), (2048, 136), (0, 16)])
def test_rows_are_transposed_as_on_the_cpu(shape: tuple[int, ...], gpu: Any) -> None:
    rng = np.random.default_rng(5)
    kernels = (quantise_rows, largest_scale, quantise_transposed, swiglu_bwd_fp8, swiglu_bwd)
    k, theirs = bind(kernels, gpu, "test"), bind(kernels, CPU, "test")
    x, gu = on_gpu(rng.normal(size=shape)), on_gpu(rng.normal(size=(*shape[:-1], 2 * shape[-1])))
    scale = k.largest_scale(k.quantise_rows(x)[1])
    assert same(wide(scale), theirs.largest_scale(theirs.quantise_rows(wide(x))[1]))
    for e5m2, kind in ((False, E4M3), (True, E5M2)):
        codes, transposed = k.quantise_transposed(x, scale, e5m2)
        expected, wanted_transposed = theirs.quantise_transposed(wide(x), wide(scale), e5m2)
        assert same(numbers(transposed, kind), wanted_transposed)
        assert codes is None or same(numbers(codes, kind), expected)
    dy, room = x.copy(), x.copy()
    codes, transposed = k.swiglu_bwd_fp8(room, room, gu, scale)  # h over dh
    h = cp.empty_like(x)
    expected, wanted_transposed = k.quantise_transposed(k.swiglu_bwd(h, dy, gu), scale, True)
    assert same(wide(room), wide(h)) and same(numbers(codes, E5M2), numbers(expected, E5M2))
    assert same(numbers(transposed, E5M2), numbers(wanted_transposed, E5M2))


def near(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(found.astype(np.float64)).all()
    assert np.linalg.norm(found.astype(np.float64) - expected) <= 6e-3 * np.linalg.norm(expected)


def test_a_model_has_the_gradients_of_the_cpus_emulation(gpu: Any) -> None:
    """Not the same bits: numbers that differ in their last bits may round to different codes."""
    from tinyforge.models.nanoeuler import PRESETS, NanoEuler
    from tinyforge.op import Stash

    config, rng = PRESETS["small"], np.random.default_rng(3)
    ids = rng.integers(0, config.vocab, (4, 128))
    targets = rng.integers(0, config.vocab, (4, 128, config.mtp_heads))
    losses, grads = [], []
    for backend in (gpu, CPU, get_backend("numpy", "fp32", workers=1)):
        model = NanoEuler(config, backend)
        model.initialise(0)
        stash = Stash()
        nll = model.forward(backend.asarray(ids), backend.asarray(targets), stash)
        losses.append(float(nll.mean()))
        model.backward(backend.asarray(np.full(nll.shape, 1 / nll.size), backend.master_dtype), stash)
        grads.append(backend.to_numpy(model.buffer.grads).copy())
    assert abs(losses[0] - losses[1]) < 2e-3
    size = np.linalg.norm(grads[2])
    emulated, unrounded = np.linalg.norm(grads[0] - grads[1]), np.linalg.norm(grads[1] - grads[2])
    print(losses, emulated / size, unrounded / size)
    assert emulated < unrounded  # closer to the emulation than that is to the gradient without rounding
    assert unrounded < 0.1 * size
