"""Residual add and layer normalisation in one op: the joint between two halves of a block."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like, per_row
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Param, Stash
from tinyforge.ops.layernorm import LayerNorm, layernorm_fwd
from tinyforge.params import with_buffer


@kernel
def add_layernorm_fwd(
    residual: Array, delta: Array, weight: Array, bias: Array | None, eps: float
) -> tuple[Array, Array, Array, Array]:
    x = residual + delta
    return x, *layernorm_fwd(x, weight, bias, eps)


add_layernorm_fwd.on("meta")(lambda delta: (like(delta), like(delta), per_row(delta), per_row(delta)))


class AddLayerNorm(LayerNorm):
    """x = residual + delta,  y = layernorm(x); returns (x, y)

    residual, delta, x, y: (..., C); w: (C,); b: (C,), or none. Saves x, and mean and reciprocal deviation: (...).
    delta=None: the op before has added it already, as Linear does with `add`, and x is `residual`. The unfused
    reference is `residual + delta`, then LayerNorm.

    backward(dy=(dx, dy)): both inputs of the add get the same gradient, dx + layernorm_bwd(dy), returned as
    (dresidual, ddelta), which are the same array. dx is None at the end of the stream, where nothing else reads x.
    """

    add_fwd = add_layernorm_fwd

    def forward(self, residual: Array, delta: Array | None, stash: Stash | None = None) -> tuple[Array, Array]:
        self.expect(residual, self.weight.size)
        known = (self.weight.value, self.bias.value if self.bias else None, self.eps)
        if delta is None:
            x, (y, mean, rstd) = residual, self.fwd(residual, *known)
        else:
            self.expect(delta, shape=residual.shape)
            x, y, mean, rstd = self.add_fwd(residual, delta, *known)
        self.save(stash, x, mean, rstd)
        return x, y

    def normed(self, x: Array) -> Array:
        """y, recomputed from the sum x."""
        bias = self.bias.value if self.bias else None
        return self.fwd(x, self.weight.value, bias, self.eps)[0]

    def backward(self, dy: tuple[Array | None, Array], stash: Stash) -> tuple[Array, Array]:
        x, mean, rstd = stash.pop(self)
        residual, dnormed = dy
        dbias = self.bias.grad if self.bias else None
        dsum = self.bwd(self.weight.grad, dbias, dnormed, self.weight.value, x, mean, rstd, residual)
        return dsum, dsum

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4)):
            for bias in (Param("bias", shape[-1:], fill=0.0, decay=False), None):
                weight = Param("weight", shape[-1:], fill=1.0, decay=False)
                op = with_buffer(cls(weight, bias, backend), backend, rng)
                yield op, (backend.asarray(rng.normal(size=shape) + 1), backend.asarray(rng.normal(size=shape)))
