"""Launches value_embedding.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, or_null, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import value_embedding
from tinyforge.ops.embedding import Order
from tinyforge.ops.embedding_cuda import embedding_bwd

FILE = "ops/value_embedding.cu"
PARTS = 64
"""Parts of the sum over tokens for the gate's gradient."""


def lanes_of(dim: int, vec: int) -> int:
    """The lanes of a warp that take a head."""
    return min(32, 1 << (dim // vec - 1).bit_length())


@value_embedding.value_embedding_fwd.on("cupy")
def value_embedding_fwd(
    out: Array | None, qkv: Array, x: Array, ids: Array, table: Array, gate: Array
) -> tuple[Array, Array]:
    if out is None or not out.flags.c_contiguous:
        y = qkv.copy(order="C")
    else:
        y = out
        if out is not qkv:
            out[...] = qkv
    x, ids = contiguous(x), contiguous(ids)
    (heads, reads), (*_, all_heads, dim) = gate.shape, y.shape
    gates = new((*ids.shape, heads), wide(y.dtype))
    if gates.size:
        vec = vector(dim, y, table)
        lanes = lanes_of(dim, vec)
        total = gates.size * lanes
        launch = load(FILE, "value_embedding_fwd", SCALAR=scalar(y.dtype), VEC=vec)
        counts = map(np.uint32, (total, heads, dim, all_heads * dim, x.shape[-1], reads, lanes))
        values = y.reshape(-1)[(all_heads - heads) * dim :]
        launch(blocks(total), (256,), (values, gates, x, ids, table, gate, *counts))
    if out is not None and y is not out:
        out[...] = y
        return out, gates
    return y, gates


@value_embedding.value_embedding_bwd.on("cupy")
def value_embedding_bwd(
    dtable: Array | None,
    dgate: Array | None,
    dqkv: Array,
    x: Array,
    ids: Array,
    table: Array,
    gate: Array,
    gates: Array,
    order: Order | None = None,
) -> Array:
    dqkv, x, ids = contiguous(dqkv), contiguous(x), contiguous(ids)
    (heads, reads), (*_, all_heads, dim) = gate.shape, dqkv.shape
    dz = new(gates.shape, gates.dtype)
    if not dz.size:
        return dz
    tokens, rows = ids.size, None if dtable is None else new((*ids.shape, heads * dim), dqkv.dtype)
    vec = vector(dim, dqkv, table)
    lanes = lanes_of(dim, vec)
    total = dz.size * lanes
    launch = load(FILE, "value_embedding_bwd", SCALAR=scalar(dqkv.dtype), VEC=vec)
    counts = map(np.uint32, (total, heads, dim, all_heads * dim, lanes))
    values = dqkv.reshape(-1)[(all_heads - heads) * dim :]
    launch(blocks(total), (256,), (or_null(rows), dz, values, ids, table, gates, *counts))
    if dtable is not None and rows is not None:
        embedding_bwd(dtable, rows, ids, order)
    if dgate is not None:
        partial = new((min(PARTS, -(-tokens // 64)), heads * reads), dz.dtype)
        launch = load(FILE, "value_gate_dweight", SCALAR=scalar(dqkv.dtype), VEC=1)
        launch((heads, len(partial)), (256,), (partial, dz, x, *map(np.uint32, (tokens, x.shape[-1], reads))))
        add_columns(dgate, None, partial)
    return dz


@value_embedding.value_gate_bwd.on("cupy")
def value_gate_bwd(dx: Array, dz: Array, gate: Array) -> None:
    heads, reads = gate.shape
    total = dx.size // dx.shape[-1] * reads
    if total:
        launch = load(FILE, "value_gate_bwd", SCALAR=scalar(dx.dtype), VEC=1)
        counts = map(np.uint32, (total, heads, dx.shape[-1], reads))
        launch(blocks(total), (256,), (dx, dz, gate, *counts))
