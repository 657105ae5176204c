"""Muon's kernels and products on the GPU: next to NumPy's, with and without cuBLASLt's batched products, in bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.optim.test_muon import OPTIONS, SHAPES, naive_orthogonal
from tinyforge.backends import get_backend
from tinyforge.models.nanoeuler import PRESETS, NanoEuler
from tinyforge.op import Param, Stash
from tinyforge.optim import Muon, MuonConfig, Pace
from tinyforge.optim.muon import COEFFICIENTS, STEPS, A, B, C, newton_schulz
from tinyforge.params import ParamBuffer
from tinyforge.registry import find_model
from tinyforge.train.plan import Split, plan_step

pytestmark = pytest.mark.gpu


def rounded(x: np.ndarray) -> np.ndarray:
    from ml_dtypes import bfloat16

    return x.astype(bfloat16).astype(np.float64)


def in_bf16(x: np.ndarray) -> np.ndarray:
    """What bf16 makes of the formula: whatever is stored is rounded, sums are not."""
    x = rounded(x)
    x = rounded(x / np.sqrt((x**2).sum()))
    x = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(STEPS):
        gram = rounded(x @ x.T)
        x = rounded(A * x + rounded(B * gram + C * gram @ gram) @ x)
    return x


def error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "tf32", "bf16"])
@pytest.mark.parametrize("shape", [*SHAPES, (256, 768), (768, 2048), (2048, 768)])
def test_newton_schulz(shape: tuple[int, int], precision: str, batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinyforge.optim import muon_cuda

    if not batched:
        monkeypatch.setattr(muon_cuda, "gemm_batched", lambda *arguments, **options: False)
    backend = get_backend("cupy", precision)
    x = np.random.default_rng(0).normal(size=(3, *shape)) * 1e-3
    squares = backend.asarray(np.stack([(x**2).sum(axis=(1, 2)) / 2] * 2, axis=1), np.dtype(np.float64))
    found = [
        backend.to_numpy(newton_schulz.bind(backend)(backend.asarray(x), squares, COEFFICIENTS["quintic"])).astype(
            np.float64
        )
        for _ in range(2)
    ]
    assert np.array_equal(*found)
    for one, got in zip(x, found[0], strict=True):
        wanted = naive_orthogonal(one)
        if precision == "bf16":
            expected = in_bf16(one)
            expected = expected if shape[0] <= shape[1] else expected.T
            assert error(got, wanted) < max(1.5 * error(expected, wanted), 0.01)
        else:
            assert error(got, wanted) < {"fp64": 1e-12, "fp32": 1e-4, "tf32": 2e-2}[precision]


@pytest.mark.parametrize("option", ["plain", *OPTIONS])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_steps_are_those_of_numpy(precision: str, option: str, poisoned_memory: None) -> None:
    """In bf16 the products differ, and what does not go through them is the same."""
    params = [
        Param("embedding", (11, 8)),
        Param("qkv", (40, 24), matrices=(24, 8, 8)),
        Param("odd", (9, 7), matrices=(4, 5)),
        Param("head", (11, 8)),
        Param("norm", (7,), decay=False),
    ]
    found = []
    for backend in (get_backend("numpy", "fp64", 1), get_backend("cupy", precision)):
        buffer = ParamBuffer([Param(p.name, p.shape, decay=p.decay, matrices=p.matrices) for p in params], backend)
        rng = np.random.default_rng(0)
        for p in buffer.params:
            buffer.set_master(p, rng.normal(size=p.shape))
        buffer.publish()
        optimizer = Muon(buffer, backend, MuonConfig(weight_decay=0.3, **OPTIONS.get(option, {})))
        for step in range(4):
            for p in buffer.params:
                p.grad[...] = backend.asarray(rng.normal(size=p.shape), backend.master_dtype)
            _, factor = optimizer.clip(1.0)
            optimizer.step(Pace(0.05, 0.8 + 0.04 * step), factor)
        host = backend.to_numpy
        assert np.array_equal(host(buffer.values), host(buffer.masters.astype(backend.dtype)))
        found.append(
            {
                f"{what} {p.name}": host(optimizer._view(what, p))
                for what in ("masters", "m", "v")
                for p in optimizer.having(what)
            }
        )
    wanted, got = found
    for name in wanted:
        through_products = precision == "bf16" and name in ("masters qkv", "masters odd", "v qkv", "v odd")
        tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-2 if through_products else 1e-5}[precision]
        assert error(got[name], wanted[name]) < tolerance, name


def test_a_norm_that_is_not_finite_stops_all_further_steps() -> None:
    backend = get_backend("cupy", "bf16")
    buffer = ParamBuffer([Param("map", (8, 8), matrices=(8,)), Param("norm", (8,), decay=False)], backend)
    optimizer = Muon(buffer, backend, MuonConfig(normuon=True))
    changed = []
    for number in (1.0, np.inf, 1.0):
        buffer.grads.fill(number)
        before = [a.copy() for a in (buffer.masters, buffer.values, optimizer.m, optimizer.v)]
        _, factor = optimizer.clip(1.0)
        optimizer.step(0.1, factor)
        now = (buffer.masters, buffer.values, optimizer.m, optimizer.v)
        changed.append(any(bool((a != b).any()) for a, b in zip(now, before, strict=True)))
    assert changed == [True, False, False]


def test_the_plan_is_within_five_percent_of_the_measured_peak() -> None:
    """Of a step with so few tokens that the optimizer's own memory is the peak."""
    import cupy

    from tinyforge.backends.cupy_backend import PeakMemory

    backend, config = get_backend("cupy", "bf16"), PRESETS["base"]
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.used_bytes()
    with PeakMemory() as peak:
        model: Any = NanoEuler(config, backend)
        model.initialise(0)
        optimizer = Muon(model.buffer, backend)
        ids = backend.asarray(np.zeros((1, 64), np.int32))
        targets = backend.asarray(np.zeros((1, 64, config.mtp_heads), np.int32))
        for _ in range(2):
            stash = Stash()
            model.forward(ids, targets, stash)
            model.backward(backend.asarray(np.full(config.mtp_heads, 1e-2), backend.master_dtype), stash)
            _, factor = optimizer.clip(1.0)
            optimizer.step(1e-3, factor)
    planned = plan_step(find_model("nanoeuler"), config, "bf16", 1, 64, split=Split(optimizer="muon")).peak
    assert planned == pytest.approx(peak.bytes - before, rel=0.05)
