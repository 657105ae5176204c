"""Objectives of encoders: gradients through small models, ranks; batches of labelled examples; images moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.gradcheck import TOLERANCE, directional_error
from tinyforge.models.vit import Config, ViT
from tinyforge.params import with_buffer
from tinyforge.recipes.classify import moved
from tinyforge.rng import Stream
from tinyforge.train.batches import Shuffled
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, Classes, MaskedTokens, Objective

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(image=6, patch=3, channels=1, classes=4, dim=6, heads=2, layers=1, hidden=5)


def vit(backend: Any = FP64) -> ViT:
    model = ViT(TINY, backend)
    return with_buffer(model, backend, np.random.default_rng(0), std=0.3) if backend is FP64 else model


def images(rows: int, seed: int, weights: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (rows, 1, 6, 6)).astype(np.uint8)
    targets = rng.integers(0, 4, (rows, 1, 1)).astype(np.int32)
    targets[0] = -1
    return Batch(pixels, targets, rng.uniform(0.1, 2, targets.shape) if weights else None)


def loss_of(model: Any, batches: list[Batch], objective: Objective) -> float:
    parallel = DataParallel(model, FP64, objective)
    totals = parallel.gradients(batches)
    return objective.figures(totals.sums, totals.counts)["loss"]


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("objective", [Classes(), MaskedTokens()])
def test_the_gradient_of_the_loss_through_a_small_model(objective: Objective, weights: bool) -> None:
    """Two batches of unequal counts: the mean is over all of a step's."""
    model, batches = vit(), [images(4, 1, weights), images(3, 2, weights)]
    loss_of(model, batches, objective)
    grad = model.buffer.grads.copy()
    error = directional_error(
        lambda: loss_of(model, batches, objective), model.buffer.values, grad, np.random.default_rng(5)
    )
    assert error < TOLERANCE


def test_the_loss_is_the_mean_over_what_has_a_class() -> None:
    model, batch = vit(), images(5, 1)
    nll = model.forward(*batch.inputs(FP64))
    assert loss_of(model, [batch], Classes()) == pytest.approx(nll[1:].mean(), rel=1e-12)
    figures = Classes().figures(np.array([8.0, 8.0]), np.array([4, 0]))
    assert figures["loss"] == 2.0 and figures["likelihood"] == pytest.approx(np.exp(-2))
    assert MaskedTokens().figures(np.array([8.0, 8.0]), np.array([4, 0]))["perplexity"] == pytest.approx(np.exp(2))


@pytest.mark.parametrize("workers", [2, 3])
def test_ranks_predict_what_one_does(workers: int) -> None:
    batch, found = images(5, 3), []
    for count in (1, workers):
        backend = get_backend("numpy", "fp64", count)
        model = vit(backend)
        model.initialise(0)
        found.append(DataParallel(model, backend).logits(batch))
    assert found[0].shape == (5, 4)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_every_example_once_an_epoch_in_an_order_of_its_own() -> None:
    data = Shuffled(7, 3, lambda rows, stream: Batch(rows, rows))
    epochs = [np.concatenate([data.batch(7 * e + i, 1).ids for i in range(7)]) for e in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    again = Shuffled(7, 3, lambda rows, stream: Batch(rows, rows)).batch(4, 3).ids
    assert np.array_equal(again, np.concatenate(epochs)[12:15])  # across the end of an epoch, and from nowhere


def test_images_move_by_whole_pixels_each_its_own_way() -> None:
    image = np.zeros((1, 1, 7, 7), np.uint8)
    image[0, 0, 3, 3] = 9
    found = moved(np.repeat(image, 200, axis=0), 2, Stream(0, "test"))
    places = {(int(i), int(j)) for _, _, i, j in zip(*np.nonzero(found), strict=True)}
    assert found.shape == (200, 1, 7, 7) and (found.sum(axis=(1, 2, 3)) == 9).all()
    assert places == {(3 + i, 3 + j) for i in range(-2, 3) for j in range(-2, 3)}
