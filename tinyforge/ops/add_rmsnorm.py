"""Residual add and RMS normalisation in one op: the joint between two halves of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import numpy_kernel
from tinyforge.op import Array, Op, Param, Stash, with_buffer
from tinyforge.ops.rmsnorm import rmsnorm_bwd, rmsnorm_fwd


class AddRMSNorm(Op):
    """x = residual + delta,  y = rmsnorm(x); returns (x, y)

    residual, delta, x, y: (..., C); w: (C,). Saves x and the reciprocal root mean square: (...).
    The add is a forward-Euler step of size 1 along delta; the unfused reference is `residual + delta`, then RMSNorm.

    backward(dy=(dx, dy)): both inputs of the add get the same gradient, dx + rmsnorm_bwd(dy); it is returned once,
    as (dresidual, ddelta) that are the same array.
    """

    kernels = ("add_rmsnorm_fwd", "add_rmsnorm_bwd", "rmsnorm_fwd")

    def __init__(self, weight: Param, backend: Backend, eps: float = 1e-5, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight
        self.eps = eps

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, residual: Array, delta: Array, stash: Stash | None = None) -> tuple[Array, Array]:
        x, y, rstd = self.k.add_rmsnorm_fwd(residual, delta, self.weight.value, self.eps)
        if stash is not None:
            stash.push(self, x, rstd)
        return x, y

    def normed(self, x: Array) -> Array:
        """y once more, from the sum x."""
        return self.k.rmsnorm_fwd(x, self.weight.value, self.eps)[0]

    def backward(self, dy: tuple[Array, Array], stash: Stash) -> tuple[Array, Array]:
        x, rstd = stash.pop(self)
        dsum = self.k.add_rmsnorm_bwd(*dy, x, rstd, self.weight.value, self.weight.grad)
        return dsum, dsum

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4)):
            eps = 1.0 if shape[-1] == 1 else 1e-5
            op = with_buffer(cls(Param("weight", shape[-1:], fill=1.0, decay=False), backend, eps), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)), backend.asarray(rng.normal(size=shape)))


@numpy_kernel
def add_rmsnorm_fwd(residual: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array, Array]:
    x = residual + delta
    y, rstd = rmsnorm_fwd(x, weight, eps)
    return x, y, rstd


@numpy_kernel
def add_rmsnorm_bwd(dx: Array, dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    dsum = rmsnorm_bwd(dy, x, rstd, weight, dweight)
    dsum += dx
    return dsum
