"""Data-parallel gradients: one part of the batch per rank, gradients added in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.kernel import Array
from tinyforge.op import Op, Stash
from tinyforge.ops.cross_entropy import sum_tokens
from tinyforge.optim import AdamW, AdamWConfig, Muon, MuonConfig
from tinyforge.parallel import Group, part_of, start_group
from tinyforge.parallel.buckets import UNIT, Buckets, Watched
from tinyforge.parallel.nccl import spared
from tinyforge.parallel.sums import add_
from tinyforge.parallel.zero import ShardedAdamW, pieces_of, stage_of
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


@dataclass
class Rank:
    """What one rank works with.

    state: of a recurrent model, what is carried. shards: of `--shards-per-step`; 0 for a part of the batch a rank.
    batches: the micro-batches of a step, by its number; for ranks that share no memory. optimizer: theirs too.
    """

    group: Group
    model: Any
    backend: Backend
    objective: Objective | None
    state: Array | None
    shards: int = 0
    batches: Callable[[int], Sequence[Batch]] | None = None
    optimizer: AdamW | None = None
    buckets: Buckets | None = None
    captured: Any = None

    def __post_init__(self) -> None:
        count, ranks = self.shards or self.group.size, self.group.size
        # The parts of a batch that this rank computes, each with its number among all.
        self.parts = range(count * self.group.rank // ranks, count * (self.group.rank + 1) // ranks)
        self.count = count
        levels = (len(self.parts) - 1).bit_length() if self.objective else 0
        size = self.model.buffer.size
        self.scratch = [self.backend.zeros((size,), self.backend.master_dtype) for _ in range(levels)]

    def batches_of(self, told: Sequence[Batch] | int) -> Sequence[Batch]:
        """Those of a step, see `Sharded.told`."""
        if not isinstance(told, int):
            return told
        assert self.batches is not None
        return self.batches(told)

    def part(self, batch: Batch, number: int) -> Batch:
        return batch[self.rows(batch, number)]

    def rows(self, batch: Batch, number: int) -> slice:
        """The rows of a part: those that belong together stay together."""
        part = part_of(number, self.count, len(batch.ids) // batch.together)
        return slice(part.start * batch.together, part.stop * batch.together)

    def make_optimizer(self, config: AdamWConfig | None, zero: int = 0, micro_batches: int = 1) -> AdamW:
        """AdamW, or Muon with its config, over the model's weights as they are now. The bits are those of `zero` 0, see
        `stage_of`; Muon knows no other."""
        buffer, ranks = self.model.buffer, self.group.size
        buckets = self.buckets or Buckets(buffer, self.model.ops())
        stage = 0 if self.group.shares else stage_of(zero, ranks, self.shards, micro_batches)
        parts = self.shards or (ranks if self.buckets else 0)
        pieces = pieces_of(buckets, parts) if parts else None
        if isinstance(config, MuonConfig):
            self.optimizer = Muon(buffer, self.backend, config, pieces)
        elif stage:
            self.optimizer = ShardedAdamW(buffer, self.backend, config, self.group, buckets, self.shards, stage)
        else:
            self.optimizer = AdamW(buffer, self.backend, config, pieces)
        if self.buckets:
            self._move(stage)
        return self.optimizer

    def _move(self, stage: int) -> None:
        """Move what the ranks send each other to where it travels best."""
        assert self.buckets
        buffer, group = self.model.buffer, self.group
        if stage < 2 and (grads := group.reachable(buffer.size, self.backend.master_dtype)) is not None:
            buffer.place_grads(grads)
        if stage and (values := group.reachable(buffer.size, self.backend.dtype)) is not None:
            buffer.place_values(values)

    @property
    def sharded(self) -> ShardedAdamW | None:
        """The optimizer, where the ranks share out its state."""
        return self.optimizer if isinstance(self.optimizer, ShardedAdamW) else None


class Sharded:
    """A model on all ranks of a group. This process tells the others what to do, and takes its part of every batch.

    Forked workers have replicas, which read the model's weights and own their gradients; `backend.workers` says how
    many there are. Where the backend has a group, each of its ranks has made the same model and a `Sharded` of its own:
    rank 0 goes on with the run, the others `follow`.
    """

    def __init__(
        self, model: Model, backend: Backend, objective: Objective | None = None, carried: int = 0, *, shards: int = 0,
        batches: Callable[[int], Sequence[Batch]] | None = None,
    ) -> None:  # fmt: skip
        """objective: for `gradients`, to which the model's own terms are added; `nll` needs none. carried: rows whose
        state a recurrent model carries from batch to batch, `state`: (layers, 2, rows, C); each rank writes its own
        rows, forked workers into memory that all of them share. shards, batches: see `Rank`."""
        self.model, self.backend = model, backend
        self.objective = with_terms(objective, model.config) if objective else None
        self.state = backend.shared_zeros(model.state_shape(carried)) if carried else None  # type: ignore[attr-defined]
        of_rank = (backend, self.objective, self.state, shards)
        self.group: Group = backend.group or start_group(backend.workers, partial(_fork_follows, model, *of_rank))
        self.rank = Rank(self.group, model, *of_rank, batches)
        if backend.group and self.objective:
            self.rank.buckets = Buckets(model.buffer, model.ops())
        # Where the bits of one GPU are to be those of several, it works as if there were others.
        backend.spare(self.group.spares if backend.group else spared() if shards else 0)

    @property
    def alone(self) -> bool:
        """Whether the weights exist once: one process, or workers that share them."""
        return self.backend.group is None

    def gradients(self, batches: Sequence[Batch], noise: Stream | None = None, number: int | None = None) -> Totals:
        """Set the model's gradients to those of the objective over all `batches`.

        noise: what is random in this step's passes; each batch and rank draws from a stream of its own below it.
        number: of the step; ranks with memory of their own make its batches themselves. On a GPU the sums stay there:
        this returns before they are computed, and `backend.to_numpy` waits for them.
        """
        assert self.objective is not None, "Sharded was made without an objective"
        counts = sum((self.objective.count(batch) for batch in batches[1:]), self.objective.count(batches[0]))
        self.group.send_object((gradients_of, (self.told(batches, number), counts, noise)))
        return Totals(gradients_of(self.rank, tuple(batches), counts, noise), counts)

    def told(self, batches: Sequence[Batch], number: int | None) -> Sequence[Batch] | int:
        """What the other ranks are told of a step's batches: its number, where they make them themselves."""
        return tuple(batches) if self.alone or self.rank.batches is None or number is None else number

    def clip(self, limit: float) -> tuple[Any, Any]:
        """`AdamW.clip` of the gradients that `gradients` has left."""
        return clip(self.rank, limit) if self.alone else self.on_all_ranks(clip, limit)

    def update(self, lr: float) -> None:
        """`AdamW.step` with the factor that `clip` has found."""
        update(self.rank, lr) if self.alone else self.on_all_ranks(update, lr)

    def carried(self) -> Array:
        """The state of all rows."""
        return self.state if self.alone else self.on_all_ranks(carried)

    def be_patient(self, seconds: float) -> None:
        """From now on a rank may keep the others waiting for so long."""
        self.on_all_ranks(be_patient, seconds)

    def nll(self, batch: Batch) -> np.ndarray:
        """Summed negative log-likelihood per head, (K,) float64; nothing is saved."""
        return self.backend.to_numpy(self.on_all_ranks(_nll, batch))

    def token_nll(self, batch: Batch) -> np.ndarray:
        """Head 0's negative log-likelihood of every target, (B, T), 0 where there is none; nothing is saved."""
        return self.backend.to_numpy(self.on_all_ranks(_token_nll, batch))

    def logits(self, batch: Batch) -> np.ndarray:
        """The logits of a classifier, (B, classes); nothing is saved."""
        return self.backend.to_numpy(self.on_all_ranks(_logits, batch))

    def on_all_ranks(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What work(rank, *arguments) returns on rank 0; all ranks run it. `work` is a function of a module, by whose
        name the others find it."""
        self.group.send_object((work, arguments))
        return work(self.rank, *arguments)

    def led(self, work: Callable[[], Any]) -> Any:
        """What work() returns on rank 0. All ranks with memory of their own call this, and get it; meanwhile they do
        what it asks of them. For what happens before `Run.train`, in which they follow."""
        if self.alone:
            return work()
        if self.group.rank == 0:
            found = work()
            self.group.send_object((None, found))
            return found
        return self._follow()

    def follow(self) -> NoReturn:
        """Of a rank above 0: do what rank 0 says, until it ends the run, which raises SystemExit."""
        while True:
            self._follow()

    def _follow(self) -> Any:
        while (asked := self.group.send_object())[0] is not None:
            work, arguments = asked
            work(self.rank, *arguments)
        return asked[1]


def _fork_follows(model: Model, backend: Backend, objective: Objective | None, state: Array | None, shards: int,
                  group: Group) -> None:  # fmt: skip
    """A forked worker: do what rank 0 does, with a replica."""
    rank = Rank(group, model.replica(), backend, objective, state, shards)
    while True:
        work, arguments = group.send_object()
        work(rank, *arguments)


def gradients_of(rank: Rank, batches: Sequence[Batch] | int, counts: np.ndarray, noise: Any) -> Array:
    """Leave the sum of all ranks' gradients in the model's, or with a sharded optimizer each rank's part of it; returns
    the sums. noise: a Stream, what stands for one, or None."""
    batches = rank.batches_of(batches)
    group, grads, tree = rank.group, rank.model.buffer.grads, rank.shards > 0
    begin, last = partial(_begin, rank), len(batches) - 1
    if rank.optimizer:
        rank.optimizer.know(range(0))
    watches = group.overlaps and rank.buckets and len(rank.parts) == 1

    def known(total: Array) -> None:
        """Before the last backward pass: sums of one part may travel first, not last."""
        if watches:
            group.all_reduce_(total, tree)

    def stash_of(index: int) -> Stash:
        """Of the backward of a micro-batch."""
        if rank.sharded and grads is None:
            return rank.sharded.windows(first=index == 0)
        return rank.buckets.watched(None, begin) if watches and rank.buckets and index == last else Stash()

    add, sums = add_.bind(rank.backend), []
    for position, part in enumerate(rank.parts):
        sums.append(_gradients_of_part(rank, batches, part, counts, noise, stash_of, known))
        # A binary counter: what has the place of a 1 is added, from the lowest on, to what comes.
        level = 0
        while position >> level & 1:
            add(grads, rank.scratch[level])
            sums[-2:] = [sums[-2] + sums[-1]]
            level += 1
        if part != rank.parts[-1]:
            rank.scratch[level][...] = grads
    total = sums[0]
    if not rank.buckets:
        group.all_reduce_(grads, tree)
    elif grads is not None and not watches:
        for number in reversed(range(len(rank.buckets.slices))):
            begin(number)
    if not watches:
        group.all_reduce_(total, tree)
    group.join()
    return total


def _begin(rank: Rank, number: int) -> None:
    """Start to sum a bucket of the gradients over the ranks."""
    assert rank.buckets
    for p in rank.buckets.params[number]:
        p.settle()
    grads, tree = rank.model.buffer.grads[rank.buckets.slices[number]], rank.shards > 0
    if rank.sharded:
        rank.group.reduce_scatter_(grads, tree, UNIT)
    else:
        rank.group.all_reduce_(grads, tree)


def _gradients_of_part(
    rank: Rank, batches: Sequence[Batch], number: int, counts: np.ndarray, noise: Any,
    stash_of: Callable[[int], Stash], known: Callable[[Array], None],
) -> Array:  # fmt: skip
    """The model's gradients become those of one part of every batch, each with a stash of its own; known: is told the
    sums of all before the last backward pass."""
    model, backend, objective = rank.model, rank.backend, rank.objective
    assert objective is not None
    if model.buffer.grads is not None:
        model.buffer.clear_grads()
    total: Array = 0.0
    # A number that is not finite stops the run by name (train/run.py); NumPy's own warnings would only precede that.
    with np.errstate(all="ignore"):
        for index, whole in enumerate(batches):
            batch, stash = rank.part(whole, number), stash_of(index)
            stash.noise = noise and noise.fork(f"{index}/{number}")
            nll = forward(model, backend, batch, stash, rank.state)
            sums, dnll = objective.weigh(nll, batch, counts, backend)
            total = total + sums
            if index == len(batches) - 1:
                known(total)
            if len(batch.ids):
                model.backward(dnll, stash)
            if isinstance(stash, Watched):
                _finish(rank, stash, index == len(batches) - 1)
    model.buffer.settle_grads()
    return total


def _finish(rank: Rank, stash: Watched, last: bool) -> None:
    """A backward pass is over: begin the sums that are left, and under those of the last one the norm of the others."""
    mark, begun = rank.group.mark(), sorted(stash.begun)
    stash.finish()
    if last and rank.optimizer and begun and begun == list(range(begun[0], begun[-1] + 1)):
        rank.group.join(mark)
        pieces = rank.shards or rank.group.size  # of a bucket
        rank.optimizer.know(range(pieces * begun[0], pieces * (begun[-1] + 1)))


def _nll(rank: Rank, whole: Batch) -> Array:
    totals = []
    with np.errstate(all="ignore"):
        for number in rank.parts:
            nll = likelihoods(forward(rank.model, rank.backend, rank.part(whole, number), None))
            totals.append(sum_tokens.bind(rank.backend)(nll))
    while len(totals) > 1:
        totals = [a + b for a, b in zip(totals[::2], totals[1::2], strict=True)]
    rank.group.all_reduce_(totals[0], rank.shards > 0)
    rank.group.join()
    return totals[0]


def _token_nll(rank: Rank, whole: Batch) -> Array:
    found = rank.backend.zeros(whole.targets.shape[:2], rank.backend.master_dtype)
    for number in rank.parts:
        part = rank.rows(whole, number)
        if len((batch := whole[part]).ids):
            found[part] = likelihoods(forward(rank.model, rank.backend, batch, None))[..., 0]
    rank.group.all_reduce_(found)
    rank.group.join()
    return found


def _logits(rank: Rank, whole: Batch) -> Array:
    found = rank.backend.zeros((len(whole.ids), rank.model.config.classes), rank.backend.master_dtype)
    for number in rank.parts:
        part = rank.rows(whole, number)
        if len((batch := whole[part]).ids):
            ids, _targets, *more = batch.inputs(rank.backend)
            found[part] = rank.model.classify(ids, *more)[:, 0]
    rank.group.all_reduce_(found)
    rank.group.join()
    return found


# --- what a run does beside gradients, on each rank that has memory of its own ----------------------------------------


def clip(rank: Rank, limit: float) -> tuple[Any, Any]:
    assert rank.optimizer is not None
    return rank.optimizer.clip(limit)


def update(rank: Rank, lr: float) -> None:
    assert rank.optimizer is not None
    rank.optimizer.step(lr, rank.optimizer.factor)


def carried(rank: Rank) -> Array:
    """The state of all rows, of which each rank has computed its own."""
    assert rank.state is not None
    found, rows = rank.backend.zeros(rank.state.shape, rank.state.dtype), rank.state.shape[2]
    for number in rank.parts:
        own = part_of(number, rank.count, rows)
        found[:, :, own] = rank.state[:, :, own]
    rank.group.all_reduce_(found)  # with zeros: to gather them
    rank.group.join()
    return found


def be_patient(rank: Rank, seconds: float) -> None:
    rank.group.be_patient(seconds)


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
