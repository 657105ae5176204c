"""--document-mask from the ids to the gradients: where documents begin, and that none knows of its neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models import gpt2, llama, moe, nanoeuler
from tinyforge.op import Stash
from tinyforge.ops.attention import Documents
from tinyforge.registry import find_model, models
from tinyforge.rng import Stream
from tinyforge.train.batches import DocumentMask, Examples, MixedTokens, PackedTokens, starts_of
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, NextTokens
from tinyforge.train.plan import plan_step
from tinyforge.train.settings import PretrainSettings, restarts

FP64 = get_backend("numpy", "fp64", workers=1)
GPT2 = gpt2.Config(dim=12, heads=3, layers=2, context=140, vocab=11)
LLAMA = llama.Config(dim=12, heads=4, kv_heads=2, head_dim=6, layers=2, context=140, vocab=11, hidden=10, window=30)
NANOEULER = nanoeuler.Config(
    dim=16, heads=4, kv_heads=2, layers=2, context=140, vocab=11, mtp_heads=2, hidden=10, mtp_weights=(1, 1)
)
MOE = moe.Config(
    dim=16,
    heads=4,
    kv_heads=2,
    layers=2,
    context=140,
    vocab=11,
    mtp_heads=2,
    hidden=6,
    experts=4,
    mtp_weights=(1, 1),
    balance=0.0,
    router_z=0.0,
)
KINDS: dict[str, tuple[Any, ModelConfig]] = {
    "gpt2": (gpt2.GPT2, GPT2),
    "llama": (llama.Llama, LLAMA),
    "nanoeuler": (nanoeuler.NanoEuler, NANOEULER),
    "moe": (moe.MoE, MOE),
}
EVERY = pytest.mark.parametrize("kind", KINDS)
LENGTH, BORDERS = 140, ((0, 50, 64, 140), (0, 1, 131, 140))
STARTS = np.stack([np.repeat(ends[:-1], np.diff(ends)) for ends in BORDERS]).astype(np.int32)


def tiny(kind: str, **options: Any) -> Any:
    model = KINDS[kind][0](KINDS[kind][1], options.pop("backend", FP64), **options)
    rng = np.random.default_rng(0)
    for p in model.buffer.params:
        p.value[...] = p.fill + 0.2 * rng.normal(size=p.shape)
    return model


def inputs(model: Any) -> tuple[np.ndarray, np.ndarray]:
    rng, heads = np.random.default_rng(1), model.prediction_heads
    return rng.integers(0, 11, (2, LENGTH), np.int32), rng.integers(-1, 11, (2, LENGTH, heads), np.int32)


def learn(model: Any, ids: Any, targets: Any, documents: Documents | None, noise: Any = None) -> tuple[Any, Any]:
    """nll of a pass, and all gradients."""
    model.buffer.grads[...] = 0
    stash = Stash(noise)
    nll = model.forward(ids, targets, stash, documents=documents)
    model.backward(np.ones(nll.shape[-1]), stash)
    return nll, model.buffer.grads.copy()


def test_every_model_that_keeps_documents_apart_is_tried() -> None:
    assert {name for name, spec in models().items() if spec.documents} <= set(KINDS)


def test_a_document_begins_with_its_separator() -> None:
    """What predicts its first word then sees nothing of the document before, whose end it is."""
    tokens = np.array([5, 6, 0, 7, 0, 0, 8, 9, 5, 6, 7, 0, 8, 9, 5, 0, 6])
    plain, masked = (PackedTokens(tokens, 4, 1, 3, mask) for mask in (None, DocumentMask(0, restart=True)))
    for index in range(6):
        one, other = plain.batch(index, 2), masked.batch(index, 2)
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.targets, other.targets)
        assert one.documents is None
        assert other.documents is not None and other.documents.restart and other.documents.starts.dtype == np.int32
        for ids, starts in zip(other.ids, other.documents.starts, strict=True):
            assert starts.tolist() == [max([0, *(s for s in range(t + 1) if ids[s] == 0)]) for t in range(4)]
    (only,) = (b.documents.starts for b in masked.in_order(5, 5) if b.documents)  # two rows, the last filled up
    assert only.tolist() == [[0, 0, 2, 2], [0, 1, 1, 1]]
    mixed = MixedTokens({"a": tokens}, {"a": 1}, 4, 1, 3, DocumentMask(0, restart=False)).batch(0, 2)  # type: ignore
    assert mixed.documents and np.array_equal(mixed.documents.starts, starts_of(mixed.ids == 0))


def test_a_record_begins_where_the_one_before_ends() -> None:
    examples = [([1, 2, 3, 4], 2), ([5, 6, 7], 1), ([8, 9], 1)]
    for restart in (None, False, True):
        batch = Examples(examples, 20, 1, 0, restart).pad([examples, examples[:1]])
        assert (batch.documents is None) == (restart is None)
        if batch.documents:
            assert batch.documents.starts.tolist() == [[0, 0, 0, 0, 4, 4, 4, 7], [0] * 8]
            assert batch.documents.restart is restart
            assert batch[1:].documents.starts.tolist() == [[0] * 8]  # type: ignore[union-attr]


@EVERY
def test_a_packed_row_is_learned_as_its_documents_alone(kind: str) -> None:
    model = tiny(kind)
    ids, targets = inputs(model)
    nll, grads = learn(model, ids, targets, Documents(STARTS, restart=True))
    total = np.zeros_like(grads)
    for row, ends in enumerate(BORDERS):
        for begin, end in zip(ends, ends[1:], strict=False):
            part = np.s_[row : row + 1, begin:end]
            alone, share = learn(model, ids[part], targets[part], None)
            np.testing.assert_allclose(nll[part], alone, rtol=1e-10, atol=1e-12)
            total += share
    np.testing.assert_allclose(grads, total, rtol=1e-9, atol=1e-11)


@EVERY
def test_only_learned_positions_notice_that_they_restart(kind: str) -> None:
    """RoPE's scores depend on distances, and these are the same within a document."""
    model = tiny(kind)
    kept, restarted = (learn(model, *inputs(model), Documents(STARTS, restart)) for restart in (False, True))
    assert np.array_equal(kept[1], restarted[1]) == (kind != "gpt2")
    assert not np.allclose(kept[0], learn(model, *inputs(model), None)[0])


@EVERY
@pytest.mark.parametrize("restart", [False, True])
def test_a_neighbour_changes_no_bit(kind: str, restart: bool) -> None:
    model = tiny(kind)
    ids, targets = inputs(model)
    changed, documents = ids.copy(), Documents(STARTS, restart)
    changed[:, :50] = (ids[:, :50] + 1) % 11
    before, after = (learn(model, x, targets, documents)[0] for x in (ids, changed))
    assert not np.allclose(before[0, :50], after[0, :50])
    # A neighbour may go to other experts. The products of an expert then have another number of rows, and a BLAS may
    # sum a row of a smaller product in another order.
    rtol = 1e-12 if kind == "moe" else 0
    np.testing.assert_allclose(after[0, 50:], before[0, 50:], rtol)
    np.testing.assert_allclose(after[1, 131:], before[1, 131:], rtol)


@EVERY
def test_recomputing_and_splitting_among_processes_change_nothing(kind: str) -> None:
    ids, targets = inputs(tiny(kind))
    plain, *others = (
        learn(tiny(kind, recompute=r), ids, targets, Documents(STARTS, True))[1] for r in ("", "norms", "blocks")
    )
    assert all(np.array_equal(plain, again) for again in others)
    found = []
    for workers in (1, 2):
        backend = get_backend("numpy", "fp64", workers=workers)
        model = tiny(kind, backend=backend)
        parallel = DataParallel(model, backend, NextTokens(model.config.head_weights))
        batch = Batch(ids, targets, documents=Documents(STARTS, True))
        parallel.gradients([batch])
        found.append((model.buffer.grads.copy(), parallel.nll(batch)))
    for one, two in zip(*found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-10, atol=1e-13)


def test_dropout_draws_the_same_mask_with_documents() -> None:
    model = gpt2.GPT2(GPT2.override({"dropout": 0.3}), FP64)
    model.initialise(0)
    ids, targets = inputs(model)
    one = Documents(np.zeros_like(STARTS))  # one document a row: what attention sees anyway
    expected, found = (learn(model, ids, targets, documents, Stream(1, "noise")) for documents in (None, one))
    assert np.array_equal(expected[0], found[0]) and np.array_equal(expected[1], found[1])


@pytest.mark.parametrize(("model", "positions"), [("nanoeuler", 0), ("llama", 0), ("gpt2", 1)])
def test_the_plan_counts_where_documents_begin(model: str, positions: int) -> None:
    """int32 for each token, and the positions where they are learned and restart."""
    spec, rows, length = find_model(model), 4, 128
    config = KINDS[model][1]
    plain, masked = (plan_step(spec, config, "bf16", rows, length, restart=restart) for restart in (None, True))
    assert masked.saved - plain.saved == (1 + positions) * rows * length * 4
    assert 0 <= masked.peak - plain.peak <= (1 + positions) * rows * length * 4 + (2 + 2) * rows * length * 4


def test_a_model_that_cannot_is_refused() -> None:
    for model in models():
        settings = PretrainSettings(model=model, document_mask="restart")
        if find_model(model).documents:
            settings.check()
            assert restarts(settings, find_model(model)) is True
        else:
            with pytest.raises(UserError, match=f"--document-mask: {model} does not keep documents apart; .*nanoeuler"):
                settings.check()
    assert restarts(PretrainSettings(), find_model("nanoeuler")) is None
