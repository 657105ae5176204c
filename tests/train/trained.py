"""A few steps of a model, plain or by `Captured`: what tests of captured steps compare, on the host and on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.optim import AdamWConfig, Pace
from tinyforge.rng import Stream
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, NextTokens


def pace(number: int, lr: float) -> Pace:
    """What schedules say of a step."""
    return Pace(lr)


class Trained:
    """with_graph: by `Captured`. config: of the optimizer. The model is initialised here."""

    def __init__(self, backend: Backend, model: Any, with_graph: bool, config: AdamWConfig | None = None) -> None:
        self.backend, self.model = backend, model
        model.initialise(0)
        self.parallel = DataParallel(model, backend, NextTokens(model.config.head_weights))
        self.optimizer = self.parallel.rank.make_optimizer(config)
        self.captured = Captured(self.parallel, self.optimizer, 0.5) if with_graph else None
        self.found: list[tuple[Any, Any]] = []  # the sums and the norm of each step

    def step(self, number: int, batches: Sequence[Batch]) -> None:
        noise, now = Stream(7, f"dropout/{number}"), pace(number, 1e-2 / (1 + number))
        if self.captured:
            totals, norm = self.captured.step(batches, noise, now)
        else:
            totals = self.parallel.gradients(batches, noise, head_weights=now.head_weights)
            norm, factor = self.optimizer.clip(0.5)
            self.optimizer.step(now, factor)
        self.found.append((totals.sums, norm))

    def bits(self) -> dict[str, bytes]:
        """Of all that is learned, and of the sums and norms of all steps, read at the end alone."""
        buffer, optimizer, host = self.model.buffer, self.optimizer, self.backend.to_numpy
        steps = {f"step {n}": np.append(host(sums), float(norm)) for n, (sums, norm) in enumerate(self.found)}
        arrays = {
            "masters": buffer.masters,
            "values": buffer.values,
            "grads": buffer.grads,
            "m": optimizer.m,
            "v": optimizer.v,
        }
        return {
            "step count": str(optimizer.step_count).encode(),
            **{name: a.tobytes() for name, a in steps.items()},
            **{name: host(a).tobytes() for name, a in arrays.items()},
        }


def assert_same_bits(plain: Trained, graph: Trained, steps: Sequence[Sequence[Batch]]) -> None:
    for number, batches in enumerate(steps):
        for trained in (plain, graph):
            trained.step(number, batches)
    expected, got = plain.bits(), graph.bits()
    assert [what for what in expected if expected[what] != got[what]] == []
    assert np.isfinite(graph.backend.to_numpy(graph.model.buffer.masters)).all()
