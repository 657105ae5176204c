"""Launches layernorm.wgsl."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.webgpu_array import contiguous, groups, launch, new
from tinyforge.kernel import Array
from tinyforge.ops import add_layernorm, layernorm
from tinyforge.ops.linear_webgpu import linear_bwd_bias, rows_of

FILE = "ops/layernorm.wgsl"
Four = tuple[Array, Array, Array, Array]


def normalise(x: Array, delta: Array | None, weight: Array, bias: Array | None, eps: float) -> Four:
    """(x + delta, y, mean, rstd)."""
    rows = rows_of(x)
    y, mean, rstd = (new(x, shape) for shape in (x.shape, x.shape[:-1], x.shape[:-1]))
    total = None if delta is None else new(x, x.shape)
    arrays: dict[str, Any] = {
        "y": y,
        "mean": mean,
        "rstd": rstd,
        "x": rows,
        "weight": weight,
        "bias": bias,
        "sum": total,
    }
    arrays["delta"] = None if delta is None else contiguous(delta)
    flags = {"ADD": delta is not None, "BIAS": bias is not None}
    launch(FILE, "layernorm_fwd", groups(len(rows), 1), arrays, (eps, *rows.shape), flags)
    return (x if total is None else total), y, mean, rstd


@layernorm.layernorm_fwd.on("webgpu")
def layernorm_fwd(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    return normalise(x, None, weight, bias, eps)[1:]


@add_layernorm.add_layernorm_fwd.on("webgpu")
def add_layernorm_fwd(residual: Array, delta: Array, weight: Array, bias: Array | None, eps: float) -> Four:
    return normalise(residual, delta, weight, bias, eps)


@layernorm.layernorm_bwd.on("webgpu")
def layernorm_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dy: Array,
    weight: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    residual: Array | None,
) -> Array:
    rows = rows_of(dy)
    dx, product = new(x, x.shape), new(x, rows.shape)
    arrays: dict[str, Any] = {"dx": dx, "product": product, "dy": rows, "x": contiguous(x), "weight": weight}
    arrays |= {"saved_mean": mean, "saved_rstd": rstd}
    arrays["residual"] = None if residual is None else contiguous(residual)
    launch(FILE, "layernorm_bwd", groups(len(rows), 1), arrays, (0.0, *rows.shape), {"RESIDUAL": residual is not None})
    if dweight is not None:
        linear_bwd_bias(dweight, product)
    if dbias is not None:
        linear_bwd_bias(dbias, rows)
    return dx
