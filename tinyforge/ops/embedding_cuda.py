"""Launches embedding.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import embedding
from tinyforge.ops.rows_cuda import launch_vectors

FILE = "ops/embedding.cu"
SHELF, PIECE = constant(FILE, "SHELF"), constant(FILE, "PIECE")


@embedding.embedding_fwd.on("cupy")
def embedding_fwd(ids: Array, weight: Array) -> Array:
    ids, width = contiguous(ids), weight.shape[-1]
    y = new((*ids.shape, width), weight.dtype)
    return launch_vectors(FILE, "embedding_fwd", y.size, width, (y, ids, weight))


@embedding.embedding_bwd.on("cupy")
def embedding_bwd(dweight: Array, dy: Array, ids: Array) -> None:
    dy, ids = contiguous(dy), contiguous(ids)
    rows, width = dweight.shape
    tokens = ids.size
    if not dy.size:
        return
    vec = vector(width, dy, dweight)
    vectors = width // vec
    threads = min(256, -(-vectors // 32) * 32)
    columns, pieces = -(-vectors // threads), (tokens - 1) // PIECE
    order, starts, done = (new((n,), ids.dtype) for n in (tokens, rows + 1, columns * rows))
    partial = new((2 * (pieces + 1), width), dweight.dtype)
    macros = {"SCALAR": scalar(dy.dtype), "VEC": vec}
    sort, launch = load(FILE, "embedding_order", **macros), load(FILE, "embedding_bwd", **macros)
    sort(blocks(rows, SHELF), (32, 32), (order, starts, done, ids, *map(np.int32, (tokens, rows, columns))))
    counts = map(np.int32, (pieces, rows, vectors))
    launch((pieces + rows, columns), (threads,), (dweight, partial, done, dy, ids, order, starts, *counts))
