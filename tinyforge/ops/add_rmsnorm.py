"""Residual add and RMS normalisation in one op: the joint between two halves of a block."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like, per_row
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Param, Stash
from tinyforge.ops.rmsnorm import RMSNorm, rmsnorm_fwd
from tinyforge.params import with_buffer


@kernel
def add_rmsnorm_fwd(
    residual: Array, delta: Array, weight: Array, eps: float, plus_one: bool = False
) -> tuple[Array, Array, Array]:
    x = residual + delta
    y, rstd = rmsnorm_fwd(x, weight, eps, plus_one)
    return x, y, rstd


add_rmsnorm_fwd.on("meta")(lambda delta: (like(delta), like(delta), per_row(delta)))


class AddRMSNorm(RMSNorm):
    """x = residual + delta,  y = rmsnorm(x); returns (x, y)

    residual, delta, x, y: (..., C); w: (C,). Saves y, and the reciprocal root mean square: (...). delta=None: the op
    before has added it already, as Linear does with `add`, and x is `residual`. The add is a forward-Euler step of
    size 1 along delta; the unfused reference is `residual + delta`, then RMSNorm.

    backward(dy=(dx, dy)): both inputs of the add get the same gradient, dx + rmsnorm_bwd(dy), returned as
    (dresidual, ddelta), which are the same array. dx is None at the end of the stream, where nothing else reads x.
    """

    add_fwd = add_rmsnorm_fwd

    def forward(self, residual: Array, delta: Array | None, stash: Stash | None = None) -> tuple[Array, Array]:
        self.expect(residual, self.weight.size)
        if delta is None:
            x, (y, rstd) = residual, self.fwd(residual, self.weight.value, self.eps, self.plus_one)
        else:
            self.expect(delta, shape=residual.shape)
            x, y, rstd = self.add_fwd(residual, delta, self.weight.value, self.eps, self.plus_one)
        self.save(stash, y, rstd)
        return x, y

    def normed(self, x: Array) -> Array:
        """y, recomputed from the sum x."""
        return self.fwd(x, self.weight.value, self.eps, self.plus_one)[0]

    def backward(self, dy: tuple[Array | None, Array], stash: Stash) -> tuple[Array, Array]:
        y, rstd = stash.pop(self)
        residual, dnormed = dy
        dsum = self.bwd(self.weight.grad, dnormed, self.weight.value, y, rstd, residual, self.plus_one)
        return dsum, dsum

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4)):
            eps = 1.0 if shape[-1] == 1 else 1e-5
            op = with_buffer(cls(Param("weight", shape[-1:], fill=1.0, decay=False), backend, eps), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)), backend.asarray(rng.normal(size=shape)))
