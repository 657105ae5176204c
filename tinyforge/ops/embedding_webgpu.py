"""Launches embedding.wgsl."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.webgpu_array import contiguous, groups, host_of, launch, new, upload_like
from tinyforge.kernel import Array
from tinyforge.ops import embedding

FILE = "ops/embedding.wgsl"


@embedding.embedding_fwd.on("webgpu")
def embedding_fwd(ids: Array, weight: Array) -> Array:
    width = weight.shape[-1]
    y = new(weight, (*ids.shape, width))
    arrays = {"y": y, "table": weight, "ids": contiguous(ids), "x": None}
    launch(FILE, "embedding_fwd", groups(y.size), arrays, (y.size, width, 1), {"RESTART": True})
    return y


@embedding.embedding_order.on("webgpu")
def embedding_order(ids: Array, rows: int) -> None:
    """None: `embedding_bwd` sorts the ids on the host."""


@embedding.embedding_bwd.on("webgpu")
def embedding_bwd(dweight: Array, dy: Array, ids: Array, order: None = None) -> None:
    """The ids are sorted on the host, which has them still."""
    host, width = host_of(ids).reshape(-1), dweight.shape[-1]
    if not host.size:
        return
    tokens = np.argsort(host, kind="stable").astype(np.int32)
    rows, first = np.unique(host[tokens], return_index=True)
    starts = np.append(first, host.size).astype(np.int32)
    arrays = {"dtable": dweight, "dy": contiguous(dy), "order": upload_like(dy, tokens)}
    arrays |= {"starts": upload_like(dy, starts), "rows": upload_like(dy, rows.astype(np.int32))}
    count = len(rows) * width
    launch(FILE, "embedding_bwd", groups(count), arrays, (count, width, 1))
