"""Launches adamw.wgsl. The norm is added up on the host, in float64, from 256 partial sums of each piece."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.webgpu_array import groups, host_of, launch, new, told_on_host
from tinyforge.kernel import Array
from tinyforge.optim import adamw

FILE, PARTS = "optim/adamw.wgsl", 256


@adamw.adamw_.on("webgpu")
def adamw_(
    values: Array, masters: Array, m: Array, v: Array, grads: Array, rates: Array, grad_scale: Any, config: Any
) -> None:
    if config.cautious:  # the mask has no WGSL
        told_on_host(adamw.adamw_.body)(values, masters, m, v, grads, rates, grad_scale, config)
        return
    rate, root, shrink = rates.tolist()
    sizes = (rate, root, shrink, float(grad_scale), config.beta1, 1 - config.beta1, config.beta2, 1 - config.beta2)
    arrays = {"weights": masters, "m": m, "v": v, "grads": grads}
    launch(FILE, "adamw", groups(masters.size), arrays, (*sizes, config.eps, masters.size))


@adamw.square_sums.on("webgpu")
def square_sums(sums: Array, grads: Array, bounds: Array) -> None:
    found = np.zeros(sums.shape)
    pieces = [grads[start:stop] for start, stop in bounds.tolist()]
    parts = [new(grads, (PARTS,)) for _ in pieces]
    for piece, part in zip(pieces, parts, strict=True):
        launch(FILE, "square_sums", (PARTS,), {"sums": part, "grads": piece}, (*[0.0] * 9, piece.size))
    found[:, 0] = [host_of(part).sum(dtype=np.float64) for part in parts]
    sums[...] = found


@adamw.clip_factor.on("webgpu")
def clip_factor(sums: Array, previous: Any, limit: float) -> tuple[Any, Any]:
    return adamw.clip_factor.body(sums, previous, limit)
