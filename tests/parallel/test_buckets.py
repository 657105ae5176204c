"""Buckets are complete when they are summed, in every model; the sharded optimizer does what the plain one does."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.op import Param, WithKeywords
from tinyforge.optim import AdamW, AdamWConfig
from tinyforge.parallel import Alone, Group, part_of, start_group
from tinyforge.parallel.buckets import BUCKET, LEAST, UNIT, Buckets, Watched
from tinyforge.parallel.zero import ShardedAdamW, pieces_of, stage_of
from tinyforge.params import ParamBuffer
from tinyforge.registry import models
from tinyforge.train.plan import Split, plan_step

TINY = Config(
    dim=64, heads=4, kv_heads=2, layers=2, context=16, vocab=128, mtp_heads=2, hidden=96, mtp_weights=(1, 0.5)
)


@pytest.mark.parametrize("sizes", [[], [7], [0], [32, 64], [5000, 100, 100, 64], [64, 100, 9000, 3, 0]])
def test_buckets_cover_everything_once_in_whole_parameters(sizes: list[int]) -> None:
    """0: of those that are not decayed, as is the last."""
    params = [Param(f"p{i}", (size or 40,), decay=bool(size)) for i, size in enumerate(sizes)]
    buffer = ParamBuffer(params, get_backend("numpy", "fp32", workers=1))
    buckets = Buckets(buffer, [], elements=256)
    assert [i for bucket in buckets.slices for i in range(buffer.size)[bucket]] == list(range(buffer.size))
    assert [p for of_bucket in buckets.params for p in of_bucket] == buffer.params
    for bucket, of_bucket in zip(buckets.slices, buckets.params, strict=True):
        assert all(bucket.start <= buffer.place(p).start and buffer.place(p).stop <= bucket.stop for p in of_bucket)
        assert bucket.stop - bucket.start <= 256 or len(of_bucket) == 1
        assert len({p.decay for p in of_bucket}) == 1


def copied(buffer: ParamBuffer, buckets: Buckets, to: list[tuple[slice, np.ndarray]], number: int) -> None:
    bucket = buckets.slices[number]
    to.append((bucket, buffer.grads[bucket].copy()))


@pytest.mark.parametrize(
    ("name", "recompute"),
    [(name, how) for name, spec in sorted(models().items()) for how in ("", *["blocks"] * spec.blocks)],
)
def test_a_bucket_is_begun_when_its_gradients_are_known(name: str, recompute: str) -> None:
    """A copy of each bucket as it was when it was begun is what backward leaves there in the end."""
    kind: Any = models()[name].build
    rng, backend, tried = np.random.default_rng(0), get_backend("numpy", "fp64", workers=1), 0
    for model, inputs in kind.cases(backend, rng):
        if isinstance(model, WithKeywords):
            continue
        tried += 1
        model.recompute = recompute
        buffer = ParamBuffer(model.params(), backend)  # the case's own is not the model's
        for p in buffer.params:
            buffer.set_master(p, rng.normal(size=p.shape) * 0.2 + p.fill)
        buckets = Buckets(buffer, model.ops(), elements=64 * UNIT)
        begun: list[tuple[slice, np.ndarray]] = []
        stash = buckets.watched(None, partial(copied, buffer, buckets, begun))
        out = model.forward(*inputs, stash=stash)
        assert not begun
        several = isinstance(out, tuple)
        dy: Any = tuple(rng.normal(size=part.shape) for part in (out if several else (out,)))
        model.backward(dy if several else dy[0], stash)
        during = len(begun)
        stash.finish()
        assert sorted(bucket.start for bucket, _ in begun) == [bucket.start for bucket in buckets.slices]
        assert buffer.grads.any()
        for bucket, copy in begun:
            assert np.array_equal(copy, buffer.grads[bucket]), (name, bucket)
        assert len(buckets.slices) < 4 or during > 1, "nothing was summed under backward"
    assert tried


def test_a_bucket_begun_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: here a bucket waits for one of its ops and forgets the others."""
    right = Buckets.watched

    def watched(self: Buckets, *arguments: Any) -> Watched:
        stash = right(self, *arguments)
        stash._missing = [set(sorted(missing)[:1]) for missing in stash._missing]
        return stash

    monkeypatch.setattr(Buckets, "watched", watched)
    with pytest.raises(AssertionError, match="nanoeuler"):
        test_a_bucket_is_begun_when_its_gradients_are_known("nanoeuler", "")


def test_the_last_buckets_are_small() -> None:
    """Of `base`: none has more elements than what lies before it, or 32 MB, unless it is one parameter."""
    from tinyforge.backends.meta import MetaBackend
    from tinyforge.models.nanoeuler import PRESETS

    model = NanoEuler(PRESETS["base"], MetaBackend("bf16"))
    buckets = Buckets(model.buffer, model.ops())
    sizes = [bucket.stop - bucket.start for bucket in buckets.slices]
    assert sizes[:4] == [3145728, 1572864, 4718592, 7864320] and sum(sizes) == model.buffer.size
    for bucket, params, size in zip(buckets.slices, buckets.params, sizes, strict=True):
        assert len(params) == 1 or size <= min(BUCKET, max(LEAST, bucket.start))
    assert len(sizes) < 25


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shards", [0, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("options", [{}, {"cautious": True, "group_rates": (("embeddings", 5.0), ("heads", 0.5))}])
def test_a_sharded_optimizer_takes_the_steps_of_a_plain_one(
    size: int, shards: int, stage: int, options: dict[str, Any]
) -> None:
    if shards % size:
        pytest.skip("shards are a multiple of the ranks")

    def steps(group: Group | None, stage: int = stage) -> dict[str, np.ndarray]:
        backend = get_backend("numpy", "fp32", workers=1)
        model = NanoEuler(TINY, backend)
        model.initialise(0)
        buffer, buckets = model.buffer, Buckets(model.buffer, model.ops(), elements=200 * UNIT)
        config = AdamWConfig(weight_decay=0.3, **options)
        optimizer = (
            ShardedAdamW(buffer, backend, config, group, buckets, shards, stage)
            if group
            else AdamW(buffer, backend, config, pieces_of(buckets, shards) if shards else None)
        )
        for step in range(4):
            flat = np.random.default_rng(step).normal(size=buffer.size).astype(np.float32)
            if group and stage == 2:  # two micro-batches, of which rank 0 has brought all there is
                assert isinstance(optimizer, ShardedAdamW) and buffer.grads is None
                for first in (True, False):
                    stash = optimizer.windows(first=first)
                    for number, params in enumerate(buckets.params):
                        stash._open(number)
                        for p in params:
                            p.grad += buffer.view(flat, p) * np.float32(0.5 * (group.rank == 0))
                    stash.finish()
                with pytest.raises(RuntimeError, match="has no grad yet"):
                    _ = buffer.params[0].grad
            else:
                buffer.grads[...] = flat
            optimizer.clip(0.5 * step)
            optimizer.step(1e-2, optimizer.factor)
        if isinstance(optimizer, ShardedAdamW):
            held = (optimizer.m, optimizer.v, *([optimizer.grads] if stage == 2 else []))
            assert all(flat.size <= buffer.size / size + UNIT * len(buckets.slices) for flat in held)
        names = [p.name for p in optimizer.owned()]
        state = {what: dict(zip(names, optimizer.tensors(what), strict=True)) for what in ("masters", "m", "v")}
        found = group.gather_objects(state) if group else [state]
        if group and group.rank:
            return {}
        whole = {
            f"{what} {name}": tensor
            for of_rank in found
            for what, tensors in of_rank.items()
            for name, tensor in tensors.items()
        }
        assert len(whole) == 3 * len(buffer.params) == sum(len(tensors) for r in found for tensors in r.values())
        return {**whole, "values": buffer.values.copy()}

    expected = steps(None)
    group = start_group(size, lambda ranks: steps(ranks) and None)
    found = steps(group)
    assert found.keys() == expected.keys()
    for what, flat in expected.items():
        if shards:
            assert np.array_equal(found[what], flat), what
        else:  # the norm's last bits
            np.testing.assert_allclose(found[what], flat, rtol=1e-5, atol=1e-7)
    group.close()


def test_what_was_taken_out_can_be_put_in_again() -> None:
    backend = get_backend("numpy", "fp32", workers=1)
    model = NanoEuler(TINY, backend)
    buckets = Buckets(model.buffer, model.ops(), elements=200 * UNIT)
    for optimizer in (AdamW(model.buffer, backend), ShardedAdamW(model.buffer, backend, None, Alone(), buckets)):
        for what in ("masters", "m", "v"):
            tensors = [np.random.default_rng(n).normal(size=p.shape) for n, p in enumerate(model.buffer.params)]
            for p, tensor in zip(model.buffer.params, tensors, strict=True):
                optimizer.take(what, p, tensor)
            for tensor, found in zip(tensors, optimizer.tensors(what), strict=True):
                assert np.array_equal(found, tensor.astype(np.float32))


def test_gradients_stay_whole_where_an_order_of_sums_is_promised() -> None:
    assert [stage_of(zero, 1) for zero in (0, 1, 2)] == [0, 0, 0]
    assert [stage_of(zero, 2) for zero in (0, 1, 2)] == [0, 1, 2] == [stage_of(zero, 2, 0, 4) for zero in (0, 1, 2)]
    assert [stage_of(zero, 2, shards=2) for zero in (0, 1, 2)] == [0, 1, 2]
    assert stage_of(2, 2, shards=4) == stage_of(2, 4, shards=4, micro_batches=2) == 1


def test_the_plan_of_a_rank() -> None:
    spec, config = models()["nanoeuler"], PRESETS["base"]
    one = plan_step(spec, config, "bf16", 32, 512)
    two = plan_step(spec, config, "bf16", 64, 512, split=Split(2))
    assert two == one
    sharded = plan_step(spec, config, "bf16", 64, 512, split=Split(2, zero=1))
    count = NanoEuler(config, get_backend("numpy", "fp32", workers=1)).buffer.values.size
    assert sharded.moments == pytest.approx(one.moments / 2, rel=1e-3)
    assert one.weights - sharded.weights == pytest.approx(4 * count / 2, rel=1e-3)  # half of the masters
    assert one.peak - sharded.peak == pytest.approx(4 * count / 2 + one.moments / 2, rel=1e-3)
    both = plan_step(spec, config, "bf16", 64, 512, split=Split(2, zero=2))
    assert both.moments == sharded.moments
    assert sharded.weights - both.weights == pytest.approx(4 * count / 2, rel=1e-3)  # half of the gradients
    # Windows are open while backward's other arrays are there: of the half, a few buckets come back.
    assert 0.4 * (4 * count / 2) < sharded.peak - both.peak < 4 * count / 2
    trees = plan_step(spec, config, "bf16", 64, 512, split=Split(2, shards=8))
    assert trees.peak < plan_step(spec, config, "bf16", 64, 512).peak


def test_the_page_has_the_forecasts_of_what_is_shared_out() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/parallel.md").read_text(encoding="utf-8")
    rows = re.findall(r"\| `(\w+)`, (\d+) x (\d+) a GPU, (\d+) GPUs \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", page)
    assert len(rows) == 3
    for name, *numbers in rows:
        a_gpu, seq_len, ranks = map(int, numbers[:3])
        plans = [
            plan_step(
                models()["nanoeuler"], PRESETS[name], "bf16", a_gpu * ranks, seq_len, split=Split(ranks, zero=zero)
            )
            for zero in (0, 1, 2)
        ]
        assert [f"{plan.peak / 2**30:.2f}" for plan in plans] == numbers[3:], name


def test_parts_in_units() -> None:
    for count in (0, 32, 96, 3200):
        for size in (1, 2, 3, 7):
            parts = [part_of(rank, size, count, 32) for rank in range(size)]
            assert [i for part in parts for i in range(count)[part]] == list(range(count))
            assert all(part.start % 32 == 0 for part in parts)
