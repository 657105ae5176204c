"""A constant multiple of an array."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def scale_fwd(x: Array, factor: float) -> Array:
    return x * x.dtype.type(factor)


class Scale(Op):
    """y = c x

    x, y: (...). c: a constant. Saves nothing. backward: dx = c dy.
    """

    fwd = scale_fwd

    def __init__(self, factor: float, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.factor = factor

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        self.save(stash)
        return self.fwd(x, self.factor)

    def backward(self, dy: Array, stash: Stash) -> Array:
        stash.pop(self)
        return self.fwd(dy, self.factor)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for factor, shape in ((2.5, (2, 3, 5)), (-0.3, (1,)), (1.5, (0, 4))):
            yield cls(factor, backend), (backend.asarray(rng.normal(size=shape)),)
