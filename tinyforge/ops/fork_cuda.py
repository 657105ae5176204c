"""Launches fork.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import fork


@fork.fork_bwd.on("cupy")
def fork_bwd(first: Array, second: Array) -> Array:
    first, second = contiguous(first), contiguous(second)
    dx = new(first.shape, first.dtype)
    if dx.size:
        vec = vector(dx.size, dx, first, second)
        launch = load("ops/fork.cu", "fork_bwd", SCALAR=scalar(dx.dtype), VEC=vec)
        launch(blocks(dx.size // vec), (256,), (dx, first, second, np.uint32(dx.size // vec)))
    return dx
