"""Data-parallel gradients: one part of the batch per rank, gradients added in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.kernel import Array
from tinyforge.op import Op, Stash
from tinyforge.ops.cross_entropy import sum_tokens
from tinyforge.parallel import Group, part_of, send_object, start_group
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream
from tinyforge.train.objectives import LN2, Batch, Objective, likelihoods, with_terms


class Model(Protocol):
    """What training asks of a model: nll, (B, T, K), or (nll, terms) where its config has `term_weights`; its gradient,
    of the same form; and copies that share its weights.

    documents: asked only of models that are registered with them.
    """

    config: ModelConfig
    buffer: ParamBuffer

    forward: Callable[..., Any]  # (ids, targets, whatever `Batch.more` has, stash=None, and `documents` or `state`)

    def backward(self, dnll: Any, stash: Stash) -> Any: ...
    def replica(self) -> Any: ...
    def ops(self) -> list[Op]: ...
    def flop_per_token(self, seq_len: int) -> float: ...


@dataclass(frozen=True)
class Totals:
    """Of all batches of a step: what the objective has summed and counted. The sums may still be under way on a
    device."""

    sums: Array
    counts: np.ndarray


class Sharded:
    """A model and its replicas, one per rank of a group. Replicas read the model's weights and own their gradients.

    This process is rank 0, takes the first part of every batch itself, and tells the others what to do; they take
    theirs at the same time. `backend.workers` says how many there are.
    """

    def __init__(
        self, model: Model, backend: Backend, objective: Objective | None = None, carried: int = 0
    ) -> None:
        """objective: for `gradients`, to which the model's own terms are added; `nll` needs none. carried: rows whose
        state a recurrent model carries from batch to batch, `state`: (layers, 2, rows, C), in memory that all ranks
        share; each writes its own rows."""
        self.model, self.backend = model, backend
        self.objective = with_terms(objective, model.config) if objective else None
        self.state = backend.shared_zeros(model.state_shape(carried)) if carried else None  # type: ignore[attr-defined]
        self.group = start_group(backend.workers, partial(_follow, model, backend, self.objective, self.state))

    def gradients(self, batches: Sequence[Batch], noise: Stream | None = None) -> Totals:
        """Set the model's gradients to those of the objective over all `batches`.

        noise: what is random in this step's passes; each batch and rank draws from a stream of its own below it. On a
        GPU the sums stay there: this returns before they are computed, and `backend.to_numpy` waits for them.
        """
        assert self.objective is not None, "Sharded was made without an objective"
        counts = sum((self.objective.count(batch) for batch in batches[1:]), self.objective.count(batches[0]))
        return Totals(self._on_all_ranks(_gradients, tuple(batches), counts, noise), counts)

    def nll(self, batch: Batch) -> np.ndarray:
        """Summed negative log-likelihood per head, (K,) float64; nothing is saved."""
        return self.backend.to_numpy(self._on_all_ranks(_nll, batch))

    def logits(self, batch: Batch) -> np.ndarray:
        """The logits of a classifier, (B, classes); nothing is saved."""
        return self.backend.to_numpy(self._on_all_ranks(_logits, batch))

    def _on_all_ranks(self, work: Callable[..., Array], *arguments: Any) -> Array:
        send_object(self.group, (work, arguments))
        return work(self.group, self.model, self.backend, self.objective, self.state, *arguments)


def _follow(model: Model, backend: Backend, objective: Objective | None, state: Array | None, group: Group) -> None:
    """A rank above 0: do what rank 0 does, with a replica."""
    replica = model.replica()
    while True:
        work, arguments = send_object(group)
        work(group, replica, backend, objective, state, *arguments)


def _gradients(
    group: Group, model: Model, backend: Backend, objective: Objective, state: Array | None, batches: Sequence[Batch],
    counts: np.ndarray, noise: Stream | None,
) -> Array:  # fmt: skip
    """Leave the sum of all ranks' gradients in the model's; returns the sums."""
    grads = model.buffer.grads
    grads.fill(0)
    total: Array = 0.0
    # A number that is not finite stops the run by name (train/run.py); NumPy's own warnings would only precede that.
    with np.errstate(all="ignore"):
        for number, whole in enumerate(batches):
            batch = _part(group, whole)
            stash = Stash(noise=noise and noise.fork(f"{number}/{group.rank}"))
            nll = forward(model, backend, batch, stash, state)
            sums, dnll = objective.weigh(nll, batch, counts, backend)
            if len(batch.ids):
                model.backward(dnll, stash)
            total = total + sums
    group.all_reduce_(grads)
    group.all_reduce_(total)
    return total


def _nll(group: Group, model: Model, backend: Backend, _: Objective | None, __: Array | None, whole: Batch) -> Array:
    with np.errstate(all="ignore"):
        nll = likelihoods(forward(model, backend, _part(group, whole), None))
        total = sum_tokens.bind(backend)(nll)
    group.all_reduce_(total)
    return total


def _logits(group: Group, model: Any, backend: Backend, _: Objective | None, __: Array | None, whole: Batch) -> Array:
    found = backend.zeros((len(whole.ids), model.config.classes), backend.master_dtype)
    part = part_of(group.rank, group.size, len(whole.ids))
    batch = whole[part]
    if len(batch.ids):
        ids, _targets, *more = batch.inputs(backend)
        found[part] = model.classify(ids, *more)[:, 0]
    group.all_reduce_(found)
    return found


def _part(group: Group, batch: Batch) -> Batch:
    return batch[part_of(group.rank, group.size, len(batch.ids))]


def forward(
    model: Model, backend: Backend, batch: Batch, stash: Stash | None, state: Array | None = None
) -> Any:
    """What the model gives for a batch, which has no row where there are fewer rows than ranks. state: what is carried,
    of all rows."""
    if not len(batch.ids):
        nll, terms = backend.zeros(batch.targets.shape, backend.master_dtype), len(model.config.term_weights)
        return (nll, backend.zeros((terms,), backend.master_dtype)) if terms else nll
    options: dict[str, Any] = {}
    if batch.documents is not None:
        options["documents"] = batch.documents.on(backend)
    if state is not None and batch.stream is not None:
        options["state"] = state[:, :, batch.stream : batch.stream + len(batch.ids)]
        if batch.anew:
            options["state"].fill(0)
    return model.forward(*batch.inputs(backend), stash=stash, **options)


def evaluate_heads(sharded: Sharded, batches: Iterable[Batch], byte_lengths: np.ndarray) -> np.ndarray:
    """Bits per byte of every head over all `batches`, (K,): its nll over the bytes of its own targets."""
    nll: Any = 0.0
    size: Any = 0.0
    for batch in batches:
        nll += sharded.nll(batch)
        size += np.where(batch.targets >= 0, byte_lengths[batch.targets], 0).sum(axis=(0, 1))
    return nll / LN2 / np.maximum(1.0, size)


def evaluate_nll(sharded: Sharded, batches: Iterable[Batch], byte_lengths: np.ndarray) -> float:
    """Head 0's bits per byte over all `batches`."""
    return float(evaluate_heads(sharded, batches, byte_lengths)[0])
