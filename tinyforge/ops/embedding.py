"""Token embedding: a table of rows, one per id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.compile import constant
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def embedding_fwd(ids: Array, weight: Array) -> Array:
    return weight[ids]


embedding_fwd.on("meta")(lambda ids, weight: empty((*ids.shape, weight.shape[-1]), weight.dtype))


@kernel
def embedding_bwd(dweight: Array, dy: Array, ids: Array) -> None:
    # Sorting brings equal ids together, so each row of dW is one sum in a fixed order. np.add.at computes the same sums
    # one element at a time, several times slower.
    flat = ids.reshape(-1)
    if flat.size == 0:
        return
    order = np.argsort(flat, kind="stable")
    rows, starts = np.unique(flat[order], return_index=True)
    dweight[rows] += np.add.reduceat(dy.reshape(-1, dy.shape[-1])[order], starts, axis=0)


@embedding_bwd.on("meta")
def embedding_bwd_memory(dweight: Array, dy: Array, ids: Array) -> None:
    rows, width = dweight.shape
    tokens = ids.size
    if not dy.size:
        return
    vector = 16 // dy.itemsize if width % (16 // dy.itemsize) == 0 else 1
    columns = -(-width // (vector * 256))
    pieces = (tokens - 1) // constant("ops/embedding.cu", "PIECE") + 1
    # The sorted ids, where each row begins, progress counters, and partial sums of rows that are cut into pieces.
    held = [empty((n,), np.int32) for n in (tokens, rows + 1, columns * rows)]
    held.append(empty((2 * pieces, width), dweight.dtype))


class Embedding(Op):
    """y[..., :] = W[ids[...], :]

    ids: (...) int32 in [0, V); W: (V, C); y: (..., C). Saves ids. Raises IndexError for others, on NumPy; on a GPU the
    loader has checked them, since reading them here would wait for the device.

    backward: dW[v] += sum of dy over the positions where ids == v. Ids get no gradient.
    """

    fwd = embedding_fwd
    bwd = embedding_bwd

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def forward(self, ids: Array, stash: Stash | None = None) -> Array:
        self.expect_ids(ids, self.weight.shape[0])
        if stash is not None:
            stash.push(self, ids)
        return self.fwd(ids, self.weight.value)

    def backward(self, dy: Array, stash: Stash) -> None:
        (ids,) = stash.pop(self)
        if not self.weight.frozen:
            self.bwd(self.weight.grad, dy, ids)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for vocab, dim, shape in ((11, 6, (3, 7)), (1, 1, (1, 1)), (5, 3, (2, 0)), (9, 4, (13,))):
            op = with_buffer(cls(Param("weight", (vocab, dim), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.integers(0, vocab, shape)),)
