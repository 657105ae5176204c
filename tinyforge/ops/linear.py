"""Linear map without bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def linear_fwd(x: Array, weight: Array) -> Array:
    return (x.reshape(-1, x.shape[-1]) @ weight.T).reshape(*x.shape[:-1], weight.shape[0])


@linear_fwd.on("phantom")
def linear_fwd_memory(x: Array, weight: Array) -> Array:
    return empty((*x.shape[:-1], weight.shape[0]), x.dtype)


@kernel
def linear_bwd(dweight: Array, dy: Array, x: Array, weight: Array) -> Array:
    rows = dy.reshape(-1, dy.shape[-1])
    dweight += rows.T @ x.reshape(-1, x.shape[-1])
    return (rows @ weight).reshape(x.shape)


@linear_bwd.on("phantom")
def linear_bwd_memory(dweight: Array, dy: Array, x: Array, weight: Array) -> Array:
    return empty(x.shape, x.dtype)


class Linear(Op):
    """y = x W^T

    x: (..., I); W: (O, I); y: (..., O). Saves x; or `recompute`, a function that computes x again from what other ops
    have saved anyway: memory for the price of that function (Chen et al., "Training Deep Nets with Sublinear Memory
    Cost", 2016).

    backward: dx = dy W, dW += dy^T x, with all leading axes folded into one.
    """

    kernels = (linear_fwd, linear_bwd)

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(
        self, x: Array, stash: Stash | None = None, *, recompute: Callable[[], Array] | None = None
    ) -> Array:
        if stash is not None:
            stash.push(self, recompute or (lambda: x))
        return self.k.linear_fwd(x, self.weight.value)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        return self.k.linear_bwd(self.weight.grad, dy, x(), self.weight.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for (o, i), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
            op = with_buffer(cls(Param("weight", (o, i), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(*lead, i))),)
