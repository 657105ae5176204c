"""One training run: the loop that pretraining, fine-tuning and your own recipe share.

A recipe passes in a `Task`: the model, its batches, the objective, how to evaluate, what to sample. `Run` does the
rest: sharded gradients, clipping, the optimizer, the schedule, progress, metrics, checkpoints, signals, and the stop on
a number that is not finite. Read `Run.train`, then `Run.take_step`.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from tinyforge import checkpoint
from tinyforge.backends import Backend, compile
from tinyforge.errors import UserError
from tinyforge.files import locked
from tinyforge.optim import Pace, learning_rate
from tinyforge.optim.groups import WIDTH, batch_factor, describe_rates
from tinyforge.optim.schedules import held, linear
from tinyforge.parallel import Alone, Group
from tinyforge.parallel.launch import ProcessGroupInfo, assert_equal_on_ranks, init_process_group, started_as_rank
from tinyforge.parallel.star import PREPARING
from tinyforge.params import load_named
from tinyforge.report import count_of, figure, took
from tinyforge.rng import Stream
from tinyforge.terminal import printable
from tinyforge.train import diagnose, metrics
from tinyforge.train import state as state_of_run
from tinyforge.train.batches import Where
from tinyforge.train.captured import Captured, captures
from tinyforge.train.data_parallel import DataParallel, Totals, Trainable
from tinyforge.train.diagnose import first_nonfinite
from tinyforge.train.objectives import Batch, Objective, with_terms
from tinyforge.train.plan import Plan, check_flags, check_task
from tinyforge.train.settings import Settings, Teaching
from tinyforge.train.writers import open_writer

FLOP_CONVENTION = "6 FLOP a token and parameter outside the embedding, and attention; no recomputation"
FIRST_STEPS = 600.0  # seconds that a rank may take for its first steps, in which a GPU's kernels are compiled
CARRIED = "carried"  # the name, among the moments in a checkpoint, of the state carried from batch to batch
OF_TASK = "task."  # the prefix there of the names of `Task.state`
OVERFITTED = 0.01  # tolerated rise of the held-out loss from its minimum to the end


@dataclass(frozen=True, kw_only=True)
class Task:
    """A recipe's part of a run.

    batches(step): the micro-batches of that step, a pure function; with --batch-schedule it is called with a range, the
    numbers of the step's micro-batches. evaluate(parallel): figures on held-out data, with
    `val_bits_per_byte` among them for text. sample(): a few lines to show, or "". tokenizer: None for a model that
    reads no tokens. meta: more for meta.json, at least "kind", "model" and "config", and with a tokenizer
    "tokenizer_hash", so that the checkpoint can be opened. flop_per_token: FLOP per `unit`, to
    report the share of the machine's peak that training reached. carried: rows whose state is carried from batch to
    batch, see `Batch.stream`. unit: what training reads: "tokens", or the name of a row of a batch, such as "images";
    it names columns of the metrics. curve: the figure that is plotted, any that is logged, held-out ones by "val_" and
    its name; by default the loss or bits per byte. --keep-best compares bits per byte or the loss where they are held
    out, else the curve's, and keeps the lowest. figures(): more to log for the step whose batches were made last.
    state: float arrays that `batches` keeps from one step to the next if it is not a pure function: they are saved in
    the checkpoint and restored. plan: of the memory, recorded with the run, from a recipe that has called `check_fits`
    before it made the model; by default `Run` checks that a step fits. published: the base's published files, kept in
    the checkpoints.
    """

    model: Trainable
    tokenizer: Any
    objective: Objective
    batches: Callable[[Any], Sequence[Any]]  # of `Batch`, or `Arrays`
    evaluate: Callable[[DataParallel], Mapping[str, float]]
    meta: dict[str, Any]
    sample: Callable[[], str] = str
    flop_per_token: float = 0.0
    carried: int = 0
    unit: str = "tokens"
    curve: str = ""
    figures: Callable[[], Mapping[str, float]] = dict
    state: dict[str, np.ndarray] = field(default_factory=dict)
    plan: Plan | None = None
    published: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A step that was taken. Its sums and norm may still be in flight on a device. where: its number, or those of its
    micro-batches if a schedule says how many there are."""

    number: int
    where: Where
    batches: Sequence[Batch]
    totals: Totals
    norm: Any
    lr: float
    figures: Mapping[str, float]

    def size(self, unit: str) -> int:
        """Tokens that were read, padding included; or rows, for any other unit."""
        return sum(batch.size(unit) for batch in self.batches)


class Signals:
    """Ctrl-C and SIGTERM ask the run to save and exit after the step; a second one ends the process at once.

    waiting: not entered yet.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.waiting = True

    def __enter__(self) -> Signals:
        self.waiting = False
        numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
        self._old = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.received = number
        signal.signal(number, self._old[number])

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


@contextmanager
def claimed(settings: Settings, resume: bool) -> Iterator[None]:
    """Lock --out for this process. Raises UserError if another run is writing there, or, without `resume`, if it holds
    a run. `running` calls this for a recipe.
    """
    out = Path(settings.out)
    with ExitStack() as held:
        with metrics.writing_in(out):
            try:
                held.enter_context(locked(out, leave_nothing=True))
            except BlockingIOError:
                raise UserError(f"{out}: another run is writing there; wait for it, or choose another --out") from None
        # Checked while the lock is held: a run that has just ended must not be overlooked.
        if checkpoint.steps(out) and not resume:
            raise UserError(f"{out} already holds a run; continue it with --resume, or choose another --out")
        checkpoint.sweep(out)
        yield


@contextmanager
def running(settings: Settings, resume: bool) -> Iterator[ProcessGroupInfo]:
    """Connect to the run's other ranks, if there are any; rank 0 claims --out. A recipe does all its work inside, so
    that it fails at once: if any rank fails, rank 0 prints why and all end. The ranks are for `open_backend`.

    Raises UserError as `claimed` does, and for flags that do not fit the number of ranks.
    """
    with init_process_group() as ranks:
        ranks.saved = lambda: bool(checkpoint.steps(Path(settings.out)))
        if not settings.several_ranks:
            ranks.must_be_one()
        if settings.gpus and settings.gpus > 1 and not started_as_rank():
            raise UserError("--gpus: this recipe starts no ranks; put mpirun -n 2 before the command, or leave it out")
        if settings.batch_size % ranks.size:
            raise UserError(f"--batch-size is {settings.batch_size}, the run has {ranks.size} ranks; use a multiple")
        with claimed(settings, resume) if ranks.rank == 0 else nullcontext():
            yield ranks


class Run:
    """The state of a run and its parts, each of which can be called alone.

    step: steps taken. tokens: read by them, in the task's unit. micro_batches: the same in micro-batches. joules: used.
    unread: steps whose loss has not been read yet: each read waits for the device, so there is one every
    `backend.read_every` steps. rates: tokens per second between reads. last_saved: the newest checkpoint.
    """

    def __init__(self, task: Task, settings: Settings, backend: Backend, resume: bool = False) -> None:
        if task.plan is None:
            task = replace(task, plan=check_task(task, backend, settings))
        check_flags(settings, task.model, task.unit)
        self.task, self.settings, self.backend = task, settings, backend
        self.out = Path(settings.out)
        self.buffer = task.model.buffer
        self.objective = with_terms(task.objective, task.model.config)
        self.group: Group = backend.group or Alone()
        shards = settings.reduction_shards or 0
        self.parallel = DataParallel(
            task.model, backend, task.objective, task.carried, shards=shards, batches=task.batches
        )
        self.parallel.rows = settings.batch_size
        self.noise = Stream(settings.seed, "dropout")
        self.step, self.tokens, self.micro_batches = 0, 0, 0
        self._window = 0
        self._step_seconds = 0.0  # that a step has taken lately; 0 before the second report
        self.last_saved: Path | None = None
        self._saved_step = 0
        self.signals = Signals()
        self.unread: list[Step] = []
        self.rates: list[float] = []
        self._before, self._joules_before = 0.0, 0.0  # seconds and joules of earlier processes
        assert_equal_on_ranks(
            self.group, {key: task.meta.get(key) for key in ("model", "config", "tokenizer_hash", "data_hash")}
        )
        self._begin(checkpoint.load(self.out) if resume and self.group.rank == 0 else None)
        graphs = captures(settings.cuda_graph, task.objective, backend, task.carried, task.plan)
        optional = settings.cuda_graph == "auto" and self.group.size == 1
        self.captured = Captured(self.parallel, self.optimizer, settings.clip, optional) if graphs else None
        if self.group.rank:
            return
        self.log = metrics.Metrics(self.out, self.step)
        metrics.save_about(self.out, self._about())
        self.log.also = open_writer(settings.log, self.out, self.step, settings.to_dict())
        self._start = self._began = time.perf_counter()  # of this process; of the steps that are not reported yet
        self._energy_at_start = backend.energy()
        self._bar: Any = None
        self._kernels: list[float] = []  # seconds that each took to load, until the first report

    def _begin(self, found: checkpoint.Checkpoint | None) -> None:
        """Set weights, moments and a carried state to those of the start of a run, or of a checkpoint. Rank 0 reads the
        checkpoint and broadcasts it, so the number of ranks may differ from that which made it."""
        group, buffer, backend, settings = self.group, self.buffer, self.backend, self.settings
        if found:
            _check_same(found, self.task)
            load_named(buffer, buffer.masters, found.weights, backend, found.path)
            moments = found.optimizer()
            self.task.state.update(
                {name.removeprefix(OF_TASK): moments[name] for name in moments if name.startswith(OF_TASK)}
            )
            self._take_meta(found)
        group.broadcast_(buffer.masters)
        if buffer.frozen:
            group.broadcast_(buffer.frozen_values)
        group.join()
        buffer.publish()
        rank = self.parallel.rank
        width = getattr(self.task.model.config, "dim", 0)
        config = settings.optimizer_config(width or WIDTH)
        if (settings.group_rates or settings.rate_rule != "plain") and group.rank == 0:
            print(describe_rates(config.group_rates, settings.lr, settings.rate_rule, buffer.params))
        self.optimizer = rank.make_optimizer(config, settings.zero, settings.most_micro_batches)
        if settings.zero and group.size == 1:
            print(f"--zero {settings.zero} changes nothing here: there is one rank, and nothing to share out")
        elif settings.zero == 2 and rank.zero_optimizer and rank.zero_optimizer.grads is None:
            print(
                "--zero 2 keeps the gradients whole here, as --zero 1: --reduction-shards adds up parts of a step in "
                "them"
            )
        self.step = self.optimizer.step_count = group.send_object(self.step)
        if not self.step:
            return
        state_of_run.read_moments(self.optimizer, group, found)
        state = self.parallel.state
        if state is None:
            return
        if found:
            moments = found.optimizer()
            if (shape := moments.shape(CARRIED)) != state.shape:
                got = shape or "nothing"
                raise UserError(f"checkpoint {found.path}: {CARRIED} has {got}, the run expects {state.shape}")
            state[...] = backend.asarray(moments[CARRIED], state.dtype)
        group.broadcast_(state)
        group.join()

    def _take_meta(self, found: checkpoint.Checkpoint) -> None:
        self.step = self._saved_step = found.meta["step"]
        self.micro_batches = found.meta.get("micro_batches", 0)
        read = found.meta.get(self.task.unit, found.meta.get("tokens", 0))  # "tokens" in earlier versions
        self.tokens, self._before = read, found.meta["elapsed"]
        self._joules_before = found.meta.get("joules", 0.0)
        self.last_saved = found.path
        print(f"resuming at step {self.step} from {found.path}")
        ranks = found.meta.get("ranks", 1)
        if ranks != self.group.size and not self.settings.reduction_shards:
            print(
                f"begun on {ranks} rank{'s' * (ranks > 1)}, going on with {self.group.size}: the same batches, but "
                "other last bits of sums; --reduction-shards makes them the same"
            )

    def _about(self) -> dict[str, Any]:
        """The content of run.json, all known before the first step."""
        task, plan = self.task, self.task.plan
        names = ("kind", "model", "config", "corpus", "machine")
        return {
            **{name: value for name, value in task.meta.items() if name in names},
            "parameters": self.buffer.count,
            "learned": sum(p.size for p in self.buffer.params),
            "unit": task.unit,
            "flop_per_token": task.flop_per_token,
            "plan": asdict(plan) if plan else None,
            "settings": self.settings.to_dict(),
        }

    # --- where the run is

    def elapsed(self) -> float:
        """Seconds, those of earlier processes included."""
        return self._before + time.perf_counter() - self._start

    def joules(self) -> float | None:
        """Energy that the device has used for the run; None if it has no counter."""
        energy = self.backend.energy()
        if energy is None or self._energy_at_start is None:
            return None
        return self._joules_before + energy - self._energy_at_start

    def _read(self) -> dict[str, int]:
        """How much training has read, by the name of the unit."""
        return {self.task.unit: self.tokens}

    def progress(self) -> float:
        """The fraction of the run that is done."""
        if self.settings.steps is not None:
            return self.step / self.settings.steps
        return self.elapsed() / (60.0 * (self.settings.minutes or 0.0))

    # --- the run

    def train(self) -> Path:
        """Run to the end of the settings; returns the last checkpoint. Exits with 128 + number after a signal, and on a
        rank above 0 when rank 0 ends the run."""
        from tqdm import tqdm

        if self.group.rank:
            self.parallel.follow()
        pace = 0.5 if sys.stderr.isatty() else 20.0  # seconds between updates: a log file expects few lines
        shown = {"unit": "step", "dynamic_ncols": True, "mininterval": pace, "maxinterval": pace}
        self._bar = tqdm(total=self.settings.steps, initial=self.step, **shown)
        compile.on_load = self._loaded
        with ExitStack() as inside, self._bar, warnings.catch_warnings():
            # Each step is checked for numbers that are not finite, with a message that names their source.
            warnings.simplefilter("ignore", RuntimeWarning)
            done = self.progress() >= 1.0
            self.parallel.be_patient(max(FIRST_STEPS, self.settings.timeout))
            self._began = time.perf_counter()
            while not done and not self.signals.received:
                self.take_step()
                if self.signals.waiting:  # before the first step a signal ends the process at once: nothing is lost
                    inside.enter_context(self.signals)
                done = self.progress() >= 1.0
                evaluates, saves = self._every(self.settings.eval_every) or done, self._every(self.settings.save_every)
                if evaluates or saves or self._every(self.backend.read_every):
                    self.report()
                if evaluates or saves:
                    self.parallel.be_patient(PREPARING)  # the other ranks wait meanwhile
                    # Evaluate before saving: the metrics of a resumed run then have the checkpoint's figures.
                    if evaluates:
                        self.evaluate()
                    if saves or (evaluates and self._best() == self.step):
                        self.save()
                    self.parallel.be_patient(self.settings.timeout)
                if not self.unread:
                    self._began = time.perf_counter()  # evaluating and saving are not training
            self.report()
            self.parallel.be_patient(PREPARING)
            if self._saved_step != self.step:
                self.save()
        return self.finish()

    def _loaded(self, kernel: str, seconds: float) -> None:
        """Show progress while a GPU's kernels are compiled in the first steps; the first time takes half a minute."""
        self._kernels.append(seconds)
        self._bar.set_postfix_str(f"{count_of(len(self._kernels), 'kernel')} ready", refresh=True)

    def _every(self, steps: int) -> bool:
        return self.step % steps == 0

    def take_step(self) -> None:
        """One optimizer step. Nothing here waits for a device."""
        task, settings, progress = self.task, self.settings, self.progress()
        count, where = settings.micro_batches_at(progress), cast(Where, self.step)
        if settings.points("batch_schedule"):
            where = range(self.micro_batches, self.micro_batches + count)
        batches, noise = task.batches(where), self.noise.fork(str(self.step))
        if points := settings.points("window_schedule"):
            self._set_window(int(held(points, progress)))
        pace = self._pace(progress, batches)
        if self.captured:
            totals, norm = self.captured.step(batches, noise, pace, where)
        else:
            totals = self.parallel.gradients(batches, noise, where, pace.head_weights)
            norm, _ = self.parallel.clip(settings.clip)
        self.unread.append(Step(self.step, where, batches, totals, norm, pace.lr, task.figures()))
        if self.backend.read_every == 1:
            self._figures(self.unread[-1])  # before the weights change; on a device AdamW.clip protects them
        if not self.captured:
            self.parallel.update(pace)
        self.step += 1
        self.micro_batches += count
        if self._bar is not None:
            self._bar.update(1)

    def _pace(self, progress: float, batches: Sequence[Batch]) -> Pace:
        """What the schedules say of the step."""
        settings, further = self.settings, self.settings.points("mtp_schedule")
        lr = learning_rate(
            settings.schedule, progress, settings.lr, decay=settings.decay_fraction, warmup=settings.warmup
        )
        # A step takes at most all of a weight: a run of few steps would turn its sign.
        timescale = settings.decay_timescale
        decay = min(1.0, self._step_share() / timescale) / settings.lr if timescale else None
        if settings.rate_rule != "plain":
            lr *= batch_factor(settings.rate_rule, sum(batch.size("tokens") for batch in batches))
        points, weights = settings.points("momentum_schedule"), tuple[float, ...]()
        if further:
            first, *others = self.task.model.config.head_weights
            weights = (first, *(weight * linear(further, progress) for weight in others))
        return Pace(lr, linear(points, progress) if points else None, weights, decay)

    def _step_share(self) -> float:
        """The share of a step in the run; by the clock, 0 in the first steps, in which kernels are compiled."""
        if self.settings.steps is not None:
            return 1 / self.settings.steps
        return self._step_seconds / (60.0 * (self.settings.minutes or 0.0))

    def _set_window(self, window: int) -> None:
        if window != self._window:
            self._window = window
            self.parallel.set_window(window)

    def _figures(self, taken: Step) -> tuple[dict[str, float], float]:
        """A step's figures and gradient norm; waits for the device. Raises UserError if they are not finite."""
        found = self.objective.figures(self.backend.to_numpy(taken.totals.sums), taken.totals.counts)
        found |= taken.figures
        norm = float(taken.norm)
        if not (np.isfinite(found["loss"]) and np.isfinite(norm)):
            self._refuse_nonfinite(taken, found["loss"], norm)
        return found, norm

    def report(self) -> None:
        """Read the figures of the steps since the last report, and log them."""
        if not self.unread:
            return
        self.backend.synchronize()
        if not self.rates:
            compile.on_load = None
            self.parallel.be_patient(self.settings.timeout)
            if self._kernels:
                took(
                    f"preparing {count_of(len(self._kernels), 'kernel')}, which the next run finds on disk",
                    sum(self._kernels),
                    self._say,
                )
            first = "the first step" if len(self.unread) == 1 else f"the first {len(self.unread)} steps"
            took(first, time.perf_counter() - self._began, self._say)
        seconds = time.perf_counter() - self._began
        if self.rates:
            self._step_seconds = seconds / len(self.unread)
        rate = sum(taken.size(self.task.unit) for taken in self.unread) / seconds
        self.rates.append(rate)
        for taken in self.unread:
            found, norm = self._figures(taken)
            self.tokens += taken.size(self.task.unit)
            self.log.write(
                step=taken.number + 1,
                **self._read(),
                **found,
                lr=taken.lr,
                grad_norm=norm,
                **{f"{self.task.unit}_per_second": round(rate)},
                seconds=round(self.elapsed(), 3),
            )
        if self._bar is not None:
            bits = f", {found['bits_per_byte']:.2f} bits/byte" if "bits_per_byte" in found else ""
            loss = f"loss {figure(found['loss'])}{bits}"
            if curve := self.task.curve:  # a second name of the loss, or another figure
                named = f"{curve} {figure(found[curve])}"
                loss = named if found[curve] == found["loss"] else f"{loss}, {named}"
            left = max(0.0, 60 * (self.settings.minutes or 0) - self.elapsed())
            rest = "" if self.settings.steps else f", {left:.0f} s left"
            speed = f"{rate:,.0f} {self.task.unit}/s"
            self._bar.set_postfix_str(f"{loss}, {speed}{rest}", refresh=False)
        self.unread.clear()
        self._began = time.perf_counter()

    def evaluate(self) -> Mapping[str, float]:
        """Measure the model on held-out data, and show a sample. Also logs the norms of the last step's gradients by
        layer, unless they are parallel, and the memory."""
        self.optimizer.settle()  # a decoder keeps the arrays, which do not wait as `Param.value` does
        norms = {} if self.parallel.rank.zero_optimizer else metrics.layer_norms(self.buffer, self.backend)
        figures = self.task.evaluate(self.parallel)
        memory = {"peak_memory_mib": round(metrics.peak_memory_mib(), 1)}
        if held := self.backend.memory().get("held"):
            memory["gpu_memory_mib"] = round(held / 2**20, 1)
        self.log.write(step=self.step, **self._read(), seconds=round(self.elapsed(), 3), **figures, **norms, **memory)
        shown = ", ".join(f"{name.replace('_', ' ')} {figure(value)}" for name, value in figures.items())
        self._say(f"step {self.step}: {shown}")
        if self.settings.keep_best and not metrics.compared([figures], self.task.curve):
            names = ", ".join((*metrics.COMPARED, *([f"val_{self.task.curve}"] if self.task.curve else [])))
            self._say(f"--keep-best keeps no checkpoint: none of {names} is among the held-out figures")
        if text := self.task.sample():
            self.log.write_sample(step=self.step, **self._read(), text=text)
            self._say(text)
        return figures

    def _best(self) -> int | None:
        """With --keep-best, the step with the best held-out figure so far."""
        return metrics.best_step(self.log.path, self.task.curve) if self.settings.keep_best else None

    def _say(self, line: str) -> None:
        line = printable(line)  # a sample is untrusted text
        print(line) if self._bar is None else self._bar.write(line)

    def save(self) -> Path:
        """Write a checkpoint. Raises UserError if a weight is not finite or the files cannot be written."""
        more = {OF_TASK + name: np.ascontiguousarray(array) for name, array in self.task.state.items()}
        if self.parallel.state is not None:
            more[CARRIED] = np.array(self.backend.to_numpy(self.parallel.carried()))
        meta = {
            **self.task.meta,
            "settings": self.settings.to_dict(),
            "elapsed": round(self.elapsed(), 3),
            **self._read(),
        }
        if self.settings.points("batch_schedule"):
            meta["micro_batches"] = self.micro_batches
        if self.group.size > 1:
            meta["ranks"] = self.group.size
        if (joules := self.joules()) is not None:
            meta["joules"] = joules
        if self.rates:
            meta[f"{self.task.unit}_per_second"] = round(float(np.median(self.rates)))
        try:
            write = partial(state_of_run.write, self.parallel, more)
            self.last_saved = checkpoint.save_with(
                self.out,
                self.step,
                write,
                self.task.tokenizer,
                meta,
                self.settings.keep,
                self.task.published,
                self._best(),
            )
            self._saved_step = self.step
        except FloatingPointError as bad:
            raise UserError(
                f"step {self.step}: weight {bad} is not finite; {self._last_good()}. Try a lower --lr or --clip"
            ) from None
        return self.last_saved

    # --- the end

    def finish(self) -> Path:
        """Plot the curve and print a summary; after a signal exit the process."""
        last = self.last_saved or self.save()
        checkpoint.prune(self.out, self.settings.keep, self._best())  # a run killed after its last save has not pruned
        rows, picture = metrics.read(self.log.path), self.out / "loss.png"
        written = [last, self.log.path]
        resume = f"--resume --out {shlex.quote(str(self.out))}"
        try:
            if metrics.plot(rows, picture, self.task.curve, self.task.unit):
                written.append(picture)
        except OSError as error:  # a missing picture is not a failed run
            print(
                f"warning: cannot write {picture}: {error.strerror or error}; all else is saved. Free some space, "
                f"then {resume} draws it",
                file=sys.stderr,
            )
        if self.signals.received is not None:
            print(f"\nstopped at step {self.step}; saved {last}. Continue with {resume}", file=sys.stderr)
            sys.exit(128 + self.signals.received)
        held, joules = self.backend.memory().get("held"), self.joules()
        on_gpu = f", {held / 2**20:.0f} MiB on the GPU" if held else ""
        energy = f", {joules / 3600:.1f} Wh as the GPU counts" if joules is not None else ""
        print(
            f"{count_of(self.step, 'step')} in {self.elapsed():.0f} s, peak memory {metrics.peak_memory_mib():.0f} "
            f"MiB{on_gpu}{energy}"
        )
        print(f"wrote {', '.join(map(str, written))}")
        if self.step == self._bar.initial:
            own = shlex.quote(str(self.out))
            base = f" with --base {own}, which trains on from its weights" if hasattr(self.settings, "base") else ""
            print(f"the run had ended before; start another{base}, in another --out")
        self._print_utilisation()
        _print_overfitting(rows, self.settings)
        return last

    def _print_utilisation(self) -> None:
        if not (self.rates and self.task.flop_per_token):
            return
        try:
            peak = self.backend.matmul_peak() / 1e9
        except MemoryError:  # the model fills the device; it is saved already
            return
        rate = float(np.median(self.rates))
        achieved = rate * self.task.flop_per_token / 1e9
        gflop = f"{achieved:,.0f}" if achieved >= 10 else f"{achieved:.3g}"
        share = f"{achieved / peak:.0%}" if achieved >= 0.01 * peak else f"{100 * achieved / peak:.2g}%"
        counted = f" ({FLOP_CONVENTION})" if self.task.unit == "tokens" else ""
        print(
            f"median {rate:,.0f} {self.task.unit}/s: {gflop} GFLOP/s, {share} of the {peak:,.0f} "
            f"that a matrix product reaches here in {self.backend.precision.name}{counted}"
        )

    def _refuse_nonfinite(self, taken: Step, loss: float, norm: float) -> NoReturn:
        if self._bar is not None:
            self._bar.close()
        noise = self.noise.fork(str(taken.number))
        counts = taken.totals.counts
        if self.parallel.alone:
            sources: Iterable[str] = (
                first_nonfinite(self.task.model, batch, self.objective, counts, noise.fork(f"{i}/0"))
                for i, batch in enumerate(taken.batches)
            )
        else:
            found = self.parallel.on_all_ranks(diagnose.sources, taken.where, counts, noise)
            sources = [f"{what}, {self.group.name(rank)}" for rank, what in enumerate(found) if what]
        source = next(filter(None, sources), "the sum of the gradients")
        raise UserError(
            f"step {taken.number}: loss {loss}, gradient norm {norm}: the first number that is not finite came from "
            f"{source}; {self._last_good()}. Try a lower --lr or --clip"
        )

    def _last_good(self) -> str:
        left = checkpoint.steps(self.out)
        return f"the last good checkpoint is {left[-1]}" if left else "no checkpoint had been saved yet"


def train(task: Task, settings: Settings, backend: Backend, resume: bool = False) -> Path:
    """Run to the end of `settings`; returns the last checkpoint. Exits with 128 + number after a signal."""
    with claimed(settings, resume):
        return Run(task, settings, backend, resume).train()


def _print_overfitting(rows: Sequence[Mapping[str, Any]], settings: Settings) -> None:
    """Print a warning if the held-out loss was lower before: it should be lowest at the end of the schedule."""
    key = "val_bits_per_byte"
    held_out = [row for row in rows if key in row]
    if not held_out:
        return
    best, last = min(held_out, key=lambda row: row[key]), held_out[-1]
    if last[key] > (1 + OVERFITTED) * best[key]:
        taught = ", or with a --teacher" if isinstance(settings, Teaching) and not settings.teacher else ""
        print(
            f"held-out bits per byte were {best[key]:.3f} at step {best['step']} and are {last[key]:.3f} now: the "
            f"model overfits. Train for fewer steps, on more data, or with more --weight-decay{taught}"
        )


def _check_same(found: checkpoint.Checkpoint, task: Task) -> None:
    given = json.loads(json.dumps(task.meta))  # as in the checkpoint, where a tuple is a list
    parts = {
        "model": "model",
        "config": "config",
        "tokenizer_hash": "tokenizer",
        "data_hash": "data",
        "examples_hash": "data",
        "teacher": "teacher",
    }
    for key, what in parts.items():
        if key == "teacher" and key not in found.meta and key in given:
            raise UserError(
                f"--resume: {found.path} was made without a teacher; leave out --teacher, or start a new run with "
                "another --out"
            )
        # Checkpoints of earlier versions do not name the model.
        if key in found.meta and found.meta[key] != given.get(key):
            raise UserError(
                f"--resume: {found.path} was made with another {what}; give the same {what}, or start a new run "
                "with another --out"
            )
