"""Launches mixture_biased.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, or_null, scalar
from tinyforge.kernel import Array
from tinyforge.ops import mixture_biased

FILE = "ops/mixture_biased.cu"


def _launch(entry: str, dtype: Any, rows: int, *arguments: Any) -> None:
    """A warp for each row; the last arguments are sizes."""
    if rows:
        load(FILE, entry, SCALAR=scalar(dtype))(blocks(rows, 8), (32, 8), arguments)


@mixture_biased.clamped_swiglu_fwd.on("cupy")
def clamped_swiglu_fwd(gu: Array, bias: Array, weights: Array, slots: Array, starts: Array, limit: float) -> Array:
    gu, weights, rows, half = contiguous(gu), contiguous(weights), len(gu), gu.shape[1] // 2
    hidden, sizes = new((rows, half), gu.dtype), map(np.int32, (rows, half, len(bias)))
    bound = wide(gu.dtype).type(limit)
    _launch("clamped_fwd", gu.dtype, rows, hidden, gu, bias, weights, slots, starts, bound, *sizes)
    return hidden


@mixture_biased.clamped_swiglu_bwd.on("cupy")
def clamped_swiglu_bwd(
    dh: Array, gu: Array, bias: Array, weights: Array, slots: Array, starts: Array, limit: float
) -> tuple[Array, Array, Array]:
    dh, gu, weights = contiguous(dh), contiguous(gu), contiguous(weights)
    rows, half = dh.shape
    dgu, hidden, dweights = new(gu.shape, gu.dtype), new(dh.shape, gu.dtype), new(weights.shape, wide(gu.dtype))
    sizes, bound = map(np.int32, (rows, half, len(bias))), wide(gu.dtype).type(limit)
    arrays = (dgu, hidden, dweights, dh, gu, bias, weights, slots, starts)
    _launch("clamped_bwd", gu.dtype, rows, *arrays, bound, *sizes)
    return dgu, hidden, dweights


@mixture_biased.expert_bias_fwd.on("cupy")
def expert_bias_fwd(rows: Array, bias: Array, weights: Array, slots: Array, starts: Array) -> None:
    sizes = map(np.int32, (*rows.shape, len(bias)))
    _launch("expert_bias_fwd", rows.dtype, len(rows), rows, bias, contiguous(weights), slots, starts, *sizes)


@mixture_biased.expert_bias_bwd.on("cupy")
def expert_bias_bwd(dweights: Array, dy: Array, bias: Array, slots: Array, tokens: Array, starts: Array) -> None:
    dy, sizes = contiguous(dy), map(np.int32, (len(tokens), dy.shape[1], len(bias)))
    _launch("expert_bias_bwd", dy.dtype, len(tokens), dweights, dy, bias, slots, tokens, starts, *sizes)


@mixture_biased.sum_by_expert.on("cupy")
def sum_by_expert(
    dbias: Array, x: Array, tokens: Array | None, weights: Array | None, slots: Array, starts: Array
) -> None:
    x, (experts, width) = contiguous(x), dbias.shape
    if x.size:
        weighted = or_null(None if weights is None else contiguous(weights))
        launch = load(FILE, "sum_by_expert", SCALAR=scalar(x.dtype))
        arguments = (dbias, x, or_null(tokens), weighted, slots, starts, np.int32(width))
        launch((-(-width // 256), experts), (256,), arguments)
