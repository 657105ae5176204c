"""Elementwise activations: ReLU and its square, the logistic function, SiLU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Stash
from tinyforge.ops.sigmoid import sigmoid, silu_slope


@kernel
def relu_fwd(x: Array) -> Array:
    return np.maximum(x, 0)


@kernel
def relu_bwd(dy: Array, y: Array) -> Array:
    return dy * (y > 0)


@kernel
def relu2_fwd(x: Array) -> Array:
    y = np.maximum(x, 0)
    y *= y
    return y


@kernel
def relu2_bwd(dy: Array, x: Array) -> Array:
    dx = np.maximum(x, 0)
    dx *= 2
    dx *= dy
    return dx


@kernel
def sigmoid_fwd(x: Array) -> Array:
    return sigmoid(x)


@kernel
def sigmoid_bwd(dy: Array, y: Array) -> Array:
    dx = 1 - y
    dx *= y
    dx *= dy
    return dx


@kernel
def silu_fwd(x: Array) -> Array:
    y = sigmoid(x)
    y *= x
    return y


@kernel
def silu_bwd(dy: Array, x: Array) -> Array:
    dx = silu_slope(x, sigmoid(x))
    dx *= dy
    return dx


class ReLU(Op):
    """y = max(x, 0)

    x, y: (...). Saves y. backward: dx = dy where y > 0, else 0. At the kink x = 0 the derivative counts as 0.

    Source: Nair and Hinton, "Rectified Linear Units Improve Restricted Boltzmann Machines" (2010).
    """

    fwd = relu_fwd
    bwd = relu_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        y = self.fwd(x)
        if stash is not None:
            stash.push(self, y)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        (y,) = stash.pop(self)
        return self.bwd(dy, y)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 5), (1,), (9, 8), (0, 4)):
            x = np.abs(rng.normal(size=shape)) + 0.1
            x[..., ::2] *= np.where(rng.random(shape)[..., ::2] < 0.5, -1, 1)  # the last axis has an active element
            x.flat[:1] = np.abs(x.flat[:1])
            yield cls(backend), (backend.asarray(x),)


class SquaredReLU(Op):
    """y = max(x, 0)^2

    x, y: (...). Saves x. backward: dx = 2 dy max(x, 0).

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021).
    """

    fwd = relu2_fwd
    bwd = relu2_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        if stash is not None:
            stash.push(self, x)
        return self.fwd(x)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        return self.bwd(dy, x)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for op, inputs in ReLU.cases(backend, rng):  # away from 0, where the second derivative jumps
            yield cls(op.backend), inputs


class Sigmoid(Op):
    """y = s(x) = 1 / (1 + exp(-x))

    x, y: (...). Saves y. backward: dx = dy y (1 - y).
    """

    fwd = sigmoid_fwd
    bwd = sigmoid_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        y = self.fwd(x)
        if stash is not None:
            stash.push(self, y)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        (y,) = stash.pop(self)
        return self.bwd(dy, y)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 5), (1,), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)


class SiLU(Op):
    """y = x s(x),  s(x) = 1 / (1 + exp(-x))

    x, y: (...). Saves x. backward: dx = dy s (1 + x (1 - s)).

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), where it has its name.
    """

    fwd = silu_fwd
    bwd = silu_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        if stash is not None:
            stash.push(self, x)
        return self.fwd(x)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        return self.bwd(dy, x)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 5), (1,), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)
