"""Launches class_token.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar, vector
from tinyforge.kernel import Array
from tinyforge.ops import class_token
from tinyforge.ops.linear_cuda import linear_bwd_bias

FILE = "ops/class_token.cu"


@class_token.class_token_fwd.on("cupy")
def class_token_fwd(x: Array, token: Array) -> Array:
    x = contiguous(x)
    y = new((len(x), x.shape[1] + 1, x.shape[2]), x.dtype)
    if y.size:
        vec = vector(x.shape[2], x, token, y)
        launch = load(FILE, "class_token_fwd", SCALAR=scalar(x.dtype), VEC=vec)
        sizes = map(np.uint32, (y.size // vec, y.shape[1], x.shape[2] // vec))
        launch(blocks(y.size // vec), (256,), (y, x, token, *sizes))
    return y


@class_token.class_token_bwd.on("cupy")
def class_token_bwd(dtoken: Array | None, dy: Array) -> Array:
    dy = contiguous(dy)
    dx = new((len(dy), dy.shape[1] - 1, dy.shape[2]), dy.dtype)
    if not dy.size:
        return dx
    first = new((len(dy), dy.shape[2]), dy.dtype)
    vec = vector(dy.shape[2], dy, dx, first)
    launch = load(FILE, "class_token_bwd", SCALAR=scalar(dy.dtype), VEC=vec)
    sizes = map(np.uint32, (dy.size // vec, dy.shape[1], dy.shape[2] // vec))
    launch(blocks(dy.size // vec), (256,), (dx, first, dy, *sizes))
    if dtoken is not None:
        linear_bwd_bias(dtoken, first)
    return dx
