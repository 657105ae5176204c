"""Launches gelu.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import add_columns, contiguous, new, or_null, processors, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import gelu
from tinyforge.ops.rows_cuda import launch_elements, launch_vectors

FILE = "ops/gelu.cu"


@gelu.gelu_fwd.on("cupy")
def gelu_fwd(x: Array, bias: Array | None, approximate: str) -> Array:
    x, exact = contiguous(x), int(approximate == "erf")
    y = new(x.shape, x.dtype)
    if bias is None:
        return launch_elements(FILE, "gelu_fwd", y, x, EXACT=exact)
    return launch_vectors(FILE, "gelu_fwd_bias", x.size, x.shape[-1], (y, x, bias), EXACT=exact)


@gelu.gelu_bwd.on("cupy")
def gelu_bwd(
    hidden: Array | None, dbias: Array | None, dy: Array, x: Array, bias: Array | None, approximate: str
) -> Array:
    dy, x, exact = contiguous(dy), contiguous(x), int(approximate == "erf")
    dx = new(x.shape, x.dtype)
    if bias is None or not x.size:
        return launch_elements(FILE, "gelu_bwd", dx, hidden, dy, x, EXACT=exact)
    width = x.shape[-1]
    rows, vec = x.size // width, vector(width, x, dy, bias, dx, *(() if hidden is None else (hidden,)))
    columns = -(-width // (32 * vec))
    # Two waves of the four blocks that a multiprocessor holds; at least 64 rows each.
    parts = min(-(-rows // 64), -(-8 * processors() // columns))
    partial = new((parts, width), wide(x.dtype))  # unused if the bias is frozen
    launch = load(FILE, "gelu_bwd_bias", SCALAR=scalar(x.dtype), VEC=vec, EXACT=exact)
    arrays = (dx, or_null(hidden), partial, dy, x, bias)
    launch((columns, parts), (32, 8), (*arrays, np.int32(rows), np.int32(width)))
    if dbias is not None:
        add_columns(dbias, None, partial)
    return dx
