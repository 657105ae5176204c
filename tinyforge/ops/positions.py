"""Learned absolute positions, as GPT-2 has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def positions_fwd(x: Array, weight: Array) -> Array:
    return x + weight[: x.shape[1]]


@positions_fwd.on("phantom")
def positions_fwd_memory(x: Array, weight: Array) -> Array:
    return empty(x.shape, x.dtype)


@kernel
def positions_bwd(dweight: Array, dy: Array) -> None:
    dweight[: dy.shape[1]] += dy.sum(axis=0)


@positions_bwd.on("phantom")
def positions_bwd_memory(dweight: Array, dy: Array) -> None:
    pass


class LearnedPositions(Op):
    """y[b, t, :] = x[b, t, :] + P[offset + t, :]

    x, y: (B, T, C); P: (positions, C), offset + T <= positions. offset: how many tokens come before x, when decoding
    with a cache. Saves nothing but the offset.
    backward: dx = dy (the same array), dP[offset + t] += sum over b of dy[b, t].
    """

    kernels = (positions_fwd, positions_bwd)

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, x: Array, stash: Stash | None = None, *, offset: int = 0) -> Array:
        if offset + x.shape[1] > self.weight.shape[0]:
            raise ValueError(
                f"{self.name}: x has positions {offset} to {offset + x.shape[1]}, the table {self.weight.shape[0]}; "
                "shorten the input"
            )
        if stash is not None:
            stash.push(self, offset)
        return self.k.positions_fwd(x, self.weight.value[offset:])

    def backward(self, dy: Array, stash: Stash) -> Array:
        (offset,) = stash.pop(self)
        if not self.weight.frozen:
            self.k.positions_bwd(self.weight.grad[offset:], dy)
        return dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 4), (1, 1, 1), (3, 5, 2), (2, 0, 3)):
            op = with_buffer(cls(Param("weight", (5, shape[-1]), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)
