"""Dropout with a mask that is a pure function of the stash's noise and the op's name."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Key, Op, Stash
from tinyforge.rng import philox


@kernel
def dropout(x: Array, key: Key, rate: float) -> Array:
    blocks = -(-x.size // 4)
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0] = np.arange(blocks)
    kept = philox(counter, key).reshape(-1)[: x.size] >= np.uint32(rate * 2**32)
    return x * (kept.reshape(x.shape) * x.dtype.type(1.0 / (1.0 - rate)))


class Dropout(Op):
    """y = x * m / (1 - p), m[i] = 1 with probability 1 - p

    x, y: (...). m[i] = (bits[i] >= floor(p * 2^32)), bits[i] the i-th 32-bit word of the stream
    `stash.noise.fork(name)`: the mask is the same on every backend and is recomputed in backward, so only the stream's
    key is saved. Give each dropout of a model a name of its own, and each micro-batch of a run a noise of its own.
    Without a stash, without noise on it, or at rate 0, y = x, the same array.

    Source: Srivastava et al., "Dropout" (2014); masks without memory as in Salmon et al., Philox (2011).
    """

    drop = dropout

    def __init__(self, rate: float, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"Dropout: rate is {rate}, expected 0 <= rate < 1")
        self.rate = rate

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        if stash is None:
            return x
        key = stash.key(self, self.rate)
        stash.push(self, key)
        return x if key is None else self.drop(x, key, self.rate)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (key,) = stash.pop(self)
        return dy if key is None else self.drop(dy, key, self.rate)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for rate in (0.4, 0.0):
            for shape in ((2, 3, 9), (1,), (0, 4)):
                yield cls(rate, backend), (backend.asarray(rng.normal(size=shape)),)
