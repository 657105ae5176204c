"""The hyperbolic tangent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Stash


@kernel
def tanh_fwd(x: Array) -> Array:
    return np.tanh(x)


@tanh_fwd.on("meta")
def tanh_fwd_memory(x: Array) -> Array:
    return empty(x.shape, x.dtype)


@kernel
def tanh_bwd(dy: Array, y: Array) -> Array:
    return dy * (1.0 - y * y)


@tanh_bwd.on("meta")
def tanh_bwd_memory(y: Array) -> Array:
    return empty(y.shape, y.dtype)


class Tanh(Op):
    """y = tanh x

    x, y: (...). Saves y. backward: dx = dy (1 - y^2), since the derivative of tanh is 1 - tanh^2.
    """

    kernels = (tanh_fwd, tanh_bwd)

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        y = self.k.tanh_fwd(x)
        if stash is not None:
            stash.push(self, y)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        (y,) = stash.pop(self)
        return self.k.tanh_bwd(dy, y)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 5), (1,), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape)),)
