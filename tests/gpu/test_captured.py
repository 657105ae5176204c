"""Steps as CUDA graphs next to plain ones: the same bits of all that is learned, and the memory that they take."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.trained import Trained, assert_same_bits
from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.ops.attention import Documents
from tinyforge.optim import AdamWConfig, MuonConfig
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics
from tinyforge.train.batches import PackedTokens
from tinyforge.train.captured import MOST, Captured
from tinyforge.train.data_parallel import DataParallel, evaluate_nll
from tinyforge.train.distil import Distilled, Ensemble
from tinyforge.train.objectives import Batch, NextTokens
from tinyforge.train.plan import plan_step
from tinyforge.train.run import Task, train
from tinyforge.train.settings import Settings

pytestmark = pytest.mark.gpu

VOCAB = 301
MODELS: dict[str, tuple[str, Any]] = {
    "nanoeuler": (
        "nanoeuler",
        Config(
            dim=128,
            heads=4,
            kv_heads=2,
            layers=3,
            context=96,
            vocab=VOCAB,
            mtp_heads=2,
            hidden=152,
            mtp_weights=(1, 0.5),
        ),
    ),
    "gpt2": ("gpt2", {"dim": 128, "heads": 4, "layers": 2, "context": 96, "vocab": VOCAB, "dropout": 0.0}),
    "gpt2, dropout": ("gpt2", {"dim": 128, "heads": 2, "layers": 2, "context": 96, "vocab": VOCAB, "dropout": 0.2}),
    "llama": (
        "llama",
        {
            "dim": 128,
            "heads": 4,
            "kv_heads": 2,
            "hidden": 152,
            "layers": 2,
            "context": 96,
            "vocab": VOCAB,
            "qk_norm": True,
        },
    ),
    "lstm": ("lstm", {"dim": 128, "layers": 2, "context": 96, "vocab": VOCAB, "dropout": 0.2, "reset": 5}),
    "mamba": ("mamba", {"dim": 128, "layers": 2, "state": 8, "context": 96, "vocab": VOCAB}),
    "char_mlp": ("char_mlp", {"context": 96, "vocab": VOCAB}),
    # More layers than CuPy concatenates without an upload.
    "moe": (
        "moe",
        MoEConfig(
            dim=64,
            heads=2,
            kv_heads=1,
            layers=9,
            context=96,
            vocab=VOCAB,
            mtp_heads=2,
            hidden=48,
            experts=4,
            active=2,
            mtp_weights=(1, 0.5),
        ),
    ),
}


def batch(number: int, heads: int, rows: int = 4, **more: Any) -> Batch:
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCAB, (rows, 96), dtype=np.int32)
    return Batch(ids, rng.integers(-99, VOCAB, (rows, 96, heads), dtype=np.int32).clip(-1), **more)


def trained(
    name: str, precision: str, with_graph: bool, recompute: Any = "", optimizer: AdamWConfig | None = None
) -> Trained:
    kind, config = MODELS[name]
    spec, backend = find_model(kind), get_backend("cupy", precision)
    if isinstance(config, dict):
        config = next(iter(spec.presets.values())).override(config)
    return Trained(backend, spec.build(config, backend, recompute=recompute), with_graph, optimizer)


def same_bits(name: str, precision: str, steps: Sequence[Sequence[Batch]], **options: Any) -> None:
    assert_same_bits(*(trained(name, precision, with_graph, **options) for with_graph in (False, True)), steps)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "tf32", "fp64"])
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_have_the_bits_of_plain_ones(name: str, precision: str) -> None:
    heads = trained(name, precision, False).model.config.prediction_heads
    same_bits(name, precision, [[batch(n, heads)] for n in range(20)])


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_steps_of_muon_have_the_bits_of_plain_ones(precision: str) -> None:
    for config in (MuonConfig(), MuonConfig(normuon=True, coefficients="polar-express", cautious=True)):
        same_bits("nanoeuler", precision, [[batch(n, 2)] for n in range(10)], optimizer=config)


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_steps_with_a_teacher_have_the_bits_of_plain_ones(precision: str) -> None:
    def taught(with_graph: bool) -> Trained:
        backend = get_backend("cupy", precision)
        student, teacher = (NanoEuler(MODELS["nanoeuler"][1].override({"layers": n}), backend) for n in (2, 3))
        teacher.initialise(1)
        return Trained(backend, Distilled(student, Ensemble([teacher], 2, backend), share=0.7), with_graph)

    assert_same_bits(taught(False), taught(True), [[batch(n, 2)] for n in range(12)])


def test_twenty_steps_in_fp8_too() -> None:
    heads = trained("nanoeuler", "fp8", False).model.config.prediction_heads
    same_bits("nanoeuler", "fp8", [[batch(n, heads)] for n in range(20)])


def test_micro_batches_recomputation_weights_and_documents() -> None:
    def more(number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        starts = np.maximum.accumulate(np.where(rng.random((4, 96)) < 0.05, np.arange(96), 0), axis=1).astype(np.int32)
        return {"weights": rng.random((4, 96, 2)), "documents": Documents(starts, restart=True)}

    steps = [[batch(2 * n + i, 2, **more(2 * n + i)) for i in range(2)] for n in range(8)]
    same_bits("nanoeuler", "bf16", steps)
    same_bits("nanoeuler", "bf16", steps, recompute="blocks")


def test_each_shape_has_a_graph_and_evaluation_comes_between() -> None:
    """More shapes than get a graph, in turns; the evaluation's arrays come and go between the graphs' launches."""
    kinds = MOST + 1
    plain, graph = both = [trained("nanoeuler", "bf16", with_graph) for with_graph in (False, True)]
    for number in range(4 * kinds):
        for each in both:
            each.step(number, [batch(number, 2, rows=2 + number % kinds)])
            each.found.append((each.parallel.nll(batch(number, 2, rows=9)), 0.0))
    for each in both:
        each.found = [(each.backend.xp.asarray(sums), norm) for sums, norm in each.found]
    assert plain.bits() == graph.bits()


def test_an_upload_in_a_captured_step_is_an_error_and_the_next_step_is_plain_again() -> None:
    graph = trained("nanoeuler", "bf16", True)
    right = graph.model.forward

    def uploads(*arguments: Any, **options: Any) -> Any:
        import cupy

        cupy.asarray(np.arange(1000))
        return right(*arguments, **options)

    graph.step(0, [batch(0, 2)])
    graph.model.forward = uploads
    with pytest.raises(UserError, match="--cuda-graph: the step uploads 8000 bytes"):
        graph.step(1, [batch(1, 2)])
    graph.model.forward = right
    graph.captured = None
    graph.step(1, [batch(1, 2)])
    assert np.isfinite(float(graph.found[-1][1]))


@pytest.mark.parametrize("name", ["base", "small"])
def test_the_plan_is_within_five_percent_of_the_peak(name: str) -> None:
    from tinyforge.backends.cupy_backend import PeakMemory, used_bytes

    config, rows = PRESETS[name], {"base": 8, "small": 256}[name]
    backend = get_backend("cupy", "bf16")
    gc.collect()
    before = used_bytes()
    with PeakMemory() as peak:
        model = NanoEuler(config, backend)
        model.initialise(0)
        parallel = DataParallel(model, backend, NextTokens(config.head_weights))
        captured = Captured(parallel, parallel.rank.make_optimizer(None), 1.0)
        rng = np.random.default_rng(0)
        for number in range(5):
            ids = rng.integers(0, config.vocab, (rows, config.context), dtype=np.int32)
            targets = rng.integers(0, config.vocab, (rows, config.context, config.mtp_heads), dtype=np.int32)
            captured.step([Batch(ids, targets)], Stream(number, "dropout"), 1e-3)
        backend.synchronize()
    planned = plan_step(find_model("nanoeuler"), config, "bf16", rows, config.context).peak
    assert planned == pytest.approx(peak.bytes - before, rel=0.05)


TOKENIZER = Tokenizer([], ["<|endoftext|>"])
TINY = Config(
    dim=64, heads=2, kv_heads=1, layers=2, context=32, vocab=257, mtp_heads=2, hidden=40, mtp_weights=(1, 0.5)
)
TOKENS = np.array(TOKENIZER.encode("the cat sat on the mat and the dog sat on the cat. " * 20), np.int32)


class Trial:
    def __init__(self, out: Path, capture: str = "on") -> None:
        self.settings = Settings(
            steps=25,
            save_every=7,
            eval_every=6,
            batch_size=4,
            keep=0,
            lr=1e-2,
            out=str(out),
            backend="cupy",
            precision="bf16",
            cuda_graph=capture,
        )
        self.backend = get_backend("cupy", "bf16")
        self.model = NanoEuler(TINY, self.backend)
        self.model.initialise(0)
        self.data = PackedTokens(TOKENS, 32, 2, seed=0)
        meta = {"kind": "pretrain", "config": TINY.to_dict(), "tokenizer_hash": TOKENIZER.hash()}
        self.task = Task(
            model=self.model,
            tokenizer=TOKENIZER,
            objective=NextTokens(TINY.head_weights, TOKENIZER.byte_lengths),
            batches=lambda step: [self.data.batch(2 * step, 4), self.data.batch(2 * step + 1, 4)],
            evaluate=self.evaluate,
            sample=lambda: "a sample",
            meta=meta,
        )

    def evaluate(self, parallel: DataParallel) -> dict[str, float]:
        return {"val_bits_per_byte": evaluate_nll(parallel, self.data.in_order(4, 200), TOKENIZER.byte_lengths)}

    def train(self, resume: bool = False) -> Path:
        return train(self.task, self.settings, self.backend, resume)


def test_a_run_resumes_bit_for_bit_with_and_without_graphs(tmp_path: Path) -> None:
    whole, plain = Trial(tmp_path / "whole"), Trial(tmp_path / "plain", capture="off")
    whole.train()
    plain.train()
    log = (tmp_path / "whole" / "metrics.jsonl").read_text(encoding="utf-8")
    resumed = []
    for name, capture in (("cut", "on"), ("cut, plain", "off")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(log, encoding="utf-8")
        source = tmp_path / ("whole" if capture == "on" else "plain") / "step-00000014"
        source.rename(tmp_path / name / source.name)
        trial = Trial(tmp_path / name, capture)
        trial.train(resume=True)
        resumed.append(trial)
    masters = [t.backend.to_numpy(t.model.buffer.masters).tobytes() for t in (whole, plain, *resumed)]
    assert len(set(masters)) == 1
    rows = [
        [
            (row["step"], row["loss"], row["grad_norm"])
            for row in metrics.read(tmp_path / name / "metrics.jsonl")
            if "loss" in row
        ]
        for name in ("whole", "plain", "cut")
    ]
    assert rows[0] == rows[1] == rows[2] and len(rows[0]) == 25


def test_a_nan_stops_the_run_and_leaves_the_weights_before_it(tmp_path: Path) -> None:
    """A weight becomes NaN between two launches of the graph; the step is run again without it to find which."""
    trial = Trial(tmp_path)
    good = trial.task.batches

    def batches(step: int) -> Any:
        if step == 13:
            next(p for p in trial.model.buffer.params if "blocks.1.down" in p.name).value[0, 0] = np.nan
        return good(step)

    object.__setattr__(trial.task, "batches", batches)
    with pytest.raises(UserError, match="step 13: loss nan, .* came from weight blocks.1.down"):
        trial.train()
    assert np.isfinite(trial.backend.to_numpy(trial.model.buffer.masters)).all()
