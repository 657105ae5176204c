"""The training step as a CUDA graph (--cuda-graph): small models, several GPUs and busy hosts wait for Python.

    step 1 of a kind   runs without a graph; records which dropout keys are used
    step 2             runs on arrays at fixed addresses, in the graph's memory: this compiles its kernels
    step 3             is captured, and the graph launched
    from then on       one upload of what changes, one launch, one copy of the results

A kind of step is given by the shapes of its batches and the attention window; each has a graph of its own. All that
changes from step to step is in one array: ids and targets, the objective's factors, the optimizer's rates, the keys of
dropout. The bits are those of a step without a graph: the same kernels with the same arguments, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.memory import free_memory
from tinyforge.optim import AdamW, Rate
from tinyforge.optim.schedules import pace_of
from tinyforge.rng import Stream
from tinyforge.train.batches import Where
from tinyforge.train.data_parallel import DataParallel, Totals, Worker, gradients_of
from tinyforge.train.objectives import Batch, NextTokens, Objective, counts_of, of_tokens
from tinyforge.train.plan import Plan

MOST = 4
"""Kinds of steps that get a graph; further kinds run without."""
_ALIGNED = 256  # bytes: the alignment that kernels may assume of an array's memory


def captures(setting: str, objective: Objective, backend: Backend, carried: int = 0, plan: Plan | None = None) -> bool:
    """Whether steps become graphs. "auto" (--cuda-graph): on GPUs where all batches have one shape, as those of tokens
    do; on a single one where its free memory holds a step's arrays twice, since evaluation shares none with a graph.
    carried: rows whose state is carried."""
    if setting != "auto":
        return setting == "on"
    if backend.name != "cupy" or type(of_tokens(objective)) is not NextTokens or carried:
        return False
    if backend.group is not None and backend.group.size > 1:
        return True
    free, _ = free_memory(backend)
    return plan is not None and free is not None and 2 * (plan.peak - plan.weights - plan.moments) <= free


class Captured:
    """Captured steps of `parallel` with `optimizer`. limit: of the gradient's norm, see `AdamW.clip`.

    Each rank makes its own, at the same point of the program: all capture and launch the same steps. Raises UserError
    if the step cannot be captured: on a CPU, or with an objective that is weighed on the host. optional: a step with
    something that a graph cannot repeat, such as a custom op's upload, says so and runs without. window: the attention
    window that a schedule has set, 0 without one.
    """

    def __init__(self, parallel: DataParallel, optimizer: AdamW, limit: float, optional: bool = False) -> None:
        if not hasattr(of_tokens(parallel.objective), "factors"):
            raise UserError(
                f"--cuda-graph: the objective {type(of_tokens(parallel.objective)).__name__} is not one that a "
                "graph can repeat; use --cuda-graph off"
            )
        self.parallel, self.optimizer, self.limit = parallel, optimizer, limit
        self.backend = parallel.backend
        self.graphs = self.backend.graphs()
        # The last step's clipping factor, which all graphs read and write.
        self.factor = self.backend.zeros((), np.dtype(np.float64))
        self.factor.fill(1)
        self.optional, self.most = optional, MOST
        self.window = 0
        self._kinds: dict[Any, _Kind] = {}
        parallel.rank.captured = self

    def step(
        self, batches: Sequence[Batch], noise: Stream, lr: Rate, number: Where | None = None
    ) -> tuple[Totals, Any]:
        """`DataParallel.gradients`, `clip` and `update`: the sums, and the gradient norm. number: as of `gradients`."""
        if not self.parallel.alone:
            self.parallel.group.send_object((captured_step, (self.parallel.payload(batches, number), noise, lr)))
        return self.of_rank(batches, noise, lr)

    def of_rank(self, batches: Sequence[Batch], noise: Stream, lr: Rate) -> tuple[Totals, Any]:
        """One rank's part of a step."""
        objective = self.parallel.objective
        assert objective is not None
        counts = counts_of(objective, batches, pace_of(lr).head_weights)
        shapes = (self.window, *(batch.kind() for batch in batches))
        if shapes not in self._kinds and len(self._kinds) < self.most:
            self._kinds[shapes] = _Kind(self)
        known = self._kinds.get(shapes)
        if known is None:
            return self.plain(batches, counts, noise, lr)
        return known.step(batches, counts, noise, lr)

    def refused(self, error: UserError) -> None:
        """No graphs from now on. Raises the error if they are not optional."""
        if not self.optional:
            raise error
        print(f"steps run without a graph: {error}", file=sys.stderr)
        self.most = 0
        self._kinds.clear()
        self.optimizer.step_count -= 1

    def plain(self, batches: Sequence[Batch], counts: np.ndarray, noise: Any, lr: Rate) -> tuple[Totals, Any]:
        """A step without a graph, with the matrix products that graphs use."""
        with self.graphs.products.in_use():
            sums = gradients_of(self.parallel.rank, batches, counts, noise)
            norm, factor = self.optimizer.clip(self.limit)
            self.optimizer.step(lr, factor)
        self.factor[...] = factor
        return Totals(sums, counts), norm


def captured_step(rank: Worker, batches: Sequence[Batch] | Where, noise: Stream, lr: Rate) -> None:
    """The step on a rank above 0."""
    rank.captured.of_rank(rank.batches_of(batches), noise, lr)


class _Kind:
    """Steps whose arrays have the same shapes."""

    def __init__(self, owner: Captured) -> None:
        self.owner, self.backend = owner, owner.backend
        self.names: list[str] = []
        self.inputs: Inputs | None = None
        self.warm = False
        self.replay: Callable[[], None] | None = None

    def step(self, batches: Sequence[Batch], counts: np.ndarray, noise: Stream, lr: Rate) -> tuple[Totals, Any]:
        owner, objective = self.owner, cast(Any, self.owner.parallel.objective)
        factors = objective.factors(counts)
        if self.inputs is None:
            asked: dict[str, Any] = {}
            totals, norm = owner.plain(batches, counts, _Asked(noise, asked), lr)
            self.names = list(asked)
            rates = self._rates(owner.optimizer.rates(1, lr))
            self.inputs = Inputs([*self._arrays(batches), factors, rates, self._keys(noise)], self.backend)
            self.out = self.backend.zeros((len(totals.sums) + 1,), np.dtype(np.float64))
            self._work = self._step_on(batches)
            return totals, norm
        rates = self._rates(owner.optimizer.count_step(lr))
        self.inputs.put([*self._arrays(batches), factors, rates, self._keys(noise)])
        owner.optimizer.settle()  # a graph does not wait for transfers that were started outside of it
        try:
            if self.replay is None and self.warm:
                self.replay = owner.parallel.group.captured(partial(owner.graphs.capture, self._work))
            if self.replay is None:
                owner.graphs.run(self._work)
                self.warm = True
            else:
                self.replay()
        except UserError as error:
            owner.refused(error)
            return owner.plain(batches, counts, noise, lr)
        owner.optimizer.factor = owner.factor
        out = self.out.copy()  # the next step writes over it
        return Totals(out[:-1], counts), out[-1]

    def _rates(self, rates: np.ndarray) -> np.ndarray:
        return rates.astype(self.backend.master_dtype)

    def _keys(self, noise: Stream) -> np.ndarray:
        """The dropout keys, and one more: the array must not be empty."""
        return np.array([*(_named(noise, name).key for name in self.names), (0, 0)], np.uint32)

    def _arrays(self, batches: Sequence[Batch]) -> list[np.ndarray]:
        """The batches' arrays in the backend's dtypes."""
        return [array for batch in batches for array in batch.parts(self.backend)]

    def _step_on(self, batches: Sequence[Batch]) -> Callable[[], None]:
        """The step on the fixed arrays, for `Graphs`. batches: an example of the shapes."""
        assert self.inputs is not None
        places = iter(self.inputs.arrays)
        moved = [batch.moved(places) for batch in batches]
        factors, rates, keys = places
        moved = [replace(batch, factors=factors) for batch in moved]
        noise = _Fixed("", {name: keys[place] for place, name in enumerate(self.names)})
        owner, nothing = self.owner, np.zeros(0)

        def work() -> None:
            sums = gradients_of(owner.parallel.rank, moved, nothing, noise)
            owner.optimizer.factor = owner.factor
            norm, factor = owner.optimizer.clip(owner.limit)
            owner.optimizer.apply(rates, factor)
            owner.optimizer.settle()
            self.out[:-1] = sums
            self.out[-1] = norm
            owner.factor[...] = factor

        return work


class Inputs:
    """Arrays with the shapes and dtypes of `like`, side by side in one buffer: `put` fills all by one upload."""

    def __init__(self, like: Sequence[np.ndarray], backend: Backend) -> None:
        ends = np.cumsum([-(-a.nbytes // _ALIGNED) * _ALIGNED for a in like])
        byte = np.dtype(np.uint8)
        self._host, self._backend = np.zeros(int(ends[-1]), byte), backend
        self._device = backend.zeros(self._host.shape, byte)
        starts = [0, *ends[:-1].tolist()]
        self._places, self.arrays = (
            [flat[at : at + a.nbytes].view(a.dtype).reshape(a.shape) for at, a in zip(starts, like, strict=True)]
            for flat in (self._host, self._device)
        )

    def put(self, values: Sequence[np.ndarray]) -> None:
        for place, value in zip(self._places, values, strict=True):
            if (place.shape, place.dtype) != (value.shape, value.dtype):
                raise ValueError(f"Inputs: {value.dtype} {value.shape}, expected {place.dtype} {place.shape}")
            place[...] = value
        self._device[...] = self._backend.asarray(self._host, self._host.dtype)


class _Asked:
    """A stream that records the names below it whose keys are used."""

    def __init__(self, stream: Stream, asked: dict[str, Any], name: str = "") -> None:
        self._stream, self._asked, self._name = stream, asked, name

    def fork(self, name: str) -> _Asked:
        return _Asked(self._stream.fork(name), self._asked, f"{self._name}/{name}")

    @property
    def key(self) -> tuple[int, int]:
        self._asked[self._name] = None
        return self._stream.key


def _named(stream: Stream, name: str) -> Stream:
    """The stream below `stream` for a name that `_Asked` has recorded."""
    return stream.fork(name.removeprefix("/"))


class _Fixed:
    """A stand-in for a stream whose keys are on the device: arrays of two words, by the names of `_Asked`."""

    def __init__(self, name: str, keys: dict[str, Array]) -> None:
        self._name, self._keys = name, keys

    def fork(self, name: str) -> _Fixed:
        return _Fixed(f"{self._name}/{name}", self._keys)

    @property
    def key(self) -> Array:
        return self._keys[self._name]
