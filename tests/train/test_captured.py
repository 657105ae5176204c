"""A captured step next to a plain one, where nothing is captured: what a graph would repeat is a function called again.

`AsGraphs` keeps the function that it is given for the third step and calls it for all that follow. Whatever a step
takes from the host other than through the fixed arrays is then that of the third step, and the bits differ. What the
launches themselves are given is compared in tests/backends/test_launchers.py; graphs on a GPU are in tests/gpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backends.as_graphs import AsGraphs
from tests.train import trained as trained_module
from tests.train.trained import Trained, assert_same_bits
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.memory import OUTSIDE
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.ops.attention import Documents
from tinyforge.optim import AdamW, AdamWConfig, MuonConfig, Pace
from tinyforge.train import captured
from tinyforge.train.captured import MOST, Captured, Inputs, captures
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, MaskedTokens, NextTokens
from tinyforge.train.plan import Plan
from tinyforge.train.preferences import DPO
from tinyforge.train.settings import DpoSettings, GrpoSettings

VOCAB = 11
MODELS: dict[str, tuple[Any, Any]] = {
    "nanoeuler": (
        NanoEuler,
        Config(
            dim=8, heads=2, kv_heads=1, layers=2, context=6, vocab=VOCAB, mtp_heads=2, hidden=6, mtp_weights=(1, 0.5)
        ),
    ),
    "gpt2": (GPT2, GPT2Config(dim=8, heads=2, layers=2, context=6, vocab=VOCAB, dropout=0.3)),
    "windowed": (Llama, LlamaConfig(dim=8, heads=2, kv_heads=1, layers=2, context=6, vocab=VOCAB, hidden=6, window=4)),
    "moe": (
        MoE,
        MoEConfig(
            dim=8,
            heads=2,
            kv_heads=1,
            layers=2,
            context=6,
            vocab=VOCAB,
            mtp_heads=2,
            hidden=6,
            experts=3,
            active=2,
            mtp_weights=(1, 0.5),
        ),
    ),
}


def batch(number: int, heads: int, rows: int = 3, **more: Any) -> Batch:
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCAB, (rows, 6), dtype=np.int32)
    return Batch(ids, rng.integers(-5, VOCAB, (rows, 6, heads), dtype=np.int32).clip(-1), **more)


def trained(
    model: str, with_graph: bool, precision: str = "fp32", config: AdamWConfig | None = None
) -> tuple[Trained, AsGraphs]:
    kind, shape = MODELS[model]
    backend, graphs = get_backend("numpy", precision, workers=1), AsGraphs()
    backend.graphs = lambda: graphs  # type: ignore[method-assign]
    return Trained(backend, kind(shape, backend), with_graph, config), graphs


def same_bits(
    model: str, steps: Sequence[Sequence[Batch]], precision: str = "fp32", config: AdamWConfig | None = None
) -> AsGraphs:
    (plain, _), (graph, graphs) = (trained(model, with_graph, precision, config) for with_graph in (False, True))
    assert_same_bits(plain, graph, steps)
    return graphs


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_bits_are_those_of_plain_steps(model: str, precision: str) -> None:
    heads = MODELS[model][1].prediction_heads
    graphs = same_bits(model, [[batch(n, heads), batch(n + 50, heads)] for n in range(6)], precision)
    assert graphs.done == ["run", "capture", *["replay"] * 4]


@pytest.mark.parametrize("options", [{}, {"normuon": True, "coefficients": "polar-express", "cautious": True}])
def test_the_bits_of_muon_are_those_of_plain_steps(options: dict[str, Any]) -> None:
    config = MuonConfig(**options, group_rates=(("heads", 2.0),) if options else ())
    same_bits("nanoeuler", [[batch(n, 2)] for n in range(6)], config=config)


@pytest.mark.parametrize("model", ["nanoeuler", "moe"])
def test_momentum_and_the_weights_of_heads_are_read_anew(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They change in every step; frozen at the captured step's, the bits would differ."""
    steps, bits = [[batch(n, 2)] for n in range(6)], []
    for momentum, weights in ((0.0, ()), (0.05, ()), (0.0, (1.0, 0.5))):

        def pace(number: int, lr: float, more: float = momentum, heads: tuple[float, ...] = weights) -> Pace:
            return Pace(lr, 0.5 + more * number, heads and (heads[0], heads[1] / (1 + number)))

        monkeypatch.setattr(trained_module, "pace", pace)
        assert same_bits(model, steps, config=MuonConfig()).done == ["run", "capture", *["replay"] * 4]
        plain, _ = trained(model, False, config=MuonConfig())
        for number, batches in enumerate(steps):
            plain.step(number, batches)
        bits.append(plain.bits()["masters"])
    assert len(set(bits)) == 3


def test_a_window_has_a_graph_of_its_own() -> None:
    """The attention window is a number in a launch: a graph that was captured with another one would repeat that."""
    plain, graph = (trained("windowed", with_graph)[0] for with_graph in (False, True))
    for number in range(8):
        for one in (plain, graph):
            one.parallel.set_window(2 if number < 4 else 4)
            one.step(number, [batch(number, 1)])
    expected, got = plain.bits(), graph.bits()
    assert [what for what in expected if expected[what] != got[what]] == []
    assert graph.captured is not None and len(graph.captured._kinds) == 2


def test_weights_and_documents_are_read_anew() -> None:
    def documents(number: int) -> Documents:
        return Documents(np.array([[0, 0, 2, 2, 2, 5], [0] * 6, [0, 1, 1, 1, 1, 1]])[[number % 3, 1, 2]], restart=True)

    weights = [np.random.default_rng(n).random((3, 6, 2)) for n in range(5)]
    same_bits("nanoeuler", [[batch(n, 2, weights=weights[n], documents=documents(n))] for n in range(5)])


def test_each_kind_of_step_has_a_graph_and_the_last_ones_none() -> None:
    """Rows of other numbers, in turns, and more kinds than get a graph."""
    kinds = MOST + 1
    steps = [[batch(n, 2, rows=1 + n % kinds)] for n in range(4 * kinds)]
    graphs = same_bits("nanoeuler", steps)
    assert [graphs.done.count(what) for what in ("run", "capture", "replay")] == [MOST, MOST, 2 * MOST]


@pytest.mark.parametrize("frozen", ["lr", "keys", "factors", "ids"])
def test_what_would_be_frozen_in_a_graph_shows(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put, places = Inputs.put, {"ids": 0, "factors": 2, "lr": 3, "keys": 4}
    first: dict[int, Any] = {}

    def stale(self: Inputs, values: Sequence[np.ndarray]) -> None:
        kept = first.setdefault(id(self), values[places[frozen]].copy())
        put(self, [kept if n == places[frozen] else v for n, v in enumerate(values)])

    monkeypatch.setattr(captured.Inputs, "put", stale)
    with pytest.raises(AssertionError):
        same_bits("gpt2", [[batch(n, 1)] for n in range(5)])


def test_after_a_norm_that_is_not_finite_the_factor_stays_where_graphs_read_it() -> None:
    graph, _ = trained("nanoeuler", True)
    assert graph.captured is not None
    for number in range(3):
        graph.step(number, [batch(number, 2)])
    assert graph.optimizer.factor is graph.captured.factor and 0 < float(graph.captured.factor) <= 1


def test_what_cannot_be_captured_is_one_line() -> None:
    backend = get_backend("numpy", "fp32", workers=1)
    model = NanoEuler(MODELS["nanoeuler"][1], backend)
    with pytest.raises(UserError, match="--cuda-graph makes a CUDA graph of the step, and the backend is numpy; use"):
        Captured(DataParallel(model, backend, NextTokens((1, 0.5))), AdamW(model.buffer, backend), 1.0)
    backend.graphs = AsGraphs  # type: ignore[method-assign]
    with pytest.raises(UserError, match="--cuda-graph: the objective DPO is not one that a graph can repeat"):
        Captured(DataParallel(model, backend, DPO()), AdamW(model.buffer, backend), 1.0)
    for settings in (DpoSettings(cuda_graph="on"), GrpoSettings(cuda_graph="on")):
        with pytest.raises(UserError, match="--cuda-graph: the loss is weighed on the host, which no graph can repeat"):
            settings.check()


def test_by_default_steps_become_graphs_on_gpus() -> None:
    """For tokens, without a carried state, and on one GPU where its memory holds a step's 100 bytes twice, apart from
    the weights and moments; --cuda-graph and --cuda-graph off decide otherwise."""
    tokens, plan = NextTokens((1, 0.5)), Plan(weights=40, moments=20, saved=70, peak=160, gradients=10)
    two = SimpleNamespace(size=2)
    for name, group, free, by_default in (
        ("cupy", None, 200, True),
        ("cupy", None, 199, False),
        ("cupy", two, 0, True),
        ("numpy", two, 200, False),
    ):
        backend: Any = SimpleNamespace(name=name, group=group, memory=lambda free=free: {"free": free + OUTSIDE})
        assert captures("auto", tokens, backend, plan=plan) == by_default
        assert not captures("auto", tokens, backend, carried=8, plan=plan)
        for other in (DPO(), MaskedTokens()):
            assert not captures("auto", other, backend, plan=plan)
        assert captures("on", tokens, backend) and not captures("off", tokens, backend)


@pytest.mark.parametrize("when", ["run", "capture"])
def test_what_a_graph_cannot_repeat_runs_without_one_unless_it_was_asked_for(
    when: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(AsGraphs):
        """As CuPy's where the step uploads: before the weights change."""

        def run(self, work: Any) -> None:
            if when == "run":
                raise UserError("--cuda-graph: the step uploads; use --cuda-graph off")
            super().run(work)

        def capture(self, work: Any) -> Any:
            raise UserError("--cuda-graph: the step cannot be captured; use --cuda-graph off")

    rng = np.random.default_rng(0)
    steps = [[Batch(*rng.integers(0, VOCAB, (2, 2, 6, 1), dtype=np.int32).repeat(2, axis=-1))] for _ in range(5)]
    steps = [[replace(batch, ids=batch.ids[..., 0]) for batch in batches] for batches in steps]

    def trained(with_graph: bool) -> Trained:
        backend = get_backend("numpy", "fp32", workers=1)
        if with_graph:
            backend.graphs = Refusing  # type: ignore[method-assign]
        build, config = MODELS["nanoeuler"]
        return Trained(backend, build(config, backend), with_graph)

    ours = trained(True)
    assert ours.captured is not None
    ours.captured.optional = True
    assert_same_bits(trained(False), ours, steps)
    assert capsys.readouterr().err.count("steps run without a graph: --cuda-graph: the step") == 1
    asked = trained(True)
    with pytest.raises(UserError, match="use --cuda-graph off"):
        for number, batches in enumerate(steps):
            asked.step(number, batches)


def test_inputs_keep_their_places() -> None:
    backend = get_backend("numpy", "fp32", workers=1)
    values = [np.arange(5, dtype=np.int32), np.ones((2, 3)), np.array([[1, 2]], np.uint32)]
    inputs = Inputs(values, backend)
    places = [a.ctypes.data for a in inputs.arrays]
    for sign in (1, 2):
        inputs.put([v * v.dtype.type(sign) for v in values])
        assert [a.ctypes.data for a in inputs.arrays] == places
        for a, v in zip(inputs.arrays, values, strict=True):
            assert np.array_equal(a, sign * v) and a.dtype == v.dtype
    with pytest.raises(ValueError, match=r"Inputs: int32 \(4,\), expected int32 \(5,\)"):
        inputs.put([values[0][:4], *values[1:]])
