"""Launches router.wgsl, and adds up the tokens' probabilities in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends.webgpu_array import contiguous, empty, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import router
from tinyforge.ops.linear_webgpu import linear_bwd_bias

FILE = "ops/router.wgsl"


@router.router_fwd.on("webgpu")
def router_fwd(logits: Array, active: int, normalised: bool = True) -> tuple[Array, Array, Array]:
    experts = logits.shape[-1]
    rows, shape = logits.size // experts, (*logits.shape[:-1], active)
    like: Any = logits
    weights, shares, usage = new(logits, shape), new(logits, (rows, experts + 1)), new(logits, (experts + 1,))
    chosen: Any = empty(like.block.device, shape, np.int32)
    arrays = {"weights": weights, "chosen": chosen, "shares": shares, "logits": contiguous(logits)}
    launch(FILE, "router_fwd", groups(rows, 64), arrays, (rows, experts, active), {"NORMALISED": normalised})
    usage.fill(0)
    linear_bwd_bias(usage, shares)
    return weights, chosen, usage


@router.router_bwd.on("webgpu")
def router_bwd(
    dweights: Array, dusage: Array, logits: Array, weights: Array, chosen: Array, normalised: bool = True
) -> Array:
    dlogits, experts, active = new(logits, logits.shape), logits.shape[-1], weights.shape[-1]
    rows = logits.size // experts
    arrays = {"dlogits": dlogits, "dweights": contiguous(dweights), "dusage": contiguous(dusage)}
    arrays |= {"logits": contiguous(logits), "saved_weights": weights, "saved_chosen": chosen}
    launch(FILE, "router_bwd", groups(rows, 64), arrays, (rows, experts, active), {"NORMALISED": normalised})
    return dlogits
