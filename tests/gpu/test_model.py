"""Whole models on the GPU: gradients against NumPy's and finite differences, precisions, determinism, training."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import checkpoint, ops
from tinyforge.backends import get_backend
from tinyforge.backends.compile import kernel_files
from tinyforge.errors import UserError
from tinyforge.formats import load
from tinyforge.gradcheck import TOLERANCE, check_op, examine, known_ops
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import override
from tinyforge.models.nanoeuler import Config, NanoEuler
from tinyforge.op import Op
from tinyforge.tokenizers import Tokenizer
from tinyforge.train import metrics
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import DataParallel, evaluate_nll
from tinyforge.train.distil import Distilled, Ensemble
from tinyforge.train.objectives import Batch, NextTokens
from tinyforge.train.run import Task, train
from tinyforge.train.settings import Settings

pytestmark = pytest.mark.gpu

CONFIG = Config(
    dim=128, heads=4, kv_heads=2, layers=3, context=96, vocab=301, mtp_heads=3, hidden=152, mtp_weights=(1, 0.5, 0.25)
)


@pytest.mark.parametrize("kind", known_ops(), ids=lambda kind: kind.__name__)
def test_every_gradient_against_finite_differences(kind: type[Op]) -> None:
    rows = check_op(kind, get_backend("cupy", "fp64"))
    assert [row for row in rows if not row.error <= TOLERANCE] == []


KERNELS = {k.name: k for kind in ops.ALL for k in kind.kernels}
FAULTS = {
    "rmsnorm_bwd": ops.RMSNorm,
    "layernorm_bwd": ops.LayerNorm,
    "rope": ops.RoPE,
    "swiglu_bwd": ops.SwiGLU,
    "gelu_bwd": ops.GELU,
    "softmax_bwd": ops.Softmax,
    "linear_bwd": ops.Linear,
    "swiglu_linear_bwd": ops.SwiGLULinear,
    "cross_entropy_bwd": ops.CrossEntropy,
    "linear_cross_entropy_bwd": ops.LinearCrossEntropy,
}


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_gradient_that_is_one_percent_off_is_caught(kernel: str) -> None:
    backend = get_backend("cupy", "fp64")
    right, calls = KERNELS[kernel].bind(backend), iter(range(10**9))

    def wrong(*arguments: Any) -> Any:
        # RoPE's forward and backward are one kernel: some calls must be right for others to contradict them.
        factor = 1.01 if kernel != "rope" or next(calls) % 2 else 1.0
        return right(*arguments) * factor

    with override(KERNELS[kernel], "cupy", wrong):
        assert max(row.error for row in examine(FAULTS[kernel], backend, contract=False).rows) > TOLERANCE


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 40, "full_every": 2},
    "half RoPE": {"rotary_dim": 16},
    "fixed scale": {"qk_scale": "fixed", "attention_scale": 0.2},
    "learned scale": {"qk_scale": "learned"},
    "x0": {"mix_first": True, "embedding_norm": True},
    "smear": {"smear": 12},
    "values": {"value_every": 2, "value_gate": 12},
    "softcap": {"logit_softcap": 3.0},
    "relu2": {"gated": False, "activation": "relu2"},
}
OPTIONS["all"] = {name: value for given in OPTIONS.values() for name, value in given.items()}


def gradients(
    backend_name: str, precision: str, teachers: int = 0, options: Any = None
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    backend, config = get_backend(backend_name, precision, workers=1), CONFIG.override(options or {})
    model, *others = (NanoEuler(config.override({"layers": 3 - i % 3}), backend) for i in range(1 + teachers))
    for i, each in enumerate([model, *others]):
        each.initialise(seed=3 + i)
    learner = Distilled(model, Ensemble(others, 3, backend), 0.7) if others else model
    rng = np.random.default_rng(5)
    ids = rng.integers(0, CONFIG.vocab, (4, 96), dtype=np.int32)
    batch = Batch(ids, rng.integers(-1, CONFIG.vocab, (4, 96, 3), dtype=np.int32))
    sums = DataParallel(learner, backend, NextTokens(CONFIG.head_weights)).gradients([batch]).sums
    return backend.to_numpy(sums), {p.name: backend.to_numpy(p.grad).copy() for p in model.buffer.params}


# tf32 and bf16 are measured against float64 as well: 10 and 7 bits of mantissa, over the depth of the model.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5), ("tf32", 1e-2), ("bf16", 5e-2)])
@pytest.mark.parametrize("teachers", [0, 3])
def test_gradients_are_those_of_numpy(precision: str, tolerance: float, teachers: int) -> None:
    wanted_nll, expected = gradients("numpy", precision if precision in ("fp64", "fp32") else "fp64", teachers)
    nll, got = gradients("cupy", precision, teachers)
    np.testing.assert_allclose(nll, wanted_nll, rtol=tolerance)
    for name, w in expected.items():
        assert np.linalg.norm(got[name] - w) <= tolerance * np.linalg.norm(w), name


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 1e-5), ("bf16", 8e-2)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_options_are_those_of_numpy(options: dict[str, Any], precision: str, tolerance: float) -> None:
    wanted_nll, expected = gradients("numpy", "fp32" if precision == "fp32" else "fp64", options=options)
    nll, got = gradients("cupy", precision, options=options)
    np.testing.assert_allclose(nll, wanted_nll, rtol=tolerance)
    for name, w in expected.items():
        few = 8 if precision == "bf16" and w.size < 16 else 1  # sums over all numbers, whose signs differ
        assert np.linalg.norm(got[name] - w) <= few * tolerance * np.linalg.norm(w) + 1e-12, name


FP8_OPTIONS = {name: value for name, value in OPTIONS["all"].items() if name not in ("gated", "activation")}


@pytest.mark.parametrize(
    ("precision", "options"),
    [*((name, {}) for name in ("fp32", "bf16", "fp8")), ("bf16", OPTIONS["all"]), ("fp8", FP8_OPTIONS)],
)
def test_the_same_seed_gives_the_same_bits(precision: str, options: dict[str, Any]) -> None:
    runs = [gradients("cupy", precision, options=options) for _ in range(3)]
    assert len({nll.tobytes() for nll, _ in runs}) == 1
    for name in runs[0][1]:
        assert len({grads[name].tobytes() for _, grads in runs}) == 1, name


TOKENIZER = Tokenizer([], ["<|endoftext|>"])
TINY = Config(
    dim=64, heads=2, kv_heads=1, layers=2, context=32, vocab=257, mtp_heads=2, hidden=40, mtp_weights=(1, 0.5)
)
TOKENS = np.array(TOKENIZER.encode("the cat sat on the mat and the dog sat on the cat. " * 20), np.int32)


class Trial:
    def __init__(self, out: Path, **settings: Any) -> None:
        plan = {"steps": 25, "save_every": 7, "eval_every": 12, "batch_size": 4, "keep": 0, "lr": 1e-2}
        self.settings = Settings(**{"out": str(out), "backend": "cupy", "precision": "bf16", **plan, **settings})
        self.backend = get_backend("cupy", self.settings.precision)
        self.model = NanoEuler(TINY, self.backend)
        self.model.initialise(0)
        self.data = PackedTokens(TOKENS, 32, 2, seed=0)
        meta = {"kind": "pretrain", "config": TINY.to_dict(), "tokenizer_hash": TOKENIZER.hash()}
        self.task = Task(
            model=self.model,
            tokenizer=TOKENIZER,
            objective=NextTokens(TINY.head_weights, TOKENIZER.byte_lengths),
            batches=self.batches,
            evaluate=self.evaluate,
            sample=lambda: "a sample",
            meta=meta,
        )

    def batches(self, step: int) -> list[Batch]:
        return [self.data.batch(2 * step, 4), self.data.batch(2 * step + 1, 4)]

    def evaluate(self, parallel: DataParallel) -> dict[str, float]:
        return {"val_bits_per_byte": evaluate_nll(parallel, self.data.in_order(4, 200), TOKENIZER.byte_lengths)}

    def train(self, resume: bool = False) -> Path:
        return train(self.task, self.settings, self.backend, resume)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_run_learns_resumes_bit_for_bit_and_is_read_on_the_cpu(tmp_path: Path, precision: str) -> None:
    whole, again = (Trial(tmp_path / name, precision=precision) for name in ("whole", "again"))
    last = whole.train()
    again.train()
    # A run that is cut off after step 14: that checkpoint, and a log that is ahead of it.
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "step-00000014").rename(tmp_path / "cut" / "step-00000014")
    log = (tmp_path / "whole" / "metrics.jsonl").read_text(encoding="utf-8")
    (tmp_path / "cut" / "metrics.jsonl").write_text(log, encoding="utf-8")
    resumed = Trial(tmp_path / "cut", precision=precision)
    resumed.train(resume=True)
    for other in (again, resumed):
        for name in ("masters", "values"):
            a, b = (whole.backend.to_numpy(getattr(t.model.buffer, name)) for t in (whole, other))
            assert a.tobytes() == b.tobytes()
    rows = [row for row in metrics.read(tmp_path / "whole" / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 26)) and rows[-1]["loss"] < 0.6 * rows[0]["loss"]

    weights = checkpoint.load(last).weights
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    on_cpu = load(last, get_backend("numpy", "fp32", workers=1))
    evaluated = evaluate_nll(
        DataParallel(on_cpu.model, on_cpu.model.backend), whole.data.in_order(4, 200), TOKENIZER.byte_lengths
    )
    assert evaluated == pytest.approx(
        whole.evaluate(DataParallel(whole.model, whole.backend))["val_bits_per_byte"],
        rel=1e-5 if precision == "fp32" else 2e-2,
    )
    on_gpu = load(last, get_backend("cupy", "fp32"))
    text = [
        list(generate(m.model, TOKENIZER.encode("the cat"), Sampling(temperature=0, max_tokens=12)))
        for m in (on_cpu, on_gpu)
    ]
    assert text[0] == text[1] and len(text[0]) == 12


def test_a_nan_stops_the_run_and_leaves_the_weights_before_it(tmp_path: Path) -> None:
    # No graph: it would not see the kernel that is exchanged below.
    trial = Trial(tmp_path, save_every=100, cuda_graph="off")
    good = trial.batches
    op = trial.model.blocks[1].mlp.down
    right = op.bwd

    def poisoned(*arguments: Any) -> Any:
        result = right(*arguments)
        result[0, 0, 0] = np.nan
        return result

    def batches(step: int) -> list[Batch]:
        if step == 13:
            op.bwd = poisoned
        return good(step)

    object.__setattr__(trial.task, "batches", batches)
    with pytest.raises(UserError, match="step 13: .* came from backward of blocks.1.down"):
        trial.train()
    assert np.isfinite(trial.backend.to_numpy(trial.model.buffer.masters)).all()


def test_the_kernel_files_are_found_as_package_data() -> None:
    assert {f"ops/{n}.cu" for n in ("rmsnorm", "swiglu", "cross_entropy", "embedding")} <= set(kernel_files())


def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="--device is 99, visible GPUs are 0 to"):
        get_backend("cupy", "fp32", device=99)


def test_the_driver_counts_energy() -> None:
    backend = get_backend("cupy", "bf16")
    before = backend.energy()
    if before is None:
        pytest.skip("this driver counts no energy")
    start = time.perf_counter()
    while time.perf_counter() - start < 0.5:
        backend.matmul_peak(size=4096, rounds=1)
    used = backend.energy() - before
    assert 10 < used / (time.perf_counter() - start) < 2000  # watts
