"""Launches router_losses.cu."""

from __future__ import annotations

from collections.abc import Sequence

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import CupyBackend, blocks, contiguous, new, scalar
from tinyforge.kernel import Array
from tinyforge.ops import router_losses

FILE = "ops/router_losses.cu"
AT_ONCE = 8


@router_losses.router_losses_fwd.on("cupy")
def router_losses_fwd(
    usages: Sequence[Array], starts: Sequence[Array], active: int, *, backend: CupyBackend
) -> tuple[Array, Array]:
    usage, counts = (_joined(arrays, backend.repeats) for arrays in (usages, starts))
    width = len(usages[0])
    terms, slope = new((2,), usage.dtype), new((width,), usage.dtype)
    launch = load(FILE, "router_losses_fwd", SCALAR=scalar(usage.dtype))
    launch((1,), (256,), (terms, slope, usage, counts, *map(np.int32, (len(usages), width - 1, active))))
    return terms, slope


def _joined(arrays: Sequence[Array], repeats: bool) -> Array:
    """The arrays concatenated. For more than eight of them CuPy uploads the addresses, which a graph cannot do."""
    if repeats and len(arrays) > AT_ONCE:
        arrays = [cupy.concatenate(arrays[i : i + AT_ONCE]) for i in range(0, len(arrays), AT_ONCE)]
        return _joined(arrays, repeats)
    return cupy.concatenate(arrays)


@router_losses.router_losses_bwd.on("cupy")
def router_losses_bwd(dterms: Array, slope: Array) -> Array:
    dusage = new(slope.shape, slope.dtype)
    launch = load(FILE, "router_losses_bwd", SCALAR=scalar(slope.dtype))
    launch(blocks(len(slope)), (256,), (dusage, contiguous(dterms), slope, np.int32(len(slope) - 1)))
    return dusage
