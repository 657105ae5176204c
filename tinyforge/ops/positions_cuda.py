"""Launches positions.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import embedding_cuda
from tinyforge.ops import positions as body

FILE = "ops/positions.cu"


@body.positions_fwd.on("cupy")
def positions_fwd(x: Array, weight: Array, positions: Array | None) -> Array:
    x = contiguous(x)
    y = new(x.shape, x.dtype)
    if x.size:
        vec = vector(x.shape[-1], x, weight, y)
        total, sequence, width = (np.uint32(n // vec) for n in (x.size, x[0].size, x.shape[-1]))
        args: tuple[Any, ...] = (y, x, weight, total, sequence)
        macros: dict[str, Any] = {"SCALAR": scalar(x.dtype), "VEC": vec}
        if positions is not None:
            macros["RESTART"], args = 1, (*args, contiguous(positions), width)
        load(FILE, "positions_fwd", **macros)(blocks(x.size // vec), (256,), args)
    return y


@body.positions_bwd.on("cupy")
def positions_bwd(dweight: Array, dy: Array, positions: Array | None) -> None:
    if positions is not None:  # a sum over the tokens that share a row, as of the tokens that share an id
        embedding_cuda.embedding_bwd(dweight, dy, positions)
        return
    dy = contiguous(dy)
    if dy.size:
        vec = vector(dy.shape[-1], dy, dweight)
        sequence = dy[0].size // vec
        launch = load(FILE, "positions_bwd", SCALAR=scalar(dy.dtype), VEC=vec)
        launch(blocks(sequence, 32), (32, 8), (dweight, dy, np.uint32(sequence), np.int32(len(dy))))
