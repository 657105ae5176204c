"""Launches attention_sink.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import attention_sink

FILE = "ops/attention_sink.cu"
PARTS = 64
"""Parts of a head's sum."""


@attention_sink.sink_fwd.on("cupy")
def sink_fwd(out: Array, lse: Array, sinks: Array) -> None:
    batch, length, heads, dim = out.shape
    if out.size:
        launch = load(FILE, "sink_fwd", SCALAR=scalar(out.dtype), VEC=vector(dim, out))
        rows = batch * length * heads
        launch(blocks(rows, 8), (32, 8), (out, lse, sinks, *map(np.int32, (rows, length, heads, dim))))


@attention_sink.sink_bwd.on("cupy")
def sink_bwd(dsinks: Array, dy: Array, out: Array, lse: Array, sinks: Array) -> None:
    dy, (batch, length, heads, dim) = contiguous(dy), out.shape
    if out.size:
        partial = new((min(PARTS, -(-batch * length // 8)), heads), dsinks.dtype)
        launch = load(FILE, "sink_bwd", SCALAR=scalar(out.dtype), VEC=vector(dim, dy, out))
        sizes = map(np.int32, (batch * length, length, heads, dim))
        launch((heads, len(partial)), (32, 8), (partial, dy, out, lse, sinks, *sizes))
        add_columns(dsinks, None, partial)
