"""Several sources mixed: shares exact at every length, each window once an epoch, all from the seed and the step."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.shards import Part, Shards, ShardWriter, Source, TokenSequence, write_manifest
from tinyforge.tokenizers import Tokenizer
from tinyforge.train.batches import MixedTokens, PackedTokens
from tinyforge.train.corpus import mix_weights
from tinyforge.train.objectives import Batch


def mixed(
    weights: dict[str, Fraction | int], seed: int = 0, lengths: tuple[int, ...] = (103, 211, 57), full: bool = False
) -> MixedTokens:
    """Source i has the ids 1000 i, 1000 i + 1, ...: an id says where it stood."""
    ids = {name: 1000 * i + np.arange(n) for i, (name, n) in enumerate(zip(weights, lengths, strict=False))}
    return MixedTokens(ids, {k: Fraction(v) for k, v in weights.items()}, seq_len=10, heads=3, seed=seed, full=full)


def same(a: Batch, b: Batch) -> bool:
    return np.array_equal(a.ids, b.ids) and np.array_equal(a.targets, b.targets)


@pytest.mark.parametrize(
    "weights",
    [
        [1],
        [1, 1],
        [7, 3],
        [1, 999],
        [999, 1],
        [1, 1, 1],
        [5, 3, 2],
        [1, 10, 100, 1000],
        [1000, 100, 10, 1],
        [1, 1, 1, 1, 1, 1, 1, 50],
        [123_456_789_012, 987_654_321, 5_555_555_555],
    ],
)
def test_shares_are_exact_at_every_length(weights: list[int]) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    by_name = dict(zip(names, map(Fraction, weights), strict=True))
    data = MixedTokens({name: np.zeros(100) for name in names}, by_name, seq_len=8, heads=1, seed=0)
    counts = [0] * len(weights)
    for number in range(5000):
        source, place = data.locate(number)
        assert place == counts[source]
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction((number + 1) * weight, sum(weights))) <= max(1, len(weights) - 1)


def test_after_a_whole_period_nothing_is_left_over() -> None:
    data = mixed({"a": Fraction("0.7"), "b": Fraction("0.2"), "c": Fraction("0.1")})
    for period in (0, 1, 10**12):
        sources = [data.locate(10 * period + i)[0] for i in range(10)]
        assert [sources.count(s) for s in range(3)] == [7, 2, 1]
        places = {s: data.locate(10 * period + i)[1] for i, s in reversed(list(enumerate(sources)))}
        assert places == {0: 7 * period, 1: 2 * period, 2: period}


def test_each_source_has_its_own_epochs_and_shows_each_window_once() -> None:
    data = mixed({"a": 1, "b": 2}, full=True)
    starts: list[list[int]] = [[], []]
    for index in range(40):
        for first in data.batch(index, 6).ids[:, 0].tolist():
            starts[first // 1000].append(first % 1000)
    assert [len(s) for s in starts] == [80, 160]
    for seen, source in zip(starts, data.sources, strict=True):
        epochs = [seen[i : i + source.windows] for i in range(0, len(seen) - source.windows + 1, source.windows)]
        assert len(epochs) >= 8
        for epoch in epochs:
            assert np.array_equal(np.diff(sorted(epoch)), [10] * (source.windows - 1))
            assert min(epoch) >= 0 and max(epoch) + 10 < len(source.tokens)
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)
    assert data.epochs(240) == {"a": 80 / data.sources[0].windows, "b": 160 / data.sources[1].windows}


def test_every_target_is_what_the_text_says() -> None:
    data = mixed({"a": 5, "b": 3, "c": 2})
    ends = np.array([103, 1211, 2057])
    for index in range(30):
        batch = data.batch(index, 4)
        assert batch.ids.shape == (4, 10) and batch.targets.shape == (4, 10, 3)
        expected = batch.ids[..., None] + 1 + np.arange(3)
        last = ends[batch.ids[:, 0] // 1000][:, None, None]
        counts = batch.targets[..., :1] >= 0
        assert np.array_equal(batch.targets, np.where((expected < last) & counts, expected, -1))
        assert counts.any(axis=1).all()


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    weights: dict[str, Fraction | int] = {"a": 2, "b": 1}
    forward = mixed(weights)
    batches = [forward.batch(i, 4) for i in range(60)]
    backward = mixed(weights)
    assert all(same(backward.batch(i, 4), batches[i]) for i in reversed(range(60)))
    assert all(same(mixed(weights).batch(i, 4), batches[i]) for i in (0, 17, 59))
    assert not same(mixed(weights, seed=1).batch(0, 4), batches[0])


def test_an_order_longer_than_what_is_made_of_it_at_once() -> None:
    """Over 4096 windows: two blocks of the same permutation."""
    tokens = np.arange(9001 * 2)
    data = MixedTokens({"a": tokens}, {"a": Fraction(1)}, seq_len=2, heads=1, seed=4, full=True)
    (source,) = data.sources
    starts = np.concatenate([data.batch(i, 100).ids[:, 0] for i in range(source.windows // 100)])
    assert source.windows == 9000 and np.array_equal(np.diff(np.sort(starts)), [2] * 8999)
    assert not np.array_equal(starts[:4096], np.sort(starts[:4096]))
    assert abs(np.corrcoef(np.arange(9000), starts)[0, 1]) < 0.05


def test_windows_across_the_borders_of_files(tmp_path: Path) -> None:
    """The same batches from 23 files of 9 ids, of a window and less, as from an array."""
    tokens = np.random.default_rng(1).integers(0, 258, 200)
    writer = ShardWriter(tmp_path, "a", "train", Tokenizer([], ["<|endoftext|>", "</s>"]), shard_tokens=9)
    writer.append(tokens)
    sequence = TokenSequence([tmp_path / file.file for file in writer.close()])
    one, two = (MixedTokens({"a": ids}, {"a": Fraction(1)}, 10, 4, 0) for ids in (sequence, tokens))
    assert all(same(one.batch(i, 3), two.batch(i, 3)) for i in range(20))
    packed, plain = (PackedTokens(ids, 10, 4, 0) for ids in (sequence, tokens))
    assert all(same(a, b) for a, b in zip(packed.in_order(3, 150), plain.in_order(3, 150), strict=True))


def test_a_source_shorter_than_a_sequence_is_refused() -> None:
    mixed({"a": 1, "b": 1}, lengths=(103, 11))
    with pytest.raises(UserError, match="source b: 10 tokens to train on, one training sequence takes 11; leave"):
        mixed({"a": 1, "b": 1}, lengths=(103, 10))


def test_weights_are_taken_as_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer([], ["<|endoftext|>", "</s>"])
    tokenizer.save(tmp_path / "tokenizer.json")
    sources = []
    for name, length in (("books", 30), ("a=b", 20)):
        writer = ShardWriter(tmp_path, name, "train", tokenizer)
        writer.append(np.zeros(length, np.uint16))
        sources.append(Source(name, "", Part(1, length, length, writer.close())))
    write_manifest(tmp_path, tokenizer, sources, {})
    shards = Shards([tmp_path])
    assert mix_weights([], shards) == {"books": 30, "a=b": 20}
    assert mix_weights(["books=0.7", "a=b=0.1"], shards) == {"books": Fraction(7, 10), "a=b": Fraction(1, 10)}
    assert mix_weights(["books=1e-3", "a=b=0"], shards) == {"books": Fraction(1, 1000)}
