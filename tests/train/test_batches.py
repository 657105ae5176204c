"""Batches: what is predicted from what, what is seen how often, and that nothing depends on what came before."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tinyforge.errors import UserError
from tinyforge.train.batches import (
    ContinuedTokens,
    Examples,
    MixedTokens,
    PackedTokens,
    check_ids,
    fingerprint,
    shifted_targets,
)
from tinyforge.train.objectives import Batch


def same(a: Batch, b: Batch) -> bool:
    return np.array_equal(a.ids, b.ids) and np.array_equal(a.targets, b.targets)


def test_head_k_predicts_k_tokens_further_and_nothing_past_the_end() -> None:
    targets = shifted_targets(np.array([[10, 11, 12, 13, 14]]), length=4, heads=3)
    assert targets.shape == (1, 4, 3) and targets.dtype == np.int32
    assert targets[0].tolist() == [[11, 12, 13], [12, 13, 14], [13, 14, -1], [14, -1, -1]]


def test_a_window_predicts_what_the_text_says() -> None:
    """Token i of the stream is i: every target can be checked from its input."""
    length, heads = 103, 3
    data = PackedTokens(np.arange(length), seq_len=10, heads=heads, seed=0)
    for index in range(12):
        batch = data.batch(index, size=3)
        assert batch.ids.shape == (3, 10) and batch.targets.shape == (3, 10, heads)
        expected = batch.ids[..., None] + 1 + np.arange(heads)
        counts = batch.targets[..., :1] >= 0
        assert np.array_equal(batch.targets, np.where((expected < length) & counts, expected, -1))
        assert counts.any(axis=1).all()


@pytest.mark.parametrize("seq_len", [1, 2, 7, 16])
def test_every_token_but_the_first_is_a_target_once_an_epoch(seq_len: int) -> None:
    """Of every length, the last tokens too, and for each head as many as it can predict."""
    for length in range(seq_len + 1, 5 * seq_len + 3):
        tokens = np.arange(length)
        packed = PackedTokens(tokens, seq_len, 2, seed=length)
        (source,) = (mixed := MixedTokens({"a": tokens}, {"a": Fraction(1)}, seq_len, 2, seed=length)).sources
        loaders: list[tuple[Any, int, int]] = [(packed, packed.windows, 1), (mixed, source.windows, 1)]
        loaders += [
            (found := ContinuedTokens(tokens, seq_len, 2, seed=length, rows=rows), found.windows, rows)
            for rows in (1, 2, 3)
            if length >= rows * seq_len + 2
        ]
        for data, windows, rows in loaders:
            for epoch in range(3):
                batches = [data.batch(epoch * windows + i, rows) for i in range(windows)]
                for head in range(2):
                    found = np.concatenate([batch.targets[..., head].ravel() for batch in batches])
                    assert np.sort(found[found >= 0]).tolist() == list(range(1 + head, length))
                assert all(batch.ids.shape == (rows, seq_len) for batch in batches)


@pytest.mark.parametrize("length", [31, 40, 47, 101])
def test_each_epoch_of_an_earlier_version_shows_each_full_window_once(length: int) -> None:
    data = PackedTokens(np.arange(length), seq_len=10, heads=1, seed=3, full=True)
    orders = []
    for epoch in range(3):
        starts = [int(data.batch(epoch * data.windows + i, 1).ids[0, 0]) for i in range(data.windows)]
        assert np.array_equal(np.diff(sorted(starts)), [10] * (data.windows - 1))
        assert min(starts) >= 0 and max(starts) + 10 < length
        orders.append(tuple(starts))
    assert len(set(orders)) == 3 or data.windows < 3


def test_a_batch_depends_on_the_seed_and_the_step_alone() -> None:
    tokens = np.random.default_rng(0).integers(0, 9, 400)
    forward = PackedTokens(tokens, 8, 2, seed=5)
    batches = [forward.batch(i, 4) for i in range(40)]
    backward = PackedTokens(tokens, 8, 2, seed=5)
    assert all(same(backward.batch(i, 4), batches[i]) for i in reversed(range(40)))
    other = PackedTokens(tokens, 8, 2, seed=6)
    assert not same(other.batch(0, 4), batches[0])


def test_evaluation_predicts_each_token_once() -> None:
    tokens = np.arange(50)
    data = PackedTokens(tokens, seq_len=8, heads=2, seed=0)
    predicted = np.concatenate([b.targets[..., 0].ravel() for b in data.in_order(size=2, limit=50)])
    assert predicted[predicted >= 0].tolist() == list(range(1, 50))
    limited = np.concatenate([b.targets[..., 0].ravel() for b in data.in_order(size=2, limit=20)])
    assert limited[limited >= 0].tolist() == list(range(1, 21))
    assert all((b.ids >= 0).all() for b in data.in_order(size=3, limit=50))


def test_a_corpus_shorter_than_a_sequence_is_refused() -> None:
    PackedTokens(np.arange(9), seq_len=8, heads=2, seed=0)
    with pytest.raises(UserError, match="8 tokens, one training sequence takes 9; give more text or a smaller"):
        PackedTokens(np.arange(8), seq_len=8, heads=2, seed=0)


def test_only_the_replies_are_learned() -> None:
    """The second row holds two examples: the end of the first reply does not look into the second prompt."""
    first, second, third = ([1, 2, 3, 40, 50, 60, 70], 3), ([1, 2, 60], 2), ([4, 80, 90], 1)
    data = Examples([first, second, third], seq_len=6, heads=2, seed=0)
    batch = data.pad([[first], [second, third]])
    assert batch.ids.tolist() == [[1, 2, 3, 40, 50, 60], [1, 2, 60, 4, 80, 90]]
    assert batch.targets[0].tolist() == [[-1, -1], [-1, 40], [40, 50], [50, 60], [60, 70], [70, -1]]
    assert batch.targets[1].tolist() == [[-1, 60], [60, -1], [-1, 80], [80, 90], [90, -1], [-1, -1]]


def test_examples_come_once_an_epoch_in_an_order_of_the_seed() -> None:
    """70 examples of 2 to 11 tokens in rows of up to 20."""
    examples = [([i] * (2 + i % 10), 1) for i in range(70)]
    data = Examples(examples, seq_len=19, heads=1, seed=1)
    batches = [data.batch(i, 4) for i in range(40)]
    first_epoch: list[int] = []
    for batch in batches:
        assert batch.ids.shape[0] == 4 and batch.ids.shape[1] <= 19
        seen = {int(i) for i in batch.ids.ravel()}
        if seen & set(first_epoch) - {0}:
            break
        first_epoch += seen
    # What is missing was in rows too few for a batch.
    assert len(set(first_epoch)) > 70 - 4 * 20 / 2
    again = Examples(examples, seq_len=19, heads=1, seed=1)
    assert all(same(again.batch(i, 4), batches[i]) for i in reversed(range(40)))
    assert not same(Examples(examples, seq_len=19, heads=1, seed=2).batch(0, 4), batches[0])
    assert not same(batches[0], batches[len(batches) // 2])


def test_rows_are_full() -> None:
    data = Examples([([i] * (2 + i % 10), 1) for i in range(700)], seq_len=49, heads=1, seed=1)
    tokens = sum(int((data.batch(i, 8).ids > 0).sum()) for i in range(8))
    assert tokens > 0.85 * 8 * 8 * 49
    size = sum(len(ids) for ids, _ in data.examples)
    assert size / (8 * 49) - 1 < data.batches_in(0, 8) < size / (8 * 49) / 0.85


def test_fewer_examples_than_a_batch_make_a_small_batch() -> None:
    data = Examples([([1, 2], 1), ([3, 4], 1)], seq_len=2, heads=1, seed=0)
    assert sorted(data.batch(5, 32).ids[:, 0].tolist()) == [1, 3] and data.batches_in(0, 32) == 1


def test_no_example_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="no example left to train on"):
        Examples([], seq_len=8, heads=1, seed=0)


@pytest.mark.parametrize(("ids", "named"), [([0, 5, 10], 10), ([0, -1], -1)])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int], named: int) -> None:
    with pytest.raises(UserError, match=f"token id {named} is outside the vocabulary of 10"):
        check_ids(np.array(ids), vocab=10)


def test_ids_within_the_vocabulary_pass() -> None:
    check_ids(np.array([0, 9]), vocab=10)
    check_ids(np.array([], np.int32), vocab=10)


def test_the_fingerprint_sees_one_changed_token() -> None:
    tokens = np.arange(10, dtype=np.int32)
    changed = tokens.copy()
    changed[7] = 0
    assert fingerprint(tokens) == fingerprint(tokens.copy()) != fingerprint(changed)


def test_rows_that_continue_carry_on_where_they_were() -> None:
    rows, length = 3, 5
    data = ContinuedTokens(np.arange(100), length, 2, seed=0, rows=rows)
    assert data.windows == 7
    for epoch in range(3):
        found = [data.batch(epoch * 7 + i, rows) for i in range(7)]
        ids = np.concatenate([b.ids for b in found], axis=1)
        assert (np.diff(ids, axis=1) % 100 == 1).all() and (np.diff(ids[:, 0]) % 100 == 34).all()
        assert [(b.stream, b.reset_state) for b in found] == [(0, i == 0) for i in range(7)]
    assert len({int(data.batch(epoch * 7, rows).ids[0, 0]) for epoch in range(40)}) > 25


def test_rows_of_an_earlier_version_that_continue() -> None:
    rows, length = 3, 5
    data = ContinuedTokens(np.arange(100), length, 2, seed=0, rows=rows, full=True)
    assert data.windows == 6
    for epoch in range(3):
        found = [data.batch(epoch * 6 + i, rows) for i in range(6)]
        ids = np.concatenate([b.ids for b in found], axis=1)  # (rows, an epoch's tokens of each)
        assert (np.diff(ids, axis=1) == 1).all() and (np.diff(ids[:, 0]) == 6 * length).all()
        assert len(set(ids.ravel())) == ids.size == 90 and ids.max() + 2 < 100
        for b in found:
            assert np.array_equal(b.targets, b.ids[..., None] + np.array([1, 2]))
        assert [(b.stream, b.reset_state) for b in found] == [(0, i == 0) for i in range(6)]
    firsts = {int(data.batch(epoch * 6, rows).ids[0, 0]) for epoch in range(20)}
    assert firsts == set(range(9))  # every offset that leaves room comes up


def test_a_part_of_a_batch_knows_which_state_it_continues() -> None:
    whole = ContinuedTokens(np.arange(100), 5, 1, seed=0, rows=4).batch(0, 4)
    parts = [whole[slice(0, 1)], whole[slice(1, 4)]]
    assert [part.stream for part in parts] == [0, 1] and all(part.reset_state for part in parts)
    assert Batch(whole.ids, whole.targets)[slice(1, 3)].stream is None


def test_too_little_text_for_rows_that_continue() -> None:
    with pytest.raises(UserError, match="corpus: 20 tokens, 4 rows of 5 take 21; give more text"):
        ContinuedTokens(np.arange(20), 5, 1, seed=0, rows=4)
    with pytest.raises(ValueError, match="a batch of 2 rows, made for 4"):
        ContinuedTokens(np.arange(100), 5, 1, seed=0, rows=4).batch(0, 2)
