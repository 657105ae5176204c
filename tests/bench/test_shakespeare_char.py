"""The benchmark trains both contenders on the same data from the same weights, and finds the same losses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import shakespeare_char as bench
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.registry import find_model

FP64 = get_backend("numpy", "fp64", workers=1)


def options(**changes: Any) -> bench.Options:
    """A tiny model without dropout, on a text that repeats."""
    config = (
        find_model(bench.MODEL)
        .presets[bench.PRESET]
        .override({"dim": 8, "heads": 2, "layers": 2, "context": 6, "vocab": 5, "dropout": 0.0})
    )
    ids = np.tile(np.array([0, 1, 2, 3, 4, 3, 2, 1], np.int32), 50)
    found = bench.Options(config, ids[:360], ids[360:], 12, 4, 5, 0, "fp64", 1)
    return replace(found, **changes)


def test_the_peer_takes_the_same_steps() -> None:
    pytest.importorskip("torch")
    said: list[str] = []
    found = bench.measure(options(), FP64, "torch-eager", said.append)
    ours, theirs = (found["results"][name] for name in (bench.OURS, bench.EAGER))
    assert [step for step, _ in ours["losses"]] == [5, 10, 12]
    for (step, mine), (other_step, other) in zip(ours["losses"], theirs["losses"], strict=True):
        assert step == other_step and mine == pytest.approx(other, abs=1e-9)
    assert ours["best_val_nats"] == min(loss for _, loss in ours["losses"]) < np.log(5)
    assert theirs["ours_over_this"] == ours["seconds"] / theirs["seconds"]
    assert f"{ours['best_val_nats']:.4f}" in "\n".join(bench.table(found)) and said[0] == bench.OURS


def test_dropout_is_sampled_anew_in_each_step_and_not_in_evaluation() -> None:
    config = options().config.override({"dropout": 0.5})
    ours = bench.Ours(options(config=config), FP64)
    batch = options().batch(0)
    assert ours.nll(batch) == ours.nll(batch)
    gradients = []
    for number in (0, 0, 1):
        ours.parallel.gradients([batch], ours.noise.fork(str(number)))
        gradients.append(ours.model.buffer.grads.copy())
    assert (gradients[0] == gradients[1]).all() and (gradients[0] != gradients[2]).any()


def test_the_held_out_text_is_predicted_once_and_batches_stay_within_the_training_text() -> None:
    chosen = options(held_out=np.arange(41, dtype=np.int32) % 5)
    targets = np.concatenate([b.targets.reshape(-1) for b in chosen.held_out_batches()])
    assert (targets[targets >= 0] == chosen.held_out[1:]).all()
    ramp = options(train=np.arange(360, dtype=np.int32))
    for step in range(20):
        batch = ramp.batch(step)
        assert (batch.targets[..., 0] == batch.ids + 1).all() and (np.diff(batch.ids) == 1).all()
    assert (ramp.batch(3).ids == ramp.batch(3).ids).all() and (ramp.batch(3).ids != ramp.batch(4).ids).any()


def test_the_rate_rises_for_100_steps_and_falls_to_a_tenth() -> None:
    rates = [options(steps=5000).lr(step) for step in (0, 50, 100, 2550, 4999)]
    assert rates == pytest.approx([1e-5, 5e-4, 1e-3, 5.5e-4, 1e-4], rel=1e-3)


def test_the_text_is_split_by_characters(tmp_path: Path) -> None:
    text = "First Citizen: é\n" * 200
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    train, held_out, vocab = bench.read_characters(tmp_path / "input.txt", context=256)
    assert vocab == len(set(text)) and len(train) == int(0.9 * len(text))
    letters = sorted(set(text))
    assert "".join(letters[i] for i in [*train, *held_out]) == text
    with pytest.raises(UserError, match="has 3,400 characters, its last tenth needs more than 500"):
        bench.read_characters(tmp_path / "input.txt", context=500)


def test_the_command_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input.txt").write_text("to be or not to be, " * 100, encoding="utf-8")
    spec = find_model(bench.MODEL)
    small = spec.presets[bench.PRESET].override({"dim": 8, "heads": 2, "layers": 1, "context": 16})
    monkeypatch.setitem(spec.presets, bench.PRESET, small)  # type: ignore[arg-type]
    target = tmp_path / "found.json"
    flags = ["--data", str(tmp_path / "input.txt"), "--backend", "numpy", "--steps", "3", "--workers", "1"]
    assert bench.main([*flags, "--json", str(target)]) == 0
    found = json.loads(target.read_text(encoding="utf-8"))
    assert list(found["results"]) == [bench.OURS] and found["config"]["vocab"] == 8
    with pytest.raises(UserError, match="--steps is 0, expected 1 or more"):
        bench.main([*flags, "--steps", "0"])
