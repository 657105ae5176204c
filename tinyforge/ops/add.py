"""The sum of two arrays: where two branches of a model meet."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def add_fwd(a: Array, b: Array) -> Array:
    return a + b


class Add(Op):
    """y = a + b

    a, b, y: (...), of one shape. Saves nothing. backward: da = dy and db = dy, both the array that was passed in.
    """

    fwd = add_fwd

    def forward(self, a: Array, b: Array, stash: Stash | None = None) -> Array:
        self.expect(a)
        self.expect(b, shape=a.shape)
        self.save(stash)
        return self.fwd(a, b)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, Array]:
        stash.pop(self)
        return dy, dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 5), (1,), (0, 4)):
            yield cls(backend), tuple(backend.asarray(rng.normal(size=shape)) for _ in range(2))
