"""The router's losses, on the host: a few numbers for each layer."""

from __future__ import annotations

from collections.abc import Sequence

from tinyforge.backends.webgpu_array import on_host
from tinyforge.kernel import Array
from tinyforge.ops import router_losses

forward, backward = on_host(router_losses.router_losses_fwd.body), on_host(router_losses.router_losses_bwd.body)


@router_losses.router_losses_fwd.on("webgpu")
def router_losses_fwd(usages: Sequence[Array], starts: Sequence[Array], active: int) -> tuple[Array, Array]:
    terms, slope = forward(usages, starts, active)
    return terms, slope


@router_losses.router_losses_bwd.on("webgpu")
def router_losses_bwd(dterms: Array, slope: Array) -> Array:
    dusage: Array = backward(dterms, slope)
    return dusage
