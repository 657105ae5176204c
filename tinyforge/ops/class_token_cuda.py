"""Launches class_token.cu."""

from __future__ import annotations

from tinyforge.backends.cupy_backend import contiguous, new
from tinyforge.kernel import Array
from tinyforge.ops import class_token
from tinyforge.ops.linear_cuda import linear_bwd_bias
from tinyforge.ops.rows_cuda import launch_vectors

FILE = "ops/class_token.cu"


@class_token.class_token_fwd.on("cupy")
def class_token_fwd(x: Array, token: Array) -> Array:
    x = contiguous(x)
    y = new((len(x), x.shape[1] + 1, x.shape[2]), x.dtype)
    return launch_vectors(FILE, "class_token_fwd", y.size, x.shape[2], (y, x, token), y.shape[1])


@class_token.class_token_bwd.on("cupy")
def class_token_bwd(dtoken: Array | None, dy: Array) -> Array:
    dy = contiguous(dy)
    dx = new((len(dy), dy.shape[1] - 1, dy.shape[2]), dy.dtype)
    if not dy.size:
        return dx
    first = new((len(dy), dy.shape[2]), dy.dtype)
    launch_vectors(FILE, "class_token_bwd", dy.size, dy.shape[2], (dx, first, dy), dy.shape[1])
    if dtoken is not None:
        linear_bwd_bias(dtoken, first)
    return dx
