"""Muon against its formula in float64, against the singular values that it promises, and against PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from tinyforge.optim import AdamW, AdamWConfig, Muon, MuonConfig, Pace
from tinyforge.optim.groups import batch_factor, check_groups, describe_rates, group_of, group_rates
from tinyforge.optim.muon import COEFFICIENTS, EPS, STEPS, A, B, C, muon_, muon_momentum, newton_schulz
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


def without_nesterov(m: Any, grads: Any, starts: Any, rows: int, columns: int, grad_scale: Any, rates: Any) -> Any:
    muon_momentum(m, grads, starts, rows, columns, grad_scale, rates)
    x = np.stack([m[start : start + rows * columns].reshape(rows, columns) for start in starts.tolist()])
    return x, (x**2).sum(axis=(1, 2))[:, None]


FAULTS: dict[str, tuple[Kernel[..., Any], Any]] = {
    "no Nesterov": (muon_momentum, without_nesterov),
    "not normalised": (newton_schulz, lambda x, squares, rounds: newton_schulz(x, squares * 0.9, rounds)),
    "scale of the rows": (
        muon_,
        lambda values, masters, x, starts, rates, grad_scale, scale, factors, careful: muon_(
            values, masters, x, starts, rates, grad_scale, 0.2 * x.shape[1] ** 0.5, factors, careful
        ),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(fault: str) -> None:
    kernel, wrong = FAULTS[fault]
    with override(kernel, "numpy", wrong), pytest.raises(AssertionError, match="qkv|gate_up"):
        test_steps_follow_the_formula("fp64", 1e-12, 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "NorMuon": {"normuon": True},
    "Polar Express": {"coefficients": "polar-express"},
    "cautious decay": {"cautious": True},
    "group rates": {"group_rates": (("matrices", 3.0), ("embeddings", 7.0), ("scalars", 0.5))},
    "all": {
        "normuon": True,
        "row_beta": 0.7,
        "coefficients": "polar-express",
        "cautious": True,
        "group_rates": (("matrices", 0.5), ("heads", 4.0)),
    },
}


def by_torch(
    w: np.ndarray, m: np.ndarray, rows: np.ndarray, g: np.ndarray, lr: float, momentum: float, config: MuonConfig
) -> None:
    """A step of one matrix in PyTorch, from the papers' lines, in float64, in place. lr: the run's."""
    torch = pytest.importorskip("torch")
    weight, first, second, grad = (torch.from_numpy(a) for a in (w, m, rows, g))
    first.mul_(momentum).add_(grad, alpha=1 - momentum)
    ahead = torch.lerp(grad, first, momentum)
    u, s, v = torch.linalg.svd(ahead, full_matrices=False)
    s = s / torch.linalg.vector_norm(s)
    if config.coefficients == "polar-express":
        s = s / 1.01
        published = [
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        ]
        for a, b, c in published:
            s = a / 1.01 * s + b / 1.01**3 * s**3 + c / 1.01**5 * s**5
    else:
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    update = 0.2 * max(w.shape) ** 0.5 * (u * s) @ v
    if config.normuon:
        orthogonal = (u * s) @ v
        second.mul_(config.row_beta).add_((orthogonal**2).mean(dim=1), alpha=1 - config.row_beta)
        divided = orthogonal / (second.sqrt() + 1e-7)[:, None]
        update = 0.2 * w.size**0.5 * divided / torch.linalg.matrix_norm(divided)
    update *= dict(config.group_rates).get("matrices", 1.0)
    decayed = weight * (update * weight >= 0) if config.cautious else weight
    weight.sub_(lr * (update + config.weight_decay * decayed))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_follow_their_papers(option: str) -> None:
    """With another momentum in every step. What has no matrices goes as with an AdamW of the same rates."""
    config = replace(CONFIG, **OPTIONS[option])
    (buffer, _), backend = some_buffer("fp64", 1), get_backend("numpy", "fp64", 2)
    optimizer, other = Muon(buffer, backend, config), some_buffer("fp64", 1)[0]
    plain = AdamWConfig(weight_decay=0.3, cautious=config.cautious, group_rates=config.group_rates)
    adamw = AdamW(other, backend, plain)
    naive = {p.name: (p.value.copy(), np.zeros(p.shape), np.zeros(p.shape[:-1])) for p in buffer.params}
    rng = np.random.default_rng(1)
    for step in range(1, 5):
        lr, momentum = 0.1 / step, 0.6 + 0.1 * step
        for p, same in zip(buffer.params, other.params, strict=True):
            p.grad[...] = same.grad[...] = rng.normal(size=p.shape)
            w, m, second = naive[p.name]
            parts = (matrices_of(p, a) for a in (w, m, p.grad * 0.5))
            starts = np.cumsum([0, *p.matrices])
            for (one, first, grad), start, stop in zip(zip(*parts, strict=True), starts, starts[1:], strict=False):
                by_torch(one, first, second.reshape(-1)[start:stop], grad, lr, momentum, config)
        optimizer.step(Pace(lr, momentum), 0.5)
        adamw.step(lr, 0.5)
    for p, same in zip(buffer.params, other.params, strict=True):
        if p.matrices:
            np.testing.assert_allclose(p.value, naive[p.name][0], atol=1e-12, err_msg=p.name)
            if config.normuon:
                np.testing.assert_allclose(optimizer._view("v", p), naive[p.name][2], atol=1e-12, err_msg=p.name)
        else:
            np.testing.assert_allclose(p.value, same.value, atol=1e-13, err_msg=p.name)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_change_what_is_learned(option: str) -> None:
    found = []
    for config in (CONFIG, replace(CONFIG, **OPTIONS[option])):
        buffer, _ = some_buffer("fp64", 1)
        optimizer = Muon(buffer, get_backend("numpy", "fp64", 1), config)
        buffer.grads[...] = np.random.default_rng(2).normal(size=buffer.size)
        optimizer.step(0.1)
        found.append(buffer.params[1].value.copy())
    assert not np.allclose(*found, atol=1e-3)


def test_an_update_of_normuon_has_the_same_root_mean_square_and_even_rows() -> None:
    """A row that is ten times as large as the others in every step ends no larger."""
    backend = get_backend("numpy", "fp64", 1)
    buffer = ParamBuffer([Param("map", (6, 4), matrices=(6,))], backend)
    optimizer = Muon(buffer, backend, MuonConfig(normuon=True, weight_decay=0.0))
    for step in range(30):
        buffer.grads[:24] = np.random.default_rng(step).normal(size=24) * np.repeat([10, 1, 1, 1, 1, 1], 4)
        before = buffer.params[0].value.copy()
        optimizer.step(0.1)
        change = (buffer.params[0].value - before) / 0.1
        assert np.sqrt((change**2).mean()) == pytest.approx(0.2, rel=1e-6)
    rows = np.sqrt(optimizer._view("v", buffer.params[0]))
    assert rows.shape == (6,) and rows.min() > 0


def test_polar_express_brings_singular_values_nearer_to_one() -> None:
    """Over three powers of ten, in the largest error: the published claim."""
    s = np.geomspace(3e-3, 0.99, 2000)
    worst = {}
    for name, rounds in COEFFICIENTS.items():
        x = s.copy()
        for a, b, c in rounds:
            x = a * x + b * x**3 + c * x**5
        worst[name] = float(np.abs(x - 1).max())
    assert len(COEFFICIENTS["polar-express"]) == STEPS
    assert worst["polar-express"] < 0.13 < 0.3 < worst["quintic"]


def test_groups_are_known_by_name_and_what_decays() -> None:
    model = NanoEuler(Config(dim=16, heads=4, kv_heads=2, layers=1, hidden=24), get_backend("numpy", "fp32", workers=1))
    groups: dict[str, set[str]] = {}
    for p in model.buffer.params:
        groups.setdefault(group_of(p), set()).add(p.name)
    assert set(groups) == {"matrices", "embeddings", "heads", "scalars"}
    assert groups["matrices"] == {p.name for p in model.buffer.params if p.matrices}
    assert all("norm" in name for name in groups["scalars"])
    assert group_of(Param("blocks.3.value_embedding.weight", (9, 4))) == "value_embeddings"
    assert group_of(Param("conv.weight", (9, 4))) == group_of(Param("by_head", (8, 4), matrices=(4, 4))) == "matrices"


def test_the_rule_of_width_and_batch() -> None:
    assert group_rates((), "plain", 64) == () and batch_factor("plain", 7) == 1.0
    found = dict(group_rates(("embeddings=10", "scalars=2"), "width-batch", 192))
    assert found == {"embeddings": 20.0, "value_embeddings": 2.0, "heads": 2.0, "scalars": 2.0}
    assert group_rates(("heads=1",), "width-batch", 768) == () and batch_factor("width-batch", 1 << 17) == 0.5
    params = some_buffer("fp32", 1)[0].params
    shown = describe_rates((("embeddings", 10.0),), 0.004, "plain", params)
    assert shown == (
        "learning rates: matrices 0.004, embeddings 0.04, heads 0.004, scalars 0.004 "
        "(--lr x the factor of --group-rates)"
    )
    for wrong in ("embedding=10", "embeddings", "embeddings=0", "embeddings=x", "heads=2"):
        with pytest.raises(UserError, match=f"--group-rates: '{wrong}' expects GROUP=FACTOR with a group of matrices"):
            PretrainSettings(group_rates=("heads=3", wrong)).check()
    with pytest.raises(UserError, match="this model has no value_embeddings, only matrices, embeddings, heads"):
        check_groups(("embeddings=3", "value_embeddings=3"), params)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=(3, *shape)) * 1e-3
    found = newton_schulz(x.copy(), (x**2).sum(axis=(1, 2))[:, None], COEFFICIENTS["quintic"])
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


@pytest.mark.parametrize("options", [{}, OPTIONS["all"]], ids=["muon", "all options"])
def test_workers_do_not_change_a_bit(options: dict[str, Any]) -> None:
    results = []
    for workers in (1, 2, 5):
        buffer, _ = some_buffer("fp32", workers)
        optimizer = Muon(buffer, get_backend("numpy", "fp32", workers), replace(CONFIG, **options))
        buffer.grads[...] = np.random.default_rng(2).normal(size=buffer.size)
        optimizer.step(0.01)
        results.append(buffer.values.tobytes())
    assert len(set(results)) == 1


def test_the_moments_of_rows_can_be_taken_out_and_put_in() -> None:
    buffer, _ = some_buffer("fp32", 1)
    optimizer = Muon(buffer, get_backend("numpy", "fp32", 1), replace(CONFIG, normuon=True))
    assert optimizer.having("v") == buffer.params
    shapes = {p.name: optimizer.shape_of("v", p) for p in buffer.params}
    assert shapes["qkv"] == (10,) and shapes["gate_up"] == (2, 4) and shapes["embedding"] == (11, 6)
    plain = some_buffer("fp32", 1)[1]
    assert optimizer.v.size == plain.v.size + 10 + 8
    tensors = [np.random.default_rng(n).normal(size=shapes[p.name]) for n, p in enumerate(buffer.params)]
    for p, tensor in zip(buffer.params, tensors, strict=True):
        optimizer.take("v", p, tensor)
    for tensor, found in zip(tensors, optimizer.tensors("v"), strict=True):
        assert np.array_equal(found, tensor.astype(np.float32))


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
    assert [len(batch[2]) for batch in optimizer._batches] == [1, 6]
    assert [len(batch[2]) for batch in in_parts._batches] == [1] * 7
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
    for options, flag in ({"normuon": True}, "normuon"), ({"newton_schulz": "polar-express"}, "newton-schulz"):
        with pytest.raises(UserError, match=f"--{flag} is given without --optimizer muon; add it, or leave"):
            PretrainSettings(**options).check()
    backend = get_backend("numpy", "fp32", workers=1)
    config = Config(dim=16, heads=4, kv_heads=2, layers=1, hidden=24)
    adapted = Adapted(partial(NanoEuler, config, backend), Adapters(2, 4.0, 0.0))
    with pytest.raises(UserError, match="--optimizer muon: of what is learned here nothing is a matrix between"):
        Muon(adapted.buffer, backend)
