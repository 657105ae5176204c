"""The training step of a model of ours, as several benchmarks time it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinyforge.backends import Backend
from tinyforge.optim import AdamWConfig
from tinyforge.rng import Stream
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import DataParallel, Totals
from tinyforge.train.objectives import NextTokens, with_terms

LR, CLIP = 1e-3, 1.0
MESSAGES = 3  # from rank 0 in a plain step: gradients, clip, update


def repeated(batches: Sequence[Any]) -> Callable[[int], Any]:
    """The batches in turn, by the step's number."""
    return lambda step: batches[step % len(batches)]


class Ours:
    """The step of `tinyforge.train.run`, without its logging. On several ranks, rank 0 leads and the others follow.

    batch: from a step's number to its batch. captured: as a CUDA graph, from the third step on. optimizer: None for
    AdamW's defaults. zero: the ZeRO stage. ranks: 1 for a model on one rank of a process group too. objective: None for
    next tokens.
    """

    def __init__(
        self,
        model: Any,
        backend: Backend,
        batch: Callable[[int], Any],
        *,
        captured: bool = False,
        optimizer: AdamWConfig | None = None,
        zero: int = 0,
        ranks: int = 1,
        seed: int = 0,
        objective: Any = None,
    ) -> None:
        self.model, self.backend, self.batch, self.noise = model, backend, batch, Stream(seed, "dropout")
        self.objective = objective or NextTokens(model.config.head_weights)
        self.parallel = DataParallel(model, backend, self.objective, batches=lambda step: [batch(step)])
        self.optimizer = self.parallel.rank.make_optimizer(optimizer, zero)
        self.reserved = self.parallel.group.reserved_sms if ranks > 1 else 0  # of the process, which contenders share
        self.captured = Captured(self.parallel, self.optimizer, CLIP) if captured else None

    def step(self, index: int, lr: float = LR) -> Loss | None:
        """One step; the loss before it, on rank 0."""
        group = self.parallel.group
        self.backend.spare(self.reserved)
        if group.rank:
            for _ in range(1 if self.captured else MESSAGES):
                work, arguments = group.send_object()
                work(self.parallel.rank, *arguments)
            return None
        batches, noise = [self.batch(index)], self.noise.fork(str(index))
        if self.captured:
            return Loss(self, self.captured.step(batches, noise, lr, index)[0])
        totals = self.parallel.gradients(batches, noise, index)
        self.parallel.clip(CLIP)
        self.parallel.update(lr)
        return Loss(self, totals)


@dataclass(frozen=True)
class Loss:
    """Of a step of ours: asking for the number waits for the device, as a run does every ten steps."""

    of: Ours
    totals: Totals

    def __float__(self) -> float:
        objective, totals = with_terms(self.of.objective, self.of.model.config), self.totals
        return objective.figures(self.of.backend.to_numpy(totals.sums), totals.counts)["loss"]
