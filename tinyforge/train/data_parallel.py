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
from tinyforge.optim import AdamW, AdamWConfig, Muon, MuonConfig, Rate
from tinyforge.parallel import Group, part_of, start_group
from tinyforge.parallel.buckets import UNIT, Buckets, Watched
from tinyforge.parallel.nccl import spared
from tinyforge.parallel.sums import add_
from tinyforge.parallel.zero import ShardedAdamW, pieces_of, stage_of
from tinyforge.params import ParamBuffer
from tinyforge.rng import Stream
from tinyforge.train.batches import Where
from tinyforge.train.objectives import LN2, Arrays, Batch, Objective, counts_of, likelihoods, with_terms


class Trainable(Protocol):
    """A model in training: forward gives nll, (B, T, K), or (nll, terms) if its config has `term_weights`;
    backward takes their gradients in the same form; replica makes a copy that shares its weights."""

    config: ModelConfig
    buffer: ParamBuffer

    # (ids, targets, *Batch.extra_inputs, stash=None), and `documents` or `state` if the model supports them
    forward: Callable[..., Any]

    def backward(self, dnll: Any, stash: Stash) -> Any: ...
    def replica(self) -> Any: ...
    def ops(self) -> list[Op]: ...
    def flop_per_token(self, seq_len: int) -> float: ...


@dataclass(frozen=True)
class Totals:
    """The objective's sums and counts over all batches of a step. The sums may still be in flight on a device."""

    sums: Array
    counts: np.ndarray


@dataclass
class Worker:
    """All that one rank works with.

    state: the carried state of a recurrent model. shards: --reduction-shards; 0 for one part of the batch per rank.
    batches: for ranks that do not share memory: from a step's number, or the numbers of its micro-batches, to these.
    """

    group: Group
    model: Any
    backend: Backend
    objective: Objective | None
    state: Array | None
    shards: int = 0
    batches: Callable[[Any], Sequence[Batch]] | None = None
    optimizer: AdamW | None = None
    buckets: Buckets | None = None
    captured: Any = None

    def __post_init__(self) -> None:
        count, ranks = self.shards or self.group.size, self.group.size
        # The numbers of the parts of a batch that this rank computes.
        self.parts = range(count * self.group.rank // ranks, count * (self.group.rank + 1) // ranks)
        self.count = count
        levels = (len(self.parts) - 1).bit_length() if self.objective else 0
        size = self.model.buffer.size
        self.scratch = [self.backend.zeros((size,), self.backend.master_dtype) for _ in range(levels)]

    def batches_of(self, payload: Sequence[Batch] | Where) -> Sequence[Batch]:
        """The batches of a step, see `DataParallel.payload`."""
        if not isinstance(payload, int | range):
            return payload
        assert self.batches is not None
        return self.batches(payload)

    def part(self, batch: Batch, number: int) -> Batch:
        return batch[self.rows(batch, number)]

    def rows(self, batch: Batch, number: int) -> slice:
        """The rows of a part; `Batch.group_size` rows stay together."""
        part = part_of(number, self.count, len(batch) // batch.group_size)
        return slice(part.start * batch.group_size, part.stop * batch.group_size)

    def make_optimizer(self, config: AdamWConfig | None, zero: int = 0, micro_batches: int = 1) -> AdamW:
        """AdamW, or Muon if the config is Muon's, over the model's current weights. Where the bits are
        the same with every `zero`: docs/parallel.md. Muon needs `zero` 0."""
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
        """Move the arrays that the ranks exchange to memory that makes collectives faster."""
        assert self.buckets
        buffer, alloc_registered = self.model.buffer, partial(self.group.alloc_registered, tree=self.shards > 0)
        if stage < 2 and (grads := alloc_registered(buffer.size, self.backend.master_dtype)) is not None:
            buffer.place_grads(grads)
        if stage and (values := alloc_registered(buffer.size, self.backend.dtype)) is not None:
            buffer.place_values(values)

    @property
    def zero_optimizer(self) -> ShardedAdamW | None:
        """The optimizer, if its state is sharded over the ranks."""
        return self.optimizer if isinstance(self.optimizer, ShardedAdamW) else None


class DataParallel:
    """A model on all ranks of a group. This process tells the others what to do, and computes its part of every batch.

    `backend.workers` forked workers have replicas, which read the model's weights and own their gradients. If the
    backend has a group instead, each rank has made the same model and its own `DataParallel`: rank 0 continues the run,
    the others `follow`. rows: that `losses` takes at once; in a run those of a micro-batch, whose memory is planned.
    """

    rows = 64

    def __init__(
        self,
        model: Trainable,
        backend: Backend,
        objective: Objective | None = None,
        carried: int = 0,
        *,
        shards: int = 0,
        batches: Callable[[Any], Sequence[Batch]] | None = None,
    ) -> None:
        """objective: for `gradients`; the model's own terms are added to it. `nll` needs none. carried: rows whose
        state, (layers, 2, rows, C), a recurrent model carries from batch to batch; each rank writes its own rows,
        forked workers into shared memory. shards, batches: see `Worker`."""
        self.model, self.backend = model, backend
        self.objective = with_terms(objective, model.config) if objective else None
        self.state = backend.shared_zeros(model.state_shape(carried)) if carried else None  # type: ignore[attr-defined]
        of_rank = (backend, self.objective, self.state, shards)
        self.group: Group = backend.group or start_group(backend.workers, partial(_fork_follows, model, *of_rank))
        self.rank = Worker(self.group, model, *of_rank, batches)
        if backend.group and self.objective:
            self.rank.buckets = Buckets(model.buffer, model.ops())
        # With --reduction-shards one GPU must give the bits of several, so it reserves as many SMs as they do.
        backend.spare(self.group.reserved_sms if backend.group else spared() if shards else 0)

    @property
    def alone(self) -> bool:
        """Whether there is one copy of the weights: a single process, or workers that share them."""
        return self.backend.group is None

    def gradients(
        self,
        batches: Sequence[Batch],
        noise: Stream | None = None,
        number: Where | None = None,
        head_weights: Sequence[float] = (),
    ) -> Totals:
        """Set the model's gradients to those of the objective over all `batches`.

        noise: for dropout; each batch and part forks a stream of its own from it. number: of the step, or of its
        batches; ranks with memory of their own make its batches themselves. head_weights: of this step, if the
        objective's are not its own. On a GPU this returns before the sums are computed; `backend.to_numpy` waits for
        them.
        """
        assert self.objective is not None, "DataParallel was made without an objective"
        counts = counts_of(self.objective, batches, head_weights)
        self.group.send_object((gradients_of, (self.payload(batches, number), counts, noise)))
        return Totals(gradients_of(self.rank, tuple(batches), counts, noise), counts)

    def payload(self, batches: Sequence[Batch], number: Where | None) -> Sequence[Batch] | Where:
        """The message to the other ranks: the step's batches, or its number if they make the batches themselves."""
        return tuple(batches) if self.alone or self.rank.batches is None or number is None else number

    def clip(self, limit: float) -> tuple[Any, Any]:
        """`AdamW.clip` of the gradients that `gradients` has computed."""
        return clip(self.rank, limit) if self.alone else self.on_all_ranks(clip, limit)

    def set_window(self, window: int) -> None:
        """`Model.set_window` on all ranks."""
        self.on_all_ranks(set_window, window)

    def update(self, lr: Rate) -> None:
        """`AdamW.step` with the factor from `clip`."""
        update(self.rank, lr) if self.alone else self.on_all_ranks(update, lr)

    def carried(self) -> Array | None:
        """The state of all rows."""
        return self.state if self.alone else self.on_all_ranks(carried)

    def be_patient(self, seconds: float) -> None:
        """From now on a rank may keep the others waiting for `seconds`."""
        self.on_all_ranks(be_patient, seconds)

    def nll(self, batch: Batch) -> np.ndarray:
        """Summed negative log-likelihood per head, (K,) float64; nothing is saved."""
        return self.backend.to_numpy(self.on_all_ranks(_nll, batch))

    def token_nll(self, batch: Batch) -> np.ndarray:
        """Head 0's negative log-likelihood of every target, (B, T), 0 where there is none; nothing is saved."""
        return self.backend.to_numpy(self.on_all_ranks(_token_nll, batch))

    def losses(self, batch: Arrays) -> np.ndarray:
        """What forward returns for each row, (B,), from passes over `rows` rows; nothing is saved."""
        starts = range(0, max(1, len(batch)), self.rows)
        parts = (self.on_all_ranks(_losses, batch[start : start + self.rows]) for start in starts)
        return np.concatenate([self.backend.to_numpy(part) for part in parts])

    def logits(self, batch: Batch) -> np.ndarray:
        """The logits of a classifier, (B, classes); nothing is saved."""
        return self.backend.to_numpy(self.on_all_ranks(_logits, batch))

    def on_all_ranks(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run work(rank, *arguments) on all ranks; returns rank 0's result. `work` is a function of a module: it is
        pickled by name."""
        self.group.send_object((work, arguments))
        return work(self.rank, *arguments)

    def led(self, work: Callable[[], Any]) -> Any:
        """Run work() on rank 0, while the other ranks follow; returns its result on all ranks. All ranks with memory of
        their own call this. For work before `Run.train`, in which they follow anyway."""
        if self.alone:
            return work()
        if self.group.rank == 0:
            found = work()
            self.group.send_object((None, found))
            return found
        return self._follow()

    def follow(self) -> NoReturn:
        """On a rank above 0: do what rank 0 says until it ends the run, which raises SystemExit."""
        while True:
            self._follow()

    def _follow(self) -> Any:
        while (asked := self.group.send_object())[0] is not None:
            work, arguments = asked
            work(self.rank, *arguments)
        return asked[1]


def _fork_follows(
    model: Trainable, backend: Backend, objective: Objective | None, state: Array | None, shards: int, group: Group
) -> None:
    """A forked worker: do what rank 0 does, with a replica."""
    rank = Worker(group, model.replica(), backend, objective, state, shards)
    while True:
        work, arguments = group.send_object()
        work(rank, *arguments)


def gradients_of(rank: Worker, batches: Sequence[Batch] | Where, counts: np.ndarray, noise: Any) -> Array:
    """Set the model's gradients to the sum over all ranks, or with a sharded optimizer to each rank's part of it;
    returns the objective's sums. noise: a Stream or a stand-in for one, or None."""
    batches = rank.batches_of(batches)
    group, grads, tree = rank.group, rank.model.buffer.grads, rank.shards > 0
    begin, last = partial(_begin, rank), len(batches) - 1
    if rank.optimizer:
        rank.optimizer.know(range(0))
    watches = group.overlaps and rank.buckets and len(rank.parts) == 1

    def known(total: Array) -> None:
        """Called before the last backward pass: the sums of a single part can be reduced before the gradients."""
        if watches:
            group.all_reduce_(total, tree)

    def stash_of(index: int) -> Stash:
        """The stash for a micro-batch."""
        if rank.zero_optimizer and grads is None:
            return rank.zero_optimizer.windows(first=index == 0)
        return rank.buckets.watched(None, begin) if watches and rank.buckets and index == last else Stash()

    add, sums = add_.bind(rank.backend), []
    for position, part in enumerate(rank.parts):
        sums.append(_gradients_of_part(rank, batches, part, counts, noise, stash_of, known))
        # A binary counter over the parts: each level holds the sum of a complete subtree, and equal ones are added.
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


def _begin(rank: Worker, number: int) -> None:
    """Start summing a bucket of the gradients over the ranks."""
    assert rank.buckets
    for p in rank.buckets.params[number]:
        p.settle()
    grads, tree = rank.model.buffer.grads[rank.buckets.slices[number]], rank.shards > 0
    if rank.zero_optimizer:
        rank.group.reduce_scatter_(grads, tree, UNIT)
    else:
        rank.group.all_reduce_(grads, tree)


def _gradients_of_part(
    rank: Worker,
    batches: Sequence[Batch],
    number: int,
    counts: np.ndarray,
    noise: Any,
    stash_of: Callable[[int], Stash],
    known: Callable[[Array], None],
) -> Array:
    """Set the model's gradients to those of one part of every batch, each with a stash of its own. known: called with
    the sums over all batches before the last backward pass."""
    model, backend, objective = rank.model, rank.backend, rank.objective
    assert objective is not None
    if model.buffer.grads is not None:
        model.buffer.clear_grads()
    total: Any = 0.0
    # The run stops at a number that is not finite and names its source (train/run.py); NumPy's warnings are redundant.
    with np.errstate(all="ignore"):
        for index, whole in enumerate(batches):
            batch, stash = rank.part(whole, number), stash_of(index)
            stash.noise = noise and noise.fork(f"{index}/{number}")
            nll = forward(model, backend, batch, stash, rank.state)
            sums, dnll = objective.weigh(nll, batch, counts, backend)
            total = total + sums
            if index == len(batches) - 1:
                known(total)
            if len(batch):
                model.backward(dnll, stash)
            if isinstance(stash, Watched):
                _finish(rank, stash, index == len(batches) - 1)
    model.buffer.settle_grads()
    return total


def _finish(rank: Worker, stash: Watched, last: bool) -> None:
    """A backward pass is over: start the remaining sums; in the last pass, compute the norm of the others meanwhile."""
    mark, begun = rank.group.mark(), sorted(stash.begun)
    stash.finish()
    if last and rank.optimizer and begun and begun == list(range(begun[0], begun[-1] + 1)):
        rank.group.join(mark)
        pieces = rank.shards or rank.group.size  # of a bucket
        rank.optimizer.know(range(pieces * begun[0], pieces * (begun[-1] + 1)))


def _nll(rank: Worker, whole: Batch) -> Array:
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


def _token_nll(rank: Worker, whole: Batch) -> Array:
    def first_head(batch: Batch) -> Array:
        return likelihoods(forward(rank.model, rank.backend, batch, None))[..., 0]

    return _of_rows(rank, whole, whole.targets.shape[:2], first_head)


def _losses(rank: Worker, whole: Arrays) -> Array:
    return _of_rows(rank, whole, (len(whole),), lambda batch: forward(rank.model, rank.backend, batch, None))


def _logits(rank: Worker, whole: Batch) -> Array:
    def classify(batch: Batch) -> Array:
        ids, _targets, *more = batch.inputs(rank.backend)
        return rank.model.classify(ids, *more)[:, 0]

    return _of_rows(rank, whole, (len(whole.ids), rank.model.config.classes), classify)


def _of_rows(rank: Worker, whole: Any, shape: tuple[int, ...], compute: Callable[[Any], Array]) -> Array:
    """compute(batch) for the rows of each part, gathered from all ranks: (rows, ...), of this shape."""
    found = rank.backend.zeros(shape, rank.backend.master_dtype)
    for number in rank.parts:
        rows = rank.rows(whole, number)
        if len(batch := whole[rows]):
            found[rows] = compute(batch)
    rank.group.all_reduce_(found)  # with zeros: to gather them
    rank.group.join()
    return found


# --- what each rank with memory of its own does in a run besides gradients --------------------------------------------


def clip(rank: Worker, limit: float) -> tuple[Any, Any]:
    assert rank.optimizer is not None
    return rank.optimizer.clip(limit)


def set_window(rank: Worker, window: int) -> None:
    rank.model.set_window(window)
    if rank.captured:
        rank.captured.window = window


def update(rank: Worker, lr: Rate) -> None:
    assert rank.optimizer is not None
    rank.optimizer.step(lr, rank.optimizer.factor)


def carried(rank: Worker) -> Array:
    """The state of all rows; each rank has computed its own rows."""
    assert rank.state is not None
    found, rows = rank.backend.zeros(rank.state.shape, rank.state.dtype), rank.state.shape[2]
    for number in rank.parts:
        own = part_of(number, rank.count, rows)
        found[:, :, own] = rank.state[:, :, own]
    rank.group.all_reduce_(found)  # with zeros: to gather them
    rank.group.join()
    return found


def be_patient(rank: Worker, seconds: float) -> None:
    rank.group.be_patient(seconds)


def forward(model: Trainable, backend: Backend, batch: Any, stash: Stash | None, state: Array | None = None) -> Any:
    """The model's forward on a batch, which is empty if there are fewer rows than ranks. state: the carried state of
    all rows."""
    if not len(batch):
        nll, terms = batch.nothing(backend), len(model.config.term_weights)
        return (nll, backend.zeros((terms,), backend.master_dtype)) if terms else nll
    options: dict[str, Any] = {}
    if batch.documents is not None:
        options["documents"] = batch.documents.on(backend)
    if stash is not None and getattr(batch, "taught", None) is not None:
        options["taught"] = batch.taught
    if state is not None and batch.stream is not None:
        options["state"] = state[:, :, batch.stream : batch.stream + len(batch)]
        if batch.reset_state:
            options["state"].fill(0)
    return model.forward(*batch.inputs(backend), stash=stash, **options)


def evaluate_heads(parallel: DataParallel, batches: Iterable[Batch], byte_lengths: np.ndarray) -> np.ndarray:
    """Bits per byte of every head over all `batches`, (K,): its nll over the bytes of its own targets."""
    nll: Any = 0.0
    size: Any = 0.0
    for batch in batches:
        nll += parallel.nll(batch)
        size += np.where(batch.targets >= 0, byte_lengths[batch.targets], 0).sum(axis=(0, 1))
    return nll / LN2 / np.maximum(1.0, size)


def evaluate_nll(parallel: DataParallel, batches: Iterable[Batch], byte_lengths: np.ndarray) -> float:
    """Head 0's bits per byte over all `batches`."""
    return float(evaluate_heads(parallel, batches, byte_lengths)[0])
