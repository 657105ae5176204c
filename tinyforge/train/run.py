"""One training run: what pretraining, fine-tuning and a recipe of one's own share.

A recipe hands in a `Task`: the model, where batches come from, what is learned of them, how to evaluate, what to
sample. `Run` does the rest: sharded gradients, clipping, the optimizer, the schedule, progress, metrics, checkpoints,
signals, and the stop on a number that is not finite. Read `Run.train`, then `Run.step`.
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
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tinyforge import checkpoint
from tinyforge.backends import Backend, compile
from tinyforge.errors import UserError
from tinyforge.files import locked
from tinyforge.optim import AdamWConfig, MuonConfig, learning_rate
from tinyforge.parallel import Alone, Group
from tinyforge.parallel.launch import Ranks, joined, same
from tinyforge.parallel.star import PREPARING
from tinyforge.params import load_named
from tinyforge.report import took
from tinyforge.rng import Stream
from tinyforge.terminal import printable
from tinyforge.train import diagnose, metrics
from tinyforge.train import state as state_of_run
from tinyforge.train.captured import Captured
from tinyforge.train.data_parallel import Model, Sharded, Totals
from tinyforge.train.diagnose import first_nonfinite
from tinyforge.train.objectives import Batch, Objective, with_terms
from tinyforge.train.plan import Plan
from tinyforge.train.settings import Settings
from tinyforge.train.writers import open_writer

FLOP_CONVENTION = "6 FLOP a token and parameter outside the embedding, and attention; no recomputation"
FIRST_STEPS = 600.0  # seconds that a rank may take over its first steps, in which a GPU's kernels are compiled
CARRIED = "carried"  # the state that goes from batch to batch, beside the moments in a checkpoint
OF_TASK = "task."  # before the names of `Task.state` there
OVERFITTED = 0.01  # share by which held-out text may end worse than it was


@dataclass(frozen=True)
class Task:
    """What a recipe brings to a run.

    batches(step): the micro-batches of that step, a pure function. evaluate(sharded): figures on held-out data, with
    `val_bits_per_byte` among them where there are bytes. sample(): a few lines to show. meta: what else goes into
    meta.json; "kind", "model", "config" and "tokenizer_hash" at least, so that the checkpoint can be opened.
    flop_per_token: for the share of the machine's peak that training reached. carried: rows whose state is carried from
    batch to batch, see `Batch.stream`. unit: what the speed counts, "tokens" or "images", one of them a row of a batch;
    flop_per_token is that of a unit. curve: the figure that the picture shows, the loss or bits per byte where none is
    named. figures(): more to log of the step whose batches were made last. state: float arrays that `batches` keeps
    from one step for the next, where it is no pure function: they go into the checkpoint, and come back from there.
    plan: of the memory; it is noted down with the run.
    """

    model: Model
    tokenizer: Any
    objective: Objective
    batches: Callable[[int], Sequence[Batch]]
    evaluate: Callable[[Sharded], Mapping[str, float]]
    sample: Callable[[], str]
    meta: dict[str, Any]
    flop_per_token: float = 0.0
    carried: int = 0
    unit: str = "tokens"
    curve: str = ""
    figures: Callable[[], Mapping[str, float]] = dict
    state: dict[str, np.ndarray] = field(default_factory=dict)
    plan: Plan | None = None


@dataclass(frozen=True)
class Step:
    """A step that was taken, or is about to be. Its sums and norm may still be under way on a device."""

    number: int
    batches: Sequence[Batch]
    totals: Totals
    norm: Any
    lr: float
    figures: Mapping[str, float]

    def size(self, unit: str) -> int:
        """Tokens that were read, those that only fill a row counted too; or rows, which are images."""
        return sum(batch.ids.size if unit == "tokens" else len(batch.ids) for batch in self.batches)


class Signals:
    """Ctrl-C and SIGTERM ask the run to save and leave after the step; a second one ends the process at once.

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
    """Hold --out for this process. Refused where another run writes there, and, without `resume`, where one has been.

    A recipe claims its folder before it prepares anything: what is wrong shows at once. Raises UserError.
    """
    out = Path(settings.out)
    with ExitStack() as held:
        try:
            held.enter_context(locked(out, leave_nothing=True))
        except BlockingIOError:
            raise UserError(f"{out}: another run is writing there; wait for it, or choose another --out") from None
        except OSError as error:
            raise metrics.cannot_write_in(out, error) from error
        # Asked while the folder is held: a run that ends just now must not be taken for none.
        if checkpoint.steps(out) and not resume:
            raise UserError(f"{out} already holds a run; continue it with --resume, or choose another --out")
        checkpoint.sweep(out)
        yield


@contextmanager
def running(settings: Settings, resume: bool) -> Iterator[Ranks]:
    """Meet the run's other ranks, if there are any; rank 0 holds --out. A recipe does all its work in here: whatever
    rank fails, rank 0 says so and all end."""
    with joined() as ranks:
        if ranks.size > 1 and not settings.several_ranks:
            raise UserError(f"the run has {ranks.size} ranks, and this recipe runs as one; drop mpirun or srun")
        if settings.batch_size % ranks.size:
            raise UserError(f"--batch-size is {settings.batch_size}, the run has {ranks.size} ranks; use a multiple")
        with claimed(settings, resume) if ranks.rank == 0 else nullcontext():
            yield ranks


class Run:
    """The state of a run and its parts, each of which can be called alone.

    step: steps taken. tokens, joules: used by them. unread: steps whose loss has not been looked at: on a device each
    look waits, so it is taken every `backend.read_every` steps. rates: tokens per second between looks. last_saved:
    the newest checkpoint. received: the signal that ends the run.
    """

    def __init__(self, task: Task, settings: Settings, backend: Backend, resume: bool = False) -> None:
        self.task, self.settings, self.backend = task, settings, backend
        self.out = Path(settings.out)
        self.buffer = task.model.buffer
        self.objective = with_terms(task.objective, task.model.config)
        self.group: Group = backend.group or Alone()
        self.sharded = Sharded(task.model, backend, task.objective, task.carried,
                               shards=settings.shards_per_step or 0, batches=task.batches)  # fmt: skip
        self.noise = Stream(settings.seed, "dropout")
        self.step, self.tokens = 0, 0
        self.last_saved: Path | None = None
        self.signals = Signals()
        self.unread: list[Step] = []
        self.rates: list[float] = []
        self._before, self._joules_before = 0.0, 0.0  # seconds and joules of earlier processes
        same(self.group, {key: task.meta.get(key) for key in ("model", "config", "tokenizer_hash", "data_hash")})
        self._begin(checkpoint.load(self.out) if resume and self.group.rank == 0 else None)
        self.captured = Captured(self.sharded, self.optimizer, settings.clip) if settings.capture == "on" else None
        if self.group.rank:
            return
        self.log = metrics.Metrics(self.out, self.step)
        metrics.save_about(self.out, self._about())
        self.log.also = open_writer(settings.log, self.out, self.step, settings.to_dict())
        self._start = self._began = time.perf_counter()  # the process's part of the run; what is not reported yet
        self._energy_at_start = backend.energy()
        self._bar: Any = None
        self._kernels: list[float] = []  # seconds that each took to load, until the first report

    def _begin(self, found: checkpoint.Checkpoint | None) -> None:
        """Weights, moments and a carried state as they are at the start of a run, or in a checkpoint. Rank 0 has the
        checkpoint, and hands what is in it to the others: they may be more or fewer than those that made it."""
        group, buffer, backend, settings = self.group, self.buffer, self.backend, self.settings
        if found:
            _check_same(found, self.task)
            load_named(buffer, buffer.masters, found.weights, backend, found.path)
            moments = found.optimizer()
            self.task.state.update({name.removeprefix(OF_TASK): moments[name] for name in moments
                                    if name.startswith(OF_TASK)})  # fmt: skip
            self._take_meta(found)
        group.broadcast_(buffer.masters)
        if buffer.frozen:
            group.broadcast_(buffer.frozen_values)
        group.join()
        buffer.publish()
        rank = self.sharded.rank
        config = (MuonConfig if settings.optimizer == "muon" else AdamWConfig)(weight_decay=settings.weight_decay)
        self.optimizer = rank.make_optimizer(config, settings.zero, settings.grad_accum)
        if settings.zero == 2 and rank.sharded and rank.sharded.grads is None:
            print("--zero 2 keeps the gradients whole here, as --zero 1: --shards-per-step adds up parts of a step in "
                  "them")  # fmt: skip
        self.step = self.optimizer.step_count = group.send_object(self.step)
        if not self.step:
            return
        state_of_run.read_moments(self.optimizer, group, found)
        state = self.sharded.state
        if state is None:
            return
        if found:
            moments = found.optimizer()
            if (shape := moments.shape(CARRIED)) != state.shape:
                got = shape or "nothing"
                raise UserError(f"checkpoint {found.path}: {CARRIED} has {got}, the run wants {state.shape}")
            state[...] = backend.asarray(moments[CARRIED], state.dtype)
        group.broadcast_(state)
        group.join()

    def _take_meta(self, found: checkpoint.Checkpoint) -> None:
        self.step = found.meta["step"]
        self.tokens, self._before = found.meta.get("tokens", 0), found.meta["elapsed"]
        self._joules_before = found.meta.get("joules", 0.0)
        self.last_saved = found.path
        print(f"resuming at step {self.step} from {found.path}")
        ranks = found.meta.get("ranks", 1)
        if ranks != self.group.size and not self.settings.shards_per_step:
            print(f"begun on {ranks} rank{'s' * (ranks > 1)}, going on with {self.group.size}: the same batches, but "
                  "other last bits of sums; --shards-per-step makes them the same")  # fmt: skip

    def _about(self) -> dict[str, Any]:
        """What run.json has: what is known before the first step."""
        task, plan = self.task, self.task.plan
        names = ("kind", "model", "config", "corpus", "machine")
        return {
            **{name: value for name, value in task.meta.items() if name in names},
            "parameters": self.buffer.count, "learned": sum(p.size for p in self.buffer.params),
            "unit": task.unit, "flop_per_token": task.flop_per_token, "plan": asdict(plan) if plan else None,
            "settings": self.settings.to_dict(),
        }  # fmt: skip

    # --- where the run is

    def elapsed(self) -> float:
        """Seconds, those of the processes before this one included."""
        return self._before + time.perf_counter() - self._start

    def joules(self) -> float | None:
        """What the device has used for the run; None where nobody counts."""
        energy = self.backend.energy()
        if energy is None or self._energy_at_start is None:
            return None
        return self._joules_before + energy - self._energy_at_start

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
            self.sharded.follow()
        pace = 0.5 if sys.stderr.isatty() else 20.0  # seconds between updates: a log file wants few lines
        self._bar = tqdm(total=self.settings.steps, initial=self.step, unit="step", dynamic_ncols=True,
                         mininterval=pace, maxinterval=pace)  # fmt: skip
        compile.on_load = self._loaded
        with ExitStack() as inside, self._bar, warnings.catch_warnings():
            # Each step is checked for numbers that are not finite, and the message names their source.
            warnings.simplefilter("ignore", RuntimeWarning)
            done = self.progress() >= 1.0
            self.sharded.be_patient(max(FIRST_STEPS, self.settings.timeout))
            self._began = time.perf_counter()
            while not done and not self.signals.received:
                self.take_step()
                if self.signals.waiting:  # until here nothing is lost: a signal has ended the process at once
                    inside.enter_context(self.signals)
                done = self.progress() >= 1.0
                stopping = done or self.signals.received is not None
                if stopping or any(self._every(n) for n in (
                    self.backend.read_every, self.settings.eval_every, self.settings.save_every)):  # fmt: skip
                    self.report()
                # Evaluation comes before the save: what is resumed has its figures in the metrics already.
                evaluates = self._every(self.settings.eval_every) or done
                saves = self._every(self.settings.save_every) or done or self.signals.received is not None
                if evaluates or saves:
                    self.sharded.be_patient(PREPARING)  # the other ranks wait meanwhile
                if evaluates:
                    self.evaluate()
                if saves or self.signals.received is not None:  # it may have come after the look above
                    if not (evaluates or saves):
                        self.sharded.be_patient(PREPARING)
                    self.report()
                    self.save()
                if (evaluates or saves) and not (done or self.signals.received):
                    self.sharded.be_patient(self.settings.timeout)
                if not self.unread:
                    self._began = time.perf_counter()  # evaluating and saving are not training
        return self.finish()

    def _loaded(self, kernel: str, seconds: float) -> None:
        """A GPU's kernels are compiled during the first steps, the first time for half a minute: that is shown."""
        self._kernels.append(seconds)
        self._bar.set_postfix_str(f"{len(self._kernels)} kernels made ready", refresh=True)

    def _every(self, steps: int) -> bool:
        return self.step % steps == 0

    def take_step(self) -> None:
        """One optimizer step. On a device nothing here waits for it."""
        task, settings = self.task, self.settings
        batches, noise = task.batches(self.step), self.noise.fork(str(self.step))
        lr = learning_rate(
            settings.schedule, self.progress(), settings.lr, decay=settings.lr_decay, warmup=settings.warmup
        )
        if self.captured:
            totals, norm = self.captured.step(batches, noise, lr, self.step)
        else:
            totals = self.sharded.gradients(batches, noise, self.step)
            norm, _ = self.sharded.clip(settings.clip)
        self.unread.append(Step(self.step, batches, totals, norm, lr, task.figures()))
        if self.backend.read_every == 1:
            self._figures(self.unread[-1])  # before the weights change; a device keeps them by itself, see AdamW.clip
        if not self.captured:
            self.sharded.update(lr)
        self.step += 1
        if self._bar is not None:
            self._bar.update(1)

    def _figures(self, taken: Step) -> tuple[dict[str, float], float]:
        """A step's figures and gradient norm; waits for the device. Raises UserError if they are not finite."""
        found = self.objective.figures(self.backend.to_numpy(taken.totals.sums), taken.totals.counts)
        found |= taken.figures
        norm = float(taken.norm)
        if not (np.isfinite(found["loss"]) and np.isfinite(norm)):
            self._refuse_nonfinite(taken, found["loss"], norm)
        return found, norm

    def report(self) -> None:
        """Look at the steps since the last look, and write them down."""
        if not self.unread:
            return
        self.backend.synchronize()
        if not self.rates:
            compile.on_load = None
            self.sharded.be_patient(self.settings.timeout)
            if self._kernels:
                took(f"making {len(self._kernels)} kernels ready, the next run finds them on the disk",
                     sum(self._kernels), self._say)  # fmt: skip
            first = "the first step" if len(self.unread) == 1 else f"the first {len(self.unread)} steps"
            took(first, time.perf_counter() - self._began, self._say)
        rate = sum(taken.size(self.task.unit) for taken in self.unread) / (time.perf_counter() - self._began)
        self.rates.append(rate)
        for taken in self.unread:
            found, norm = self._figures(taken)
            self.tokens += taken.size(self.task.unit)
            self.log.write(
                step=taken.number + 1, tokens=self.tokens, **found, lr=taken.lr, grad_norm=norm,
                tokens_per_second=round(rate), seconds=round(self.elapsed(), 3),
            )  # fmt: skip
        if self._bar is not None:
            bits = f", {found['bits_per_byte']:.2f} bits/byte" if "bits_per_byte" in found else ""
            bits += f", {self.task.curve} {found[self.task.curve]:.3f}" if self.task.curve else ""
            left = max(0.0, 60 * (self.settings.minutes or 0) - self.elapsed())
            rest = "" if self.settings.steps else f", {left:.0f} s left"
            speed = f"{rate:,.0f} {self.task.unit}/s"
            self._bar.set_postfix_str(f"loss {found['loss']:.3f}{bits}, {speed}{rest}", refresh=False)
        self.unread.clear()
        self._began = time.perf_counter()

    def evaluate(self) -> Mapping[str, float]:
        """Measure the model on held-out data, and show a sample. Logged with it: the norms of the last step's gradients
        by layer, where they still lie there whole, and the memory."""
        self.optimizer.settle()  # a decoder keeps arrays, which do not wait
        norms = {} if self.sharded.rank.sharded else metrics.layer_norms(self.buffer, self.backend)
        figures = self.task.evaluate(self.sharded)
        memory = {"peak_memory_mib": round(metrics.peak_memory_mib(), 1)}
        if held := self.backend.memory().get("held"):
            memory["gpu_memory_mib"] = round(held / 2**20, 1)
        self.log.write(
            step=self.step, tokens=self.tokens, seconds=round(self.elapsed(), 3), **figures, **norms, **memory
        )
        shown = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        self._say(f"step {self.step}: {shown}")
        text = self.task.sample()
        self.log.write_sample(step=self.step, tokens=self.tokens, text=text)
        self._say(text)
        return figures

    def _say(self, line: str) -> None:
        line = printable(line)  # a sample is made of foreign text
        print(line) if self._bar is None else self._bar.write(line)

    def save(self) -> Path:
        """Write a checkpoint. Raises UserError where a weight is not finite, or the disk refuses."""
        more = {OF_TASK + name: np.ascontiguousarray(array) for name, array in self.task.state.items()}
        if self.sharded.state is not None:
            more[CARRIED] = np.array(self.backend.to_numpy(self.sharded.carried()))
        meta = {
            **self.task.meta, "settings": self.settings.to_dict(), "elapsed": round(self.elapsed(), 3),
            "tokens": self.tokens,
        }  # fmt: skip
        if self.group.size > 1:
            meta["ranks"] = self.group.size
        if (joules := self.joules()) is not None:
            meta["joules"] = joules
        if self.rates:
            meta["tokens_per_second"] = round(float(np.median(self.rates)))
        try:
            write = partial(state_of_run.write, self.sharded, more)
            self.last_saved = checkpoint.save_with(
                self.out, self.step, write, self.task.tokenizer, meta, self.settings.keep
            )
        except FloatingPointError as bad:
            raise UserError(
                f"step {self.step}: weight {bad} is not finite; {self._last_good()}. Try a lower --lr or --clip"
            ) from None
        return self.last_saved

    # --- the end

    def finish(self) -> Path:
        """Draw the curve and say how it went; after a signal leave the process."""
        last = self.last_saved or self.save()
        checkpoint.prune(self.out, self.settings.keep)  # a kill after the last save has left that to us
        rows, picture = metrics.read(self.log.path), self.out / "loss.png"
        written = [last, self.log.path]
        resume = f"--resume --out {shlex.quote(str(self.out))}"
        try:
            if metrics.plot(rows, picture, self.task.curve):
                written.append(picture)
        except OSError as error:  # a picture is no reason to end as if the run had failed
            print(f"warning: cannot write {picture}: {error.strerror or error}; all else is saved. Free some space, "
                  f"then {resume} draws it", file=sys.stderr)  # fmt: skip
        if self.signals.received is not None:
            print(f"\nstopped at step {self.step}; saved {last}. Continue with {resume}", file=sys.stderr)
            sys.exit(128 + self.signals.received)
        held, joules = self.backend.memory().get("held"), self.joules()
        on_gpu = f", {held / 2**20:.0f} MiB on the GPU" if held else ""
        energy = f", {joules / 3600:.1f} Wh as the GPU counts" if joules is not None else ""
        print(f"{self.step} steps in {self.elapsed():.0f} s, peak memory {metrics.peak_memory_mib():.0f} MiB"
              f"{on_gpu}{energy}")  # fmt: skip
        print(f"wrote {', '.join(map(str, written))}")
        self._print_utilisation()
        _print_overfitting(rows)
        return last

    def _print_utilisation(self) -> None:
        if not (self.rates and self.task.flop_per_token):
            return
        try:
            peak = self.backend.matmul_peak() / 1e9
        except MemoryError:  # the model fills the device; what it trained is saved
            return
        rate = float(np.median(self.rates))
        achieved = rate * self.task.flop_per_token / 1e9
        print(
            f"median {rate:,.0f} {self.task.unit}/s: {achieved:,.0f} GFLOP/s, {achieved / peak:.0%} of the {peak:,.0f} "
            f"that a matrix product reaches here in {self.backend.precision.name} ({FLOP_CONVENTION})"
        )

    def _refuse_nonfinite(self, taken: Step, loss: float, norm: float) -> NoReturn:
        if self._bar is not None:
            self._bar.close()
        noise = self.noise.fork(str(taken.number))
        counts = taken.totals.counts
        if self.sharded.alone:
            sources: Iterable[str] = (
                first_nonfinite(self.task.model, batch, self.objective, counts, noise.fork(f"{i}/0"))
                for i, batch in enumerate(taken.batches)
            )
        else:
            found = self.sharded.on_all_ranks(diagnose.sources, taken.number, counts, noise)
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


def _print_overfitting(rows: Sequence[Mapping[str, Any]]) -> None:
    """Say so if held-out text was predicted better before: the end of a schedule is where it should be best."""
    key = "val_bits_per_byte"
    held_out = [row for row in rows if key in row]
    if not held_out:
        return
    best, last = min(held_out, key=lambda row: row[key]), held_out[-1]
    if last[key] > (1 + OVERFITTED) * best[key]:
        print(f"held-out bits per byte were {best[key]:.3f} at step {best['step']} and are {last[key]:.3f} now: the "
              "model overfits. Train for fewer steps, on more data, or with more --weight-decay")  # fmt: skip


def _check_same(found: checkpoint.Checkpoint, task: Task) -> None:
    given = json.loads(json.dumps(task.meta))  # as the checkpoint has it: a tuple is a list there
    for key, what in (("model", "model"), ("config", "config"), ("tokenizer_hash", "tokenizer"), ("data_hash", "data")):
        # Checkpoints of earlier versions name no model: their settings do, by default.
        if key in found.meta and found.meta[key] != given.get(key):
            raise UserError(
                f"--resume: {found.path} was made with another {what}; give the same {what}, or start a new run "
                "with another --out"
            )
