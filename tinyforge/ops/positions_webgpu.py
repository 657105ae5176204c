"""Launches embedding.wgsl for a table of positions."""

from __future__ import annotations

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import positions as op
from tinyforge.ops.embedding_webgpu import FILE, embedding_bwd
from tinyforge.ops.linear_webgpu import linear_bwd_bias


@op.positions_fwd.on("webgpu")
def positions_fwd(x: Array, weight: Array, positions: Array | None) -> Array:
    y = new(x, x.shape)
    ids = None if positions is None else contiguous(positions)
    arrays = {"y": y, "table": contiguous(weight), "ids": ids, "x": contiguous(x)}
    sizes = (y.size, x.shape[-1], max(x.shape[1], 1))
    launch(FILE, "embedding_fwd", groups(y.size), arrays, sizes, {"ADD": True, "RESTART": positions is not None})
    return y


@op.positions_bwd.on("webgpu")
def positions_bwd(dweight: Array, dy: Array, positions: Array | None) -> None:
    if positions is not None:
        embedding_bwd(dweight, dy, positions)
    elif dy.size:
        table = dweight[: dy.shape[1]].reshape(-1)
        linear_bwd_bias(table, dy.reshape(dy.shape[0], table.size))
