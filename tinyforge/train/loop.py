"""The training loop: what pretraining and fine-tuning share.

A recipe hands in a `Task`: where batches come from, how to evaluate, what to sample. The loop does the rest: sharded
gradients, clipping, AdamW, the schedule, progress, metrics, checkpoints, signals, and the stop on a NaN.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.ops.cross_entropy import head_scale
from tinyforge.optim import AdamW, AdamWConfig, learning_rate
from tinyforge.params import load_named, named
from tinyforge.train import metrics
from tinyforge.train.diagnose import first_nonfinite
from tinyforge.train.settings import Settings
from tinyforge.train.sharded import Batch, Model, Sharded

LN2 = float(np.log(2.0))
OVERFITTED = 0.01  # share by which held-out text may end worse than it was


@dataclass(frozen=True)
class Task:
    """What a recipe brings to the loop.

    batches(step): the micro-batches of that step, a pure function. evaluate(sharded): figures on held-out data, with
    `val_bits_per_byte` among them. sample(): a few lines to show. meta: what else goes into meta.json.
    flop_per_token, counted as flop_convention says: for the share of the machine's peak that training reached.
    """

    model: Model
    tokenizer: Any
    byte_lengths: np.ndarray
    head_weights: tuple[float, ...]
    batches: Callable[[int], Sequence[Batch]]
    evaluate: Callable[[Sharded], dict[str, float]]
    sample: Callable[[], str]
    meta: dict[str, Any]
    flop_per_token: float = 0.0
    flop_convention: str = ""


@dataclass(frozen=True)
class _Step:
    """A step that was taken, or is about to be. nll and norm may still be under way on a device."""

    number: int
    batches: Sequence[Batch]
    targets: np.ndarray
    scale: np.ndarray
    nll: Any
    norm: Any
    lr: float

    @property
    def size(self) -> int:
        """Tokens that were read, those that only fill a row counted too."""
        return sum(batch.ids.size for batch in self.batches)

    def read(self, backend: Backend) -> tuple[float, float, float]:
        """Loss, gradient norm, and head 0's nll; waits for the device."""
        nll = backend.to_numpy(self.nll)
        return float(nll @ self.scale), float(self.norm), float(nll[0])


class _Signals:
    """Ctrl-C and SIGTERM ask the loop to save and leave after the step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> _Signals:
        numbers: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)
        self._old = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.received = number
        signal.signal(number, self._old[number])

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def bits_per_byte(nll: float, targets: np.ndarray, byte_lengths: np.ndarray) -> float:
    """Head 0's summed nll in bits over the true bytes of the tokens it predicted (special tokens have none)."""
    predicted = targets[..., 0]
    return nll / LN2 / max(1, int(byte_lengths[predicted[predicted >= 0]].sum()))


def evaluate_nll(sharded: Sharded, batches: Any, byte_lengths: np.ndarray) -> float:
    """Head 0's bits per byte over all `batches`."""
    return float(evaluate_heads(sharded, batches, byte_lengths)[0])


def evaluate_heads(sharded: Sharded, batches: Any, byte_lengths: np.ndarray) -> np.ndarray:
    """Bits per byte of every head over all `batches`, (K,): its nll over the bytes of its own targets."""
    nll: Any = 0.0
    size: Any = 0.0
    for batch in batches:
        nll += sharded.nll(batch)
        size += np.where(batch.targets >= 0, byte_lengths[batch.targets], 0).sum(axis=(0, 1))
    return nll / LN2 / np.maximum(1.0, size)


def train(task: Task, settings: Settings, backend: Backend, resume: bool) -> Path:
    """Run to the end of `settings`; returns the last checkpoint. Exits with 128 + number after a signal."""
    from tqdm import tqdm

    out = Path(settings.out)
    buffer = task.model.buffer
    sharded = Sharded(task.model, backend)
    optimizer = AdamW(buffer, backend, AdamWConfig(weight_decay=settings.weight_decay))
    step, before, tokens, joules = 0, 0.0, 0, 0.0
    last_saved: Path | None = None
    if resume:
        found = checkpoint.load(out)
        _check_same(found, task)
        load_named(buffer, buffer.masters, found.weights, backend, found.path)
        moments = found.optimizer()
        for prefix, flat in (("m.", optimizer.m), ("v.", optimizer.v)):
            load_named(buffer, flat, moments, backend, found.path, prefix)
        step, before = found.meta["step"], found.meta["elapsed"]
        tokens, joules = found.meta.get("tokens", 0), found.meta.get("joules", 0.0)
        optimizer.step_count = step
        last_saved = found.path
        print(f"resuming at step {step} from {found.path}")
    elif checkpoint.steps(out):
        raise UserError(f"{out} already holds a run; continue it with --resume, or choose another --out")
    log = metrics.Metrics(out, step)
    start, energy_before = time.perf_counter(), backend.energy()
    rates: list[float] = []

    def elapsed() -> float:
        return before + time.perf_counter() - start

    def used() -> dict[str, float]:
        energy = backend.energy()
        return {} if energy is None or energy_before is None else {"joules": joules + energy - energy_before}

    def progress() -> float:
        if settings.steps is not None:
            return step / settings.steps
        return elapsed() / (60.0 * (settings.minutes or 0.0))

    def save() -> Path:
        tensors = named(buffer, optimizer.m, backend, "m.") | named(buffer, optimizer.v, backend, "v.")
        meta = {**task.meta, "settings": settings.to_dict(), "elapsed": round(elapsed(), 3), "tokens": tokens, **used()}
        if rates:
            meta["tokens_per_second"] = round(float(np.median(rates)))
        weights = named(buffer, buffer.masters, backend)
        bad = next((name for name, value in weights.items() if not np.isfinite(value).all()), None)
        if bad is not None:
            raise UserError(f"step {step}: weight {bad} is not finite; {_last_good(out)}. Try a lower --lr or --clip")
        return checkpoint.save(out, step, weights, tensors, task.tokenizer, meta, settings.keep)

    def evaluate(bar: Any) -> None:
        figures = task.evaluate(sharded)
        log.write(step=step, tokens=tokens, seconds=round(elapsed(), 3), **figures)
        shown = ", ".join(f"{k.replace('_', ' ')} {v:.3f}" for k, v in figures.items())
        bar.write(f"step {step}: {shown}")
        bar.write(task.sample())

    pace = 0.5 if sys.stderr.isatty() else 20.0  # seconds between updates: a log file wants few lines
    bar = tqdm(total=settings.steps, initial=step, unit="step", dynamic_ncols=True, mininterval=pace, maxinterval=pace)
    with _Signals() as signals, bar, warnings.catch_warnings():
        # Each step is checked for numbers that are not finite, and the message names their source.
        warnings.simplefilter("ignore", RuntimeWarning)
        done = progress() >= 1.0
        unread: list[_Step] = []
        began = time.perf_counter()

        def check(taken: _Step) -> tuple[float, float, float]:
            loss, norm, first = taken.read(backend)
            if not (np.isfinite(loss) and np.isfinite(norm)):
                bar.close()
                _refuse_nonfinite(task, taken.batches, taken.scale, taken.number, loss, norm, out)
            return loss, norm, first

        def report() -> None:
            """Look at the steps since the last look, and write them down."""
            nonlocal began, tokens
            backend.synchronize()
            rate = sum(taken.size for taken in unread) / (time.perf_counter() - began)
            rates.append(rate)
            for taken in unread:
                loss, norm, first = check(taken)
                bpb = bits_per_byte(first, taken.targets, task.byte_lengths)
                tokens += taken.size
                log.write(
                    step=taken.number + 1, tokens=tokens, loss=loss, bits_per_byte=bpb, lr=taken.lr, grad_norm=norm,
                    tokens_per_second=round(rate), seconds=round(elapsed(), 3),
                )  # fmt: skip
            left = "" if settings.steps else f", {max(0.0, 60 * (settings.minutes or 0) - elapsed()):.0f} s left"
            bar.set_postfix_str(f"loss {loss:.3f}, {bpb:.2f} bits/byte, {rate:,.0f} tokens/s{left}", refresh=False)
            unread.clear()
            began = time.perf_counter()

        while not done and signals.received is None:
            batches = task.batches(step)
            targets = np.concatenate([b.targets.reshape(-1, b.targets.shape[-1]) for b in batches])
            scale = head_scale(targets, task.head_weights)
            nll = sharded.gradients(batches, scale)
            norm, factor = optimizer.clip(settings.clip)
            lr = learning_rate(settings.schedule, progress(), settings.lr, decay=settings.lr_decay)
            unread.append(_Step(step, batches, targets, scale, nll, norm, lr))
            if backend.read_every == 1:
                check(unread[-1])  # before the weights change; a device keeps them by itself, see AdamW.clip
            optimizer.step(lr, factor)
            step += 1
            done = progress() >= 1.0
            bar.update(1)
            stops = (backend.read_every, settings.eval_every, settings.save_every)
            if done or signals.received is not None or any(step % every == 0 for every in stops):
                report()
            # Evaluation comes before the save: what is resumed has its figures in the metrics already.
            if step % settings.eval_every == 0 or done:
                evaluate(bar)
            if step % settings.save_every == 0 or done or signals.received is not None:
                if unread:  # the signal came after the look above
                    report()
                last_saved = save()
            if not unread:
                began = time.perf_counter()  # evaluating and saving are not training
    if last_saved is None:
        last_saved = save()
    written, rows = [last_saved, log.path], metrics.read(log.path)
    try:
        if metrics.plot(rows, out / "loss.png"):
            written.append(out / "loss.png")
    except OSError as error:  # a picture is no reason to end as if the run had failed
        print(f"warning: cannot write {out / 'loss.png'}: {error.strerror or error}; all else is saved. Free some "
              f"space, then --resume --out {out} draws it", file=sys.stderr)  # fmt: skip
    if signals.received is not None:
        print(f"\nstopped at step {step}; saved {last_saved}. Go on with --resume --out {out}", file=sys.stderr)
        sys.exit(128 + signals.received)
    held = backend.memory().get("held")
    on_gpu = f", {held / 2**20:.0f} MiB on the GPU" if held else ""
    energy = f", {used()['joules'] / 3600:.1f} Wh as the GPU counts" if used() else ""
    print(f"{step} steps in {elapsed():.0f} s, peak memory {metrics.peak_memory_mib():.0f} MiB{on_gpu}{energy}")
    print(f"wrote {', '.join(map(str, written))}")
    if rates and task.flop_per_token:
        _print_utilisation(task, backend, float(np.median(rates)))
    _print_overfitting(rows)
    return last_saved


def _print_overfitting(rows: Sequence[dict[str, Any]]) -> None:
    """Say so if held-out text was predicted better before: the end of a schedule is where it should be best."""
    key = "val_bits_per_byte"
    held_out = [row for row in rows if key in row]
    if not held_out:
        return
    best, last = min(held_out, key=lambda row: row[key]), held_out[-1]
    if last[key] > (1 + OVERFITTED) * best[key]:
        print(f"held-out bits per byte were {best[key]:.3f} at step {best['step']} and are {last[key]:.3f} now: it "
              "learns its data by heart. Train for less long, on more data, or with more --weight-decay")  # fmt: skip


def _print_utilisation(task: Task, backend: Backend, tokens_per_second: float) -> None:
    try:
        peak = backend.matmul_peak() / 1e9
    except MemoryError:  # the model fills the device; what it trained is saved
        return
    achieved = tokens_per_second * task.flop_per_token / 1e9
    print(
        f"median {tokens_per_second:,.0f} tokens/s: {achieved:,.0f} GFLOP/s, {achieved / peak:.0%} of the {peak:,.0f} "
        f"that a matrix product reaches here in {backend.precision.name} ({task.flop_convention})"
    )


def _check_same(found: checkpoint.Checkpoint, task: Task) -> None:
    given = json.loads(json.dumps(task.meta))  # as the checkpoint has it: a tuple is a list there
    for key, what in (("config", "config"), ("tokenizer_hash", "tokenizer"), ("data_hash", "data")):
        if found.meta.get(key) != given.get(key):
            raise UserError(
                f"--resume: {found.path} was made with another {what}; give the same {what}, or start a new run "
                "with another --out"
            )


def _refuse_nonfinite(
    task: Task, batches: Sequence[Batch], scale: np.ndarray, step: int, loss: float, norm: float, out: Path
) -> None:
    where = next((w for b in batches if "sum of the" not in (w := first_nonfinite(task.model, b, scale))),
                 "the sum of the gradients")  # fmt: skip
    raise UserError(
        f"step {step}: loss {loss}, gradient norm {norm}: the first number that is not finite came from {where}; "
        f"{_last_good(out)}. Try a lower --lr or --clip"
    )


def _last_good(out: Path) -> str:
    left = checkpoint.steps(out)
    return f"the last good checkpoint is {left[-1]}" if left else "no checkpoint had been saved yet"
