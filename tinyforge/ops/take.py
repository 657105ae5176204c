"""Selected positions of each sequence: the class token, or the masked words."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def take_fwd(x: Array, where: Array) -> Array:
    """x: (B, T, C); where: (B, M); returns (B, M, C)."""
    y = x[np.arange(len(x))[:, None], np.maximum(where, 0)]
    y[where < 0] = 0
    return y


take_fwd.on("meta")(lambda x, where: empty((*where.shape, x.shape[-1]), x.dtype))


@kernel
def take_bwd(dy: Array, where: Array, length: int) -> Array:
    """dx: (B, length, C), zeros where nothing was taken."""
    dx = np.zeros((len(dy), length, dy.shape[-1]), dy.dtype)
    row, place = np.nonzero(where >= 0)
    dx[row, where[row, place]] = dy[row, place]
    return dx


take_bwd.on("meta")(lambda dy, length: empty((len(dy), length, dy.shape[-1]), dy.dtype))


class Take(Op):
    """y[b, m] = x[b, where[b, m]],  0 where `where` is -1

    x: (B, T, C); where: (B, M) int32 in [0, T), no position twice in a row, or -1 for none; y: (B, M, C). Saves where.
    backward: dx[b, where[b, m]] = dy[b, m], and 0 at all other positions. A position must not come twice because its
    gradient is assigned, not added.
    """

    fwd = take_fwd
    bwd = take_bwd

    def forward(self, x: Array, where: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        self.save(stash, where, x.shape[1])
        return self.fwd(x, where)

    def backward(self, dy: Array, stash: Stash) -> tuple[Array, None]:
        where, length = stash.pop(self)
        return self.bwd(dy, where, length), None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (b, t, c), m in (((3, 7, 4), 3), ((1, 1, 1), 1), ((2, 5, 3), 5)):
            where = np.stack([rng.permutation(t)[:m] for _ in range(b)])
            where[rng.random(where.shape) < 0.2 * (m > 1)] = -1
            yield cls(backend), (backend.asarray(rng.normal(size=(b, t, c))), backend.asarray(where))
