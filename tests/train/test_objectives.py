"""What is learned: an objective is checked through a small model like an op, and its figures are the loss by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.gradcheck import TOLERANCE, directional_error
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Stash
from tinyforge.ops.attention import Documents
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Arrays, Batch, MaskedTokens, MeanOfRows, NextTokens, WithTerms, likelihoods

FP64 = get_backend("numpy", "fp64", workers=1)
CONFIG = Config(dim=8, heads=2, kv_heads=1, layers=1, context=7, vocab=11, mtp_heads=2, hidden=6, mtp_weights=(1, 0.5))
OBJECTIVE = NextTokens(CONFIG.head_weights)


def model() -> NanoEuler:
    made = NanoEuler(CONFIG, FP64)
    made.initialise(seed=1)
    made.buffer.values *= 8  # far from the start, where all tokens are as likely
    return made


def batch(rows: int, seed: int, weights: str = "none") -> Batch:
    """Random ids; a fifth of the targets are missing. weights: none, random of both signs, or a mask of 0 and 1."""
    rng = np.random.default_rng(seed)
    shape = (rows, 7, 2)
    targets = rng.integers(0, 11, shape, dtype=np.int32)
    targets[rng.random(shape) < 0.2] = -1
    made = {"none": None, "random": rng.normal(size=shape), "mask": (rng.random(shape) < 0.5).astype(float)}
    return Batch(rng.integers(0, 11, (rows, 7), dtype=np.int32), targets, made[weights])


def loss_of(net: NanoEuler, batches: list[Batch], objective: NextTokens = OBJECTIVE) -> float:
    counts = sum(objective.count(b) for b in batches)
    sums = sum(objective.weigh(net.forward(b.ids, b.targets), b, counts, FP64)[0] for b in batches)
    return objective.figures(sums, counts)["loss"]


def worst_error(weights: str, objective: Any = OBJECTIVE) -> float:
    """The gradient of the loss of two unequal micro-batches, against finite differences of it, over all parameters."""
    net, rng = model(), np.random.default_rng(3)
    batches = [batch(3, 0, weights), batch(2, 1, weights)]
    counts = sum(objective.count(b) for b in batches)
    for b in batches:
        stash = Stash()
        net.backward(objective.weigh(net.forward(b.ids, b.targets, stash), b, counts, FP64)[1], stash)
        assert not len(stash)
    return max(directional_error(lambda: loss_of(net, batches), p.value, p.grad, rng) for p in net.params())


@pytest.mark.parametrize("weights", ["none", "random", "mask"])
def test_the_gradient_is_the_losses(weights: str) -> None:
    assert worst_error(weights) < TOLERANCE


class PerBatch(NextTokens):
    """A fault: each micro-batch is divided by its own count, as if the mean of means were the mean."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Any) -> tuple[Any, Any]:
        return super().weigh(nll, batch, self.count(batch), backend)


class Unweighted(NextTokens):
    """A fault: the weights go into the loss and not into its gradient."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Any) -> tuple[Any, Any]:
        sums, _ = super().weigh(nll, batch, counts, backend)
        return sums, self.scale(counts)


@pytest.mark.parametrize("fault", [PerBatch, Unweighted])
def test_a_wrong_gradient_is_found(fault: type[NextTokens]) -> None:
    assert worst_error("random", fault(CONFIG.head_weights)) > 1e-3


def test_the_loss_is_the_weighted_mean_over_heads() -> None:
    net, b = model(), batch(4, 5)
    nll = net.forward(b.ids, b.targets)
    means = [nll[..., k][b.targets[..., k] >= 0].mean() for k in range(2)]
    assert loss_of(net, [b]) == pytest.approx((means[0] + 0.5 * means[1]) / 1.5, rel=1e-12)


def test_a_mask_does_what_missing_targets_do() -> None:
    net, b = model(), batch(4, 5, "mask")
    gone = Batch(b.ids, np.where(b.weights == 0, -1, b.targets).astype(np.int32))
    assert loss_of(net, [b]) == pytest.approx(loss_of(net, [gone]), rel=1e-12)
    gradients = []
    for each in (b, gone):
        DataParallel(net, FP64, OBJECTIVE).gradients([each])
        gradients.append(net.buffer.grads.copy())
    np.testing.assert_allclose(*gradients, rtol=1e-9, atol=1e-14)


def test_uniform_weights_need_no_gradient_per_token() -> None:
    """The fast path: one number for each head, and with weights of 1 the same gradient by the other path."""
    net, b = model(), batch(4, 5)
    counts = OBJECTIVE.count(b)
    nll = net.forward(b.ids, b.targets)
    fast, ones = OBJECTIVE.weigh(nll, b, counts, FP64), Batch(b.ids, b.targets, np.ones(b.targets.shape))
    slow = OBJECTIVE.weigh(nll, ones, counts, FP64)
    assert fast[1].shape == (2,) and slow[1].shape == (4, 7, 2)
    assert np.array_equal(fast[0], slow[0]) and np.array_equal(np.broadcast_to(fast[1], (4, 7, 2)), slow[1])


def test_a_head_without_targets_adds_nothing_and_takes_nothing_from_the_others() -> None:
    whole = batch(4, 5)
    targets = whole.targets.copy()
    targets[..., 1] = -1
    first = Batch(whole.ids, targets)
    both, alone = (OBJECTIVE.scale(OBJECTIVE.count(b)) for b in (whole, first))
    assert alone.tolist() == [both[0], 0.0]
    assert OBJECTIVE.scale(np.zeros(3)).tolist() == [0.0, 0.0]
    assert NextTokens((1.0, 1.0)).scale(np.array([1, 4, 0])).tolist() == [0.5, 0.125]


def test_bits_per_byte_counts_true_bytes() -> None:
    """Three predicted tokens of 1, 3 and 0 bytes (a special one), with 8 bits of surprise between them: 2 a byte."""
    objective = NextTokens((1.0, 1.0), np.array([1, 3, 0, 9, 9, 9]))
    b = Batch(np.zeros((1, 4), np.int32), np.array([[[0, 5], [1, 5], [2, -1], [-1, 5]]], np.int32))
    sums = np.array([0, 0, 8 * np.log(2), 0])
    assert objective.figures(sums, objective.count(b))["bits_per_byte"] == pytest.approx(2.0)
    for size in (0, 1):  # a step without text counts as one byte
        assert objective.figures(sums, np.array([3, 3, size]))["bits_per_byte"] == pytest.approx(8.0)


@pytest.mark.parametrize("weights", ["none", "random"])
def test_factors_that_are_given_are_those_that_are_counted(weights: str) -> None:
    """As a CUDA graph reads them. The terms of a model weigh each batch by its tokens."""
    objective, net = WithTerms(OBJECTIVE, {"balance": 0.3, "router z": 0.2}), model()
    batches = [batch(3, 0, weights), batch(2, 1, weights)]
    counts, b = sum(objective.count(each) for each in batches), batches[0]
    result = net.forward(b.ids, b.targets), np.array([1.5, -2.5])
    sums, (dnll, dterms) = objective.weigh(result, b, counts, FP64)
    given = replace(b, factors=FP64.asarray(objective.factors(counts)))
    again, (dnll_again, dterms_again) = objective.weigh(result, given, counts, FP64)
    assert np.array_equal(sums, again) and np.array_equal(dnll, dnll_again)
    assert dterms.tolist() == pytest.approx([0.6 * 0.3, 0.6 * 0.2]) and np.array_equal(dterms, dterms_again)
    assert sums[-2:].tolist() == pytest.approx([0.6 * 1.5, 0.6 * -2.5])
    plain = OBJECTIVE.weigh(result[0], b, counts[:-1], FP64)
    assert np.array_equal(plain[0], sums[:-2]) and np.array_equal(plain[1], dnll)
    found = objective.figures(sums, counts)
    assert found["loss"] == pytest.approx(OBJECTIVE.figures(sums[:-2], counts[:-1])["loss"] + 0.18 * 1.5 - 0.12 * 2.5)
    assert found["balance"] == pytest.approx(0.9) and found["router z"] == pytest.approx(-1.5)


def test_the_mean_of_rows_has_a_gradient_for_each_row() -> None:
    objective, loss = MeanOfRows("mse"), np.array([1.0, 2.0, 6.0])
    batch: Any = SimpleNamespace(factors=None)
    sums, dloss = objective.weigh(loss, batch, np.array([12]), FP64)
    assert sums.tolist() == [9.0] and dloss.tolist() == [1 / 12] * 3
    assert objective.figures(np.array([36.0]), np.array([12])) == {"loss": 3.0, "mse": 3.0}
    for rows in (0, 1):  # none counts as one
        _, dloss = objective.weigh(loss[:rows], batch, np.array([rows]), FP64)
        assert dloss.tolist() == [1.0] * rows and objective.figures(loss[:1], np.array([rows]))["loss"] == 1.0
    given = replace(Arrays((loss,)), factors=np.array([0.25]))
    assert objective.weigh(loss, given, np.array([1]), FP64)[1].tolist() == [0.25] * 3


def test_a_perplexity_beyond_all_numbers_is_a_number() -> None:
    assert np.isfinite(MaskedTokens().figures(np.array([1e5, 1e5]), np.array([1, 0]))["perplexity"])


def test_batches_are_cut_by_rows_and_moved_part_by_part() -> None:
    """Every array, and the place in the carried state; what was moved comes back in order."""
    starts = np.arange(12, dtype=np.int32).reshape(4, 3)
    whole = Batch(
        starts + 100,
        starts[..., None] + 200,
        starts[..., None] * 0.5,
        (starts + 300, starts + 400),
        Documents(starts, restart=True),
        stream=5,
        objective_inputs=(starts[:, 0] * 1.0,),
        group_size=2,
    )
    part = whole[2:4]
    assert len(part) == 2 and (part.size("tokens"), part.size("images")) == (6, 2) and part.stream == 7
    assert whole[:2].stream == 5 and Batch(starts, starts).group_size == 1 == Arrays(()).group_size
    for got, expected in zip(part.parts(FP64), whole.parts(FP64), strict=True):
        assert np.array_equal(got, expected[2:])
    assert np.array_equal(part.objective_inputs[0], [6, 9]) and part.group_size == 2
    back = replace(part, ids=part.ids * 0, extra_inputs=(starts, starts)).moved(iter(part.parts(FP64)))
    assert [a.tolist() for a in back.parts(FP64)] == [a.tolist() for a in part.parts(FP64)]
    assert back.documents is not None and back.documents.restart
    assert part.nothing(FP64).shape == (2, 3, 1) and [a.tolist() for a in back.inputs(FP64)][3][0] == [406, 407, 408]
    assert part.kind() == back.kind() != whole.kind() and replace(part, documents=None).kind() != part.kind()
    taught = replace(whole, taught=3)
    assert [taught[rows].taught for rows in (slice(0, 2), slice(1, 2), slice(2, 4), slice(3, 4))] == [2, 1, 1, 0]
    assert len(Arrays((np.ones((4, 2)),))) == 4 and NextTokens((1.0, 1.0)).count(whole)[-1] == 0
    rows = Arrays((np.ones((4, 2)), np.arange(4)))
    assert len(rows) == rows.size("tokens") == 4 and len(rows[1:]) == 3 and rows.nothing(FP64).shape == (0,)
    assert [a.dtype.kind for a in rows.parts(FP64)] == ["f", "i"] and rows.kind() == ((4, 2), (4,))
    assert rows[1:].moved(iter(rows.parts(FP64))).given[1].tolist() == [0, 1, 2, 3]
    assert likelihoods((starts, None)) is starts is likelihoods(starts)
