"""The U-Net of examples/diffusion on a GPU: its loss and gradients next to NumPy's, and its step as a CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest

from examples.diffusion import benchmark
from examples.diffusion.unet import SPEC, Config, UNet
from tinyforge import Stash, get_backend
from tinyforge.backends import Backend
from tinyforge.registry import models

models().pop(SPEC.name, None)  # the import has registered it, and other tests look at all models there are

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]


def gradients(config: Config, backend: Backend, rows: int) -> list[np.ndarray]:
    """The losses, and the gradient of each parameter, of the same weights on every backend."""
    model, rng = UNet(config, backend), np.random.default_rng(0)
    for p in model.buffer.params:
        std = 0.1 if len(p.shape) == 1 else p.size**-0.5 * p.shape[0] ** 0.5
        model.buffer.set_master(p, p.fill + std * rng.normal(size=p.shape).astype(np.float32))
    model.buffer.publish()
    (batch, *_) = benchmark.batches_of(config, rows)
    model.buffer.clear_grads()
    stash = Stash()
    loss = model.forward(*batch.inputs(backend), stash=stash)
    model.backward(backend.asarray(np.full(rows, 1 / rows), backend.master_dtype), stash)
    model.buffer.settle_grads()
    assert not len(stash)
    return [backend.to_numpy(loss), *(backend.to_numpy(p.grad) for p in model.buffer.params)]


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-9), ("fp32", 1e-4), ("tf32", 3e-2), ("bf16", 8e-2)])
@pytest.mark.parametrize(
    ("config", "rows"),
    [(Config(width=64), 3), (Config(image=12, channels=3, classes=3, width=20, features=6), 5)],
    ids=["base", "odd"],
)
def test_losses_and_gradients_are_those_of_numpy(config: Config, rows: int, precision: str, tolerance: float) -> None:
    expected = gradients(config, get_backend("numpy", "fp64", workers=1), rows)
    found = gradients(config, get_backend("cupy", precision), rows)
    whole = np.sqrt(sum(float((w * w).sum()) for w in expected[1:]))
    apart = np.sqrt(sum(float(((g - w) ** 2).sum()) for g, w in zip(found[1:], expected[1:], strict=True)))
    assert np.abs(found[0] - expected[0]).max() <= tolerance * expected[0].max()
    assert apart <= tolerance * whole


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_have_the_bits_of_plain_ones(precision: str) -> None:
    losses = []
    for captured in (False, True):
        backend, config = get_backend("cupy", precision), Config(width=64)
        made = benchmark.ours(config, backend, benchmark.batches_of(config, 8), captured)
        losses.append([float(made.step(i)) for i in range(7)])  # type: ignore[arg-type]
    assert losses[0] == losses[1] and np.isfinite(losses[0]).all()
