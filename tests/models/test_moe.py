"""A mixture of experts: sizes, refusals, the router's losses in training, decoding, a plan that fits every choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import gradcheck
from tinyforge.backends import get_backend
from tinyforge.backends.meta import MetaBackend
from tinyforge.data.world import documents
from tinyforge.errors import UserError
from tinyforge.gradcheck import TOLERANCE, directional_error
from tinyforge.infer import make_decoder
from tinyforge.infer.decoder import ReferenceDecoder
from tinyforge.models.moe import PRESETS, Config, MoE
from tinyforge.models.nanoeuler import PRESETS as NANOEULER
from tinyforge.models.nanoeuler import NanoEuler
from tinyforge.op import Stash
from tinyforge.parallel import part_of
from tinyforge.recipes import pretrain
from tinyforge.registry import find_model
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.objectives import Batch, NextTokens, WithTerms, with_terms
from tinyforge.train.plan import plan_step

FP64 = get_backend("numpy", "fp64", workers=1)
TINY = Config(
    dim=8,
    heads=2,
    kv_heads=1,
    layers=2,
    context=7,
    vocab=11,
    hidden=3,
    experts=4,
    mtp_heads=2,
    mtp_weights=(1, 0.5),
    balance=0.5,
    router_z=0.25,
)


def model(config: Config = TINY, workers: int = 1) -> MoE:
    made = MoE(config, get_backend("numpy", "fp64", workers))
    rng = np.random.default_rng(1)
    for p in made.buffer.params:  # far from the start, where all tokens and experts are as likely
        p.value[...] = p.fill + 0.4 * rng.normal(size=p.shape)
    return made


def batch(rows: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    targets = rng.integers(-1, 11, (rows, 7, 2), dtype=np.int32)
    return Batch(rng.integers(0, 11, (rows, 7), dtype=np.int32), targets)


@pytest.mark.parametrize(
    ("preset", "count"), [("small", 2_643_072), ("base", 343_008_000), ("Mixtral-8x7B", 46_702_792_704)]
)
def test_presets_have_the_published_sizes(preset: str, count: int) -> None:
    config = PRESETS[preset].override({"context": 8})  # the tables of angles are no parameters
    assert MoE(config, MetaBackend("bf16")).buffer.count == count


@pytest.mark.parametrize("preset", ["small", "base"])
def test_a_token_takes_as_many_multiplications_as_in_nanoeuler(preset: str) -> None:
    """But for the gates: the two experts are as wide together as the one layer there."""
    mine, dense = (kind(p[preset], MetaBackend("bf16")) for kind, p in ((MoE, PRESETS), (NanoEuler, NANOEULER)))
    c = PRESETS[preset]
    assert mine.flop_per_token(64) - dense.flop_per_token(64) == 6 * c.layers * c.experts * c.dim


def test_a_config_survives_its_dictionary() -> None:
    for config in PRESETS.values():
        assert Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"experts": 0}, "experts is 0, expected at least 1"),
        ({"active": 9}, "active is 9, expected at most the 8 experts"),
        ({"tied": True}, "a tied head is one, mtp_heads is 4; use tied=false or mtp_heads=1"),
        ({"balance": -1.0}, "balance -1.0, router_z 0.001; expected 0 or more"),
        ({"mtp_weights": [1.0]}, "mtp_weights has 1 numbers for 4 heads"),
        ({"gated": False}, "experts have no gated; leave it out"),
        ({"heads": 3}, "dim 128 is not divisible by heads 3"),
    ],
)
def test_a_bad_config_is_a_one_line_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"config: .*{message}"):
        Config.from_dict(values)


def loss_of(net: MoE, batches: list[Batch], objective: Any) -> float:
    counts = sum(objective.count(b) for b in batches)
    sums = sum(objective.weigh(net.forward(b.ids, b.targets), b, counts, FP64)[0] for b in batches)
    return objective.figures(sums, counts)["loss"]


def worst_error(objective: Any) -> float:
    """The gradient of the loss of two unequal micro-batches, against finite differences of it, over all parameters."""
    net, rng = model(), np.random.default_rng(3)
    batches = [batch(3, 0), batch(2, 1)]
    counts = sum(objective.count(b) for b in batches)
    for b in batches:
        stash = Stash()
        net.backward(objective.weigh(net.forward(b.ids, b.targets, stash), b, counts, FP64)[1], stash)
        assert not len(stash)
    return max(directional_error(lambda: loss_of(net, batches, objective), p.value, p.grad, rng) for p in net.params())


def test_the_gradient_is_that_of_the_loss_with_its_terms() -> None:
    assert worst_error(with_terms(NextTokens(TINY.head_weights), TINY)) < TOLERANCE


class WholeShare(WithTerms):
    """A fault: every micro-batch's terms weigh as if it were the whole step."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Any) -> tuple[Any, Any]:
        sums, (dnll, dterms) = super().weigh(nll, batch, counts, backend)
        return sums, (dnll, dterms * counts[-1] / batch.ids.size)


class Unweighted(WithTerms):
    """A fault: the terms' weights are in the loss and not in its gradient."""

    def weigh(self, nll: Any, batch: Batch, counts: np.ndarray, backend: Any) -> tuple[Any, Any]:
        sums, (dnll, dterms) = super().weigh(nll, batch, counts, backend)
        return sums, (dnll, dterms / np.array(list(self.term_weights.values())))


@pytest.mark.parametrize("fault", [WholeShare, Unweighted])
def test_a_wrong_gradient_of_a_term_is_found(fault: type[WithTerms], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcheck, "DIRECTIONS", 1)
    assert worst_error(fault(NextTokens(TINY.head_weights), TINY.term_weights)) > 1e-3


def test_the_figures_have_each_term_by_name_and_the_loss_has_them_weighted() -> None:
    net, b = model(), batch(4, 5)
    plain = NextTokens(TINY.head_weights)
    objective = with_terms(plain, TINY)
    counts = objective.count(b)
    nll, terms = net.forward(b.ids, b.targets)
    found = objective.figures(objective.weigh((nll, terms), b, counts, FP64)[0], counts)
    alone = plain.figures(plain.weigh(nll, b, counts[:-1], FP64)[0], counts[:-1])["loss"]
    assert [found["balance"], found["router_z"]] == pytest.approx(terms.tolist())
    assert found["loss"] == pytest.approx(alone + 0.5 * terms[0] + 0.25 * terms[1])
    assert 1 <= terms[0] <= 4 and terms[1] > 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_ranks_weigh_their_terms_by_their_tokens(workers: int) -> None:
    """Of one row, some ranks have none; each part's terms are those that it would have alone."""
    whole = batch(5, 0)
    net = model(workers=workers)
    parallel = DataParallel(net, net.backend, NextTokens(TINY.head_weights))
    totals = parallel.gradients([whole, batch(1, 1)])
    terms = np.zeros(2)
    for b in (whole, batch(1, 1)):
        for part in (b[part_of(rank, workers, len(b.ids))] for rank in range(workers)):
            if len(part.ids):
                terms += len(part.ids) / 6 * model().forward(part.ids, part.targets)[1]
    assert totals.sums[-2:] == pytest.approx(terms, rel=1e-10)
    assert parallel.nll(whole).shape == (2,)


def test_terms_without_weight_are_not_computed() -> None:
    net = model(TINY.override({"balance": 0.0, "router_z": 0.0}))
    b = batch(2, 0)
    np.testing.assert_array_equal(net.forward(b.ids, b.targets), model().forward(b.ids, b.targets)[0])
    assert net.losses is None and "router_losses" not in {op.name for op in net.ops()}


def test_the_reference_decoder_decodes_it() -> None:
    assert isinstance(make_decoder(model()), ReferenceDecoder)


def test_the_plan_does_not_depend_on_the_choices() -> None:
    """A row for each choice, whatever it is: per token and layer in elements, what the blocks keep."""
    config = Config(
        dim=64,
        heads=4,
        kv_heads=2,
        layers=2,
        context=256,
        vocab=128,
        hidden=48,
        experts=8,
        mtp_heads=2,
        mtp_weights=(1, 0.5),
    )
    plan = plan_step(find_model("moe"), config, "bf16", 8, 256)
    tokens = 8 * 256
    # qkv, attention's result, two norms' results, the logits; gate and up of two rows. Numbers of four bytes: the
    # log-sum-exp of 4 heads, 2 norms, two weights, and two each of choices, slots, tokens and places.
    layer = 2 * (8 * 16 + 64 + 2 * 64 + 8 + 2 * 2 * 48) + 4 * (4 + 2 + 2 + 4 * 2)
    rest = 4 * (1 + 2) + 2 * (64 + 2 * 128) + 4
    assert plan.saved == pytest.approx(tokens * (2 * layer + rest), rel=0.02)


def test_training_logs_the_routers_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("\n".join(documents("train", 60)), encoding="utf-8")
    shape = "dim=16 heads=2 kv_heads=1 layers=1 hidden=12 experts=3 context=32 vocab=300"
    flags = "--model moe --data text.txt --steps 3 --batch-size 2 --workers 1 --backend numpy --out run --set"
    assert pretrain.main([*flags.split(), *shape.split()]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    logged = [row for row in rows if "lr" in row]
    assert len(logged) == 3
    for row in logged:
        assert 1 <= row["balance"] <= 3 and row["router_z"] > 0
