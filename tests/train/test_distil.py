"""Distillation: a model that learns from a teacher next to one that learns from the text alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.backends.as_graphs import AsGraphs
from tests.train.trained import Trained, assert_same_bits
from tinyforge.backends import Backend, get_backend
from tinyforge.errors import UserError
from tinyforge.frozen_model import frozen_model
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.gpt2 import Config as GPT2Config
from tinyforge.models.llama import Config as LlamaConfig
from tinyforge.models.llama import Llama
from tinyforge.models.lstm import Config as LSTMConfig
from tinyforge.models.lstm import LSTMModel
from tinyforge.models.mamba import Config as MambaConfig
from tinyforge.models.mamba import Mamba
from tinyforge.models.moe import Config as MoEConfig
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.op import Stash
from tinyforge.ops.attention import Documents
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.distil import Distilled, Ensemble, Teachers, check_teacher
from tinyforge.train.objectives import Batch, NextTokens
from tinyforge.train.plan import plan_step

FP64 = get_backend("numpy", "fp64", workers=1)
VOCAB = 11
SMALL = Config(
    dim=8, heads=2, kv_heads=1, layers=1, context=6, vocab=VOCAB, mtp_heads=2, hidden=6, mtp_weights=(1, 0.5)
)
LARGE = Config(
    dim=16,
    heads=2,
    kv_heads=1,
    layers=2,
    context=6,
    vocab=VOCAB,
    mtp_heads=3,
    hidden=12,
    mtp_weights=(1, 0.5, 0.2),
    dropout=0.5,
)
# Every model of the zoo that predicts next tokens, and has one head.
OTHERS: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2, GPT2Config(dim=8, heads=2, layers=2, context=6, vocab=VOCAB)),
    "llama, tied": (Llama, LlamaConfig(dim=8, heads=2, kv_heads=1, layers=1, context=6, vocab=VOCAB, hidden=6)),
    "lstm": (LSTMModel, LSTMConfig(dim=8, layers=1, context=6, vocab=VOCAB)),
    "mamba": (Mamba, MambaConfig(dim=8, layers=1, context=6, vocab=VOCAB)),
    "moe": (
        MoE,
        MoEConfig(
            dim=8,
            heads=2,
            kv_heads=1,
            layers=1,
            context=6,
            vocab=VOCAB,
            mtp_heads=1,
            hidden=6,
            experts=3,
            active=2,
            mtp_weights=(1,),
        ),
    ),
}


def built(kind: Any, config: Any, seed: int = 0, backend: Backend = FP64) -> Any:
    model = kind(config, backend)
    model.buffer.masters[...] = np.random.default_rng(seed).normal(size=model.buffer.size) / 2
    model.buffer.publish()
    return model


def batch(number: int, heads: int = 2, rows: int = 4, **more: Any) -> Batch:
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCAB, (rows, 6), dtype=np.int32)
    return Batch(ids, rng.integers(-5, VOCAB, (rows, 6, heads), dtype=np.int32).clip(-1), **more)


def gradients(model: Any, batches: list[Batch]) -> np.ndarray:
    DataParallel(model, FP64, NextTokens((1.0,) * batches[0].targets.shape[-1])).gradients(
        batches, Stream(3, "dropout")
    )
    return np.array(model.buffer.grads)


def taught_by(student: Any, teachers: list[Any], share: float) -> Distilled:
    ensemble = Ensemble(teachers, student.config.prediction_heads, student.backend)
    return Distilled(student, ensemble, share)


def log_softmax(z: np.ndarray) -> np.ndarray:
    return z - np.logaddexp.reduce(z, axis=-1, keepdims=True)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_loss_is_the_cross_entropy_with_the_mixed_targets(share: float) -> None:
    """With the teacher's dropout off, and masked positions left out."""
    student, teacher = built(NanoEuler, SMALL), built(NanoEuler, LARGE, 1)
    given, heads = batch(0), 2
    parallel = DataParallel(taught_by(student, [teacher], share), FP64, NextTokens((1.0, 1.0)))
    totals = parallel.gradients([given], Stream(3, "dropout"))
    h, taught = student.hidden(given.ids), teacher.hidden(given.ids)
    expected = np.zeros(heads)
    for k in range(heads):
        log_p, q = log_softmax(student.logits(h, k)), np.exp(log_softmax(teacher.logits(taught, k)))
        for row, column in np.argwhere(given.targets[..., k] >= 0):
            mixed = share * q[row, column]
            mixed[given.targets[row, column, k]] += 1 - share
            expected[k] -= mixed @ log_p[row, column]
    np.testing.assert_allclose(np.asarray(totals.sums)[:heads], expected, rtol=1e-12)


def test_several_teachers_teach_the_softmax_of_their_mean_logits() -> None:
    """Of different widths and numbers of heads."""
    student = built(NanoEuler, SMALL)
    teachers = [built(NanoEuler, LARGE, 1), built(NanoEuler, SMALL, 2), built(NanoEuler, LARGE, 3)]
    given, heads = batch(0), 2
    parallel = DataParallel(taught_by(student, teachers, 1.0), FP64, NextTokens((1.0, 1.0)))
    totals = parallel.gradients([given], Stream(3, "dropout"))
    h, expected = student.hidden(given.ids), np.zeros(heads)
    for k in range(heads):
        log_p = log_softmax(student.logits(h, k))
        q = np.exp(log_softmax(np.mean([t.logits(t.hidden(given.ids), k) for t in teachers], axis=0)))
        expected[k] -= (q * log_p).sum(axis=-1)[given.targets[..., k] >= 0].sum()
    np.testing.assert_allclose(np.asarray(totals.sums)[:heads], expected, rtol=1e-12)


def test_a_teacher_given_twice_is_one_teacher() -> None:
    teacher = built(NanoEuler, LARGE, 1)
    once, twice = (gradients(taught_by(built(NanoEuler, SMALL), [teacher] * n, 0.7), [batch(0)]) for n in (1, 2))
    np.testing.assert_allclose(twice, once, rtol=1e-12, atol=1e-15)


def test_a_teacher_with_a_small_share_is_no_teacher() -> None:
    """The gradients are linear in the share, and at 0 those of the text."""
    teacher, batches = built(NanoEuler, LARGE, 1), [batch(0), batch(1)]
    none, half, whole = (gradients(taught_by(built(NanoEuler, SMALL), [teacher], s), batches) for s in (0.0, 0.5, 1.0))
    np.testing.assert_allclose(none, gradients(built(NanoEuler, SMALL), batches), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(half, (none + whole) / 2, rtol=1e-9, atol=1e-12)
    assert np.abs(whole - none).max() > 1e-3


def test_a_model_that_teaches_itself_has_nothing_to_learn() -> None:
    student = built(NanoEuler, SMALL)
    assert np.abs(gradients(taught_by(student, [built(NanoEuler, SMALL)], 1.0), [batch(0)])).max() < 1e-12


@pytest.mark.parametrize("name", OTHERS)
def test_every_model_learns_and_teaches(name: str) -> None:
    """The gradients along a random direction, by finite differences; and the same model as a teacher of another."""
    kind, config = OTHERS[name]
    student, teacher = built(kind, config), built(NanoEuler, LARGE, 1)
    taught, given, objective = taught_by(student, [teacher], 0.7), batch(0, heads=1), NextTokens()
    grads = gradients(taught, [given])
    parallel, start = DataParallel(taught, FP64, objective), np.array(student.buffer.masters)
    direction = np.random.default_rng(5).normal(size=start.shape)
    direction /= np.linalg.norm(direction)

    def loss(step: float) -> float:
        student.buffer.masters[...] = start + step * direction
        student.buffer.publish()
        totals = parallel.gradients([given], Stream(3, "dropout"))
        return parallel.objective.figures(FP64.to_numpy(totals.sums), totals.counts)["loss"]  # type: ignore[union-attr]

    h = 1e-3
    numeric = (loss(-2 * h) - 8 * loss(-h) + 8 * loss(h) - loss(2 * h)) / (12 * h)
    np.testing.assert_allclose(grads @ direction, numeric, rtol=1e-8)
    back = gradients(taught_by(built(Llama, OTHERS["llama, tied"][1]), [built(kind, config)], 0.7), [given])
    assert np.isfinite(back).all() and np.abs(back).max() > 0


def test_documents_reach_the_teacher_too() -> None:
    """A row of two documents is taught as each of them alone."""
    teacher = built(NanoEuler, LARGE, 1)
    whole = batch(0, rows=1)
    starts = np.array([[0, 0, 0, 3, 3, 3]], np.int32)
    packed = Batch(whole.ids, whole.targets, documents=Documents(starts, restart=True))
    alone = [Batch(whole.ids[:, part], whole.targets[:, part]) for part in (slice(0, 3), slice(3, 6))]
    one, two = (gradients(taught_by(built(NanoEuler, SMALL), [teacher], 0.7), given) for given in ([packed], alone))
    np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-12)
    assert not np.allclose(one, gradients(taught_by(built(NanoEuler, SMALL), [teacher], 0.7), [whole]))


def test_workers_share_the_teacher_and_evaluation_does_without_it() -> None:
    found = []
    for workers in (1, 2):
        backend = get_backend("numpy", "fp64", workers=workers)
        student = built(NanoEuler, SMALL, backend=backend)
        taught = taught_by(student, [built(NanoEuler, LARGE, 1, backend)], 0.7)
        parallel = DataParallel(taught, backend, NextTokens((1.0, 1.0)))
        parallel.gradients([batch(0)])
        found.append((np.array(student.buffer.grads), parallel.nll(batch(1))))
    np.testing.assert_allclose(*(grads for grads, _ in found), rtol=1e-9, atol=1e-12)
    plain = DataParallel(built(NanoEuler, SMALL), FP64).nll(batch(1))
    for _, nll in found:
        np.testing.assert_allclose(nll, plain, rtol=1e-12)


def test_a_captured_step_repeats_the_teacher() -> None:
    def trained(with_graph: bool) -> Trained:
        backend, graphs = get_backend("numpy", "fp32", workers=1), AsGraphs()
        backend.graphs = lambda: graphs  # type: ignore[method-assign]
        taught = taught_by(NanoEuler(SMALL, backend), [built(NanoEuler, LARGE, seed, backend) for seed in (1, 2)], 0.7)
        return Trained(backend, taught, with_graph)

    assert_same_bits(trained(False), trained(True), [[batch(n)] for n in range(6)])


def test_the_forecast_counts_the_teacher() -> None:
    """Its weights in bf16, and one chunk of its logits."""
    spec, config, large = find_model("nanoeuler"), PRESETS["small"], PRESETS["base"].override({"vocab": 512})
    alone = plan_step(spec, config, "bf16", 8, 128)
    taught, twice = (
        plan_step(spec, config, "bf16", 8, 128, teachers=Teachers(models, 0.5))
        for models in (((spec, large),), ((spec, large), (spec, large)))
    )
    count = frozen_model(partial(NanoEuler, large, FP64)).buffer.count
    assert taught.weights - alone.weights == pytest.approx(2 * count, rel=0.02)  # and its rotary tables
    assert taught.moments == alone.moments and taught.saved == alone.saved
    heads = config.prediction_heads * 512 * 2 * large.dim  # side by side
    assert twice.weights - taught.weights == pytest.approx(2 * (count + heads), rel=0.02)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nanoeuler", {"vocab": 12}, "--teacher: runs/one has 12 ids, the model 11; give both the same tokenizer"),
        (
            "nanoeuler",
            {"mtp_heads": 1, "mtp_weights": (1,)},
            "--teacher: runs/one has 1 prediction head, the model 2; give the model fewer, e.g. --set mtp_heads=1",
        ),
        ("nanoeuler", {"context": 5}, "--teacher: runs/one reads 5 tokens, a row has 6; use --seq-len 5"),
        ("bert", {}, "--teacher: BERT learns masked text and NanoEuler text; use two models of next tokens"),
        ("lstm", {}, "--teacher: LSTM cannot keep documents apart; leave out --document-mask"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    spec = find_model(name)
    if name == "nanoeuler":
        teacher, student = LARGE.override(changes), SMALL
    else:
        teacher = next(iter(spec.presets.values())).override({"vocab": VOCAB})
        student = SMALL.override({"mtp_heads": 1, "mtp_weights": (1,)})
    with pytest.raises(UserError) as error:
        check_teacher("runs/one", spec, teacher, find_model("nanoeuler"), student, 6, documents=True)
    assert str(error.value) == message


@pytest.mark.parametrize("taught", [0, 1, 3, 4])
def test_a_teacher_of_the_first_rows_leaves_the_others_to_the_text(taught: int) -> None:
    student, teacher = built(NanoEuler, SMALL), built(NanoEuler, LARGE, 1)
    documents = Documents(np.repeat([[0, 0, 0, 3, 3, 3]], 4, axis=0).astype(np.int32), True)
    given, both = batch(0, documents=documents), taught_by(student, [teacher], 0.8)
    first, weight = np.arange(4)[:, None, None] < taught, np.random.default_rng(2).normal(size=(4, 6, 2))

    def passed(model: Any, weights: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        stash = Stash()
        nll = model.forward(given.ids, given.targets, stash=stash, documents=documents, **options)
        student.buffer.clear_grads()
        student.backward(weights, stash)
        student.buffer.settle_grads()
        return nll, np.array(student.buffer.grads)

    soft, of_soft = passed(both, weight * first)
    hard, of_hard = passed(student, weight * ~first)
    nll, gradient = passed(both, weight, taught=taught)
    np.testing.assert_allclose(nll, np.where(first, soft, hard), rtol=1e-12)
    np.testing.assert_allclose(gradient, of_soft + of_hard, rtol=1e-10, atol=1e-13)
    whole = gradients(both, [replace(given, taught=taught)])
    halves = [replace(given, taught=taught)[rows] for rows in (slice(2), slice(2, 4))]
    assert [half.taught for half in halves] == [min(taught, 2), max(taught - 2, 0)]
    np.testing.assert_allclose(gradients(both, halves), whole, rtol=1e-12, atol=1e-15)


def test_a_teacher_just_large_enough_is_taken() -> None:
    """As many heads as the student, a context as long as a row, documents only where they are asked for."""
    spec, lstm = find_model("nanoeuler"), find_model("lstm")
    check_teacher("runs/one", spec, SMALL, spec, SMALL, 6, documents=True)
    theirs = next(iter(lstm.presets.values())).override({"vocab": VOCAB, "context": 6})
    one_head = SMALL.override({"mtp_heads": 1, "mtp_weights": (1,)})
    check_teacher("runs/one", lstm, theirs, spec, one_head, 6, documents=False)
    with pytest.raises(UserError, match="Headless has no output heads that predict next tokens"):
        Ensemble([type("Headless", (), {"ops": lambda self: []})()], 1, FP64)
