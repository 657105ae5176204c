"""Launches router.cu."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import constant, load
from tinyforge.backends.cupy_backend import add_columns, blocks, contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import router

FILE = "ops/router.cu"
TOKENS = constant(FILE, "TOKENS")


@router.router_fwd.on("cupy")
def router_fwd(logits: Array, active: int, normalised: bool = True) -> tuple[Array, Array, Array]:
    logits = contiguous(logits)
    experts, sums = logits.shape[-1], wide(logits.dtype)
    shape, tokens = (*logits.shape[:-1], active), logits.size // experts
    weights, chosen, usage = new(shape, sums), new(shape, np.dtype(np.int32)), new((experts + 1,), sums)
    usage.fill(0)
    if tokens:
        grid = blocks(tokens, TOKENS)
        partial = new((*grid, experts + 1), sums)
        sizes = map(np.int32, (tokens, experts, active))
        launch = load(FILE, "router_fwd", SCALAR=scalar(logits.dtype), NORMALISED=int(normalised))
        launch(grid, (TOKENS,), (weights, chosen, partial, logits, *sizes))
        add_columns(usage, None, partial)
    return weights, chosen, usage


@router.router_bwd.on("cupy")
def router_bwd(
    dweights: Array, dusage: Array, logits: Array, weights: Array, chosen: Array, normalised: bool = True
) -> Array:
    dweights, dusage, logits = contiguous(dweights), contiguous(dusage), contiguous(logits)
    experts = logits.shape[-1]
    dlogits, tokens = new(logits.shape, logits.dtype), logits.size // experts
    if tokens:
        sizes = map(np.int32, (tokens, experts, weights.shape[-1]))
        launch = load(FILE, "router_bwd", SCALAR=scalar(logits.dtype), NORMALISED=int(normalised))
        launch(blocks(tokens, TOKENS), (TOKENS,), (dlogits, dweights, dusage, logits, weights, chosen, *sizes))
    return dlogits
