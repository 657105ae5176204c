"""Launches adamw.cu."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import FLOAT64, blocks, new, scalar
from tinyforge.kernel import Array, pointer
from tinyforge.optim import adamw

FILE = "optim/adamw.cu"
VEC = 4  # as in adamw.cu


@adamw.adamw_.on("cupy")
def adamw_(
    values: Array, masters: Array, m: Array, v: Array, grads: Array, rates: Array, grad_scale: Any, config: Any
) -> None:
    if masters.size % VEC:
        raise ValueError(f"adamw_: {masters.size} weights, expected a multiple of {VEC}, as ParamBuffer pads them")
    if not masters.size:
        return
    kind, vectors = masters.dtype.type, masters.size // VEC
    numbers = (config.beta1, config.beta2, config.eps)
    # A null pointer where the weights that the ops read are the masters themselves.
    rounded = np.uintp(0) if pointer(values) == pointer(masters) else values
    launch = load(FILE, "adamw", SCALAR=scalar(values.dtype), **({"CAUTIOUS": 1} if config.cautious else {}))
    arrays = (rounded, masters, m, v, grads, on_device(grad_scale), rates)
    launch(blocks(vectors), (256,), (*arrays, np.int64(vectors), *map(kind, numbers)))


def on_device(grad_scale: Any) -> Array:
    """The clipping factor where kernels read it."""
    return grad_scale if isinstance(grad_scale, cupy.ndarray) else cupy.asarray(np.float64(grad_scale))


@adamw.square_sums.on("cupy")
def square_sums(sums: Array, grads: Array, bounds: Array) -> None:
    if grads.size % VEC:
        raise ValueError(f"square_sums: {grads.size} gradients, expected a multiple of {VEC}, as ParamBuffer pads them")
    launch = load(FILE, "square_sums", SCALAR=scalar(grads.dtype))
    launch(sums.shape[::-1], (256,), (sums, grads, bounds))


@adamw.clip_factor.on("cupy")
def clip_factor(sums: Array, previous: Any, limit: float) -> tuple[Any, Any]:
    state = new((2,), FLOAT64)
    before = previous if isinstance(previous, cupy.ndarray) else np.uintp(0)
    launch = load(FILE, "finish_norm", SCALAR="float")  # it reads no gradient: any will do
    launch((1,), (256,), (state, sums, before, np.int32(sums.size), np.float64(limit)))
    return state[0], state[1]
