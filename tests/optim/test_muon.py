"""Muon against its formula in float64, against the singular values that it promises, and against PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.kernel import Kernel, override
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Param
from tinyforge.optim import AdamW, AdamWConfig, Muon, MuonConfig
from tinyforge.optim.muon import EPS, STEPS, A, B, C, muon_, muon_momentum, newton_schulz
from tinyforge.params import ParamBuffer
from tinyforge.registry import models
from tinyforge.train.settings import PretrainSettings

CONFIG = MuonConfig(momentum=0.8, weight_decay=0.3)
SHAPES = [(64, 96), (96, 64), (43, 17), (1, 5), (5, 1)]


def some_buffer(precision: str, workers: int) -> tuple[ParamBuffer, Muon]:
    """Two stacked parameters with matrices of three shapes among them, and what stays with AdamW: before, between and
    after them, two of it neighbours."""
    backend = get_backend("numpy", precision, workers)
    params = [
        Param("embedding", (11, 6)),
        Param("qkv", (10, 6), matrices=(6, 2, 2)),
        Param("between", (3, 5)),
        Param("gate_up", (2, 4, 6), matrices=(2,) * 4),
        Param("head", (11, 6)),
        Param("after head", (3, 6)),
        Param("norm", (7,), decay=False),
    ]
    buffer = ParamBuffer(params, backend)
    rng = np.random.default_rng(0)
    for p in params:
        p.value[...] = rng.normal(size=p.shape)
    return buffer, Muon(buffer, backend, CONFIG)


def matrices_of(param: Param, array: np.ndarray) -> Iterator[np.ndarray]:
    flat, start = array.reshape(-1, param.shape[-1]), 0
    for rows in param.matrices:
        yield flat[start : start + rows]
        start += rows


def naive_orthogonal(x: np.ndarray) -> np.ndarray:
    """The quintic, STEPS times, on the singular values alone."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / max(np.sqrt((s**2).sum()), EPS)
    for _ in range(STEPS):
        s = A * s + B * s**3 + C * s**5
    return (u * s) @ v


def naive_step(w: np.ndarray, m: np.ndarray, g: np.ndarray, lr: float) -> None:
    """Liu et al.'s lines, in float64, in place."""
    m[...] = CONFIG.momentum * m + (1 - CONFIG.momentum) * g
    o = naive_orthogonal(CONFIG.momentum * m + (1 - CONFIG.momentum) * g)
    w[...] = w - lr * (0.2 * np.sqrt(max(w.shape)) * o + CONFIG.weight_decay * w)


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5)])
@pytest.mark.parametrize("workers", [1, 3])
def test_steps_follow_the_formula(precision: str, tolerance: float, workers: int) -> None:
    """What has no matrices goes as with AdamW; the gradients are scaled, and the third step's are zero."""
    buffer, optimizer = some_buffer(precision, workers)
    other, adamw = some_buffer(precision, 1)[0], None
    adamw = AdamW(other, get_backend("numpy", precision, 1), AdamWConfig(weight_decay=0.3))
    naive = {p.name: (p.value.astype(np.float64), np.zeros(p.shape)) for p in buffer.params}
    rng = np.random.default_rng(1)
    for step in range(1, 5):
        for p, same in zip(buffer.params, other.params, strict=True):
            p.grad[...] = same.grad[...] = rng.normal(size=p.shape) * (step != 3)
            arrays = (*naive[p.name], p.grad.astype(np.float64) * 0.5)
            for one in zip(*(matrices_of(p, a) for a in arrays), strict=True):
                naive_step(*one, 0.1 / step)
        optimizer.step(0.1 / step, 0.5)
        adamw.step(0.1 / step, 0.5)
    for p, same in zip(buffer.params, other.params, strict=True):
        if p.matrices:
            np.testing.assert_allclose(p.value, naive[p.name][0], atol=tolerance, err_msg=p.name)
            np.testing.assert_allclose(buffer.view(optimizer.m, p), naive[p.name][1], atol=tolerance, err_msg=p.name)
        else:
            assert np.array_equal(p.value, same.value), p.name
            assert np.array_equal(optimizer._view("v", p), other.view(adamw.v, same)), p.name


def without_nesterov(m: Any, grads: Any, starts: Any, rows: int, columns: int, grad_scale: Any, momentum: float) -> Any:
    muon_momentum(m, grads, starts, rows, columns, grad_scale, momentum)
    x = np.stack([m[start : start + rows * columns].reshape(rows, columns) for start in starts.tolist()])
    return x, (x**2).sum(axis=(1, 2))[:, None]


FAULTS: dict[str, tuple[Kernel[..., Any], Any]] = {
    "no Nesterov": (muon_momentum, without_nesterov),
    "not normalised": (newton_schulz, lambda x, squares: newton_schulz(x, squares * 0.9)),
    "scale of the rows": (
        muon_,
        lambda values, masters, x, starts, rates, grad_scale, scale: muon_(
            values, masters, x, starts, rates, grad_scale, 0.2 * x.shape[1] ** 0.5
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str) -> None:
    kernel, wrong = FAULTS[fault]
    with override(kernel, "numpy", wrong), pytest.raises(AssertionError, match="qkv|gate_up"):
        test_steps_follow_the_formula("fp64", 1e-12, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=(3, *shape)) * 1e-3
    found = newton_schulz(x.copy(), (x**2).sum(axis=(1, 2))[:, None])
    for one, got in zip(x, found, strict=True):
        np.testing.assert_allclose(got, naive_orthogonal(one), atol=1e-12)
        assert 0.6 < np.linalg.svd(got, compute_uv=False).min() <= np.linalg.svd(got, compute_uv=False).max() < 1.3


def test_the_constants_are_the_published_ones_and_neighbours_are_updated_together() -> None:
    assert (A, B, C, STEPS, EPS) == (3.4445, -4.7750, 2.0315, 5, 1e-7)
    assert len(some_buffer("fp64", 1)[1]._plain) == 4


@pytest.mark.slow
def test_parity_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon rounds to bf16 whatever it is given; with that taken out it computes in float64, as we do."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with PyTorch 2.9")
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    buffer, optimizer = some_buffer("fp64", 1)
    ours = [one for p in buffer.params for one in zip(matrices_of(p, p.value), matrices_of(p, p.grad), strict=True)]
    theirs = [torch.nn.Parameter(torch.from_numpy(value.copy())) for value, _ in ours]
    peer = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        buffer.grads[...] = np.random.default_rng(step).normal(size=buffer.size)
        for (_, grad), their in zip(ours, theirs, strict=True):
            their.grad = torch.from_numpy(grad.copy())
        optimizer.step(0.02)
        peer.step()
    for (value, _), their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(value, their.detach().numpy(), rtol=1e-12, atol=1e-13)


def test_workers_do_not_change_a_bit() -> None:
    results = []
    for workers in (1, 2, 5):
        buffer, optimizer = some_buffer("fp32", workers)
        buffer.grads[...] = np.random.default_rng(2).normal(size=buffer.size)
        optimizer.step(0.01)
        results.append(buffer.values.tobytes())
    assert len(set(results)) == 1


def test_a_matrix_has_one_moment_and_what_was_taken_out_can_be_put_in() -> None:
    buffer, optimizer = some_buffer("fp32", 1)
    assert optimizer.m.size == buffer.size and optimizer.v.size == sum(-(-n // 32) * 32 for n in (66, 15, 66, 18, 7))
    assert [p.name for p in optimizer.having("v")] == ["embedding", "between", "head", "after head", "norm"]
    for what in ("masters", "m", "v"):
        tensors = [np.random.default_rng(n).normal(size=p.shape) for n, p in enumerate(optimizer.having(what))]
        for p, tensor in zip(optimizer.having(what), tensors, strict=True):
            optimizer.take(what, p, tensor)
        for tensor, found in zip(tensors, optimizer.tensors(what), strict=True):
            assert np.array_equal(found, tensor.astype(np.float32))


def test_many_matrices_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, optimizer = some_buffer("fp64", 1)
    monkeypatch.setattr("tinyforge.optim.muon.MOST", 13)
    buffer, in_parts = some_buffer("fp64", 1)
    assert [len(starts) for _, _, starts in optimizer._batches] == [1, 6]
    assert [len(starts) for _, _, starts in in_parts._batches] == [1] * 7
    for one, by in ((expected, optimizer), (buffer, in_parts)):
        one.grads[...] = np.random.default_rng(0).normal(size=one.size)
        by.step(0.1)
    assert np.array_equal(expected.values, buffer.values)


@pytest.mark.parametrize("name", sorted(models()))
def test_every_model_says_what_its_matrices_are(name: str) -> None:
    """Of what decays all but embeddings, heads and convolutions; and the pieces add up, which Param sees to."""
    kind: Any = models()[name].build
    backend = get_backend("numpy", "fp32", workers=1)
    model = kind(next(iter(models()[name].presets.values())), backend)
    plain = {p.name for p in model.buffer.params if p.decay and not p.matrices}
    known = ("embedding", "positions", "segments", "head", "outer", "conv")
    assert plain and all(any(word in p for word in known) for p in plain), plain
    assert any(p.matrices for p in model.buffer.params) and not any(p.matrices for p in model.params() if not p.decay)
    Muon(model.buffer, backend).step(1e-3)
    assert np.isfinite(model.buffer.values).all()


def test_queries_keys_values_gate_and_up_are_matrices_of_their_own() -> None:
    model = NanoEuler(Config(dim=16, heads=4, kv_heads=2, layers=1, hidden=24), get_backend("numpy", "fp32", workers=1))
    assert {p.name: p.matrices for p in model.buffer.params if p.matrices} == {
        "blocks.0.qkv.weight": (16, 8, 8),
        "blocks.0.out.weight": (16,),
        "blocks.0.gate_up.weight": (24, 24),
        "blocks.0.down.weight": (16,),
    }
    with pytest.raises(ValueError, match=r"Param x: matrices of \(3, 4\) rows, and the shape is \(8, 2\)"):
        Param("x", (8, 2), matrices=(3, 4))
    with pytest.raises(ValueError, match=r"matrices of \(2, 2, 2\) rows"):
        Param("x", (8, 2), matrices=3)
    assert Param("x", (2, 4, 6), matrices=4).matrices == (2, 2, 2, 2)


def test_what_muon_cannot_do_is_one_line() -> None:
    with pytest.raises(UserError, match="--optimizer muon expects whole matrices, and --zero 1 cuts them in parts"):
        PretrainSettings(optimizer="muon", zero=1).check()
    backend = get_backend("numpy", "fp32", workers=1)
    config = Config(dim=16, heads=4, kv_heads=2, layers=1, hidden=24)
    adapted = Adapted(partial(NanoEuler, config, backend), Adapters(2, 4.0, 0.0))
    with pytest.raises(UserError, match="--optimizer muon: of what is learned here nothing is a matrix between"):
        Muon(adapted.buffer, backend)
