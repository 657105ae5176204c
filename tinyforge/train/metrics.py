"""A run's records: metrics.jsonl, one object per line, and loss.png plotted from it; samples.jsonl, the sampled texts;
run.json, a description of the run. `python -m tinyforge.board` shows them live."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.workers import worker_pids
from tinyforge.checkpoint import how_to_go_on
from tinyforge.errors import UserError
from tinyforge.files import json_value, read_json, write_whole, writing, written_whole
from tinyforge.params import ParamBuffer
from tinyforge.report import NOISE

Row = dict[str, Any]
COMPARED = ("val_bits_per_byte", "val_loss", "test_loss")  # by --keep-best: the first that is there, the lowest


class Metrics:
    """Appends to `out/metrics.jsonl` and `out/samples.jsonl`; a resumed run first drops the rows after the step it
    starts from. All other lines stay unchanged, even damaged ones. also: called with each row of numbers."""

    def __init__(self, out: Path, step: int, also: Callable[[Row], None] | None = None) -> None:
        self.path, self.samples, self.also = out / "metrics.jsonl", out / "samples.jsonl", also
        with writing_in(out):
            out.mkdir(parents=True, exist_ok=True)
            _keep_until(step, self.path, numbers)
            if step and self.samples.exists():
                _keep_until(step, self.samples, sample)
            else:
                self.samples.unlink(missing_ok=True)

    def write(self, **row: Any) -> None:
        self._append(self.path, row)
        if self.also is not None:
            self.also(row)

    def write_sample(self, **row: Any) -> None:
        """row: step, what was read, text; no time, so that a run that was stopped and resumed writes the same bytes."""
        self._append(self.samples, row)

    def _append(self, path: Path, row: Row) -> None:
        try:
            with open(path, "a", encoding="utf-8") as f:
                f.write(json.dumps(row) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; checkpoints are untouched. Free some space, then "
                f"{how_to_go_on(path.parent)}"
            ) from error


def _keep_until(step: int, path: Path, good: Callable[[Any], bool]) -> None:
    """Drop the rows after `step`. Written atomically: a kill must not lose the rows that are kept."""
    kept = [line for line, row in _lines(path, good) if row is None or row["step"] <= step] if step else []
    with written_whole(path) as partial:
        partial.write_bytes(b"".join(line + b"\n" for line in kept))


def save_about(out: Path, about: Mapping[str, Any]) -> None:
    """Write `out/run.json`, which describes the run from the first step on: settings, sizes, the memory plan."""
    with writing_in(out):
        write_whole(out / "run.json", json.dumps(about, indent=1) + "\n")


def layer_norms(buffer: ParamBuffer, backend: Backend) -> dict[str, float]:
    """sqrt(sum g^2) of each layer's gradients, "grad_norm.blocks.3", and of parameters outside of layers,
    "grad_norm.embedding".

    A layer is a parameter's name up to the first number. The squares of all norms add up to the whole norm's.
    """
    squares: dict[str, Any] = {}
    for p in buffer.params:
        words = p.name.split(".")
        number = next((i for i, word in enumerate(words) if word.isdigit()), 0)
        layer = "grad_norm." + ".".join(words[: number + 1])
        flat = buffer.view(buffer.grads, p).reshape(-1)
        squares[layer] = squares.get(layer, 0.0) + flat @ flat  # stays on the device until all are queued
    return {layer: float(backend.to_numpy(total)) ** 0.5 for layer, total in squares.items()}


def writing_in(out: Path) -> AbstractContextManager[None]:
    """Around a write in a run's folder: turns an OSError into a UserError."""
    return writing(f"in {out}", "choose another --out, or check its permissions and space")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file. An incomplete last line, cut off by a kill, is left out; other damaged lines are left
    out with a warning."""
    rows = [row for _, row in _lines(path, numbers)]
    if damaged := [number for number, row in enumerate(rows, start=1) if row is None]:
        which = ", ".join(map(str, damaged[:5])) + f" and {len(damaged) - 5} more" * (len(damaged) > 5)
        print(f"warning: {path}: line {which} damaged, left out", file=sys.stderr)
    return [row for row in rows if row is not None]


def compared(rows: Sequence[Mapping[str, Any]], curve: str = "") -> str:
    """The held-out figure that --keep-best compares: the first of COMPARED that is logged, else "val_" and `curve`;
    empty where none is."""
    logged = {key for row in rows for key in row}
    return next((key for key in (*COMPARED, f"val_{curve}") if key in logged), "")


def best_step(path: Path, curve: str = "") -> int | None:
    """The first step at which the figure of `compared` was lowest; None where none is logged."""
    rows = read(path)
    key = compared(rows, curve)
    held_out = [row for row in rows if key in row]
    return int(min(held_out, key=lambda row: row[key])["step"]) if held_out else None


def _lines(path: Path, good: Callable[[Any], bool]) -> list[tuple[bytes, Row | None]]:
    """Every complete line, and its row; None if it is damaged."""
    if not path.is_file():
        return []
    return [(line, read_row(line, good)) for line in path.read_bytes().split(b"\n")[:-1]]


def read_row(line: bytes, good: Callable[[Any], bool]) -> Row | None:
    """The row of a line; None if it is damaged. good: `numbers`, or `sample`."""
    try:
        row = json_value(line)
    except ValueError:
        return None
    return row if good(row) else None


def numbers(row: Any) -> bool:
    """Whether a value from a line of metrics.jsonl is a row: a step and numbers."""
    return isinstance(row, dict) and type(row.get("step")) is int and {*map(type, row.values())} <= {int, float}


def sample(row: Any) -> bool:
    """Whether a value from a line of samples.jsonl is a row: a step, a text, and what was read so far, by its unit."""
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and isinstance(row.get("text"), str)
        and all(type(value) is int for name, value in row.items() if name != "text")
    )


def save_scores(out: Path, step: int, scores: dict[str, float]) -> None:
    """Add the model's scores after `step` steps to `out/scores.json`, for its card.

    Other scores of this step stay, those of another step are removed. A name with NOISE after it says how far chance
    may move the score of that name, and is removed when that score is measured again.
    """
    path = out / "scores.json"
    stale = {name + NOISE for name in scores}
    kept = {name: score for name, score in read_scores(out, step).items() if name not in stale}
    with writing(path, "the checkpoint is saved. Free some space"):
        write_whole(path, json.dumps({"step": step, **kept, **scores}, indent=1) + "\n")


def read_scores(out: Path, step: int) -> dict[str, float]:
    """The scores that `save_scores` has written for `step`; empty if there are none or the file cannot be read."""
    try:
        scores = read_json(out / "scores.json", "the scores")
    except UserError:
        return {}
    # Files of earlier versions have no step: their scores are used as they are.
    if scores.pop("step", step) != step:
        return {}
    return {name: score for name, score in scores.items() if type(score) in (int, float)}


SCALES = ((1e6, "million "), (1e3, "thousand "), (1.0, ""))
CLOCKS = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


def plot(rows: Sequence[dict[str, Any]], target: Path, curve: str = "", unit: str = "tokens") -> bool:
    """Plot training and held-out bits per byte against tokens and minutes, with the learning rate below; returns
    whether there was anything to plot. The axis is logarithmic where the loss spans a factor of 100. curve: another
    figure instead, with its held-out figures, "val_" and its name; if there are none, with all that begin with "val_".
    One that is logged for held-out data alone is plotted with the training loss. unit: what training reads.

    Raises OSError if the picture cannot be written; an old one then stays.
    """
    from matplotlib.figure import Figure

    rows = [row | {"tokens": row.get(unit, row.get("tokens"))} for row in rows if {unit, "tokens"} & row.keys()]
    trained = any(curve in row and "lr" in row for row in rows)
    train = [row for row in rows if {"lr", "loss", "seconds", curve if trained else "loss"} <= row.keys()]
    if not train or not (trained or not curve or any(key.startswith(f"val_{curve}") for row in rows for key in row)):
        return False
    figure = Figure(figsize=(8, 5.5))  # without pyplot, whose import takes longer than to draw
    # Fixed margins: a layout that is computed draws everything twice.
    margins = {"left": 0.115, "right": 0.975, "bottom": 0.09, "top": 0.91, "hspace": 0.06}
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1), gridspec_kw=margins)
    # Without text there are no bytes.
    measured = (curve if trained else "") or ("bits_per_byte" if "bits_per_byte" in train[0] else "loss")
    keys = sorted({key for row in rows for key in row if key.startswith("val_")})
    names = [key for key in keys if key.startswith(f"val_{curve or 'bits_per_byte'}")] or (keys if curve else [])
    train = [row for row in train if measured in row]
    scale, many = next((pair for pair in SCALES if train[-1]["tokens"] >= pair[0]), SCALES[-1])
    held_out = {name: [(row["tokens"] / scale, row[name]) for row in rows if name in row] for name in names}
    tokens, loss = [row["tokens"] / scale for row in train], [row[measured] for row in train]
    top.plot(tokens, loss, color="0.75", linewidth=0.8, label="training, one step")
    smooth, average = [], 0.0
    for count, value in enumerate(loss, start=1):
        average = 0.95 * average + 0.05 * value
        smooth.append(average / (1 - 0.95**count))  # without the bias towards 0 of the first steps
    top.plot(tokens, smooth, color="C0", label="training, moving average")
    for number, name in enumerate(names[1:]):
        label = f"held out, {name.removeprefix(names[0] + '_').removeprefix('val_')}"
        top.plot(*np.transpose(held_out[name]), color=f"C{4 + number}", linewidth=1.0, label=label)
    if names:
        # With a teacher the loss is no likelihood of the text, and the held-out figures have another unit.
        figured = f", {names[0].removeprefix('val_').replace('_', ' ')}" if curve or measured == "loss" else ""
        points, label = np.transpose(held_out[names[0]]), f"held out{figured}"
        top.plot(*points, "o-", color="C3", markersize=4, label=label)
    # The loss of the first steps, from random weights, would flatten the rest of the curve.
    evaluated = [value for points in held_out.values() for _, value in points]
    lowest, highest = min(loss + evaluated), sorted(loss)[int(len(loss) * 0.98)] * 1.15
    highest = max([highest, *evaluated]) if curve else highest
    if 0 < 100 * lowest < max(loss):
        top.set_yscale("log")
        highest = 1.15 * max(loss + evaluated)
    if 0.9 * lowest < highest:
        top.set_ylim(0.9 * lowest, highest)
    top.set_xlim(0, 1.01 * tokens[-1])  # the last point is not cut
    top.set_ylabel(measured.replace("_", " "))
    top.grid(alpha=0.3)
    top.legend()
    # Time also passes while a run evaluates and saves, so it is interpolated at the token axis's ticks.
    clock, ticks = top.secondary_xaxis("top"), [tick for tick in top.get_xticks() if 0 <= tick <= tokens[-1]]
    seconds, name = next((pair for pair in CLOCKS if train[-1]["seconds"] >= 2 * pair[0]), CLOCKS[-1])
    passed = np.interp(ticks, [0, *tokens], [0, *(row["seconds"] / seconds for row in train)])
    clock.set_xticks(ticks, [f"{time:.3g}" for time in passed])
    clock.set_xlabel(name)
    bottom.plot(tokens, [row["lr"] for row in train], color="C2")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel(f"{many}{unit}")
    bottom.grid(alpha=0.3)
    with written_whole(target) as partial:
        figure.savefig(partial, dpi=110, format="png")
    return True


def peak_memory_mib() -> float:
    """The peak memory of this process and its workers, MiB: the sum of their own peaks, so shared pages count in each.
    NaN on Windows, where Python has no such figure."""
    if sys.platform == "win32":
        return math.nan
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    for status in (Path(f"/proc/{pid}/status") for pid in worker_pids()):
        lines = (line.split() for line in status.read_text(encoding="ascii").splitlines())
        peak += sum(int(words[1]) for words in lines if words and words[0] == "VmHWM:") / (1 << 10)
    return peak
