"""The loop: it learns, it stops on the first bad number and names its source, and it picks up where it was."""

from __future__ import annotations

import itertools
import json
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint
from tinyforge.backends import compile, get_backend
from tinyforge.backends.numpy_backend import NumpyBackend
from tinyforge.errors import UserError
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.registry import find_model
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics
from tinyforge.train.batches import PackedTokens, micro_batches
from tinyforge.train.data_parallel import DataParallel, evaluate_nll
from tinyforge.train.objectives import NextTokens
from tinyforge.train.plan import plan_step
from tinyforge.train.run import Run, Task, claimed, running, train
from tinyforge.train.settings import PretrainSettings, Settings, SftSettings, parse

CONFIG = Config(
    dim=16, heads=4, kv_heads=2, layers=3, context=16, vocab=257, mtp_heads=2, hidden=10, mtp_weights=(1, 0.5)
)
TOKENIZER = Tokenizer([], ["<|endoftext|>"])
TOKENS = np.array(TOKENIZER.encode("the cat sat on the mat and the dog sat on the cat. " * 20), np.int32)


class Trial:
    """A tiny model and its task; `at_step` is called with the number of each step before it."""

    def __init__(self, out: Path, at_step: Callable[[Trial, int], None] | None = None, **settings: Any) -> None:
        plan = {"steps": 6, "save_every": 2, "eval_every": 3, "batch_size": 4, "keep": 0, "lr": 1e-2}
        self.settings = Settings(**{"out": str(out), **plan, **settings})
        self.backend = get_backend("numpy", "fp32", workers=1)
        self.model = NanoEuler(CONFIG, self.backend)
        self.model.initialise(0)
        data = PackedTokens(TOKENS, 16, 2, seed=0)

        def batches(step: int) -> list[Any]:
            if at_step is not None:
                at_step(self, step)
            return [data.batch(step, 4)]

        def evaluate(parallel: DataParallel) -> dict[str, float]:
            held = data.in_order(4, 200)
            return {"val_bits_per_byte": evaluate_nll(parallel, held, TOKENIZER.byte_lengths)}

        objective = NextTokens(CONFIG.head_weights, TOKENIZER.byte_lengths)
        meta = {"kind": "pretrain", "model": "nanoeuler", "config": CONFIG.to_dict()}
        self.task = Task(
            model=self.model,
            tokenizer=TOKENIZER,
            objective=objective,
            batches=batches,
            evaluate=evaluate,
            sample=lambda: "a sample",
            meta=meta,
        )

    def train(self, resume: bool = False) -> Path:
        return train(self.task, self.settings, self.backend, resume)


def spoil(op: Any, kernel: str, where: int | None = None) -> None:
    """Put a NaN in what `kernel` returns to this op, or in its argument number `where`."""
    good = getattr(op, kernel)

    def bad(*args: Any) -> Any:
        result = good(*args)
        spoilt = args[where] if where is not None else result[0] if isinstance(result, tuple) else result
        spoilt.flat[-1] = np.nan
        return result

    setattr(op, kernel, bad)


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes fail, as on a disk that is full in the middle of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def steps_of(out: Path, key: str) -> list[int]:
    return [row["step"] for row in metrics.read(out / "metrics.jsonl") if key in row]


def test_a_run_learns_and_leaves_what_it_should(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = Trial(tmp_path, steps=40, save_every=20, eval_every=15).train()
    assert last == tmp_path / "step-00000040"
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-00000020", "step-00000040"]
    assert steps_of(tmp_path, "loss") == list(range(1, 41))
    assert steps_of(tmp_path, "val_bits_per_byte") == [15, 30, 40]
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert rows[-1]["val_bits_per_byte"] < 0.6 * rows[0]["bits_per_byte"]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "a sample" in capsys.readouterr().out


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_timescale_is_a_weight_decay_that_is_smaller_in_a_longer_run(tmp_path: Path, optimizer: str) -> None:
    """1 / (lr x decay x steps); all numbers here are powers of two, so the bits are equal."""
    common = {"optimizer": optimizer, "lr": 2.0**-7, "steps": 8}
    kinds = {"timescale": {"decay_timescale": 0.5}, "decay": {"weight_decay": 32.0}, "half": {"weight_decay": 16.0}}
    found = {}
    for name, own in kinds.items():
        trial = Trial(tmp_path / name, **common, **own)
        trial.train()
        found[name] = trial.model.buffer.masters.tobytes()
    assert found["timescale"] == found["decay"] != found["half"]


def test_a_timescale_of_a_run_by_the_clock_takes_the_time_of_a_step(tmp_path: Path) -> None:
    trial = Trial(tmp_path, steps=None, minutes=2.0, lr=2.0**-7, decay_timescale=0.5)
    run = Run(trial.task, trial.settings, trial.backend)
    assert run._pace(0.5, []).decay == 0
    run._step_seconds = 15.0  # an eighth of the run
    assert run._pace(0.5, []).decay == 32
    run._step_seconds = 90.0  # more than the timescale
    assert run._pace(0.5, []).shrink(0.1) == 0


def test_a_preset_s_rates_are_for_groups_that_a_model_may_lack(tmp_path: Path) -> None:
    trial, fast = Trial(tmp_path), ["--config", "fast", "--out", str(tmp_path)]
    own, given = (
        parse(PretrainSettings, "", fast + more).settings for more in ([], ["--group-rates", "value_embeddings=2"])
    )
    assert Run(trial.task, own, trial.backend).optimizer is not None
    with pytest.raises(UserError, match="--group-rates: this model has no value_embeddings, only matrices"):
        Run(trial.task, given, trial.backend)


def test_a_run_with_captured_steps_has_the_same_bits_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instead of a graph, the captured function is called again: see test_captured.py."""
    graphs = SimpleNamespace(
        run=lambda work: work(), capture=lambda work: work, products=SimpleNamespace(in_use=nullcontext)
    )
    monkeypatch.setattr(NumpyBackend, "graphs", lambda self: graphs)
    trials = {
        name: Trial(tmp_path / name, steps=10, save_every=5, cuda_graph=capture)
        for name, capture in (("plain", "off"), ("captured", "on"))
    }
    for trial in trials.values():
        trial.train()
    shutil.copytree(tmp_path / "captured", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "step-00000010")
    trials["resumed"] = Trial(tmp_path / "resumed", steps=10, save_every=5, cuda_graph="on")
    trials["resumed"].train(resume=True)
    assert len({t.model.buffer.masters.tobytes() for t in trials.values()}) == 1
    figures = [
        [
            (row["step"], row["loss"], row["grad_norm"], row["lr"])
            for row in metrics.read(tmp_path / name / "metrics.jsonl")
            if "loss" in row
        ]
        for name in trials
    ]
    assert figures[0] == figures[1] == figures[2] and len(figures[0]) == 10


@pytest.mark.parametrize(
    ("kind", "teacher", "advice"),
    [
        (Settings, {}, "with more --weight-decay\n"),
        (SftSettings, {}, "with more --weight-decay, or with a --teacher\n"),
        (SftSettings, {"teacher": "large"}, "with more --weight-decay\n"),
    ],
)
def test_overfitting_is_said(
    kind: type[Settings], teacher: dict[str, str], advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held-out text of the same letters: at first it gets likelier, then the model knows its own text too well."""
    other = PackedTokens(np.random.default_rng(0).permutation(TOKENS), 16, 2, seed=0)

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        return {"val_bits_per_byte": evaluate_nll(parallel, other.in_order(4, 200), TOKENIZER.byte_lengths)}

    trial = Trial(tmp_path, steps=60, eval_every=5)
    trial.task, trial.settings = replace(trial.task, evaluate=evaluate), kind(**vars(trial.settings), **teacher)
    trial.train()
    figures = {
        row["step"]: row["val_bits_per_byte"]
        for row in metrics.read(tmp_path / "metrics.jsonl")
        if "val_bits_per_byte" in row
    }
    best = min(figures, key=lambda step: figures[step])
    assert 5 < best < 60
    said = f"held-out bits per byte were {figures[best]:.3f} at step {best} and are {figures[60]:.3f} now: the model"
    (line,) = [line for line in capsys.readouterr().out.splitlines(keepends=True) if line.startswith(said)]
    assert line.endswith(advice)
    Trial(tmp_path / "fine", steps=20).train()
    assert "overfits" not in capsys.readouterr().out


def test_what_a_full_disk_does_to_the_files_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture that cannot be drawn ends nothing; figures that cannot be written stop the run, which can go on."""
    trial = Trial(tmp_path)
    last = trial.train()
    picture, log = tmp_path / "loss.png", tmp_path / "metrics.jsonl"
    before = picture.read_bytes()
    capsys.readouterr()
    with no_file_beyond(log.stat().st_size):
        assert Trial(tmp_path).train(resume=True) == last
    out, err = capsys.readouterr()
    warning = f"warning: cannot write {picture}: File too large; all else is saved. Free some space, then --resume"
    assert f"{warning} --out {tmp_path} draws it" in err.splitlines()
    assert f"wrote {last}, {log}\n" in out
    assert picture.read_bytes() == before and not list(tmp_path.glob(".partial-*"))

    with no_file_beyond(log.stat().st_size), pytest.raises(UserError) as caught:
        metrics.Metrics(tmp_path, 6).write(step=7)
    assert str(caught.value) == (
        f"cannot write {log}: File too large; checkpoints are untouched. Free some space, then continue with --resume"
    )
    with no_file_beyond(10), pytest.raises(UserError, match=f"cannot write in {tmp_path}: File too large; choose"):
        Trial(tmp_path).train(resume=True)
    assert steps_of(tmp_path, "loss") == list(range(1, 7))
    Trial(tmp_path).train(resume=True)
    assert f"wrote {last}, {log}, {picture}\n" in capsys.readouterr().out


def test_the_share_of_the_peak_is_what_the_numbers_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path)
    trial.task = replace(trial.task, flop_per_token=1e6)
    monkeypatch.setattr(trial.backend, "matmul_peak", lambda: 1e12)
    trial.train()
    rates = [row["tokens_per_second"] for row in metrics.read(tmp_path / "metrics.jsonl") if "loss" in row]
    found = re.search(
        r"median ([\d,]+) tokens/s: ([\d,.]+) GFLOP/s, ([\d.]+)% of the 1,000 .* in fp32 ", capsys.readouterr().out
    )
    assert found is not None
    tokens, gflop, share = (float(number.replace(",", "")) for number in found.groups())
    assert tokens == pytest.approx(np.median(rates), abs=1)
    assert gflop == pytest.approx(tokens / 1e3, abs=1) and share == pytest.approx(tokens / 1e4, abs=1)


def test_the_peak_of_a_matrix_product_is_measured() -> None:
    assert 1e8 < get_backend("numpy", "fp32", workers=1).matmul_peak(size=256, rounds=2) < 1e14


# What is done to the model, and whom the error must name.
FAULTS: dict[str, tuple[Callable[[NanoEuler], None], str]] = {
    "a forward": (lambda m: spoil(m.blocks[1].mlp.down, "fwd"), "forward of blocks.1.down"),
    "a backward": (lambda m: spoil(m.blocks[2].attention.attention, "rope_bwd", 0), "backward of blocks.2.attention"),
    "a gradient": (lambda m: spoil(m.blocks[0].attention.qkv, "bwd", 0), "backward of blocks.0.qkv"),
    "a weight": (lambda m: m.blocks[1].mlp.down.weight.value.fill(np.inf), "weight blocks.1.down.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_nan_stops_the_run_and_names_its_source(tmp_path: Path, fault: str) -> None:
    """Steps 0 to 4 are good, step 5 makes the NaN: the checkpoint of step 4 stays, and nothing is saved after it."""
    do_harm, source = FAULTS[fault]

    def at_step(trial: Trial, step: int) -> None:
        if step == 5:
            do_harm(trial.model)

    trial = Trial(tmp_path, at_step)
    with pytest.raises(UserError) as caught:
        trial.train()
    message = str(caught.value)
    assert message.startswith("step 5: loss ") and "\n" not in message
    assert f"came from {source}; the last good checkpoint is {tmp_path / 'step-00000004'}." in message
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-00000002", "step-00000004"]
    assert all(np.isfinite(w).all() for w in checkpoint.load(tmp_path).weights.values())
    assert steps_of(tmp_path, "loss") == [1, 2, 3, 4, 5]
    healthy = Trial(tmp_path)
    assert healthy.train(resume=True).name == "step-00000006"
    assert steps_of(tmp_path, "loss") == [1, 2, 3, 4, 5, 6]


def test_looking_at_the_loss_now_and_then_changes_nothing_else(tmp_path: Path) -> None:
    """As on a device, where each look waits: every fourth step, and wherever the run evaluates, saves or ends."""
    each, fourth = Trial(tmp_path / "each", steps=11), Trial(tmp_path / "fourth", steps=11)
    fourth.backend.read_every = 4
    each.train()
    fourth.train()
    assert np.array_equal(each.model.buffer.values, fourth.model.buffer.values)
    timed = {"seconds", "tokens_per_second", "peak_memory_mib"}
    rows = [
        [{k: v for k, v in row.items() if k not in timed} for row in metrics.read(tmp_path / name / "metrics.jsonl")]
        for name in ("each", "fourth")
    ]
    assert rows[0] == rows[1] and steps_of(tmp_path / "fourth", "loss") == list(range(1, 12))


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """The last update of a run can ruin the weights with no later step to notice."""
    Trial(tmp_path).train()
    with pytest.raises(UserError, match="step 7: weight .* is not finite; the last good"):
        Trial(tmp_path, steps=7, lr=float("inf")).train(resume=True)
    assert checkpoint.latest(tmp_path).name == "step-00000006"


class Scheduled(Trial):
    """A trial with the settings of pretraining, a window in its model, and micro-batches by their numbers."""

    def __init__(self, out: Path, stop: int = 0, **settings: Any) -> None:
        super().__init__(out)
        plan = {"steps": 12, "save_every": 3, "batch_size": 4, "eval_every": 6, "keep": 0, "lr": 1e-2}
        self.settings = PretrainSettings(**{"out": str(out), **plan, **settings})
        self.config = LlamaConfig(dim=16, heads=4, kv_heads=2, layers=2, context=16, vocab=257, hidden=10, window=8)
        model, config = (Llama, self.config) if "window_schedule" in settings else (NanoEuler, CONFIG)
        self.model = model(config, self.backend)  # type: ignore[assignment, arg-type]
        self.model.initialise(0)
        heads = config.prediction_heads
        data, self.asked = PackedTokens(TOKENS, 16, heads, seed=0), list[Any]()

        def batches(where: Any) -> list[Any]:
            self.asked.append(where)
            if stop and len(self.asked) == stop:
                raise RuntimeError("killed")
            return made(where)

        made = micro_batches(data, 4, self.settings.grad_accum)
        objective = NextTokens(config.head_weights, TOKENIZER.byte_lengths)
        meta = {"kind": "pretrain", "model": "any", "config": config.to_dict()}
        self.task = replace(self.task, model=self.model, batches=batches, objective=objective, meta=meta)

        def evaluate(parallel: DataParallel) -> dict[str, float]:
            held = data.in_order(4, 200)
            return {"val_bits_per_byte": evaluate_nll(parallel, held, TOKENIZER.byte_lengths)}

        self.task = replace(self.task, evaluate=evaluate)


SCHEDULES: dict[str, dict[str, Any]] = {
    "batch": {"batch_schedule": ("0:1", "0.3:3", "0.8:2")},
    "heads": {"mtp_schedule": ("0.2:1", "0.7:0")},
    "momentum": {"momentum_schedule": ("0:0.5", "0.5:0.95", "1:0.7"), "optimizer": "muon"},
    "window": {"window_schedule": ("0:2", "0.5:4", "0.75:8")},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_resumes_to_the_same_bytes_and_matters(schedule: str, tmp_path: Path) -> None:
    own = SCHEDULES[schedule]
    whole, without = Scheduled(tmp_path / "whole", **own), Scheduled(tmp_path / "without", **own)
    without.settings = replace(without.settings, **{f"{schedule}_schedule".replace("heads", "mtp"): ()})
    for trial in (whole, without):
        trial.train()
    with pytest.raises(RuntimeError):
        Scheduled(tmp_path / "cut", stop=9, **own).train()
    resumed = Scheduled(tmp_path / "cut", **own)
    resumed.train(resume=True)
    assert np.array_equal(resumed.model.buffer.values, whole.model.buffer.values)
    assert not np.array_equal(without.model.buffer.values, whole.model.buffer.values)
    if schedule == "batch":
        sizes = [1] * 4 + [3] * 6 + [2] * 2
        starts = np.cumsum([0, *sizes]).tolist()
        assert whole.asked == [range(*at) for at in itertools.pairwise(starts)]
        assert resumed.asked == whole.asked[6:]
        rows = metrics.read(tmp_path / "cut" / "metrics.jsonl")
        assert (
            {row["step"]: row["tokens"] for row in rows}[12] == sum(sizes) * 4 * 16 == whole.settings.micro_batches * 64
        )
    if schedule == "window":
        assert {op.window for op in whole.model.ops() if hasattr(op, "window")} == {8}


def test_the_loss_of_a_step_has_the_weights_that_heads_had_in_it(tmp_path: Path) -> None:
    """At factor 0 the loss is head 0's alone, as bits per byte are."""
    Scheduled(tmp_path, mtp_schedule=("0:1", "0.5:0")).train()
    for row in metrics.read(tmp_path / "metrics.jsonl"):
        if "loss" not in row:
            continue
        alone = row["loss"] / (row["bits_per_byte"] * np.log(2))  # tokens are bytes here
        assert (alone == pytest.approx(1, abs=1e-6)) == (row["step"] > 6), row


def test_a_schedule_without_use_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--window-schedule: no layer of NanoEuler has an attention window"):
        Scheduled(tmp_path / "a").model.set_window(4)
    with pytest.raises(UserError, match="--window-schedule: it ends with 4, the window of the config is 8; end with"):
        Scheduled(tmp_path / "b", window_schedule=("0:2", "0.5:4")).train()
    with pytest.raises(UserError, match="--mtp-schedule: the model has one output head; leave the schedule out"):
        Scheduled(tmp_path / "c", window_schedule=("0:8",), mtp_schedule=("0:0",)).train()
    with pytest.raises(UserError, match="--batch-schedule and --grad-accum both say how many micro-batches"):
        PretrainSettings(batch_schedule=("0:1",), grad_accum=2).check()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_drops_what_was_written_after_the_checkpoint(optimizer: str, tmp_path: Path) -> None:
    whole = Trial(tmp_path / "whole", optimizer=optimizer)
    whole.train()

    def interrupt(trial: Trial, step: int) -> None:
        if step == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        Trial(tmp_path / "cut", interrupt, optimizer=optimizer).train()
    log = tmp_path / "cut" / "metrics.jsonl"
    log.write_text(log.read_text(encoding="utf-8") + '{"step": 6, "lo', encoding="utf-8")
    resumed = Trial(tmp_path / "cut", optimizer=optimizer)
    resumed.train(resume=True)
    assert np.array_equal(resumed.model.buffer.values, whole.model.buffer.values)
    kept = [checkpoint.load(tmp_path / run).optimizer() for run in ("whole", "cut")]
    assert all(np.array_equal(kept[0][name], kept[1][name]) for name in kept[0]) and len(kept[0]) == len(kept[1])
    matrices, moments = ("blocks.0.qkv.weight", "blocks.2.down.weight"), len(whole.model.buffer.params) * 2
    assert len(kept[0]) == moments - (optimizer == "muon") * 4 * CONFIG.layers
    assert all(f"m.{name}" in kept[0] and (f"v.{name}" in kept[0]) == (optimizer == "adamw") for name in matrices)
    for key in ("loss", "val_bits_per_byte"):
        assert steps_of(tmp_path / "cut", key) == steps_of(tmp_path / "whole", key)
    counted = [
        {row["step"]: row["tokens"] for row in metrics.read(tmp_path / run / "metrics.jsonl")}
        for run in ("whole", "cut")
    ]
    assert counted[0] == counted[1] == {step: step * 4 * 16 for step in range(1, 7)}


def test_norms_by_layer_make_up_the_whole_norm(tmp_path: Path) -> None:
    Trial(tmp_path).train()
    rows = {"loss": {}, "val_bits_per_byte": {}}  # type: dict[str, dict[int, Any]]
    for row in metrics.read(tmp_path / "metrics.jsonl"):
        rows["loss" if "loss" in row else "val_bits_per_byte"][row["step"]] = row
    assert list(rows["val_bits_per_byte"]) == [3, 6]
    for step, row in rows["val_bits_per_byte"].items():
        norms = {key: value for key, value in row.items() if key.startswith("grad_norm.")}
        layers = [f"grad_norm.blocks.{i}" for i in range(3)]
        assert sorted(norms) == [*layers, "grad_norm.embedding", "grad_norm.final_norm", "grad_norm.heads"]
        whole = sum(value**2 for value in norms.values()) ** 0.5
        assert whole == pytest.approx(rows["loss"][step]["grad_norm"], rel=1e-5) and row["peak_memory_mib"] > 1


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [
        (64, 0.4, ("tokens", "seconds")),
        (4_000, 150, ("thousand tokens", "minutes")),
        (9**9, 9e4, ("million tokens", "hours")),
    ],
)
def test_the_axes_fit_the_length_of_a_run(
    tokens: int, seconds: float, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    shown: list[str] = []
    save = Figure.savefig

    def look(figure: Figure, *arguments: Any, **options: Any) -> None:
        top, bottom = figure.axes
        (clock,) = top.child_axes
        labels = [float(label.get_text()) for label in clock.get_xticklabels()]
        assert labels[0] == 0 and len(set(labels)) == len(labels) > 3
        shown.extend((bottom.get_xlabel(), clock.get_xlabel()))
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", look)
    rows = [
        {
            "tokens": n * tokens,
            "seconds": n * seconds,
            "lr": 1,
            "loss": 3 - n / 9,
            "bits_per_byte": 2,
            "val_bits_per_byte": 2,
        }
        for n in range(1, 5)
    ]
    assert metrics.plot(rows, tmp_path / "loss.png") and tuple(shown) == expected


def test_a_figure_of_held_out_data_alone_is_plotted_over_what_was_read(tmp_path: Path) -> None:
    rows = [{"step": n, "images": 64 * n, "loss": 1 / n, "lr": 0.1, "seconds": float(n)} for n in (1, 2, 3)]
    rows.append({"step": 3, "images": 192, "val_distance": 0.5})
    assert metrics.plot(rows, tmp_path / "loss.png", "distance", "images")
    assert not metrics.plot(rows, tmp_path / "other.png", "distance")  # no tokens were read


def test_a_figure_that_only_some_evaluations_have_is_plotted(tmp_path: Path) -> None:
    steps = [{"step": n, "tokens": n, "loss": 1.0, "lr": 0.1, "seconds": n, "reward": 2.0} for n in (1, 2, 3)]
    held_out = [{"step": n, "tokens": n, "val_bits_per_byte": 3.0} for n in (1, 3)]
    picture, rows = tmp_path / "loss.png", [*steps, *held_out, {"step": 3, "tokens": 3, "val_bits_per_byte_book": 2.0}]
    for curve in ("", "reward"):
        assert metrics.plot(rows, picture, curve) and picture.stat().st_size > 10_000
        picture.unlink()
    assert not metrics.plot(rows, picture, "absent") and not picture.exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("curve", "held_out", "labels"),
    [
        (
            "rewards/accuracies",
            {"val_logps/chosen": -500.0, "val_rewards/accuracies": 0.8, "val_rewards/accuracies_pairs": 0.7},
            ["held out, pairs", "held out, rewards/accuracies"],
        ),
        ("reward", {"val_correct": 0.0, "val_format": 1.0}, ["held out, format", "held out, correct"]),
    ],
)
def test_a_curve_is_plotted_with_its_own_held_out_figures(
    curve: str, held_out: dict[str, float], labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of -500 would flatten an accuracy; a reward that is always 0 has no range to show."""
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda fig, *a, **k: (drawn.append(fig.axes[0]), write(fig, *a, **k)))
    rows = [{"step": n, "tokens": n, "loss": 0.0, "lr": 0.1, "seconds": n, curve: 0.0} for n in (1, 2)]
    metrics.plot([*rows, {"step": 2, "tokens": 2, **held_out}], tmp_path / "loss.png", curve)
    assert [text.get_text() for text in drawn[0].get_legend().get_texts()][2:] == labels
    low, high = drawn[0].get_ylim()
    assert -0.1 <= low <= 0 and high >= max(held_out.values())
    metrics.plot(rows, tmp_path / "loss.png", curve)


def test_a_loss_that_spans_decades_has_a_logarithmic_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    write = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda fig, *a, **k: (drawn.append(fig.axes[0]), write(fig, *a, **k)))
    for smallest in (0.5, 1e-3):
        rows = [{"step": n, "images": n, "loss": 1.0, "lr": 0.1, "seconds": n, "mse": 1.0} for n in (1, 2)]
        held_out = {"step": 2, "images": 2, "val_mse": smallest}
        metrics.plot([*rows, held_out], tmp_path / "loss.png", "mse", "images")
    assert [axes.get_yscale() for axes in drawn] == ["linear", "log"]
    assert drawn[1].get_ylim()[0] < 1e-3 and drawn[1].get_ylim()[1] > 1


def test_samples_and_what_the_run_is_are_written(tmp_path: Path) -> None:
    """As the figures are: rows after the checkpoint go when a run is resumed, and the files have the same bytes."""
    whole = Trial(tmp_path / "whole")
    whole.train()
    lines = (tmp_path / "whole" / "samples.jsonl").read_bytes()
    assert [json.loads(line)["step"] for line in lines.splitlines()] == [3, 6] and b'"a sample"' in lines
    about = json.loads((tmp_path / "whole" / "run.json").read_bytes())
    assert about["model"] == "nanoeuler" and about["settings"]["steps"] == 6 and about["plan"]["peak"] > 0
    assert about["parameters"] == about["learned"] == whole.model.buffer.count

    def interrupt(trial: Trial, step: int) -> None:
        if step == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        Trial(tmp_path / "cut", interrupt).train()
    with open(tmp_path / "cut" / "samples.jsonl", "ab") as file:
        file.write(b'{"step": 6, "tokens": 1, "text": "of a later step"}\n{"step": 9, "te')
    Trial(tmp_path / "cut").train(resume=True)
    assert (tmp_path / "cut" / "samples.jsonl").read_bytes() == lines
    written = {name: json.loads((tmp_path / name / "run.json").read_bytes()) for name in ("cut", "whole")}
    for name, about in written.items():
        assert about["settings"].pop("out").endswith(name)
    assert written["cut"] == written["whole"]


def test_a_task_without_samples_writes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial(tmp_path / "run")
    trial.task = replace(trial.task, sample=Task.sample)
    trial.train()
    assert not (tmp_path / "run" / "samples.jsonl").exists()
    assert "\n\n" not in capsys.readouterr().out


def test_energy_goes_on_counting_in_a_resumed_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(trial: Trial, step: int) -> None:
        if step == 4:
            raise KeyboardInterrupt

    def metered(trial: Trial, since: float) -> Trial:
        meter = itertools.count(since, 3600.0)
        trial.backend.energy = lambda: next(meter)  # type: ignore[method-assign]
        return trial

    with pytest.raises(KeyboardInterrupt):
        metered(Trial(tmp_path, interrupt), 1e6).train()
    held = checkpoint.load(tmp_path).meta["joules"]
    assert held > 0
    last = metered(Trial(tmp_path), 5e6).train(resume=True)
    assert held < checkpoint.load(last).meta["joules"] < 1e6
    assert re.search(r"[1-9]\d*\.0 Wh as the GPU counts", capsys.readouterr().out)


def test_without_a_meter_nothing_is_said_of_energy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = Trial(tmp_path).train()
    assert "joules" not in checkpoint.load(last).meta and "Wh" not in capsys.readouterr().out


def test_metrics_keep_complete_lines_up_to_the_step(tmp_path: Path) -> None:
    log = metrics.Metrics(tmp_path, 0)
    for step in range(1, 6):
        log.write(step=step, loss=1 / step)
    assert [row["step"] for row in metrics.read(metrics.Metrics(tmp_path, 3).path)] == [1, 2, 3]
    assert metrics.read(metrics.Metrics(tmp_path, 0).path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_does_not_start_over_another(tmp_path: Path) -> None:
    Trial(tmp_path).train()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="already holds a run; continue it with --resume, or choose another --out"):
        Trial(tmp_path).train()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    """The second is refused at once, also while the first has saved nothing yet; the lock goes with its process."""
    out = tmp_path / "out"
    code = (
        "import sys, time; from tinyforge.train.run import claimed; from tinyforge.train.settings import Settings\n"
        f"with claimed(Settings(out={str(out)!r}), False): print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        with pytest.raises(UserError, match=f"{out}: another run is writing there; wait for it, or choose another"):
            Trial(out).train()
        first.kill()
    last = Trial(out).train()
    assert {p.name for p in out.iterdir() if p.name.startswith(".")} == set() and last.parent == out


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(Settings(out=str(tmp_path / "a" / "b")), False):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_workers_do_not_hold_the_folder_of_a_run_that_died(tmp_path: Path) -> None:
    """They may be in the middle of a step when it is resumed."""
    code = (
        "import os, time; from tinyforge.parallel import start_group; from tinyforge.train.run import claimed\n"
        "from tinyforge.train.settings import Settings\n"
        f"with claimed(Settings(out={str(tmp_path)!r}), False):\n"
        "    group = start_group(2, lambda r: time.sleep(5)); time.sleep(0.2); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    with claimed(Settings(out=str(tmp_path)), False):
        pass


def test_resuming_rewrites_no_line_but_those_after_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "loss": 2.0}\n{"step": 1, "lo\xff\n5\n{"loss":  1,"step":2}\n'
    path.write_bytes(kept + b'{"step": 3}\n{"step": 4')
    metrics.Metrics(tmp_path, 2)
    assert path.read_bytes() == kept


def test_damaged_lines_of_the_metrics_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a warning, and the rest is kept; a last line that a kill has cut is no damage."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\xff{\n[1]\n{"step": 2}\n{"st')
    assert [row["step"] for row in metrics.read(path)] == [1, 2]
    assert f"warning: {path}: line 2, 3 damaged, left out" in capsys.readouterr().err
    path.write_bytes(b'{"step": 1}\n{"st')
    assert [row["step"] for row in metrics.read(path)] == [1]
    assert capsys.readouterr().err == ""


def test_only_what_a_run_has_named_itself_is_removed(tmp_path: Path) -> None:
    for name in ("step-best", "step-00000001-good", "step-7"):
        (tmp_path / name).mkdir()
    Trial(tmp_path, keep=1).train()
    assert {p.name for p in tmp_path.iterdir() if p.is_dir()} == {
        "step-best",
        "step-00000001-good",
        "step-7",
        "step-00000006",
    }


def test_hints_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a space and a quote in its name."""
    out = tmp_path / "my 'run'"

    def interrupt(trial: Trial, step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        Trial(out, interrupt).train()
    assert left.value.code == 128 + signal.SIGTERM
    assert f"Continue with --resume --out {shlex.quote(str(out))}\n" in capsys.readouterr().err


def test_a_signal_between_two_steps_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step is taken, and neither saved nor evaluated; then, as the last thing before the fourth, it comes."""
    trial = Trial(tmp_path, eval_every=9)
    run = Run(trial.task, trial.settings, trial.backend)

    def clock() -> float:
        if sys._getframe(1).f_code.co_name == "train" and run.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return time.perf_counter()

    monkeypatch.setattr("tinyforge.train.run.time", SimpleNamespace(perf_counter=clock))
    with pytest.raises(SystemExit) as left:
        run.train()
    assert left.value.code == 128 + signal.SIGTERM and run.last_saved == tmp_path / "step-00000003"
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step-00000002", "step-00000003"]


def test_kernels_that_are_made_ready_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a GPU does in its first steps; what is loaded later is no longer the start."""

    def load(trial: Trial, step: int) -> None:
        assert (compile.on_load is not None) == (step == 0)
        if compile.on_load is not None:
            compile.on_load("rmsnorm_fwd of ops/rmsnorm.cu", 0.7)
            compile.on_load("rmsnorm_bwd of ops/rmsnorm.cu", 0.6)

    Trial(tmp_path, load).train()
    assert "preparing 2 kernels, which the next run finds on disk: 1.3 s" in capsys.readouterr().out


def test_the_parts_of_a_run_can_be_called_alone(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    run = Run(trial.task, trial.settings, trial.backend)
    run.take_step()
    assert run.step == 1 and len(run.unread) == 1 and run.progress() == 1 / 6
    run.report()
    assert run.tokens == 4 * 16 and not run.unread and steps_of(tmp_path, "loss") == [1]
    assert run.evaluate()["val_bits_per_byte"] > 0 and steps_of(tmp_path, "val_bits_per_byte") == [1]
    assert run.save() == tmp_path / "step-00000001" == run.last_saved


def test_minutes_end_a_run_by_the_clock(tmp_path: Path) -> None:
    """A thousandth of a minute is not over before the first step, and is after a few hundred."""
    last = Trial(tmp_path, steps=None, minutes=0.001).train()
    step = int(last.name.removeprefix("step-"))
    assert step >= 1 and steps_of(tmp_path, "loss") == list(range(1, step + 1))
    assert steps_of(tmp_path, "val_bits_per_byte")[-1] == step
    assert checkpoint.load(last).meta["elapsed"] >= 0.06


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """It is saved when it is found, whatever --save-every says; without --keep-best it goes as the others."""
    figures = {1: 5.0, 2: 3.0, 3: 2.0, 4: 4.0, 5: 4.5, 6: 2.5}

    def trial(out: Path, **settings: Any) -> Trial:
        found = Trial(out, keep=1, eval_every=1, **settings)
        run: list[int] = []
        batches = found.task.batches

        def counted(step: int) -> Any:
            run.append(step + 1)
            return batches(step)

        found.task = replace(
            found.task, batches=counted, evaluate=lambda parallel: {"val_bits_per_byte": figures[run[-1]]}
        )
        return found

    def kept(out: Path) -> list[int]:
        return [checkpoint.step_of(path) for path in checkpoint.steps(out)]

    trial(tmp_path / "best", keep_best=True, save_every=4).train()
    trial(tmp_path / "usual", save_every=4).train()
    assert (kept(tmp_path / "best"), kept(tmp_path / "usual")) == ([3, 6], [6])
    assert metrics.best_step(tmp_path / "best" / "metrics.jsonl") == 3


@pytest.mark.parametrize(("curve", "figure", "kept"), [("mse", "val_mse", [2, 6]), ("", "val_other", [6])])
def test_the_best_checkpoint_of_another_figure(
    curve: str, figure: str, kept: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the curve, or a sentence that there is none to compare."""
    trial = Trial(tmp_path, keep=1, eval_every=2, save_every=4, keep_best=True)
    found, values = trial.task.objective, iter((1.0, 3.0, 2.0))
    objective = SimpleNamespace(**{name: getattr(found, name) for name in ("count", "factors", "weigh")})
    objective.figures = lambda sums, counts: found.figures(sums, counts) | {"mse": 0.00012345}
    trial.task = replace(trial.task, objective=objective, curve=curve, evaluate=lambda _: {figure: next(values)})
    trial.train()
    assert [checkpoint.step_of(path) for path in checkpoint.steps(tmp_path)] == kept
    shown = capsys.readouterr()
    assert ("--keep-best keeps no checkpoint: none of val_bits_per_byte" in shown.out) == (not curve)
    assert ("mse 0.000123" in shown.err) == bool(curve)


def test_a_step_that_does_not_fit_is_refused_by_the_run_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe need not ask; the model, which is in memory by then, is not counted twice."""
    needed, less = (plan_step(find_model("nanoeuler"), CONFIG, "fp32", rows, 16) for rows in (4, 2))
    for free, said in (
        (needed.peak, ""),
        (needed.peak - needed.weights, ""),
        (less.peak - less.weights, "--(recompute|batch-size 2)"),
    ):
        monkeypatch.setattr("tinyforge.memory.free_host_memory", lambda free=free: free)
        trial = Trial(tmp_path / str(free))
        if not said:
            assert Run(trial.task, trial.settings, trial.backend).task.plan == needed
            continue
        with pytest.raises(UserError, match=f"4 x 16 tokens in fp32 need .* of memory, .* are free; {said}"):
            trial.train()


def test_what_the_model_lacks_is_refused_by_the_run_itself(tmp_path: Path) -> None:
    class Own(NanoEuler):
        """Not registered."""

        def forward(self, ids: Any, targets: Any, stash: Any = None) -> Any:
            return super().forward(ids, targets, stash)

    for flags, said in (
        ({"recompute": "norms"}, "--recompute: Own recomputes nothing; leave it out"),
        ({"document_mask": "keep"}, "--document-mask: nanoeuler does not keep documents apart"),
    ):
        trial = Trial(tmp_path, **flags)
        trial.task = replace(trial.task, model=Own(CONFIG, trial.backend))
        with pytest.raises(UserError, match=said):
            trial.train()
    with pytest.raises(UserError, match="--gpus: this recipe starts no ranks"), running(Settings(gpus=2), False):
        pass


def test_one_rank_has_nothing_to_share_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trial(tmp_path, zero=1).train()
    assert "--zero 1 changes nothing here: there is one rank" in capsys.readouterr().out


def test_a_run_that_had_ended_names_base_only_where_the_recipe_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trial(tmp_path).train()
    Trial(tmp_path).train(resume=True)
    assert "the run had ended before; start another, in another --out" in capsys.readouterr().out
