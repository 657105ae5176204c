"""Launches router_losses.cu."""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import blocks, contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import router_losses

FILE = "ops/router_losses.cu"


@router_losses.router_losses_fwd.on("cupy")
def router_losses_fwd(usages: Sequence[Array], starts: Sequence[Array], active: int) -> tuple[Array, Array]:
    usage, counts = cupy.concatenate(usages), cupy.concatenate(starts)
    width = len(usages[0])
    terms, slope = new((2,), usage.dtype), new((width,), usage.dtype)
    launch = load(FILE, "router_losses_fwd", SCALAR=scalar(usage.dtype))
    launch((1,), (256,), (terms, slope, usage, counts, *map(np.int32, (len(usages), width - 1, active))))
    return terms, slope


@router_losses.router_losses_bwd.on("cupy")
def router_losses_bwd(dterms: Array, slope: Array) -> Array:
    dusage = new(slope.shape, slope.dtype)
    launch = load(FILE, "router_losses_bwd", SCALAR=scalar(slope.dtype))
    launch(blocks(len(slope)), (256,), (dusage, contiguous(dterms), slope, np.int32(len(slope) - 1)))
    return dusage
