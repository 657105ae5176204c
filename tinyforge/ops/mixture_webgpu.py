"""The mixture of experts on WebGPU: rows gathered by embedding.wgsl, and a product for each expert that has rows.

The choices are sorted on the host, which waits for them once a layer, and then knows where each expert's rows end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tinyforge.backends.webgpu_array import contiguous, host_of, new, on_host, upload_like
from tinyforge.backends.webgpu_gemm import gemm
from tinyforge.kernel import Array
from tinyforge.ops import mixture
from tinyforge.ops.cross_entropy_webgpu import scale_rows
from tinyforge.ops.embedding_webgpu import embedding_fwd
from tinyforge.ops.swiglu_webgpu import swiglu_bwd, swiglu_fwd

sort = on_host(mixture.sort_by_expert.body)


@mixture.sort_by_expert.on("webgpu")
def sort_by_expert(chosen: Array, experts: int) -> tuple[Array, Array, Array, Array]:
    slots, tokens, places, starts = sort(chosen, experts)
    return slots, tokens, places, starts


def gather(x: Array, rows: Array | None) -> Array:
    return contiguous(x) if rows is None else embedding_fwd(rows, contiguous(x))


def groups_of(starts: Array) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and their rows."""
    ends = host_of(starts).tolist()
    return ((e, slice(*pair)) for e, pair in enumerate(zip(ends, ends[1:], strict=False)) if pair[0] < pair[1])


def grouped(x: Array, weight: Array, tokens: Array | None, starts: Array, transposed: bool) -> Array:
    x = gather(x, tokens)
    y = new(x, (len(x), weight.shape[1 if transposed else 2]))
    for e, rows in groups_of(starts):
        gemm(x[rows], weight[e], y[rows], transpose_b=transposed)
    return y


@mixture.grouped_fwd.on("webgpu")
def grouped_fwd(x: Array, weight: Array, tokens: Array | None, starts: Array) -> Array:
    return grouped(x, weight, tokens, starts, True)


@mixture.grouped_bwd_input.on("webgpu")
def grouped_bwd_input(dy: Array, weight: Array, tokens: Array | None, starts: Array) -> Array:
    return grouped(dy, weight, tokens, starts, False)


@mixture.grouped_bwd_weight.on("webgpu")
def grouped_bwd_weight(
    dweight: Array, dy: Array, x: Array, dy_tokens: Array | None, x_tokens: Array | None, starts: Array
) -> None:
    dy, x = gather(dy, dy_tokens), gather(x, x_tokens)
    for e, rows in groups_of(starts):
        gemm(dy[rows], x[rows], dweight[e], transpose_a=True, accumulate=True)


def of_rows(weights: Array, slots: Array) -> Array:
    """The weight of each row, (R,)."""
    return embedding_fwd(slots, weights.reshape(weights.size, 1)).reshape(-1)


@mixture.weighted_swiglu_fwd.on("webgpu")
def weighted_swiglu_fwd(gu: Array, weights: Array, slots: Array) -> Array:
    return scale_rows(swiglu_fwd(gu), of_rows(weights, slots), len(gu), in_place=True)


@mixture.weighted_swiglu_bwd.on("webgpu")
def weighted_swiglu_bwd(dh: Array, gu: Array, weights: Array, slots: Array) -> tuple[Array, Array, Array]:
    w, hidden = of_rows(weights, slots), new(gu, dh.shape)
    dgu = swiglu_bwd(hidden, scale_rows(dh, w, len(dh)), gu)
    ones = new(dh, (1, dh.shape[1]))
    ones.fill(1)
    along = gemm(dh * hidden, ones, transpose_b=True)
    rows = upload_like(dh, np.argsort(host_of(slots), kind="stable").astype(np.int32))  # of each slot
    dweights = embedding_fwd(rows, along).reshape(weights.shape)
    return dgu, scale_rows(hidden, w, len(dh), in_place=True), dweights


@mixture.sum_of_rows.on("webgpu")
def sum_of_rows(rows: Array, places: Array, more: Array | None) -> Array:
    y = gather(rows, places[:, 0])
    for j in range(1, places.shape[1]):
        y += gather(rows, places[:, j])
    if more is not None:
        y += more
    return y
