"""Data-parallel gradients: one shard of the batch per worker, gradients added in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tinyforge.backends import Backend
from tinyforge.op import Array, Op, ParamBuffer, Stash


@dataclass(frozen=True)
class Batch:
    """ids: (B, T) int32, in range; targets: (B, T, K) int32, -1 for none."""

    ids: np.ndarray
    targets: np.ndarray


class Model(Protocol):
    """What training asks of a model: an Op from (ids, targets) to nll (K,), its buffer, and copies that share it."""

    buffer: ParamBuffer

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array: ...
    def backward(self, dy: Array, stash: Stash) -> Any: ...
    def replica(self) -> Any: ...
    def ops(self) -> list[Op]: ...


class Sharded:
    """A model and its replicas, one per worker. Replicas read the model's weights and own their gradients."""

    def __init__(self, model: Model, backend: Backend) -> None:
        self.backend = backend
        self.replicas = [model] + [model.replica() for _ in range(backend.workers - 1)]

    def gradients(self, batches: Sequence[Batch], scale: np.ndarray) -> np.ndarray:
        """Set the model's gradients to those of sum_k scale[k] nll[k] over all `batches`; returns nll: (K,) float64.

        `scale` is the loss's weight for each head over the whole step, see `ops.cross_entropy.head_scale`.
        """

        def work(index: int) -> np.ndarray:
            model = self.replicas[index]
            model.buffer.grads[...] = 0
            total = np.zeros(len(scale))
            for batch in batches:
                ids, targets = self._shard(batch, index)
                if len(ids):
                    stash = Stash()
                    total += self.backend.to_numpy(model.forward(ids, targets, stash))
                    model.backward(self.backend.asarray(scale), stash)
            return total

        nll = self._run(work)
        grads = self.replicas[0].buffer.grads
        for replica in self.replicas[1:]:
            grads += replica.buffer.grads
        return nll

    def nll(self, batch: Batch) -> np.ndarray:
        """Summed negative log-likelihood per head, (K,) float64; nothing is saved."""

        def work(index: int) -> np.ndarray:
            ids, targets = self._shard(batch, index)
            if not len(ids):
                return np.zeros(batch.targets.shape[-1])
            return self.backend.to_numpy(self.replicas[index].forward(ids, targets)).astype(np.float64)

        return self._run(work)

    def _run(self, work: Any) -> np.ndarray:
        return np.asarray(sum(self.backend.map(work, list(range(len(self.replicas))))))

    def _shard(self, batch: Batch, index: int) -> tuple[Array, Array]:
        workers, rows = len(self.replicas), len(batch.ids)
        part = slice(rows * index // workers, rows * (index + 1) // workers)
        return self.backend.asarray(batch.ids[part]), self.backend.asarray(batch.targets[part])
