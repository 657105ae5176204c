"""`python -m models list` and `show`: shapes and parameters are those of the real model."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.backends.meta import METER
from tinyforge.errors import UserError
from tinyforge.models.nanoeuler import SPEC, NanoEuler
from tinyforge.op import Stash
from tinyforge.registry import models
from tinyforge.train.plan import plan_step
from tinyforge.zoo import shapes
from tinyforge.zoo.command import main

ROOT = Path(__file__).resolve().parents[2]


def test_list_has_every_preset_with_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\w+)", out, re.MULTILINE) == list(models())
    expected = [name for spec in models().values() for name in spec.presets]
    assert re.findall(r"^ +(\S+) +[\d,]+ parameters$", out, re.MULTILINE) == expected
    # As DESIGN and the pages have them.
    assert re.search(r"small +1,053,824 ", out) and re.search(r"124m +124,439,808 ", out)


@pytest.mark.parametrize("name", models())
def test_what_is_shown_adds_up(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = models()[name]
    config = next(iter(spec.presets.values()))
    length = min(config.context, 9)
    before = METER.now
    layers, plan = shapes.trace(spec, config, "bf16", 2, length)
    own = [(layer.count, math.prod(shape)) for layer in layers for step in layer.steps for _, shape in step.params]
    assert sum(count * size for count, size in own) == shapes.count_parameters(spec, config)
    assert METER.now == before and plan == plan_step(spec, config, "bf16", 2, length)
    assert main(["show", name, "--batch-size", "2", "--seq-len", str(length)]) == 0
    out = capsys.readouterr().out
    for layer in layers:
        for step in layer.steps:
            assert f"{step.name} " in out and str(step.output) in out
    assert f"{shapes.count_parameters(spec, config):,} parameters\n" in out and str(plan) in out


def test_shapes_are_those_of_a_real_step() -> None:
    config = SPEC.presets["small"].override({"layers": 3, "dim": 16, "hidden": 10, "vocab": 30})
    steps: list[shapes.Step] = []
    model: Any = NanoEuler(config, get_backend("numpy", "fp32", workers=1))  # type: ignore[arg-type]
    seen: set[int] = set()
    for op in model.ops():
        shapes._record(op, steps, seen)
    ids = np.zeros((2, 7), np.int32)
    model.forward(ids, np.zeros((2, 7, 4), np.int32), Stash())
    layers, _ = shapes.trace(SPEC, config, "fp32", 2, 7)
    assert layers == shapes._layers(steps)
    assert [(layer.name, layer.count) for layer in layers] == [("", 1), ("blocks.0", 3), ("", 1)]
    assert layers[1].steps[1] == shapes.Step("qkv", "Linear", (2, 7, 32), (("weight", (32, 16)),))
    assert [step.name for step in layers[-1].steps] == ["final_norm", "heads"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "gpt5"], "unknown model 'gpt5'; known: nanoeuler"),
        (["show", "gpt2", "--config", "small"], "gpt2 has no preset 'small'; known: char, 124m, 355m"),
        (["show", "gpt2", "--batch-size", "0"], "--batch-size 0, --seq-len 256: expects a batch of at least 1"),
        (["show", "gpt2", "--seq-len", "0"], "--seq-len 0: expects a batch of at least 1"),
        (["show", "gpt2", "--seq-len", "257"], "--seq-len 257: expects a batch of at least 1, and a length of 1 to"),
        (["show", "gpt2", "--precision", "fp4"], "precision 'fp4' is not one of"),
        (["show"], "the following arguments are required: NAME"),
        ([], "the following arguments are required: list|show|record|page"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


def test_the_command_is_there() -> None:
    done = subprocess.run([sys.executable, "-m", "models", "show", "x"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
