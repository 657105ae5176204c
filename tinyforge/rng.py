"""Counter-based random numbers: Philox 4x32-10, written out so that every backend draws the same bits.

A counter-based generator is a pure function: block i of a stream is `philox(key, i)`. No state is carried from one draw
to the next, so a run restarts from one number, a GPU thread draws its own element without waiting for another, and two
backends agree bit for bit.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_FEISTEL_ROUNDS = 6
PAIRS = 1 << 14
"""Pairs of normals that are drawn together: few enough to stay in a core's cache between the rounds."""


def philox(counter: np.ndarray, key: tuple[int, int] | np.ndarray) -> np.ndarray:
    """Ten rounds of Philox 4x32. counter: (n, 4) uint32; returns (n, 4) uint32, uniform bits.

    A round multiplies two of the four words by constants and mixes the high halves with the other words and the key.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = map(int, key)
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ np.uint64(k0), p1 & _LOW, (p0 >> _32) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


class Stream:
    """A named, restartable stream. The same (seed, name, position) gives the same bits on every machine.

    `position` counts blocks of four 32-bit words from the start of the stream; each draw advances it by the blocks it
    used, and setting it back repeats the draw.
    """

    def __init__(self, seed: int, name: str = "", position: int = 0) -> None:
        self.seed = seed
        self.name = name
        self.position = position
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self.key = (int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little"))

    def fork(self, name: str) -> Stream:
        """An independent stream with a name below this one's."""
        return Stream(self.seed, f"{self.name}/{name}")

    def bits(self, count: int) -> np.ndarray:
        """`count` uniform 32-bit words."""
        blocks = -(-count // 4)
        index = np.arange(self.position, self.position + blocks, dtype=np.uint64)
        counter = np.zeros((blocks, 4), np.uint32)
        counter[:, 0], counter[:, 1] = index & _LOW, index >> _32
        self.position += blocks
        return philox(counter, self.key).reshape(-1)[:count]

    def uniform(self, shape: tuple[int, ...] = ()) -> np.ndarray:
        """float64 in [0, 1) with 53 random bits."""
        words = self.bits(2 * int(np.prod(shape))).astype(np.uint64)
        high, low = words[0::2] >> np.uint64(5), words[1::2] >> np.uint64(6)
        return ((high << np.uint64(26)) + low).reshape(shape) * 2.0**-53

    def normal(self, shape: tuple[int, ...] = ()) -> np.ndarray:
        """float64 N(0, 1), by the method of Box and Muller (1958): two uniforms give two normals."""
        out = np.empty(int(np.prod(shape)))
        for where, values in self.normal_parts(out.size, range(0, -(-out.size // 2), PAIRS)):
            out[where] = values
        self.position += -(-out.size // 2)
        return out.reshape(shape)

    def normal_parts(self, count: int, starts: Iterable[int]) -> Iterator[tuple[slice, np.ndarray]]:
        """The numbers that `normal` draws for `count`, in parts: from each of `starts` on, PAIRS pairs of numbers.

        Yields slices of the `count` numbers, and the numbers; the position stays. For n numbers, the first n / 2
        uniforms are the radii and the rest the angles. starts: even, so that each is at the start of a block of the
        stream and the bits do not depend on the parts.
        """
        half = -(-count // 2)
        first, skip = divmod(half, 2)  # the block of the first angle, and whether a radius comes before it there
        for start in starts:
            n = min(PAIRS, half - start)
            radii, angles = (Stream(self.seed, self.name, self.position + b + start // 2) for b in (0, first))
            radius = np.sqrt(-2.0 * np.log1p(-radii.uniform((n,))))
            angle = 2.0 * np.pi * angles.uniform((n + skip,))[skip:]
            second = slice(half + start, min(half + start + n, count))
            yield slice(start, start + n), radius * np.cos(angle)
            yield second, (radius * np.sin(angle))[: second.stop - second.start]

    def permutation(self, n: int) -> np.ndarray:
        """A random order of range(n): the ranks of n uniforms."""
        return np.argsort(self.uniform((n,)), kind="stable")


def permute(index: np.ndarray, n: int, stream: Stream) -> np.ndarray:
    """`index` under a random permutation of range(n): like `Stream.permutation(n)[index]`, but another permutation.

    index: (k,) integers in [0, n); returns (k,) int64. Neither time nor memory depends on n: the permutation is a
    Feistel network over pairs (l, r), l < a and r < b, with a b just above n. Each round adds a random function of one
    half to the other, which can be undone, so all rounds together are a permutation of the a b pairs. A result of n or
    more goes through the network again until it is below n (cycle walking): its cycle returns to [0, n) because it
    began there. Only the key of `stream` is used, not its position. For fewer than about ten numbers, not all orders
    are equally likely.

    Source: Black, Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002).
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = np.array(index, np.int64)
    todo = np.arange(len(out))
    while len(todo):
        left, right = out[todo] // b, out[todo] % b
        for number in range(0, _FEISTEL_ROUNDS, 2):
            left = (left + _round(right, number, stream) % a) % a
            right = (right + _round(left, number + 1, stream) % b) % b
        out[todo] = left * b + right
        todo = todo[out[todo] >= n]
    return out


def _round(half: np.ndarray, number: int, stream: Stream) -> np.ndarray:
    """A random function of `half`, (k,) int64 in [0, 2^62): one block of Philox for each."""
    counter = np.zeros((len(half), 4), np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = half & 0xFFFFFFFF, half >> 32, number
    words = philox(counter, stream.key).astype(np.int64)
    return words[:, 0] << 30 | words[:, 1] >> 2
