"""The memory that a training step needs, computed before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import numpy as np

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import Backend
from tinyforge.backends.meta import METER, MetaBackend
from tinyforge.config import BaseConfig, ModelConfig
from tinyforge.errors import UserError
from tinyforge.memory import free_memory, gib
from tinyforge.op import Recompute, Stash
from tinyforge.ops.attention import Documents
from tinyforge.optim import AdamW, AdamWConfig, Muon
from tinyforge.optim.groups import check_groups
from tinyforge.parallel import Alone
from tinyforge.parallel.buckets import Buckets, Watched
from tinyforge.parallel.zero import ShardedAdamW, stage_of
from tinyforge.registry import ModelSpec, models
from tinyforge.report import count_of
from tinyforge.rng import Stream
from tinyforge.train.distil import Teachers
from tinyforge.train.settings import Settings, restarts, sequence_length


@dataclass(frozen=True)
class Plan:
    """Bytes. weights: with masters and gradients. moments: the optimizer's. saved: kept by forward for backward. peak:
    the most at one time, the other three included. gradients: the part of `weights` that they take."""

    weights: int
    moments: int
    saved: int
    peak: int
    gradients: int

    def __str__(self) -> str:
        rows = (
            ("weights, masters, gradients", self.weights),
            ("the optimizer's moments", self.moments),
            ("saved for backward", self.saved),
            ("temporary", self.peak - self.weights - self.moments - self.saved),
            ("peak", self.peak),
        )
        return "\n".join(f"  {what:<28} {gib(count, self.peak):>10}" for what, count in rows)


@dataclass(frozen=True)
class Split:
    """How a step is split over ranks, and which optimizer updates the weights. zero: the ZeRO stage, see
    `zero.stage_of`. shards: --reduction-shards. config: the optimizer's, if it is not the default."""

    ranks: int = 1
    zero: int = 0
    shards: int = 0
    optimizer: str = "adamw"
    config: AdamWConfig | None = None

    @property
    def levels(self) -> int:
        """Copies of the gradient that a rank needs to add up shards as a tree."""
        return (max(1, self.shards // self.ranks) - 1).bit_length()

    @classmethod
    def of(cls, settings: Any, ranks: int) -> Split:
        shards = settings.reduction_shards or 0
        stage = stage_of(settings.zero, ranks, shards, settings.most_micro_batches)
        return cls(ranks, stage, shards, settings.optimizer, settings.optimizer_config())


ONE = Split()


def plan_step(
    spec: ModelSpec,
    config: BaseConfig,
    precision: str,
    batch_size: int,
    seq_len: int,
    recompute: Recompute = "",
    adapters: Adapters | None = None,
    restart: bool | None = None,
    split: Split = ONE,
    teachers: Teachers | None = None,
) -> Plan:
    """Run one step on arrays without memory and read the meter: the memory on a GPU, or on each of several.

    batch_size: of all ranks together. adapters: if given, they are learned and the model's own weights are frozen.
    restart: from --document-mask; None without it. teachers: models that are learned from.
    """
    spec.check_recompute(recompute)
    spec.check_precision(precision)
    batch_size = -(-batch_size // max(split.ranks, split.shards))
    start = METER.now
    METER.peak = start
    backend = MetaBackend(precision)
    make = partial(spec.build, config, backend, recompute=recompute)
    model = Adapted(make, adapters) if adapters else make()
    model = teachers.wrap_with_teachers(model, backend) if teachers else model
    weights = METER.now - start
    optimizer: AdamW
    zero_optimizer = None
    if split.zero and split.ranks > 1:
        buckets = Buckets(model.buffer, model.ops())
        optimizer = zero_optimizer = ShardedAdamW(
            model.buffer, backend, None, Alone(split.ranks), buckets, split.shards, split.zero
        )
        METER.peak = METER.now  # the whole masters were there for a moment, before anything else was allocated
        weights = METER.now - start - optimizer.m.nbytes - optimizer.v.nbytes
    else:
        kind: Any = Muon if split.optimizer == "muon" else AdamW
        optimizer = kind(model.buffer, backend, split.config)
    ready = METER.now - start
    sums = [backend.zeros((model.buffer.size,), backend.master_dtype) for _ in range(split.levels)]
    integers = np.dtype(np.int32)
    try:
        shapes = config.input_shapes(batch_size, seq_len)
    except NotImplementedError as error:
        raise UserError(f"{error}; the forecast of memory needs them (docs/train-your-own.md)") from error
    inputs = [
        backend.zeros(shape, None if number in config.float_inputs else integers) for number, shape in enumerate(shapes)
    ]
    stash = zero_optimizer.windows(first=True) if zero_optimizer and split.zero == 2 else Stash()
    stash.noise = Stream(0, "plan")  # as in a run: dropout needs memory too
    shape = (batch_size, seq_len)
    masked: dict[str, Any] = (
        {} if restart is None else {"documents": Documents(backend.zeros(shape, integers), restart)}
    )
    try:
        loss = model.forward(*inputs, stash=stash, **masked)  # alive until the end of backward, as in a step
    except (ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"{spec.name}: forward on arrays without memory, of the shapes of input_shapes, raises "
            f"{type(error).__name__}: {error}; a kernel whose results are not like its first array needs a function on "
            '"meta" (docs/add-an-op.md)'
        ) from error
    saved = METER.now - start - ready - sum(x.nbytes for x in sums)
    # One number for each head, as from `NextTokens` without weights, and one for each of the model's own terms.
    # A model that reads no tokens gets a number for each row.
    each = loss.shape if getattr(loss, "ndim", 0) == 1 else (config.prediction_heads,)
    dnll, terms = backend.zeros(each, backend.master_dtype), len(config.term_weights)
    model.backward((dnll, backend.zeros((terms,), backend.master_dtype)) if terms else dnll, stash)
    if isinstance(stash, Watched):
        stash.finish()
    _, factor = optimizer.clip(1.0)
    optimizer.step(1e-3, factor)
    del sums
    gradients = model.buffer.size * backend.master_dtype.itemsize
    return Plan(weights, ready - weights, saved, METER.peak - start, gradients)


def size_of(config: BaseConfig, rows: int, length: int) -> str:
    """A step's size, for people."""
    return f"{rows} x {length} tokens" if isinstance(config, ModelConfig) else count_of(rows, "row")


def print_plan(
    spec: ModelSpec, config: BaseConfig, settings: Settings, each: int = 1, teachers: Teachers | None = None
) -> None:
    """--plan: print what a step takes on a GPU, or on each of --gpus. each: rows per example of --batch-size. Raises
    UserError where the run itself would."""
    make = partial(spec.build, config, MetaBackend(settings.precision))
    model = Adapted(make, settings.adapters) if settings.adapters else make()
    check_flags(settings, model, "tokens" if spec.learns in ("text", "masked text") else spec.learns)
    split, seq_len = Split.of(settings, settings.gpus or 1), sequence_length(config, settings)
    planned = _planner(spec, config, settings.precision, settings, split.ranks, teachers)
    rows = each * settings.batch_size
    where = "on a GPU" if split.ranks == 1 else f"divided among {split.ranks} GPUs"
    if split.zero and split.ranks > 1:
        where += ", the optimizer's state shared out" if split.zero == 1 else ", gradients and optimizer shared out"
    again = f", recomputing {settings.recompute}" if settings.recompute else ""
    each_takes = "; each takes" if split.ranks > 1 else ""
    print(f"a step of {size_of(config, rows, seq_len)} in {settings.precision} {where}{again}{each_takes}:")
    plan = planned(rows)
    print(plan)
    if settings.adapters:
        whole = planned(rows, adapters=None)
        print(
            f"adapters of rank {settings.adapters.rank}: {plan.peak / whole.peak:.2f} of the {gib(whole.peak)} that "
            "all weights need"
        )


def _planner(
    spec: ModelSpec, config: BaseConfig, precision: str, settings: Settings, ranks: int, teachers: Teachers | None
) -> Callable[..., Plan]:
    """`plan_step` of a run as a function of a step's rows, with keywords for what else is changed."""
    how: dict[str, Any] = {"recompute": settings.recompute, "adapters": settings.adapters, "teachers": teachers}
    how |= {"seq_len": sequence_length(config, settings), "restart": restarts(settings, spec)}
    return partial(plan_step, spec, config, precision, split=Split.of(settings, ranks), **how)


def check_fits(
    spec: ModelSpec,
    config: BaseConfig,
    backend: Backend,
    settings: Settings,
    ranks: int = 1,
    each: int = 1,
    teachers: Teachers | None = None,
    built: bool = False,
) -> Plan:
    """The plan of a step. Raises UserError, before its arrays are allocated, if it does not fit in free memory.

    The forecast for a CPU is that for a GPU plus a copy of the gradients for each worker beyond the first. Kernels
    there allocate a little more or less, so the limit is approximate. each: rows per example of --batch-size. built:
    the model is in memory already.
    """
    free, place = free_memory(backend)
    planned = _planner(spec, config, backend.precision.name, settings, ranks, teachers)
    size = settings.batch_size

    def total(plan: Plan) -> int:
        return plan.peak + (backend.workers - 1) * plan.gradients - built * plan.weights

    def needed(size: int, **changed: Any) -> int:
        return total(planned(each * size, **changed))

    plan = planned(each * size)
    if free is None or total(plan) <= free:
        return plan
    low, high = 0, size if needed(1) <= free else 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= free else (low, middle)
    ways: tuple[Recompute, ...] = ("norms", "blocks") if spec.blocks else ("norms",)
    if way := next((way for way in ways if needed(size, recompute=way) <= free), None):
        fix = f"--recompute {way} makes it fit"
    elif low := low - low % ranks:
        fix = f"--batch-size {low} fits, with --grad-accum for as large a step"
    else:
        fix = "not even --batch-size 1 fits; use a smaller --config or --seq-len, or --precision bf16"
    raise UserError(
        f"{size_of(config, each * size, sequence_length(config, settings))} in {backend.precision.name} need "
        f"{gib(total(plan))} {place}, {gib(free)} are free; {fix}"
    )


def check_flags(settings: Settings, model: Any, unit: str) -> None:
    """Raise UserError for a flag that the model has no use for. unit: of what it reads."""
    config, windows = model.config, settings.points("window_schedule")
    if windows and not hasattr(model, "set_window"):
        raise UserError(f"--window-schedule: {type(model).__name__} has no set_window; leave the schedule out")
    if windows and windows[-1][1] != (of_config := getattr(config, "window", 0)):
        raise UserError(
            f"--window-schedule: it ends with {windows[-1][1]:g}, the window of the config is {of_config}; end with "
            f"that, or add --set window={windows[-1][1]:g}"
        )
    if settings.points("mtp_schedule") and len(config.head_weights) == 1:
        raise UserError("--mtp-schedule: the model has one output head; leave the schedule out")
    if settings.rate_rule != "plain" and not (getattr(config, "dim", 0) and unit == "tokens"):
        raise UserError(f"--rate-rule {settings.rate_rule} is for models of tokens that have a width; leave it out")
    if settings.group_rates != settings.usual().group_rates:  # a preset's are right for its config without --set
        check_groups(settings.group_rates, model.buffer.params)


def check_task(task: Any, backend: Backend, settings: Settings) -> Plan:
    """`check_fits` of a `Task`, whose model need not be registered. Raises UserError for --recompute and
    --document-mask too, if the model has neither."""
    kind, config = type(task.model), task.model.config
    spec = next((spec for spec in models().values() if spec.build is kind), None)
    recompute = getattr(task.model, "recompute", "")
    if settings.recompute and not recompute:
        raise UserError(f"--recompute: {kind.__name__} recomputes nothing; leave it out")
    if spec is None:
        masked = "documents" in signature(kind.forward).parameters
        blocks = recompute == "blocks"
        name = task.meta.get("model", kind.__name__)
        spec = ModelSpec(name, kind.__name__, kind, type(config), {}, documents=masked, blocks=blocks, fp8=True)
    return check_fits(spec, config, backend, settings, backend.group.size if backend.group else 1, built=True)
