"""Elementwise activations: ReLU and its square, the logistic function, SiLU, the hyperbolic tangent."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, Kernel, kernel
from tinyforge.op import Cases, Op, Stash
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


@kernel
def tanh_fwd(x: Array) -> Array:
    return np.tanh(x)


@kernel
def tanh_bwd(dy: Array, y: Array) -> Array:
    return dy * (1.0 - y * y)


class _Activation(Op):
    """A function of one array whose gradient is computed from its output, or with `of_input` from its input."""

    fwd = relu_fwd
    bwd: ClassVar[Kernel[..., Array]]
    of_input: ClassVar[bool] = False
    spread: ClassVar[float] = 2.0  # of the numbers in its cases

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        y = self.fwd(x)
        self.save(stash, x if self.of_input else y)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        (saved,) = stash.pop(self)
        return self.bwd(dy, saved)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 5), (1,), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * cls.spread),)


class ReLU(_Activation):
    """y = max(x, 0)

    x, y: (...). Saves y. backward: dx = dy where y > 0, else 0. At the kink x = 0 the derivative counts as 0.

    Source: Nair and Hinton, "Rectified Linear Units Improve Restricted Boltzmann Machines" (2010).
    """

    fwd = relu_fwd
    bwd = relu_bwd

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 5), (1,), (9, 8), (0, 4)):
            x = np.abs(rng.normal(size=shape)) + 0.1
            x[..., ::2] *= np.where(rng.random(shape)[..., ::2] < 0.5, -1, 1)  # the last axis has an active element
            x.flat[:1] = np.abs(x.flat[:1])
            yield cls(backend), (backend.asarray(x),)


class SquaredReLU(_Activation):
    """y = max(x, 0)^2

    x, y: (...). Saves x. backward: dx = 2 dy max(x, 0).

    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling" (2021).
    """

    fwd = relu2_fwd
    bwd = relu2_bwd
    of_input = True

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for op, inputs in ReLU.cases(backend, rng):  # away from 0, where the second derivative jumps
            yield cls(op.backend), inputs


class Sigmoid(_Activation):
    """y = s(x) = 1 / (1 + exp(-x))

    x, y: (...). Saves y. backward: dx = dy y (1 - y).
    """

    fwd = sigmoid_fwd
    bwd = sigmoid_bwd


class SiLU(_Activation):
    """y = x s(x),  s(x) = 1 / (1 + exp(-x))

    x, y: (...). Saves x. backward: dx = dy s (1 + x (1 - s)).

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), where it has its name.
    """

    fwd = silu_fwd
    bwd = silu_bwd
    of_input = True


class Tanh(_Activation):
    """y = tanh x

    x, y: (...). Saves y. backward: dx = dy (1 - y^2), since the derivative of tanh is 1 - tanh^2.
    """

    fwd = tanh_fwd
    bwd = tanh_bwd
    spread = 1.0
