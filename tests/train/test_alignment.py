"""Preference pairs and rewards: gradients through a small model against finite differences, values by hand, faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import Backend, get_backend
from tinyforge.gradcheck import TOLERANCE, directional_error
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Stash
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, Classes, MaskedTokens, NextTokens
from tinyforge.train.policy import GRPO, OLD, REFERENCE, advantages, policy_batch, reward_figures, worth_learning
from tinyforge.train.preferences import DPO, IPO, ORPO, Encoded, Pairs, SimPO, cached_reference, measure, reply_rows

FP64 = get_backend("numpy", "fp64", workers=1)
CONFIG = Config(dim=8, heads=2, kv_heads=1, layers=1, context=9, vocab=11, mtp_heads=2, hidden=6, mtp_weights=(1, 0.5))
PREFERENCES = [DPO(0.7), DPO(0.7, 0.2), IPO(0.3), SimPO(2.0, 0.0, 0.5), SimPO(1.5, 0.1), ORPO(0.4), ORPO(0.4, 0.1)]
POLICIES = [GRPO(0.1, 0.2, 0.3, name, 6) for name in ("grpo", "dapo", "dr_grpo")] + [GRPO(), GRPO(0.5, 0.3, 0.4)]


def model(seed: int = 1) -> NanoEuler:
    made = NanoEuler(CONFIG, FP64)
    made.initialise(seed=seed)
    made.buffer.values *= 4  # far from the start, where all tokens are as likely
    return made


def pairs(count: int, seed: int, net: NanoEuler | None = None) -> Pairs:
    """Random pairs of unequal lengths. net: the reference."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = rng.integers(0, 11, rng.integers(1, 4)).tolist()
        made.append((*(prompt + rng.integers(0, 11, rng.integers(1, 6)).tolist() for _ in "cr"), len(prompt)))
    found = Pairs(made, 2, seed)
    found.reference = found.reference_logps(DataParallel(net, FP64).token_nll, 2) if net else None
    return found


def replies(groups: int, size: int, seed: int) -> Batch:
    """Random replies and rewards, one group's all equal. The old log-probabilities are the model's own and some more:
    ratios lie on all sides of the clips, and so far from them that no finite difference crosses one."""
    rng = np.random.default_rng(seed)
    rows = [(rng.integers(0, 11, 3 + rng.integers(1, 5)).tolist(), 2) for _ in range(groups * size)]
    ids, targets = reply_rows(rows, 2)
    rewards = rng.random((groups, size))
    rewards[0] = 1.0
    nll = DataParallel(model(), FP64).token_nll(Batch(ids, targets))
    learned = targets[..., 0] >= 0
    logps = [np.where(learned, -nll + rng.choice([-0.6, -0.1, 0.1, 0.5], nll.shape), 0) for _ in range(2)]
    return policy_batch(ids, targets, advantages(rewards), logps)


def loss_of(net: NanoEuler, batches: list[Batch], objective: Any) -> float:
    counts = sum(objective.count(b) for b in batches)
    sums = sum(objective.weigh(net.forward(b.ids, b.targets), b, counts, FP64)[0] for b in batches)
    return objective.figures(sums, counts)["loss"]


def worst_error(objective: Any, batches: list[Batch], right: Any = None) -> float:
    """The gradient over two unequal micro-batches against finite differences of `right`'s loss, over all parameters."""
    net, rng = model(), np.random.default_rng(3)
    counts = sum(objective.count(b) for b in batches)
    for b in batches:
        stash = Stash()
        net.backward(objective.weigh(net.forward(b.ids, b.targets, stash), b, counts, FP64)[1], stash)
        assert not len(stash)
    value = right or objective
    return max(directional_error(lambda: loss_of(net, batches, value), p.value, p.grad, rng) for p in net.params())


def pair_batches(objective: DPO) -> list[Batch]:
    other = model(2) if objective.referenced else None
    return [pairs(3, 0, other).of(range(3)), pairs(2, 1, other).of(range(2))]


REPLIES = [replies(3, 4, 0), replies(2, 4, 1)]


@pytest.mark.parametrize("objective", PREFERENCES, ids=repr)
def test_the_gradient_of_preferences(objective: DPO) -> None:
    assert worst_error(objective, pair_batches(objective)) < TOLERANCE


@pytest.mark.parametrize("objective", POLICIES, ids=repr)
def test_the_gradient_of_rewards(objective: GRPO) -> None:
    """Some tokens are clipped, have no gradient, and are counted."""
    assert worst_error(objective, REPLIES) < TOLERANCE
    counts = sum(objective.count(b) for b in REPLIES)
    sums = sum(objective.weigh(model().forward(b.ids, b.targets), b, counts, FP64)[0] for b in REPLIES)
    found = objective.figures(sums, counts)
    assert 0.01 < found["clip_ratio/low_mean"] < 0.9 and 0.01 < found["clip_ratio/high_mean"] < 0.9


def test_orpo_is_finite_where_a_reply_is_certain() -> None:
    """At probability 1 the odds are infinite; log p / |y| is held at -1e-12."""
    scores, slopes = ORPO().scores(np, np.array([0.0, -4e-12, -1.0]), np.array([2.0, 2.0, 1.0]), np.zeros(3))
    odds = [-1e-12 - np.log(1e-12), -2e-12 - np.log(2e-12), -1 - np.log(1 - np.exp(-1))]
    np.testing.assert_allclose(scores, odds, rtol=1e-12)
    np.testing.assert_allclose(slopes, [1 / 2e-12, 1 / 4e-12, 1 / (1 - np.exp(-1))], rtol=1e-11)


@pytest.mark.parametrize("how", ["dapo", "grpo", "dr_grpo"])
def test_the_divisor_counts_replies_without_a_gradient(how: str) -> None:
    """Half of the groups have equal rewards; a KL term of 1e-12 for all changes nothing of the others' gradient."""
    rewards, lengths = np.array([1.0, 0, 0, 1, 0, 0, 0, 0]), (3, 2, 4, 3, 5, 5, 6, 4)
    targets = np.where(np.arange(6) < np.array(lengths)[:, None], 1, -1)[..., None].astype(np.int32)
    nll, none = np.random.default_rng(0).uniform(0.5, 2.0, (8, 6, 1)), np.zeros((8, 0))
    slopes = []
    for beta in (0.0, 1e-12):
        rows = np.arange(8) if beta else worth_learning(rewards, 4)
        advantage = advantages(rewards[rows].reshape(-1, 4), how != "dr_grpo")
        reference = -nll[rows, :, 0] if beta else none[rows]
        batch = policy_batch(np.zeros((len(rows), 6), np.int32), targets[rows], advantage, (none[rows], reference))
        objective = GRPO(beta=beta, normalise=how, max_tokens=6)
        slopes.append(objective.weigh(nll[rows], batch, objective.count(batch), FP64)[1][:4])
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-10)
    shares = {"dapo": 1 / sum(lengths), "grpo": 1 / (8 * 3), "dr_grpo": 1 / (8 * 6)}[how]
    reply = -advantages(rewards.reshape(-1, 4), how != "dr_grpo")[0, 0] * shares  # d loss / d log p of its tokens
    np.testing.assert_allclose(slopes[0][0, :, 0], [-reply] * 3 + [0] * 3, rtol=1e-12)


EVERY_OBJECTIVE = [NextTokens((1.0, 0.5)), MaskedTokens((1.0, 0.5)), Classes((1.0, 0.5)), *PREFERENCES, *POLICIES]


def small_batch(objective: Any, rows: int, lengths: int, target: int, seed: int = 0) -> tuple[np.ndarray, Batch]:
    """nll, (rows, 3, 2), and a batch whose replies have so many targets, all of them `target`."""
    rng = np.random.default_rng(seed)
    targets = np.full((rows, 3, 2), -1, np.int32)
    targets[:, :lengths] = target
    more = (rng.normal(size=rows),) + tuple(-rng.uniform(0.5, 2, (rows, 3)) for _ in range(2))
    given = more if isinstance(objective, GRPO) else more[:1] if isinstance(objective, DPO) else ()
    nll = rng.uniform(0.5, 2, (rows, 3, 2)) * (targets >= 0)
    return nll, Batch(np.zeros((rows, 3), np.int32), targets, objective_inputs=given)


@pytest.mark.parametrize("objective", EVERY_OBJECTIVE, ids=repr)
def test_an_objective_does_not_read_which_token_a_target_is(objective: Any) -> None:
    """The first one of the vocabulary is one like any other."""
    found = []
    for target in (0, 7):
        nll, batch = small_batch(objective, 4, 2, target)
        counts = objective.count(batch)
        found.append((counts, *objective.weigh(nll, batch, counts, FP64)))
    for first, other in zip(*found, strict=True):
        assert np.array_equal(first, other)


@pytest.mark.parametrize("objective", EVERY_OBJECTIVE, ids=repr)
def test_a_step_may_be_as_small_as_one_token_or_none(objective: Any) -> None:
    """The gradient is divided by the counts also where they are 1; without targets it is 0, and no figure is NaN."""
    nll, batch = small_batch(objective, 2 if isinstance(objective, DPO) else 1, 1, 0)
    counts = objective.count(batch)
    assert counts.min() <= 1
    (sums, one), (_, half) = (objective.weigh(nll, batch, n * counts, FP64) for n in (1, 2))
    np.testing.assert_allclose(one, 2 * half, rtol=1e-12)
    assert np.any(one)
    twice = objective.figures(sums if isinstance(objective, GRPO) else 2 * sums, 2 * counts)
    for name, value in objective.figures(sums, counts).items():
        expected = twice[name] * (2 if isinstance(objective, GRPO) and name != "loss" else 1)
        assert value == pytest.approx(expected, rel=1e-12), name
    nll, batch = small_batch(objective, 2, 0, 0)
    counts = objective.count(batch)
    sums, nothing = objective.weigh(nll, batch, counts, FP64)
    assert np.isfinite(np.broadcast_to(nothing, nll.shape)).all()
    assert np.isfinite([*objective.figures(sums, counts).values()]).all()
    none = 0 * counts
    assert np.isfinite([*objective.figures(0 * sums, none).values()]).all()
    assert np.isfinite(np.asarray(objective.weigh(nll[:0], batch[:0], none, FP64)[1])).all()


@pytest.mark.parametrize("objective", POLICIES, ids=repr)
def test_the_figures_of_rewards_are_those_counted_token_by_token(objective: GRPO) -> None:
    """A token whose advantage is 0 is never clipped, wherever its ratio lies; so is none at the clip itself."""
    rng, nll = np.random.default_rng(0), np.random.default_rng(1).uniform(0.5, 2, (6, 4, 1))
    targets = np.where(np.arange(4) < np.array([4, 3, 1, 2, 4, 4])[:, None], 1, -1)[..., None].astype(np.int32)
    advantage = np.array([1.5, -0.5, 0.0, 0.0, -2.0, 0.7])
    old, reference = (-nll[..., 0] + rng.uniform(-0.8, 0.8, (6, 4)) for _ in range(2))
    batch = policy_batch(np.zeros((6, 4), np.int32), targets, advantage.reshape(2, 3), (old, reference))
    names = ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean")
    sums: dict[str, float] = dict.fromkeys(names, 0.0)
    for i, t in np.argwhere(targets[..., 0] >= 0):
        logp, a = -nll[i, t, 0], advantage[i]
        ratio, away = np.exp(logp - old[i, t]), reference[i, t] - logp
        sums["kl"] += np.exp(away) - away - 1
        sums["entropy"] += nll[i, t, 0]
        sums["clip_ratio/low_mean"] += a < 0 and ratio < 1 - objective.low
        sums["clip_ratio/high_mean"] += a > 0 and ratio > 1 + objective.high
    counts = objective.count(batch)
    found = objective.figures(objective.weigh(nll, batch, counts, FP64)[0], counts)
    assert counts.tolist() == [6, 18] and sums["clip_ratio/low_mean"] >= 1 <= sums["clip_ratio/high_mean"]
    assert {name: found[name] for name in names} == pytest.approx({name: sums[name] / 18 for name in names}, rel=1e-12)


@pytest.mark.parametrize("objective", PREFERENCES, ids=repr)
def test_the_figures_of_preferences_are_those_of_each_pair(objective: DPO) -> None:
    """Of three pairs, one of which has two equal replies: that is no win."""
    nll, batch = small_batch(objective, 6, 2, 0, seed=4)
    nll[5], batch.objective_inputs[0][5] = nll[4], batch.objective_inputs[0][4]
    counts, reference = objective.count(batch), batch.objective_inputs[0]
    found = objective.figures(objective.weigh(nll, batch, counts, FP64)[0], counts)
    logps = -nll[:, :2, 0].sum(axis=1)
    s = objective.scores(np, logps, np.full(6, 2.0), reference)[0].reshape(3, 2)
    losses = objective.loss(np, s[:, 0] - s[:, 1])[0]
    learned = -logps[::2].sum() / 6 if isinstance(objective, ORPO) else 0.0
    expected = {
        "loss": losses.mean() + learned,
        "rewards/chosen": objective.beta * s[:, 0].mean(),
        "rewards/rejected": objective.beta * s[:, 1].mean(),
        "rewards/accuracies": (s[:, 0] > s[:, 1]).mean(),
        "rewards/margins": objective.beta * (s[:, 0] - s[:, 1]).mean(),
        "logps/chosen": logps[::2].mean(),
        "logps/rejected": logps[1::2].mean(),
    }
    assert found == pytest.approx(expected, rel=1e-12) and 0 < expected["rewards/accuracies"] < 1


def test_measuring_is_the_figures_of_all_pairs_and_the_accuracy_of_each_part() -> None:
    net, objective = model(), DPO(0.7)
    parts = {"a": pairs(3, 0, model(2)), "b": pairs(4, 1, model(2))}
    parallel = DataParallel(net, FP64)
    each = {}
    for name, part in parts.items():
        batch = part.of(range(len(part.pairs)))
        sums, counts = (
            objective.weigh(net.forward(batch.ids, batch.targets), batch, objective.count(batch), FP64)[0],
            objective.count(batch),
        )
        each[name] = sums, counts, objective.figures(sums, counts)
        assert measure(parallel, objective, {name: part}, 2) == pytest.approx(each[name][2], rel=1e-12)
    found = measure(parallel, objective, parts, 2)
    together = objective.figures(each["a"][0] + each["b"][0], each["a"][1] + each["b"][1])
    accuracies = {f"rewards/accuracies_{name}": each[name][2]["rewards/accuracies"] for name in parts}
    assert found == pytest.approx(together | accuracies, rel=1e-12)


# --- faults


@dataclass(frozen=True)
class NoSmoothing(DPO):
    """A fault: the gradient knows nothing of label_smoothing."""

    def loss(self, xp: Any, difference: Any) -> tuple[Any, Any]:
        return super().loss(xp, difference)[0], DPO(self.beta).loss(xp, difference)[1]


@dataclass(frozen=True)
class NoReference(DPO):
    """A fault: the loss is taken without the reference."""

    def scores(self, xp: Any, logps: Any, lengths: Any, reference: Any) -> tuple[Any, Any]:
        return super().scores(xp, logps, lengths, 0 * reference)


@dataclass(frozen=True)
class NoLength(SimPO):
    """A fault: the mean's gradient is taken for the sum's."""

    def scores(self, xp: Any, logps: Any, lengths: Any, reference: Any) -> tuple[Any, Any]:
        return logps / lengths, xp.ones_like(logps)


@dataclass(frozen=True)
class NoOdds(ORPO):
    """A fault: the odds' denominator is taken for a constant."""

    def scores(self, xp: Any, logps: Any, lengths: Any, reference: Any) -> tuple[Any, Any]:
        return super().scores(xp, logps, lengths, reference)[0], 1 / lengths


@dataclass(frozen=True)
class NoNll(ORPO):
    """A fault: the chosen replies' nll is in the loss and not in its gradient."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Any, Any]:
        sums, _ = super().weigh(nll, batch, counts, backend)
        return sums, DPO.weigh(_WithoutNll(self.beta), nll, batch, counts, backend)[1]


@dataclass(frozen=True)
class _WithoutNll(ORPO):
    def nll_weight(self, counts: np.ndarray) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("fault", "right"),
    [
        (NoSmoothing(0.7, 0.2), DPO(0.7, 0.2)),
        (NoReference(0.7), DPO(0.7)),
        (NoLength(), SimPO()),
        (NoOdds(0.4), ORPO(0.4)),
        (NoNll(0.4), ORPO(0.4)),
    ],
    ids=repr,
)
def test_a_wrong_gradient_of_preferences_is_found(fault: DPO, right: DPO) -> None:
    assert worst_error(fault, pair_batches(fault), right) > 1e-4


@dataclass(frozen=True)
class NeverClipped(GRPO):
    """A fault: clipped tokens keep their gradient."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Any, Any]:
        return super().weigh(nll, batch, counts, backend)[0], replace(
            GRPO(self.beta, normalise=self.normalise, max_tokens=self.max_tokens), low=0.999999, high=1e9
        ).weigh(nll, batch, counts, backend)[1]


@dataclass(frozen=True)
class OtherKl(GRPO):
    """A fault: the gradient is that of the estimate log p - log p_ref, k1."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Any, Any]:
        sums, dnll = super().weigh(nll, batch, counts, backend)
        distance = batch.objective_inputs[REFERENCE] + nll[..., 0]
        dnll[..., 0] -= self.beta * np.exp(distance) * self._shares(batch.targets[..., 0] >= 0, counts)
        return sums, dnll


@dataclass(frozen=True)
class OwnCounts(GRPO):
    """A fault: each micro-batch is divided by its own tokens."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Backend) -> tuple[Any, Any]:
        return super().weigh(nll, batch, self.count(batch), backend)


@pytest.mark.parametrize("fault", [NeverClipped, OtherKl, OwnCounts])
def test_a_wrong_gradient_of_rewards_is_found(fault: type[GRPO]) -> None:
    assert worst_error(fault(0.2), REPLIES, GRPO(0.2)) > 1e-4


# --- values


def test_dpo_by_hand() -> None:
    """At the reference itself the loss is ln 2, and the implicit rewards are 0."""
    net = model()
    batch = pairs(4, 0, net).of(range(4))
    counts = DPO().count(batch)
    sums, _ = DPO().weigh(net.forward(batch.ids, batch.targets), batch, counts, FP64)
    found = DPO().figures(sums, counts)
    assert found["loss"] == pytest.approx(np.log(2), rel=1e-12)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"):
        assert found[name] == pytest.approx(0, abs=1e-12)
    logps = -DataParallel(net, FP64).token_nll(batch).sum(axis=1)
    assert found["logps/chosen"] == pytest.approx(logps[::2].mean()) != found["logps/rejected"]
    assert found["logps/rejected"] == pytest.approx(logps[1::2].mean())


def test_advantages() -> None:
    found = advantages(np.array([[1.0, 0, 0, 1], [1, 1, 1, 1]]))
    deviation = np.std([1, 0, 0, 1], ddof=1)
    np.testing.assert_allclose(found[0], np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-4))
    assert not found[1].any()
    np.testing.assert_allclose(advantages(np.array([[1.0, 0, 0, 1]]), scale=False), [[0.5, -0.5, -0.5, 0.5]])
    close = np.array([[1.0, -1.0]]) * 0.5 / (0.5**0.5 + 1e-4)
    np.testing.assert_allclose(advantages(np.array([[1.0, 0.0]])), close)
    assert advantages(np.array([[1.0], [0.0]])).tolist() == [[0.0], [0.0]]  # one reply has nothing to be compared with


def test_what_a_rollout_earned() -> None:
    rewards = np.array([[1.1, 1, 1], [0.2, 0, 1], [1.1, 1, 1], [1.1, 1, 1], [1.1, 1, 1], [1.1, 1, 1]])
    found = reward_figures(rewards, ("correct", "format"), np.array([3, 5, 4, 4, 4, 4]), 2)
    assert found == pytest.approx(
        {
            "reward": 5.7 / 6,
            "reward_std": np.std([1.1, 0.2], ddof=1) / 3,
            "frac_reward_zero_std": 2 / 3,
            "rewards/correct": 5 / 6,
            "rewards/format": 1.0,
            "completions/mean_length": 4.0,
        }
    )


def test_equal_rewards_have_no_gradient() -> None:
    batch = replies(1, 4, 0)
    _, dnll = GRPO().weigh(model().forward(batch.ids, batch.targets), batch, GRPO().count(batch), FP64)
    assert not dnll.any()


def test_own_log_probabilities_need_not_be_given() -> None:
    net, batch = model(), replies(2, 4, 1)
    own = -DataParallel(net, FP64).token_nll(batch)
    given = list(batch.objective_inputs)
    given[OLD] = given[REFERENCE] = own
    empty = [given[0], own[:, :0], own[:, :0]]
    found = [
        GRPO(0.1).weigh(
            net.forward(batch.ids, batch.targets),
            replace(batch, objective_inputs=tuple(g)),
            GRPO(0.1).count(batch),
            FP64,
        )
        for g in (given, empty)
    ]
    for first, second in zip(*found, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "objective, kind",
    [
        (NextTokens(CONFIG.head_weights), "plain"),
        (NextTokens(CONFIG.head_weights), "weighed"),
        (DPO(0.7), "pairs"),
        (ORPO(0.4), "pairs"),
        (GRPO(0.1), "replies"),
    ],
)
def test_ranks_do_not_change_the_gradient(objective: Any, kind: str, workers: int) -> None:
    """Pairs and groups stay whole, also where there are fewer of them than ranks; of one row, most ranks have none."""
    rng = np.random.default_rng(0)
    rows = [Batch(rng.integers(0, 11, (n, 7)), rng.integers(-1, 11, (n, 7, 2), np.int32)) for n in (5, 1)]
    weighed = [replace(b, weights=rng.normal(size=b.targets.shape)) for b in rows]
    batches = {"plain": rows, "weighed": weighed, "pairs": pair_batches(DPO()), "replies": REPLIES}[kind]
    found = []
    for count in (1, workers):
        net = model()
        totals = DataParallel(net, get_backend("numpy", "fp64", count), objective).gradients(batches)
        found.append((totals.sums.copy(), net.buffer.grads.copy()))
    for alone, shared in zip(*found, strict=True):
        np.testing.assert_allclose(shared, alone, rtol=1e-10, atol=1e-14)


def test_every_pair_comes_once_an_epoch() -> None:
    made: list[Encoded] = [([1, 2, n], [1, 2, 10], 2) for n in range(6)]
    data = Pairs(made, 1, 0, np.arange(12.0).reshape(6, 2))
    batches = [data.batch(i, 2) for i in range(3)]
    chosen = [int(b.targets[row, -1, 0]) for b in batches for row in (0, 2)]
    assert sorted(chosen) == list(range(6))
    for b in batches:
        assert [b.objective_inputs[0][row] for row in (0, 2)] == [2.0 * b.targets[row, -1, 0] for row in (0, 2)]
        assert b.targets[1::2, -1, 0].tolist() == [10, 10] and b.group_size == 2
    again = Pairs(made, 1, 0).batch(1, 2)
    assert np.array_equal(again.ids, batches[1].ids)


def log_odds(logp: float) -> float:
    return logp - math.log(1 - math.exp(logp))


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


ODDS = log_odds(-0.5) - log_odds(-0.75)


@pytest.mark.parametrize(
    ("objective", "difference", "expected"),
    [
        (DPO(0.7, 0.2), 1.5, -0.8 * log_sigmoid(0.7 * 1.5) - 0.2 * log_sigmoid(-0.7 * 1.5)),
        (IPO(0.3), 0.5, (0.5 - 1 / 0.6) ** 2),
        (SimPO(1.5, 0.1, 0.6), 0.25, -0.9 * log_sigmoid(1.5 * 0.25 - 0.6) - 0.1 * log_sigmoid(0.6 - 1.5 * 0.25)),
        (ORPO(0.4, 0.1), ODDS, -0.4 * (0.9 * log_sigmoid(ODDS) + 0.1 * log_sigmoid(-ODDS))),
    ],
    ids=repr,
)
def test_the_losses_are_the_papers(objective: Any, difference: float, expected: float) -> None:
    """Replies of 2 and 4 tokens, of log-probabilities -1 and -3; the reference's are -1.5 and -2."""
    logps, lengths, reference = np.array([-1.0, -3.0]), np.array([2.0, 4.0]), np.array([-1.5, -2.0])
    scores, _ = objective.scores(np, logps, lengths, reference)
    assert scores[0] - scores[1] == pytest.approx(difference)
    assert objective.loss(np, np.array([difference]))[0] == pytest.approx(expected)


def test_the_defaults_are_the_papers_and_trls() -> None:
    assert DPO() == DPO(0.1, 0.0) and IPO() == IPO(0.1, 0.0) and ORPO() == ORPO(0.1, 0.0)
    assert SimPO() == SimPO(2.0, 0.0, 0.5)
    assert GRPO() == GRPO(beta=0.0, low=0.2, high=0.2, normalise="dapo", max_tokens=1)


@pytest.mark.parametrize(
    "damaged",
    [np.zeros((3, 2)), np.zeros((2, 2), np.float32), np.full((2, 2), np.nan), np.zeros((2, 2))],
    ids=["of other pairs", "in float32", "not finite", "right"],
)
def test_kept_log_probabilities_are_read_if_they_are_whole(
    damaged: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / f"{'k' * 32}.npy", damaged)
    right = damaged.shape == (2, 2) and damaged.dtype == np.float64 and not np.isnan(damaged).any()
    for number in range(2):  # written where they were damaged
        found = cached_reference(tmp_path, "k" * 40, 2, lambda: np.ones((2, 2)))
        assert np.array_equal(found, np.zeros((2, 2)) if right else np.ones((2, 2)))
        said = capsys.readouterr().out
        assert ("are those of" if right or number else "is damaged; computing it again") in said
    assert np.array_equal(np.load(tmp_path / f"{'k' * 32}.npy"), found)


def test_log_probabilities_are_kept_in_a_new_folder_or_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "one" / "two"
    cached_reference(new, "k" * 40, 2, lambda: np.ones((2, 2)))
    assert np.array_equal(np.load(new / f"{'k' * 32}.npy"), np.ones((2, 2))) and not capsys.readouterr().err
    (tmp_path / "file").write_text("no folder")
    found = cached_reference(tmp_path / "file", "k" * 40, 2, lambda: np.ones((2, 2)))
    assert np.array_equal(found, np.ones((2, 2)))
    assert "the next run computes it again" in capsys.readouterr().err


def test_rows_of_replies() -> None:
    ids, targets = reply_rows([([5, 6, 7, 8], 2), ([9, 3], 1)], 2)
    assert ids.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert targets[..., 0].tolist() == [[-1, 7, 8], [3, -1, -1]] and (targets[..., 1] == -1).all()
    made = Pairs([([1, 2, 3], [1, 2], 1), ([4, 5], [4, 6, 7], 1)], 2, 0)
    assert DPO().count(made.of([0, 1])).tolist() == [2, 3]


def test_replies_of_one_token_have_their_whole_length() -> None:
    """The mean over one token, in SimPO and GRPO."""
    batch = Pairs([([1, 2], [1, 3], 1)], 2, 0).of([0])
    nll = np.zeros((2, 1, 2))
    nll[:, 0, 0] = 1.0, 3.0
    sums, _ = SimPO(2.0, 0.0, 0.5).weigh(nll, batch, SimPO().count(batch), FP64)
    assert sums[0] == pytest.approx(np.logaddexp(0, -(2.0 * (3 - 1) - 0.5)))
    shares = GRPO(normalise="grpo")._shares(np.array([[True, False], [True, True]]), np.array([2, 3]))
    assert shares.tolist() == [[0.5, 0.0], [0.25, 0.25]]


def test_a_ratio_at_the_clip_is_not_clipped() -> None:
    ids, targets = reply_rows([([1, 2], 1), ([1, 3], 1)], 2)
    batch = policy_batch(ids, targets, np.array([[1.0, -1.0]]), [np.empty((2, 0))] * 2)
    objective = GRPO(low=0.0, high=0.0)
    _, dnll = objective.weigh(np.ones((2, 1, 2)), batch, objective.count(batch), FP64)
    assert dnll[:, 0, 0].tolist() == [0.5, -0.5]
