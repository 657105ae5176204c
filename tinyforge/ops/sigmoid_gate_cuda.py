"""Launches sigmoid_gate.cu."""

from __future__ import annotations

import math

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import sigmoid_gate

FILE = "ops/sigmoid_gate.cu"


@sigmoid_gate.sigmoid_gate_fwd.on("cupy")
def sigmoid_gate_fwd(x: Array, z: Array) -> Array:
    x, z, y = contiguous(x), contiguous(z), new(x.shape, x.dtype)
    _launch("sigmoid_gate_fwd", y, x, z)
    return y


@sigmoid_gate.sigmoid_gate_bwd.on("cupy")
def sigmoid_gate_bwd(dy: Array, x: Array, z: Array) -> tuple[Array, Array]:
    dy, x, z = contiguous(dy), contiguous(x), contiguous(z)
    dx, dz = new(x.shape, x.dtype), new(z.shape, z.dtype)
    _launch("sigmoid_gate_bwd", dx, dz, dy, x, z)
    return dx, dz


def _launch(entry: str, out: Array, *arrays: Array) -> None:
    """A warp for each row."""
    rows, width = math.prod(out.shape[:-1]), out.shape[-1]
    if out.size:
        wide = (out, *(a for a in arrays if a.shape == out.shape))
        launch = load(FILE, entry, SCALAR=scalar(out.dtype), VEC=vector(width, *wide))
        launch(blocks(rows, 8), (32, 8), (out, *arrays, np.int32(rows), np.int32(width)))
