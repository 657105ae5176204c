"""Token embedding: a table of rows, one per id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import numpy_kernel
from tinyforge.op import Array, Op, Param, Stash, with_buffer


class Embedding(Op):
    """y[..., :] = W[ids[...], :]

    ids: (...) int32 in [0, V); W: (V, C); y: (..., C). Saves ids. Ids are range-checked by the loader, not here:
    a check inside the op would have to wait for the device.

    backward: dW[v] += sum of dy over the positions where ids == v. Ids get no gradient.
    """

    kernels = ("embedding_fwd", "embedding_bwd")

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, ids: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, ids)
        return self.k.embedding_fwd(ids, self.weight.value)

    def backward(self, dy: Array, stash: Stash) -> None:
        (ids,) = stash.pop(self)
        self.k.embedding_bwd(dy, ids, self.weight.grad)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for vocab, dim, shape in ((11, 6, (3, 7)), (1, 1, (1, 1)), (5, 3, (2, 0)), (9, 4, (13,))):
            op = with_buffer(cls(Param("weight", (vocab, dim), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.integers(0, vocab, shape)),)


@numpy_kernel
def embedding_fwd(ids: Array, weight: Array) -> Array:
    return weight[ids]


@numpy_kernel
def embedding_bwd(dy: Array, ids: Array, dweight: Array) -> None:
    # Sorting brings equal ids together, so each row of dW is one sum in a fixed order. np.add.at gives the same
    # sums one element at a time, several times slower.
    flat = ids.reshape(-1)
    if flat.size == 0:
        return
    order = np.argsort(flat, kind="stable")
    rows, starts = np.unique(flat[order], return_index=True)
    dweight[rows] += np.add.reduceat(dy.reshape(-1, dy.shape[-1])[order], starts, axis=0)
