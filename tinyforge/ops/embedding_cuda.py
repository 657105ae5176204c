"""Launches embedding.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import embedding
from tinyforge.ops.embedding import Order
from tinyforge.ops.rows_cuda import launch_vectors

FILE = "ops/embedding.cu"
SHELF, PIECE = constant(FILE, "SHELF"), constant(FILE, "PIECE")


@embedding.embedding_fwd.on("cupy")
def embedding_fwd(ids: Array, weight: Array) -> Array:
    ids, width = contiguous(ids), weight.shape[-1]
    y = new((*ids.shape, width), weight.dtype)
    return launch_vectors(FILE, "embedding_fwd", y.size, width, (y, ids, weight))


@embedding.embedding_order.on("cupy")
def embedding_order(ids: Array, rows: int) -> Order:
    ids = contiguous(ids)
    order = Order(*(new((n,), ids.dtype) for n in (ids.size, rows + 1, rows)))
    sort = load(FILE, "embedding_order", SCALAR="float", VEC=1)
    sort(blocks(rows, SHELF), (32, 32), (*order, ids, np.int32(ids.size), np.int32(rows)))
    return order


@embedding.embedding_bwd.on("cupy")
def embedding_bwd(dweight: Array, dy: Array, ids: Array, order: Order | None = None) -> None:
    dy, ids = contiguous(dy), contiguous(ids)
    rows, width = dweight.shape
    tokens = ids.size
    if not dy.size:
        return
    vec = vector(width, dy, dweight)
    vectors = width // vec
    threads = min(256, -(-vectors // 32) * 32)
    columns, pieces = -(-vectors // threads), (tokens - 1) // PIECE
    sorted_tokens, starts, done = order or embedding_order(ids, rows)
    partial = new((2 * (pieces + 1), width), dweight.dtype)
    launch = load(FILE, "embedding_bwd", SCALAR=scalar(dy.dtype), VEC=vec)
    arrays = (dweight, partial, done, dy, ids, sorted_tokens, starts)
    launch((pieces + rows, columns), (threads,), (*arrays, np.int32(pieces), np.int32(vectors)))
