"""One array for two readers: the start of a residual connection."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def fork_bwd(first: Array, second: Array) -> Array:
    return first + second


class Fork(Op):
    """y = x,  z = x

    x, y, z: (...), the same array. Saves nothing. backward(dy=(dy, dz)): dx = dy + dz. In a pre-norm block this sum is
    part of the norm's backward; in a post-norm block the stream itself goes into a linear map, so it needs this op.
    """

    bwd = fork_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> tuple[Array, Array]:
        self.expect(x)
        self.save(stash)
        return x, x

    def backward(self, dy: tuple[Array, Array], stash: Stash) -> Array:
        stash.pop(self)
        return self.bwd(*dy)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 5), (1,), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape)),)
