"""Launches append.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, scalar, vector
from tinyforge.infer.cuda import prompts as body
from tinyforge.kernel import Array


@body.append.on("cupy")
def append(keys: Array, values: Array, k: Array, v: Array, past: int) -> None:
    _, tokens, heads, dim = k.shape
    if k.strides != v.strides or k.strides[2:] != (dim * k.itemsize, k.itemsize):  # the kernel has one stride for both
        k, v = contiguous(k), contiguous(v)
    stride = k.strides[1] // k.itemsize
    vec = vector(dim, keys, values, k, v)
    vectors = dim // vec
    total = tokens * heads * vectors
    launch = load("infer/cuda/append.cu", "append", SCALAR=scalar(keys.dtype), VEC=vec)
    counts = map(np.uint32, (total, heads, vectors, stride, keys.shape[1]))
    launch(blocks(total), (256,), (keys[:, past:], values[:, past:], k, v, *counts))
