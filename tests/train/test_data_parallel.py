"""Gradients over shards and micro-batches: the sum, whoever computed it, and the same bits each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.config import ModelConfig
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Param, Stash
from tinyforge.parallel import group
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, NextTokens

CONFIG = Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=12, vocab=13, mtp_heads=2, hidden=10, mtp_weights=(1, 0.5)
)


def batch(rows: int, seed: int = 0) -> Batch:
    """Random ids and targets; rows differ in how many targets they have."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CONFIG.vocab, (rows, 12), dtype=np.int32)
    return Batch(ids, rng.integers(-6, CONFIG.vocab, (rows, 12, 2), dtype=np.int32).clip(-1))


def gradients(batches: list[Batch], workers: int, precision: str = "fp64") -> tuple[np.ndarray, np.ndarray]:
    backend = get_backend("numpy", precision, workers)
    model = NanoEuler(CONFIG, backend)
    model.initialise(seed=4)
    model.buffer.grads[...] = 7  # what an earlier step left there must not count
    totals = DataParallel(model, backend, NextTokens(CONFIG.mtp_weights)).gradients(batches)
    return totals.sums, model.buffer.grads.copy()


@pytest.mark.parametrize("rows", [1, 5, 6])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_not_change_the_gradient(rows: int, workers: int) -> None:
    """One row on three workers leaves two with nothing to do; five rows do not divide evenly."""
    nll, grads = gradients([batch(rows)], workers=1)
    sharded_nll, sharded_grads = gradients([batch(rows)], workers)
    np.testing.assert_allclose(sharded_nll, nll, rtol=1e-12)
    assert np.abs(sharded_grads - grads).max() <= 1e-12 * np.abs(grads).max()


@pytest.mark.parametrize("workers", [1, 2])
def test_micro_batches_make_one_large_batch(workers: int) -> None:
    parts = [batch(4, seed) for seed in range(3)]
    whole = Batch(np.concatenate([p.ids for p in parts]), np.concatenate([p.targets for p in parts]))
    nll, grads = gradients([whole], workers=1)
    accumulated_nll, accumulated = gradients(parts, workers)
    np.testing.assert_allclose(accumulated_nll, nll, rtol=1e-12)
    assert np.abs(accumulated - grads).max() <= 1e-12 * np.abs(grads).max()


@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_seed_gives_the_same_bits(workers: int) -> None:
    runs = [gradients([batch(6), batch(5, 1)], workers, "fp32") for _ in range(5)]
    assert len({nll.tobytes() for nll, _ in runs}) == 1
    assert len({grads.tobytes() for _, grads in runs}) == 1


def test_threads_give_the_bits_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process cannot be forked."""
    processes = gradients([batch(6), batch(5, 1)], 3, "fp32")
    monkeypatch.setattr(group, "CAN_FORK", False)
    threads = gradients([batch(6), batch(5, 1)], 3, "fp32")
    assert [a.tobytes() for a in processes] == [a.tobytes() for a in threads]


def test_evaluation_sums_what_training_sums() -> None:
    backend = get_backend("numpy", "fp64", 3)
    model = NanoEuler(CONFIG, backend)
    model.initialise(seed=4)
    for rows in (2, 5):
        nll, _ = gradients([batch(rows)], workers=1)
        np.testing.assert_allclose(DataParallel(model, backend).nll(batch(rows)), nll[:2], rtol=1e-12)


class Noisy:
    """A model whose nll is what it draws: the sums tell which stream each rank and micro-batch had."""

    config = ModelConfig()

    def __init__(self, backend: Any) -> None:
        self.buffer = ParamBuffer([Param("w", (1,))], backend)

    def replica(self) -> Noisy:
        return self

    def forward(self, ids: np.ndarray, targets: np.ndarray, stash: Stash) -> np.ndarray:
        assert stash.noise is not None
        return np.full(targets.shape, stash.noise.uniform())

    def backward(self, dnll: np.ndarray, stash: Stash) -> None:
        pass


@pytest.mark.parametrize("workers", [1, 2])
def test_each_step_micro_batch_and_rank_draws_from_a_stream_of_its_own(workers: int) -> None:
    backend = get_backend("numpy", "fp64", workers)
    parallel = DataParallel(Noisy(backend), backend, NextTokens((1.0, 1.0)))  # type: ignore[arg-type]
    one = Batch(np.zeros((workers, 1), np.int32), np.zeros((workers, 1, 2), np.int32))  # a row for each rank
    for step in (0, 1):
        noise = Stream(3, f"dropout/{step}")
        drawn = [Stream(3, f"dropout/{step}/{micro}/{rank}").uniform() for micro in (0, 1) for rank in range(workers)]
        assert len({float(u) for u in drawn}) == 2 * workers
        for _ in range(2):  # a resumed run draws the same
            assert parallel.gradients([one, one], noise).sums[0] == pytest.approx(sum(drawn), rel=1e-15)
