"""Launches rmsnorm.wgsl."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import add_rmsnorm, rmsnorm
from tinyforge.ops.linear_webgpu import linear_bwd_bias, rows_of

FILE = "ops/rmsnorm.wgsl"


def normalise(x: Array, delta: Array | None, weight: Array, eps: float, plus_one: bool) -> tuple[Array, Array, Array]:
    """(x + delta, y, rstd)."""
    rows = rows_of(x)
    y, rstd = new(x, x.shape), new(x, x.shape[:-1])
    total = None if delta is None else new(x, x.shape)
    arrays: dict[str, Any] = {"y": y, "rstd": rstd, "x": rows, "weight": weight, "sum": total}
    arrays["delta"] = None if delta is None else contiguous(delta)
    sizes, flags = (eps, *rows.shape), {"ADD": delta is not None, "PLUS_ONE": plus_one}
    launch(FILE, "rmsnorm_fwd", groups(len(rows), 1), arrays, sizes, flags)
    return (x if total is None else total), y, rstd


@rmsnorm.rmsnorm_fwd.on("webgpu")
def rmsnorm_fwd(x: Array, weight: Array, eps: float, plus_one: bool = False) -> tuple[Array, Array]:
    return normalise(x, None, weight, eps, plus_one)[1:]


@add_rmsnorm.add_rmsnorm_fwd.on("webgpu")
def add_rmsnorm_fwd(
    residual: Array, delta: Array, weight: Array, eps: float, plus_one: bool = False
) -> tuple[Array, Array, Array]:
    return normalise(residual, delta, weight, eps, plus_one)


@rmsnorm.rmsnorm_bwd.on("webgpu")
def rmsnorm_bwd(
    dweight: Array | None,
    dy: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    residual: Array | None,
    plus_one: bool = False,
) -> Array:
    rows = rows_of(dy)
    dx, product = new(y, y.shape), new(y, rows.shape)
    arrays: dict[str, Any] = {
        "dx": dx,
        "product": product,
        "dy": rows,
        "saved_y": contiguous(y),
        "saved_rstd": contiguous(rstd),
    }
    arrays |= {"weight": weight, "residual": None if residual is None else contiguous(residual)}
    flags = {"RESIDUAL": residual is not None, "PLUS_ONE": plus_one}
    launch(FILE, "rmsnorm_bwd", groups(len(rows), 1), arrays, (0.0, *rows.shape), flags)
    if dweight is not None:
        linear_bwd_bias(dweight, product)
    return dx
