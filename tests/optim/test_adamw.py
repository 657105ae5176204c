"""AdamW against its formula written out per parameter; clipping; schedules at their ends and between."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.kernel import bind
from tinyforge.op import Param
from tinyforge.optim import SCHEDULES, AdamW, AdamWConfig, MuonConfig, clip_scale, learning_rate
from tinyforge.optim.adamw import square_sums
from tinyforge.optim.schedules import held, linear, read_points
from tinyforge.params import ParamBuffer

CONFIG = AdamWConfig(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)


def some_buffer(precision: str, workers: int) -> tuple[ParamBuffer, AdamW]:
    """A matrix larger than what is updated at a time, a small one, and a norm, which is not decayed."""
    backend = get_backend("numpy", precision, workers)
    params = [
        Param("norm", (7,), fill=1.0, decay=False),
        Param("large", (190, 211), std=0.5),
        Param("small", (3, 5), std=0.5),
    ]
    buffer = ParamBuffer(params, backend)
    rng = np.random.default_rng(0)
    for p in params:
        p.value[...] = rng.normal(size=p.shape)
    return buffer, AdamW(buffer, backend, CONFIG)


def naive_step(w: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, t: int, lr: float, decay: float) -> None:
    """The paper's lines, in float64, in place."""
    m[...] = CONFIG.beta1 * m + (1 - CONFIG.beta1) * g
    v[...] = CONFIG.beta2 * v + (1 - CONFIG.beta2) * g**2
    corrected_m, corrected_v = m / (1 - CONFIG.beta1**t), v / (1 - CONFIG.beta2**t)
    w[...] = w - lr * decay * w - lr * corrected_m / (np.sqrt(corrected_v) + CONFIG.eps)


def test_cautious_decay_and_rates_by_group_follow_the_formula() -> None:
    """Element by element, in Python: a weight decays only where the update makes it smaller."""
    backend = get_backend("numpy", "fp64", 2)
    buffer = ParamBuffer([Param("embedding", (5, 3)), Param("map", (4, 3)), Param("gain", (3,), decay=False)], backend)
    config = replace(CONFIG, cautious=True, group_rates=(("embeddings", 5.0), ("scalars", 0.1)))
    factors = {"embedding": 5.0, "map": 1.0, "gain": 0.1}
    optimizer, rng = AdamW(buffer, backend, config), np.random.default_rng(0)
    buffer.masters[...] = rng.normal(size=buffer.size)
    naive = {p.name: [[w, 0.0, 0.0] for w in p.value.ravel().tolist()] for p in buffer.params}
    kept = 0
    for t in range(1, 5):
        buffer.grads[...] = rng.normal(size=buffer.size)
        for p in buffer.params:
            for one, g in zip(naive[p.name], p.grad.ravel().tolist(), strict=True):
                one[1] = CONFIG.beta1 * one[1] + (1 - CONFIG.beta1) * g
                one[2] = CONFIG.beta2 * one[2] + (1 - CONFIG.beta2) * g * g
                root = math.sqrt(one[2] / (1 - CONFIG.beta2**t)) + CONFIG.eps
                update = factors[p.name] * one[1] / (1 - CONFIG.beta1**t) / root
                decays = p.decay and update * one[0] >= 0
                kept += p.decay and not decays
                one[0] -= 0.1 * (update + CONFIG.weight_decay * one[0] * decays)
        optimizer.step(0.1)
    assert kept > 10
    for p in buffer.params:
        np.testing.assert_allclose(p.value.ravel(), [one[0] for one in naive[p.name]], rtol=1e-12)


@pytest.mark.parametrize(("precision", "rtol"), [("fp64", 1e-13), ("fp32", 3e-6)])
@pytest.mark.parametrize("workers", [1, 3])
def test_five_steps_follow_the_formula(precision: str, rtol: float, workers: int) -> None:
    buffer, optimizer = some_buffer(precision, workers)
    naive = {p.name: (p.value.astype(np.float64), np.zeros(p.shape), np.zeros(p.shape)) for p in buffer.params}
    rng = np.random.default_rng(1)
    for t in range(1, 6):
        lr, grad_scale = 0.1 / t, 0.5
        for p in buffer.params:
            p.grad[...] = rng.normal(size=p.shape)
            g = p.grad.astype(np.float64) * grad_scale
            naive_step(*naive[p.name], g, t, lr, 0.0 if p.name == "norm" else CONFIG.weight_decay)
        optimizer.step(lr, grad_scale)
    assert optimizer.step_count == 5
    for p in buffer.params:
        w, m, v = naive[p.name]
        np.testing.assert_allclose(p.value, w, rtol=rtol, atol=rtol, err_msg=p.name)
        np.testing.assert_allclose(buffer.view(optimizer.m, p), m, rtol=rtol, atol=rtol, err_msg=p.name)
        np.testing.assert_allclose(buffer.view(optimizer.v, p), v, rtol=rtol, atol=rtol, err_msg=p.name)


def test_workers_do_not_change_a_bit() -> None:
    results = []
    for workers in (1, 2, 5):
        buffer, optimizer = some_buffer("fp32", workers)
        buffer.grads[...] = np.random.default_rng(2).normal(size=buffer.grads.shape)
        optimizer.step(0.01)
        results.append(buffer.values.tobytes())
    assert len(set(results)) == 1


def test_without_a_gradient_only_matrices_shrink() -> None:
    buffer, optimizer = some_buffer("fp64", 1)
    before = {p.name: p.value.copy() for p in buffer.params}
    optimizer.step(lr=0.5)
    for p in buffer.params:
        shrink = 1.0 if p.name == "norm" else 1 - 0.5 * CONFIG.weight_decay
        np.testing.assert_allclose(p.value, shrink * before[p.name], rtol=1e-15, err_msg=p.name)


def test_the_norm_is_that_of_all_gradients_and_clipping_brings_it_to_the_limit() -> None:
    buffer, optimizer = some_buffer("fp32", 1)
    buffer.grads[...] = np.random.default_rng(3).normal(size=buffer.grads.shape)
    norm, factor = optimizer.clip(1.0)
    assert norm == pytest.approx(math.sqrt(float((buffer.grads.astype(np.float64) ** 2).sum())), rel=1e-6)
    assert norm * factor == pytest.approx(1.0, rel=1e-6)
    assert optimizer.clip(1.0) == (norm, factor)  # nothing is left of the first time
    assert some_buffer("fp32", 1)[1].factor == 1.0


def test_squares_are_written_over_what_was_there() -> None:
    sums = np.full((2, 3), 7.0)
    bind((square_sums,), get_backend("numpy", "fp64", 1), "test").square_sums(
        sums, np.array([1.0, 2.0, 3.0]), np.array([[0, 2], [2, 3]])
    )
    assert sums.sum(axis=1).tolist() == [5.0, 9.0]


def test_pieces_whose_squares_are_known_before_add_up_to_the_same_norm() -> None:
    found = []
    for pieces, known in ((None, range(0)), ((9, 30_000), range(0)), ((9, 30_000), range(1, 2)), ((5,), range(2))):
        buffer, _ = some_buffer("fp32", 1)
        ends = (0, *(pieces or ()), buffer.values.size)
        optimizer = AdamW(
            buffer, get_backend("numpy", "fp32", 1), CONFIG, [slice(*two) for two in itertools.pairwise(ends)]
        )
        buffer.grads[...] = np.random.default_rng(3).normal(size=buffer.grads.shape)
        optimizer.know(known)
        norm, factor = optimizer.clip(1.0)
        optimizer.step(0.1, factor)
        found.append((norm, factor, buffer.values.copy()))
    for norm, factor, values in found[1:]:
        assert (norm, factor) == pytest.approx(found[0][:2], rel=1e-6)
        np.testing.assert_allclose(values, found[0][2], rtol=1e-5, atol=1e-6)


def test_clipping_leaves_what_is_within_the_limit() -> None:
    assert clip_scale(2.0, 1.0) == clip_scale(0.5, 0.25) == 0.5
    assert clip_scale(0.5, 1.0) == clip_scale(1.0, 1.0) == 1.0
    assert clip_scale(100.0, 0.0) == 1.0  # no limit
    assert clip_scale(0.0, 1.0) == 1.0


def test_the_first_rate_is_a_hundredth_of_the_peak() -> None:
    """A rate of 0 would waste a step; up to a hundredth of the warm-up it stays at peak / 100."""
    rates = [learning_rate("wsd", progress, 3.0, decay=0.2, warmup=0.1) for progress in (0.0, 0.0005, 0.001, 0.05, 0.1)]
    np.testing.assert_allclose(rates, [0.03, 0.03, 0.03, 1.5, 3.0], rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_never_zero(schedule: str) -> None:
    rates = [learning_rate(schedule, p, 2.0, decay=0.4, warmup=0.1) for p in (0.0, 0.025, 0.05, 0.1)]
    assert 0 < rates[0] < 0.05
    assert learning_rate(schedule, 0.0, 2.0, decay=0.4, warmup=0.0) == 2.0  # there may be none
    assert rates[1:] == pytest.approx([0.5, 1.0, 2.0])


def test_schedules_between_and_at_the_end() -> None:
    def rates(schedule: str, *progress: float) -> list[float]:
        return [learning_rate(schedule, p, 2.0, warmup=0.1, decay=0.4, floor=0.05) for p in progress]

    assert rates("constant", 0.1, 0.5, 1.0, 1.5) == [2.0] * 4
    # Half-way from 0.1 to 1, a cosine is half-way from 2 to its floor of 0.1, and stays at the floor past the end.
    assert rates("cosine", 0.1, 0.55, 1.0, 1.5) == pytest.approx([2.0, 1.05, 0.1, 0.1])
    assert rates("cosine", 0.325) == pytest.approx([0.1 + 1.9 * (1 + math.sqrt(0.5)) / 2])
    assert rates("wsd", 0.1, 0.6, 0.8, 1.0, 1.5) == pytest.approx([2.0, 2.0, 1.05, 0.1, 0.1])


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'linear'; known: wsd, cosine, constant"):
        learning_rate("linear", 0.5, 1.0, decay=0.4, warmup=0.02)


def test_the_defaults_are_gpt3s() -> None:
    """Brown et al. (2020), appendix B; Muon's momentum is Jordan's."""
    assert AdamWConfig() == AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    assert MuonConfig() == MuonConfig(0.9, 0.95, 1e-8, 0.1, momentum=0.95)
    assert learning_rate("cosine", 1.0, 1.0, warmup=0.1, decay=0.1) == pytest.approx(0.02)


def test_points_of_a_schedule() -> None:
    points = read_points("--momentum-schedule", ("0.1:0.85", "0.5:0.95", "1:0.75"), "", 0.0, 0.99)
    assert points == ((0.1, 0.85), (0.5, 0.95), (1.0, 0.75))
    expected = {0.0: 0.85, 0.1: 0.85, 0.3: 0.9, 0.5: 0.95, 0.75: 0.85, 1.0: 0.75, 1.2: 0.75}
    for progress, value in expected.items():
        assert linear(points, progress) == pytest.approx(value, abs=1e-15)
    assert [held(points, progress) for progress in (0.0, 0.1, 0.49, 0.5, 2.0)] == [0.85, 0.85, 0.85, 0.95, 0.75]


@pytest.mark.parametrize("wrong", ["0", "0:x", "-0.1:2", "1.1:2", "0.5:0", "0.2:2", "0.5:2.5", "0.5:inf", "nan:1"])
def test_a_wrong_point_is_one_line(wrong: str) -> None:
    with pytest.raises(
        UserError, match="--batch-schedule: '.*' expects AT:VALUE, .* a whole number of 1 or more, e.g."
    ):
        read_points("--batch-schedule", ("0.2:1", wrong), "0:1 0.5:2", 1)
