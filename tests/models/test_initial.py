"""The values that the models' parameters start at, by their papers and the code that they were published with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.op import Param, WithKeywords
from tinyforge.registry import models

FP64 = get_backend("numpy", "fp64", workers=1)
NAMES = ["nanoeuler", "gpt2", "llama", "moe", "mamba", "lstm", "char_mlp", "bert", "vit"]
ON_THE_STREAM = (".out.weight", "down.weight")  # maps whose result is added to the residual stream
STANDARD: dict[str, dict[str, Any]] = {
    "char_mlp": {
        "embedding": lambda c: 0.1,
        "inner": lambda c: (c.window * c.dim) ** -0.5,
        "outer": lambda c: 0.1 * c.hidden**-0.5,
    },
    # torch.nn.LSTM's U(-1 / sqrt(H), 1 / sqrt(H)), and nn.Embedding's N(0, 1)
    "lstm": {"embedding.weight": lambda c: 1.0, "": lambda c: (3 * c.dim) ** -0.5},
    # torch.nn.Linear's and nn.Conv1d's U(-1 / sqrt(n), 1 / sqrt(n)); out divided by sqrt(layers)
    "mamba": {
        "embedding.weight": lambda c: 0.02,
        "input.weight": lambda c: (3 * c.dim) ** -0.5,
        "conv.weight": lambda c: (3 * c.taps) ** -0.5,
        "select.weight": lambda c: (3 * c.expand * c.dim) ** -0.5,
        "step.weight": lambda c: (3 * c.step_rank) ** -0.5,
        "out.weight": lambda c: (3 * c.expand * c.dim * c.layers) ** -0.5,
    },
    "nanoeuler": {"value_gate.weight": lambda c: 0.0},  # the rows are added as they are
    "vit": {"embedding.weight": lambda c: (c.channels * c.patch**2) ** -0.5},
}
"""By the end of a name; others have GPT-2's 0.02, divided by sqrt(2 layers) for maps on the residual stream."""


def expected(name: str, config: Any, p: Param) -> float:
    for end, std in STANDARD.get(name, {}).items():
        if p.name.endswith(end):
            return float(std(config))
    return float(0.02 / (2 * config.layers) ** 0.5 if p.name.endswith(ON_THE_STREAM) else 0.02)


@pytest.mark.parametrize("name", NAMES)
def test_initial_values(name: str) -> None:
    """Biases are 0 and gains 1, or w = 0 in 1 + w, without weight decay; all else is N(0, std^2)."""
    for case, _ in models()[name].build.cases(FP64, np.random.default_rng(0)):
        model: Any = case.op if isinstance(case, WithKeywords) else case
        for p in model.params():
            if (len(p.shape) == 1 or p.name.endswith(".bias")) and p.name != "class_token":
                zero = p.name.endswith(("bias", "sinks", "first_scale", "smear_gate", "smear_scale")) or getattr(
                    model.config, "norm_plus_one", False
                )
                assert (p.fill, p.std) == (0.0 if zero else 1.0, 0.0), p.name
                assert not p.decay, p.name
            elif not p.name.endswith("a_log"):
                assert (p.fill, p.std) == (0.0, pytest.approx(expected(name, model.config, p))), p.name
                assert p.decay or p.name == "class_token", p.name


NO_HIDDEN_MAP = ("embedding", "positions", "segments", "head", "heads", "conv", "a_log", "outer", "class_token")
NO_HIDDEN_MAP += ("shared_gate", "bias", "value_embedding", "value_gate", "project_in", "project_out")
PARTS = {"qkv": 3, "gate_up": 2, "shared_up": 2, "inputs": 4, "recurrent": 4, "select": 3, "input": 2}


@pytest.mark.parametrize("name", NAMES)
def test_hidden_maps_are_the_matrices_that_muon_updates(name: str) -> None:
    """Tables, heads and vectors are none. Of an array of several maps each is one: queries, keys and values; gate and
    up; the gates of an LSTM; each expert's."""
    for case, _ in models()[name].build.cases(FP64, np.random.default_rng(0)):
        model: Any = case.op if isinstance(case, WithKeywords) else case
        for p in model.params():
            last = p.name.removesuffix(".weight").rsplit(".", 1)[-1]
            if len(p.shape) == 1 or last in NO_HIDDEN_MAP:
                assert p.matrices == (), p.name
                continue
            experts = p.shape[0] if len(p.shape) == 3 else 1
            assert len(p.matrices) == PARTS.get(last, 1) * experts and sum(p.matrices) == p.size // p.shape[-1], p.name
            assert p.matrices[-1] == p.matrices[-2:][0], p.name  # keys and values, gate and up, B and C


def test_mambas_steps_are_spread_over_their_range() -> None:
    """Between 0.001 and 0.1, their logarithms uniform; A = -1 .. -N."""
    spec = models()["mamba"]
    model = spec.build(spec.config(dim=2048, layers=1, state=3, context=4, vocab=3), FP64)
    model.initialise(0)
    scan = model.blocks[0].mixer.scan
    steps = np.log1p(np.exp(scan.bias.value))
    assert 1e-3 <= steps.min() < 1.01e-3 and 0.099 < steps.max() <= 0.1
    assert np.quantile(steps, [0.25, 0.5, 0.75]) == pytest.approx([10**-2.5, 1e-2, 10**-1.5], rel=0.1)
    assert np.array_equal(np.exp(scan.a_log.value).round(12), np.broadcast_to([1.0, 2.0, 3.0], (4096, 3)))


@pytest.mark.parametrize("name", ["bert", "lstm", "mamba"])
def test_initial_values_of_its_own_are_published(name: str) -> None:
    """After the last of them, to the copy in lower precision that products read; the others are random, too."""
    for case, _ in models()[name].build.cases(FP64, np.random.default_rng(0)):
        model: Any = case.op if isinstance(case, WithKeywords) else case
        calls: list[str] = []
        right = model.buffer.set_master
        model.buffer.set_master = lambda *args, _right=right, _calls=calls: (_calls.append("set"), _right(*args))
        model.buffer.publish = lambda *_, _calls=calls: _calls.append("published")
        model.buffer.masters[...] = 0
        model.initialise(3)
        assert calls[-2:] == ["set", "published"]
        random = [p for p in model.params() if p.std]
        assert random and all(model.buffer.view(model.buffer.masters, p).any() for p in random)
