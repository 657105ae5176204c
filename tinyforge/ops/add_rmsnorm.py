"""Residual add and RMS normalisation in one op: the joint between two halves of a block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, bind, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.fp8 import Scaled, quantise_rows
from tinyforge.ops.rmsnorm import normed, rmsnorm_bwd, rmsnorm_fwd, rmsnorm_scaled_bwd, rmsnorm_scaled_fwd
from tinyforge.params import with_buffer


@kernel
def add_rmsnorm_fwd(residual: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array, Array]:
    x = residual + delta
    y, rstd = rmsnorm_fwd(x, weight, eps)
    return x, y, rstd


@add_rmsnorm_fwd.on("phantom")
def add_rmsnorm_fwd_memory(
    residual: Array, delta: Array, weight: Array, eps: float
) -> tuple[Array, Array, Array]:
    return empty(delta.shape, delta.dtype), empty(delta.shape, delta.dtype), empty(delta.shape[:-1], wide(delta.dtype))


class AddRMSNorm(Op):
    """x = residual + delta,  y = rmsnorm(x); returns (x, y)

    residual, delta, x, y: (..., C); w: (C,). Saves y, and the reciprocal root mean square: (...). delta None: who made
    `residual` has added it already, as Linear does with `add`, and x is `residual`.
    The add is a forward-Euler step of size 1 along delta; the unfused reference is `residual + delta`, then RMSNorm.

    backward(dy=(dx, dy)): both inputs of the add get the same gradient, dx + rmsnorm_bwd(dy), returned as
    (dresidual, ddelta), which are the same array. dx is None at the end of the stream, where nothing else reads x.

    scaled: y comes as a `Scaled` (fp8.py), for a product in FP8. scaled_backward: so does ddelta.
    """

    kernels = (add_rmsnorm_fwd, rmsnorm_fwd, rmsnorm_bwd)

    def __init__(
        self, weight: Param, backend: Backend, eps: float = 1e-5, name: str = "", *, scaled: bool = False,
        scaled_backward: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(backend, name)
        self.weight = weight
        self.eps = eps
        self.scaled, self.scaled_backward = scaled, scaled_backward
        if scaled or scaled_backward:
            more = (rmsnorm_scaled_fwd, rmsnorm_scaled_bwd, quantise_rows)
            self.k = bind((*self.kernels, *more), backend, type(self).__name__)

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, residual: Array, delta: Array | None, stash: Stash | None = None) -> tuple[Array, Any]:
        if delta is None:
            x, (y, kept, rstd) = residual, normed(self, residual)
        else:
            x, kept, rstd = self.k.add_rmsnorm_fwd(residual, delta, self.weight.value, self.eps)
            y = Scaled(kept, *self.k.quantise_rows(kept)) if self.scaled else kept
        if stash is not None:
            stash.push(self, kept, rstd)
        return x, y

    def normed(self, x: Array) -> Any:
        """y computed again, from the sum x."""
        return normed(self, x)[0]

    def backward(self, dy: tuple[Array | None, Array], stash: Stash) -> tuple[Array, Any]:
        y, rstd = stash.pop(self)
        residual, dnormed = dy
        arguments = (self.weight.grad, dnormed, self.weight.value, y, rstd, residual)
        if not self.scaled_backward:
            dsum = self.k.rmsnorm_bwd(*arguments)
            return dsum, dsum
        scaled = Scaled(*self.k.rmsnorm_scaled_bwd(*arguments))
        return scaled.x, scaled

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4)):
            eps = 1.0 if shape[-1] == 1 else 1e-5
            op = with_buffer(cls(Param("weight", shape[-1:], fill=1.0, decay=False), backend, eps), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)), backend.asarray(rng.normal(size=shape)))
