"""Softmax over the last axis."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def softmax_fwd(x: Array) -> Array:
    y = x - x.max(axis=-1, keepdims=True)
    np.exp(y, out=y)
    y /= y.sum(axis=-1, keepdims=True)
    return y


@kernel
def softmax_bwd(dy: Array, y: Array) -> Array:
    dx = dy - np.vecdot(dy, y)[..., None]
    dx *= y
    return dx


class Softmax(Op):
    """y_i = exp(x_i - max x) / sum_j exp(x_j - max x), over the last axis

    x, y: (..., C). Saves y.

    backward: dx = y * (dy - sum_j dy_j y_j). Rows of y sum to 1, so a dy that is the same for all j gives dx = 0: a
    gradient check with `.sum()` as the loss would find nothing.
    """

    fwd = softmax_fwd
    bwd = softmax_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        y = self.fwd(x)
        self.save(stash, y)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        (y,) = stash.pop(self)
        return self.bwd(dy, y)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)
