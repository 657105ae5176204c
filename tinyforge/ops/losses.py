"""Losses that are no likelihood of a token: mean squared error, and binary cross-entropy of logits."""

from __future__ import annotations

import math

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash
from tinyforge.ops.sigmoid import sigmoid


def by_row(x: Array) -> Array:
    """(B, ...) as (B, n)."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def one_a_row(x: Array) -> Array:
    return empty(x.shape[:1], wide(x.dtype))


@kernel
def mse_fwd(x: Array, target: Array) -> Array:
    apart = by_row(x - target)
    return np.vecdot(apart, apart) / x.dtype.type(apart.shape[1])


mse_fwd.on("meta")(one_a_row)


@kernel
def mse_bwd(dy: Array, x: Array, target: Array) -> tuple[Array, Array]:
    dx = by_row(x - target)
    dx *= (dy * dy.dtype.type(2 / dx.shape[1]))[:, None]
    dx = dx.reshape(x.shape)
    return dx, -dx


mse_bwd.on("meta")(lambda x: (like(x), like(x)))


@kernel
def binary_cross_entropy_fwd(x: Array, target: Array) -> Array:
    loss = np.log1p(np.exp(-np.abs(x)))
    loss += np.maximum(x, 0)
    loss -= x * target
    return by_row(loss).mean(axis=1)


binary_cross_entropy_fwd.on("meta")(one_a_row)


@kernel
def binary_cross_entropy_bwd(dy: Array, x: Array, target: Array) -> tuple[Array, Array]:
    rows = by_row(x)
    scale = (dy / dy.dtype.type(rows.shape[1]))[:, None]
    dx = by_row(sigmoid(x) - target)
    dx *= scale
    return dx.reshape(x.shape), (-scale * rows).reshape(x.shape)


binary_cross_entropy_bwd.on("meta")(lambda x: (like(x), like(x)))


class _RowLoss(Op):
    """A loss of x and target, (B, ...) of one shape and dtype, that is a mean over each row."""

    fwd = mse_fwd
    bwd = mse_bwd

    def forward(self, x: Array, target: Array, stash: Stash | None = None) -> Array:
        if x.shape != target.shape or x.dtype != target.dtype:
            raise ValueError(
                f"{self.name}: {x.dtype} {x.shape} and targets {target.dtype} {target.shape}; expected the same"
            )
        self.expect(x)
        self.save(stash, x, target)
        return self.fwd(x, target)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, Array]:
        x, target = stash.pop(self)
        return self.bwd(dy, x, target)


class MSE(_RowLoss):
    """y_b = the mean over i of (x_bi - t_bi)^2, the mean squared error of each row

    x: (B, ...), the predictions; t: their shape and dtype; y: (B,), in the precision of sums. Saves x and t.
    backward: dx = 2 dy (x - t) / n,  dt = -dx,  n the numbers in a row. For the mean over the batch pass dy = 1 / B.
    """

    fwd = mse_fwd
    bwd = mse_bwd

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 5), (1,), (4, 1), (0, 4)):
            yield cls(backend), tuple(backend.asarray(rng.normal(size=shape)) for _ in range(2))


class BinaryCrossEntropy(_RowLoss):
    """y_b = the mean over i of -t log s(x) - (1 - t) log(1 - s(x)),  s(x) = 1 / (1 + exp(-x))

    x: (B, ...), logits; t: their shape and dtype, probabilities of 0 to 1; y: (B,), in the precision of sums. Computed
    as max(x, 0) - x t + log(1 + exp(-|x|)), in which nothing overflows. Saves x and t.
    backward: dx = dy (s(x) - t) / n,  dt = -dy x / n,  n the numbers in a row. For the mean over the batch pass
    dy = 1 / B.
    """

    fwd = binary_cross_entropy_fwd
    bwd = binary_cross_entropy_bwd

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 5), (1,), (4, 1), (0, 4)):
            x, target = rng.normal(size=shape) * 2, rng.random(shape)
            yield cls(backend), (backend.asarray(x + np.copysign(0.1, x)), backend.asarray(target))
