"""Learned absolute positions, as in GPT-2."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash, WithKeywords
from tinyforge.ops.embedding import embedding_bwd, embedding_bwd_memory
from tinyforge.params import with_buffer


@kernel
def positions_fwd(x: Array, weight: Array, positions: Array | None) -> Array:
    """positions: (B, T) int32, the row of `weight` for each token; None for 0 .. T-1 in every sequence."""
    return x + (weight[: x.shape[1]] if positions is None else weight[positions])


@kernel
def positions_bwd(dweight: Array, dy: Array, positions: Array | None) -> None:
    if positions is None:
        dweight[: dy.shape[1]] += dy.sum(axis=0)
    else:
        embedding_bwd(dweight, dy, positions)


@positions_bwd.on("meta")
def positions_bwd_memory(dweight: Array, dy: Array, positions: Array | None) -> None:
    if positions is not None:
        embedding_bwd_memory(dweight, dy, positions)


class LearnedPositions(Op):
    """y[b, t, :] = x[b, t, :] + P[first + offset + t, :]

    x, y: (B, T, C); P: (first + positions, C), offset + T <= positions. offset: how many tokens come before x, when
    decoding with a cache, or the tokens' positions, an array, (T,). first: rows before the first position, 2 in OPT.
    Saves only the offset.
    starts: (B, T) int32, for rows that hold several documents: where t's document begins and its positions restart.
    Then P[first + t - starts[b, t]] is added, and these positions are saved.
    backward: dx = dy (the same array), dP[p] += sum of dy over the tokens at position p.
    """

    fwd = positions_fwd
    bwd = positions_bwd

    def __init__(self, weight: Param, backend: Backend, name: str = "", *, first: int = 0) -> None:
        super().__init__(backend, name)
        self.weight, self.first = weight, first

    def forward(self, x: Array, stash: Stash | None = None, *, offset: Any = 0, starts: Array | None = None) -> Array:
        self.expect(x, self.weight.shape[1])
        if not isinstance(offset, int):
            return self.fwd(x, self.weight.value[self.first :], offset[None])
        if offset + x.shape[1] > (rows := self.weight.shape[0] - self.first):
            raise ValueError(
                f"{self.name}: x has positions {offset} to {offset + x.shape[1]}, the table {rows}; shorten the input"
            )
        if starts is not None and offset:
            raise ValueError(f"{self.name}: starts of documents and offset {offset}; a cache has one; drop one")
        positions = None if starts is None else self.backend.xp.arange(x.shape[1], dtype=starts.dtype) - starts
        self.save(stash, offset, positions)
        return self.fwd(x, self.weight.value[self.first + offset :], positions)

    def backward(self, dy: Array, stash: Stash) -> Array:
        offset, positions = stash.pop(self)
        if not self.weight.frozen:
            self.bwd(self.weight.grad[self.first + offset :], dy, positions)
        return dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 4), (1, 1, 1), (3, 5, 2), (2, 0, 3)):
            first = 2 if shape[1] == 3 else 0
            op = with_buffer(cls(Param("weight", (5, shape[-1]), std=1.0), backend, first=first), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)
        # Documents: positions that many tokens share, of one row and of several.
        op = with_buffer(cls(Param("weight", (6, 3), std=1.0), backend), backend, rng)
        starts = backend.asarray(np.array([[0, 0, 2, 2, 2], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]))
        yield WithKeywords(op, starts=lambda given: given), (backend.asarray(rng.normal(size=(3, 5, 3))), starts)
