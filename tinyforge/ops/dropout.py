"""Dropout whose mask is a pure function of a seed and a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import numpy_kernel
from tinyforge.op import Array, Op, Stash
from tinyforge.rng import Stream, philox


class Dropout(Op):
    """y = x * m / (1 - p), m[i] = 1 with probability 1 - p

    x, y: (...). m[i] = (bits[i] >= floor(p * 2^32)), bits[i] the i-th 32-bit word of the Philox stream at block
    `step` * 2^32: the same mask on every backend, and again in backward, so nothing but the step is saved. Set `step`
    before each training step; `step=None`, the start, is inference: y = x.

    Source: Srivastava et al., "Dropout" (2014); masks without memory as in Salmon et al., Philox (2011).
    """

    kernels = ("dropout",)

    def __init__(self, rate: float, stream: Stream, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"Dropout: rate is {rate}, wants 0 <= rate < 1")
        self.rate = rate
        self.key = stream.key
        self.step: int | None = None

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, self.step)
        return x if self.step is None else self.k.dropout(x, self.rate, self.key, self.step)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (step,) = stash.pop(self)
        return dy if step is None else self.k.dropout(dy, self.rate, self.key, step)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for step, rate in ((3, 0.4), (None, 0.4), (0, 0.0)):
            for shape in ((2, 3, 9), (1,), (0, 4)):
                op = cls(rate, Stream(7, "dropout"), backend)
                op.step = step
                yield op, (backend.asarray(rng.normal(size=shape)),)


@numpy_kernel
def dropout(x: Array, rate: float, key: tuple[int, int], step: int) -> Array:
    blocks = -(-x.size // 4)
    counter = np.zeros((blocks, 4), np.uint32)
    counter[:, 0], counter[:, 1] = np.arange(blocks), step
    kept = philox(counter, key).reshape(-1)[: x.size] >= np.uint32(rate * 2**32)
    return x * (kept.reshape(x.shape) * x.dtype.type(1.0 / (1.0 - rate)))
