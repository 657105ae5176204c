"""The random streams: known answers, statistics, and what restarting and forking promise."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tinyforge.rng import Stream, permute, philox

COUNT = 200_000

# Counter, key and output of Philox 4x32-10 as published with Random123 (its kat_vectors file).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    k0, k1 = words(key)
    blocks = philox(np.array([[0, 0, 0, 0], words(counter)], np.uint32), (k0, k1))
    assert blocks[1].tolist() == words(expected)
    assert blocks.dtype == np.uint32


def test_a_stream_is_philox_over_the_block_number() -> None:
    """The 64-bit block number fills the two low words of the counter, across the carry too."""
    stream = Stream(5, "here", position=2**32 - 1)
    counter = np.array([[2**32 - 1, 0, 0, 0], [0, 1, 0, 0]], np.uint32)
    assert stream.bits(8).tolist() == philox(counter, stream.key).reshape(-1).tolist()
    assert stream.position == 2**32 + 1


def test_uniform_is_uniform() -> None:
    u = Stream(0, "uniform").uniform((COUNT,))
    assert u.dtype == np.float64 and u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi2 = float(((counts - COUNT / 100) ** 2 / (COUNT / 100)).sum())
    assert 55 < chi2 < 160  # 99 degrees of freedom: outside by chance once in several thousand seeds
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 4 / COUNT**0.5
    # 53 random bits: the low ones must move as well.
    low = np.modf(u * 2.0**43)[0] * 1024
    assert abs(low.mean() - 511.5) < 4 * 296 / COUNT**0.5


def test_normal_is_normal() -> None:
    z = Stream(1, "normal").normal((COUNT,))
    for power, moment, deviation in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((z**power).mean() - moment) < 4 * deviation / COUNT**0.5, f"moment {power}"
    assert abs((np.abs(z) < 1.959964).mean() - 0.95) < 0.002
    # Box-Muller makes the second half from the same uniforms as the first; they must not be related.
    assert abs(np.corrcoef(z[: COUNT // 2], z[COUNT // 2 :])[0, 1]) < 4 / (COUNT / 2) ** 0.5


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (2, 3), (3, 0, 2)])
def test_any_shape_can_be_drawn(shape: tuple[int, ...]) -> None:
    stream = Stream(2)
    assert np.shape(stream.uniform(shape)) == shape
    assert np.shape(stream.normal(shape)) == shape
    assert np.isfinite(stream.normal(shape)).all()


def test_a_position_restarts_the_stream() -> None:
    stream = Stream(3, "data")
    stream.normal((7,))
    position = stream.position
    after = stream.normal((11,)), stream.permutation(6)
    stream.position = position
    resumed = Stream(3, "data", position)
    for again in (stream, resumed):
        assert np.array_equal(again.normal((11,)), after[0])
        assert np.array_equal(again.permutation(6), after[1])
        assert again.position == stream.position
    assert not np.array_equal(stream.normal((11,)), after[0])


def test_forks_are_independent_and_need_no_order() -> None:
    parent = Stream(4)
    before = parent.position
    a = parent.fork("a").uniform((COUNT,))
    parent.uniform((3,))
    b = parent.fork("b").uniform((COUNT,))
    assert before == 0 and np.array_equal(parent.fork("a").uniform((COUNT,)), a)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / COUNT**0.5
    names = itertools.product((0, 1), "ab", ("", "a", "b"))
    assert len({Stream(seed).fork(outer).fork(inner).key for seed, outer, inner in names}) == 12


def test_permutation_is_a_fair_permutation() -> None:
    stream = Stream(5)
    assert sorted(stream.permutation(1000).tolist()) == list(range(1000))
    assert stream.permutation(0).size == 0 and stream.permutation(1).tolist() == [0]
    orders = [tuple(stream.permutation(3).tolist()) for _ in range(1800)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6 and min(counts) > 240 and max(counts) < 360  # 300 each, deviation 16


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 97, 1000, 65537])
def test_permute_takes_each_number_once(n: int) -> None:
    assert sorted(permute(np.arange(n), n, Stream(1, "order")).tolist()) == list(range(n))


def test_permute_needs_only_what_is_asked_for() -> None:
    """Parts of a permutation are those of the whole, and of 10^15 numbers a part is as easily had."""
    whole = permute(np.arange(5000), 5000, Stream(2))
    asked = np.array([4999, 0, 17, 2500])
    assert permute(asked, 5000, Stream(2, position=9)).tolist() == whole[asked].tolist()
    assert permute(asked, 5000, Stream(3)).tolist() != whole[asked].tolist()
    far = permute(np.arange(1000), 10**15, Stream(2))
    assert len(set(far.tolist())) == 1000 and far.min() >= 0 and 9 * 10**14 < far.max() < 10**15


def test_permute_looks_random() -> None:
    """Means over many seeds of where a number goes and what goes where: uniform to 6 standard deviations."""
    n, seeds = 50, 600
    table = np.array([permute(np.arange(n), n, Stream(seed, "order")) for seed in range(seeds)])
    counts = np.array([np.bincount(column, minlength=n) for column in table.T])
    deviation = (counts - seeds / n) / np.sqrt(seeds / n * (1 - 1 / n))
    assert np.abs(deviation).max() < 6
    followers = np.bincount((table[:, 1:] - table[:, :-1]).ravel() % n, minlength=n)[1:]
    assert np.abs(followers / followers.mean() - 1).max() < 0.25


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 8, 32_767, 32_768, 32_769, 32_771, 100_003])
def test_normals_do_not_depend_on_the_pieces_they_are_drawn_in(count: int) -> None:
    stream = Stream(3, "pieces")
    u = Stream(3, "pieces").uniform((2, -(-count // 2)))
    radius, angle = np.sqrt(-2.0 * np.log1p(-u[0])), 2.0 * np.pi * u[1]
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    assert np.array_equal(stream.normal((count,)), expected)
    assert stream.position == -(-count // 2)
