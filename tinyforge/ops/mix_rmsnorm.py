"""The mix of the residual stream with its beginning and the normalisation that follows, in one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like, per_row
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.mix import mix_bwd, mix_fwd
from tinyforge.ops.rmsnorm import rmsnorm_bwd, rmsnorm_fwd
from tinyforge.params import with_buffer


@kernel
def mix_rmsnorm_fwd(
    x: Array, first: Array, weight: Array, a: Array, b: Array, eps: float, plus_one: bool = False
) -> tuple[Array, Array, Array]:
    mixed = mix_fwd(x, first, a, b)
    return (mixed, *rmsnorm_fwd(mixed, weight, eps, plus_one))


mix_rmsnorm_fwd.on("meta")(lambda x: (like(x), like(x), per_row(x)))


@kernel
def mix_rmsnorm_bwd(
    dweight: Array | None,
    da: Array | None,
    db: Array | None,
    dfirst: Array | None,
    dy: Array,
    residual: Array | None,
    weight: Array,
    y: Array,
    rstd: Array,
    x: Array,
    first: Array,
    a: Array,
    b: Array,
    plus_one: bool = False,
) -> tuple[Array, Array]:
    """As rmsnorm_bwd, then mix_bwd."""
    between = rmsnorm_bwd(dweight, dy, weight, y, rstd, residual, plus_one)
    return mix_bwd(da, db, dfirst, between, x, first, a, b)


mix_rmsnorm_bwd.on("meta")(lambda dfirst, dy: (like(dy), like(dy) if dfirst is None else dfirst))


class MixRMSNorm(Op):
    """x' = a x + b x0,  y = rmsnorm(x'); returns (x', y): the reference is Mix, then RMSNorm

    x, x0, x', y: (..., C); a, b: (1,); w: (C,). Saves x, x0, y, and the reciprocal root mean square: (...).
    backward(dy=(dx', dy), into=g): as AddRMSNorm's, then as Mix's; returns (dx, dx0).
    """

    fwd = mix_rmsnorm_fwd
    bwd = mix_rmsnorm_bwd

    def __init__(
        self,
        a: Param,
        b: Param,
        weight: Param,
        backend: Backend,
        eps: float = 1e-5,
        name: str = "",
        *,
        plus_one: bool = False,
    ) -> None:
        super().__init__(backend, name)
        self.a, self.b, self.weight, self.eps, self.plus_one = a, b, weight, eps, plus_one

    def forward(self, x: Array, first: Array, stash: Stash | None = None) -> tuple[Array, Array]:
        self.expect(x, self.weight.size)
        self.expect(first, shape=x.shape)
        factors = self.a.value, self.b.value
        mixed, y, rstd = self.fwd(x, first, self.weight.value, *factors, self.eps, self.plus_one)
        self.save(stash, x, first, y, rstd)
        return mixed, y

    def backward(
        self, dy: tuple[Array | None, Array], stash: Stash, *, into: Array | None = None
    ) -> tuple[Array, Array]:
        x, first, y, rstd = stash.pop(self)
        (residual, dnormed), sums = dy, (self.weight.grad, self.a.grad, self.b.grad)
        saved = (self.weight.value, y, rstd, x, first, self.a.value, self.b.value)
        return self.bwd(*sums, into, dnormed, residual, *saved, self.plus_one)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4), (20, 136)):
            fills = ("a", (1,), 1.0), ("b", (1,), 0.5), ("weight", shape[-1:], 1.0)
            a, b, weight = (Param(name, size, fill=fill, decay=False) for name, size, fill in fills)
            how: dict[str, Any] = {"eps": 1.0 if shape[-1] == 1 else 1e-5, "plus_one": len(shape) == 3}
            op = with_buffer(cls(a, b, weight, backend, **how), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)), backend.asarray(rng.normal(size=shape)))
