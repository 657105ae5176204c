"""Data-parallel gradients: one shard of the batch per worker, gradients added in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.workers import Worker
from tinyforge.kernel import Array
from tinyforge.op import Op, Stash
from tinyforge.ops.cross_entropy import sum_tokens
from tinyforge.params import ParamBuffer


@dataclass(frozen=True)
class Batch:
    """ids: (B, T) int32, in range; targets: (B, T, K) int32, -1 for none."""

    ids: np.ndarray
    targets: np.ndarray


class Model(Protocol):
    """What training asks of a model: an Op from (ids, targets) to nll (B, T, K), its buffer, and copies that share it.
    """

    buffer: ParamBuffer

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array: ...
    def backward(self, dy: Array, stash: Stash) -> Any: ...
    def replica(self) -> Any: ...
    def ops(self) -> list[Op]: ...


class Sharded:
    """A model and its replicas, one per worker. Replicas read the model's weights and own their gradients.

    The caller takes the first shard of every batch itself and the workers the others at the same time, each in a
    process of its own (`backends/workers.py`): weights and gradients lie in memory that all of them share.
    """

    def __init__(self, model: Model, backend: Backend) -> None:
        self.backend = backend
        self.replicas = [model] + [model.replica() for _ in range(backend.workers - 1)]
        self.workers = [Worker(partial(_shard_sum, r, backend)) for r in self.replicas[1:]]

    def gradients(self, batches: Sequence[Batch], scale: np.ndarray) -> Array:
        """Set the model's gradients to those of sum_k scale[k] nll[k] over all `batches`; returns nll: (K,) float64.

        `scale` is the loss's weight for each head over the whole step, see `ops.cross_entropy.head_scale`. On a GPU
        nll stays there: this returns before it is computed, and `backend.to_numpy` waits for it.
        """
        nll = self._sum(batches, scale)
        grads = self.replicas[0].buffer.grads
        for replica in self.replicas[1:]:
            grads += replica.buffer.grads
        return nll

    def nll(self, batch: Batch) -> np.ndarray:
        """Summed negative log-likelihood per head, (K,) float64; nothing is saved."""
        return self.backend.to_numpy(self._sum([batch], None))

    def _sum(self, batches: Sequence[Batch], scale: np.ndarray | None) -> Array:
        for i, worker in enumerate(self.workers, start=1):
            worker.send(([self._shard(b, i) for b in batches], scale))
        first = _shard_sum(self.replicas[0], self.backend, ([self._shard(b, 0) for b in batches], scale))
        return sum((worker.receive() for worker in self.workers), first)

    def _shard(self, batch: Batch, index: int) -> Batch:
        workers, rows = len(self.replicas), len(batch.ids)
        part = slice(rows * index // workers, rows * (index + 1) // workers)
        return Batch(batch.ids[part], batch.targets[part])


def _shard_sum(model: Model, backend: Backend, request: tuple[Sequence[Batch], np.ndarray | None]) -> Array:
    """The nll of one worker's part of all batches; with a scale, its model's gradients are set too."""
    batches, scale = request
    nll = backend.zeros((batches[0].targets.shape[-1],), np.dtype(np.float64))
    summed = sum_tokens.bind(backend)
    if scale is not None:
        model.buffer.grads.fill(0)
    # A number that is not finite stops the run by name (train/loop.py); NumPy's own warnings would only precede that.
    with np.errstate(all="ignore"):
        for batch in batches:
            if len(batch.ids):
                stash = Stash() if scale is not None else None
                ids, targets = backend.asarray(batch.ids), backend.asarray(batch.targets)
                nll += summed(model.forward(ids, targets, stash))
                if stash is not None:
                    model.backward(backend.asarray(scale, backend.master_dtype), stash)
    return nll
