"""Learned absolute positions, as GPT-2 has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import numpy_kernel
from tinyforge.op import Array, Op, Param, Stash, with_buffer


class LearnedPositions(Op):
    """y[b, t, :] = x[b, t, :] + P[t, :]

    x, y: (B, T, C); P: (positions, C), T <= positions. Saves nothing but T.
    backward: dx = dy (the same array), dP[t] += sum over b of dy[b, t].
    """

    kernels = ("positions_fwd", "positions_bwd")

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        if x.shape[1] > self.weight.shape[0]:
            raise ValueError(
                f"{self.name}: x has {x.shape[1]} positions, the table {self.weight.shape[0]}; shorten the input"
            )
        if stash is not None:
            stash.push(self)
        return self.k.positions_fwd(x, self.weight.value)

    def backward(self, dy: Array, stash: Stash) -> Array:
        stash.pop(self)
        self.k.positions_bwd(dy, self.weight.grad)
        return dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 4), (1, 1, 1), (3, 5, 2), (2, 0, 3)):
            op = with_buffer(cls(Param("weight", (5, shape[-1]), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)


@numpy_kernel
def positions_fwd(x: Array, weight: Array) -> Array:
    return x + weight[: x.shape[1]]


@numpy_kernel
def positions_bwd(dy: Array, dweight: Array) -> None:
    dweight[: dy.shape[1]] += dy.sum(axis=0)
