"""The hyperbolic tangent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Stash


@kernel
def tanh_fwd(x: Array) -> Array:
    return np.tanh(x)


@kernel
def tanh_bwd(dy: Array, y: Array) -> Array:
    return dy * (1.0 - y * y)


class Tanh(Op):
    """y = tanh x

    x, y: (...). Saves y. backward: dx = dy (1 - y^2), since the derivative of tanh is 1 - tanh^2.
    """

    fwd = tanh_fwd
    bwd = tanh_bwd

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
            yield cls(backend), (backend.asarray(rng.normal(size=shape)),)
