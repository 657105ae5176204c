"""Token embedding: a table of rows, one per id."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.compile import constant
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def embedding_fwd(ids: Array, weight: Array) -> Array:
    return weight[ids]


embedding_fwd.on("meta")(lambda ids, weight: empty((*ids.shape, weight.shape[-1]), weight.dtype))


class Order(NamedTuple):
    """Tokens sorted by their ids. tokens: (N,); those with id v are tokens[starts[v]] up to tokens[starts[v + 1] - 1].
    done: (V,), zeros between two calls of `embedding_bwd`."""

    tokens: Array
    starts: Array
    done: Array


@kernel
def embedding_order(ids: Array, rows: int) -> Order:
    """ids: all below `rows`."""
    flat = ids.reshape(-1)
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(np.bincount(flat, minlength=rows), out=starts[1:])
    return Order(np.argsort(flat, kind="stable").astype(np.int32), starts, np.zeros(rows, np.int32))


@embedding_order.on("meta")
def embedding_order_memory(ids: Array, rows: int) -> Order:
    return Order(*(empty((n,), np.int32) for n in (ids.size, rows + 1, rows)))


@kernel
def embedding_bwd(dweight: Array, dy: Array, ids: Array, order: Order | None = None) -> None:
    """order: of the ids, if it is known."""
    # Sorting brings equal ids together, so each row of dW is one sum in a fixed order. np.add.at computes the same sums
    # one element at a time, several times slower.
    if ids.size == 0:
        return
    tokens, starts, _ = order or embedding_order(ids, len(dweight))
    rows = np.flatnonzero(np.diff(starts))
    dweight[rows] += np.add.reduceat(dy.reshape(-1, dy.shape[-1])[tokens], starts[rows], axis=0)


@embedding_bwd.on("meta")
def embedding_bwd_memory(dweight: Array, dy: Array, ids: Array, order: Order | None = None) -> None:
    rows, width = dweight.shape
    tokens = ids.size
    if not dy.size:
        return
    _order = order or embedding_order_memory(ids, rows)
    pieces = (tokens - 1) // constant("ops/embedding.cu", "PIECE") + 1
    _partial = empty((2 * pieces, width), dweight.dtype)  # sums of rows that are cut into pieces


class Embedding(Op):
    """y[..., :] = W[ids[...], :]

    ids: (...) int32 in [0, V); W: (V, C); y: (..., C). Saves ids. Raises IndexError for others, on NumPy; on a GPU the
    loader has checked them, since reading them here would wait for the device.

    backward: dW[v] += sum of dy over the positions where ids == v. Ids get no gradient. order: what `order(ids)`
    returns, to sort the ids once for several tables of V rows.
    """

    fwd = embedding_fwd
    bwd = embedding_bwd
    sort = embedding_order

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def order(self, ids: Array) -> Order:
        self.expect_ids(ids, self.weight.shape[0])
        return self.sort(ids, self.weight.shape[0])

    def forward(self, ids: Array, stash: Stash | None = None, *, order: Order | None = None) -> Array:
        self.expect_ids(ids, self.weight.shape[0])
        self.save(stash, ids, order)
        return self.fwd(ids, self.weight.value)

    def backward(self, dy: Array, stash: Stash) -> None:
        ids, order = stash.pop(self)
        if not self.weight.frozen:
            self.bwd(self.weight.grad, dy, ids, order)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for vocab, dim, shape in ((11, 6, (3, 7)), (1, 1, (1, 1)), (5, 3, (2, 0)), (9, 4, (13,))):
            op = with_buffer(cls(Param("weight", (vocab, dim), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.integers(0, vocab, shape)),)
