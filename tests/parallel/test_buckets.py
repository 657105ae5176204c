"""Buckets are complete when they are summed, in every model; the sharded optimizer does what the plain one does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from models.nanoeuler import PRESETS, Config, NanoEuler
from tinyforge.backends import get_backend
from tinyforge.op import WithKeywords
from tinyforge.optim import AdamW, AdamWConfig
from tinyforge.parallel import Group, part_of, start_group
from tinyforge.parallel.buckets import UNIT, Buckets, Watched, cut
from tinyforge.parallel.zero import ShardedAdamW, pieces_of
from tinyforge.params import ParamBuffer
from tinyforge.registry import models
from tinyforge.train.plan import Split, plan_step

TINY = Config(dim=64, heads=4, kv_heads=2, layers=2, context=16, vocab=128, mtp_heads=2, hidden=96,
              mtp_weights=(1, 0.5))  # fmt: skip


@pytest.mark.parametrize(("decay_end", "size", "elements"), [
    (0, 64, 4096), (64, 64, 4096), (2048, 2080, 4096), (10_240, 10_272, 4096), (32_000_000, 32_000_032, 1 << 20),
])  # fmt: skip
def test_buckets_cover_everything_once(decay_end: int, size: int, elements: int) -> None:
    found = cut(decay_end, size, elements)
    assert found[0].start == 0 and found[-1].stop == size
    assert all(a.stop == b.start for a, b in zip(found, found[1:], strict=False))
    assert all(bucket.stop - bucket.start <= elements + 64 * UNIT for bucket in found)


def copied(buffer: ParamBuffer, to: list[tuple[slice, np.ndarray]], bucket: slice) -> None:
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
        stash = buckets.watched(None, partial(copied, buffer, begun))
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
        self._owners = [set(sorted(owners)[:1]) for owners in self._owners]
        return right(self, *arguments)

    monkeypatch.setattr(Buckets, "watched", watched)
    with pytest.raises(AssertionError, match="nanoeuler"):
        test_a_bucket_is_begun_when_its_gradients_are_known("nanoeuler", "")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shards", [0, 4])
def test_a_sharded_optimizer_takes_the_steps_of_a_plain_one(size: int, shards: int) -> None:
    if shards % size:
        pytest.skip("shards are a multiple of the ranks")

    def steps(group: Group | None) -> dict[str, np.ndarray]:
        backend = get_backend("numpy", "fp32", workers=1)
        model = NanoEuler(TINY, backend)
        model.initialise(0)
        buckets = Buckets(model.buffer, model.ops(), elements=200 * UNIT)
        config = AdamWConfig(weight_decay=0.3)
        optimizer = (
            ShardedAdamW(model.buffer, backend, config, group, buckets, shards) if group
            else AdamW(model.buffer, backend, config, pieces_of(buckets, shards) if shards else None)
        )  # fmt: skip
        for step in range(4):
            model.buffer.grads[...] = np.random.default_rng(step).normal(size=model.buffer.grads.size)
            optimizer.clip(0.5 * step)
            optimizer.step(1e-2, optimizer.factor)
        held = optimizer.m.size
        if group:
            assert held <= model.buffer.values.size // group.size + 200 * UNIT
        state = {what: np.array(optimizer.full(what)) for what in ("masters", "m", "v")}
        for what, flat in state.items():  # what was taken out can be put in again
            optimizer.take(what, flat)
            assert np.array_equal(optimizer.full(what), flat)
        return {**state, "values": model.buffer.values.copy()}

    wanted = steps(None)
    group = start_group(size, lambda ranks: steps(ranks) and None)
    found = steps(group)
    for what, flat in wanted.items():
        if shards:
            assert np.array_equal(found[what], flat), what
        else:  # the norm's last bits
            np.testing.assert_allclose(found[what], flat, rtol=1e-5, atol=1e-7)
    group.close()


def test_the_plan_of_a_rank() -> None:
    spec, config = models()["nanoeuler"], PRESETS["base"]
    one = plan_step(spec, config, "bf16", 32, 512)
    two = plan_step(spec, config, "bf16", 64, 512, split=Split(2))
    assert two == one
    sharded = plan_step(spec, config, "bf16", 64, 512, split=Split(2, zero=True))
    count = NanoEuler(config, get_backend("numpy", "fp32", workers=1)).buffer.values.size
    assert sharded.moments == pytest.approx(one.moments / 2, rel=1e-3)
    assert one.weights - sharded.weights == pytest.approx(4 * count / 2, rel=1e-3)  # half of the masters
    assert one.peak - sharded.peak == pytest.approx(4 * count / 2 + one.moments / 2, rel=1e-3)
    trees = plan_step(spec, config, "bf16", 64, 512, split=Split(2, shards=8))
    assert trees.peak < plan_step(spec, config, "bf16", 64, 512).peak


def test_parts_in_units() -> None:
    for count in (0, 32, 96, 3200):
        for size in (1, 2, 3, 7):
            parts = [part_of(rank, size, count, 32) for rank in range(size)]
            assert [i for part in parts for i in range(count)[part]] == list(range(count))
            assert all(part.start % 32 == 0 for part in parts)
