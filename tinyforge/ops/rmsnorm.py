"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, bind, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.fp8 import Scaled, quantise_rows, quantise_rows_memory
from tinyforge.params import with_buffer

LEAST_GAIN = 2.0**-50
"""A gain nearer to 0 counts as this: y is then 0 beside anything, and x r is still y over the gain."""


def gain_of(weight: Array) -> Array:
    """The weight, and LEAST_GAIN where it is nearer to 0."""
    return np.where(np.abs(weight) < LEAST_GAIN, weight.dtype.type(LEAST_GAIN), weight)


@kernel
def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    rstd = 1.0 / np.sqrt(np.vecdot(x, x) / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    y = x * rstd[..., None]
    y *= gain_of(weight)
    return y, rstd


@rmsnorm_fwd.on("phantom")
def rmsnorm_fwd_memory(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    return empty(x.shape, x.dtype), empty(x.shape[:-1], wide(x.dtype))


@kernel
def rmsnorm_bwd(
    dweight: Array | None, dy: Array, weight: Array, y: Array, rstd: Array, residual: Array | None
) -> Array:
    """dx, with `residual` added where there is one."""
    width, gain = y.shape[-1], gain_of(weight)
    dys, ys, rs = dy.reshape(-1, width), y.reshape(-1, width), rstd.reshape(-1)
    product = dys * ys
    # Both sums over dy * y are matrix-vector products: BLAS makes one pass each, with no temporary.
    if dweight is not None:
        dweight += np.ones_like(rs) @ product / gain
    mean = product @ np.full(width, 1 / width, y.dtype)
    dx = np.multiply(dys, gain)
    np.multiply(ys, 1 / gain, out=product)
    product *= mean[:, None]
    dx -= product
    dx *= rs[:, None]
    dx = dx.reshape(y.shape)
    if residual is not None:
        dx += residual
    return dx


@rmsnorm_bwd.on("phantom")
def rmsnorm_bwd_memory(
    dweight: Array | None, dy: Array, weight: Array, y: Array, rstd: Array, residual: Array | None
) -> Array:
    return empty(y.shape, y.dtype)


@kernel
def rmsnorm_scaled_fwd(x: Array, weight: Array, eps: float, *, backend: Any) -> tuple[Array, Array, Array, Array]:
    """y, its codes and scale (fp8.py), rstd."""
    y, rstd = rmsnorm_fwd(x, weight, eps)
    return y, *quantise_rows(y, backend=backend), rstd


@rmsnorm_scaled_fwd.on("phantom")
def rmsnorm_scaled_fwd_memory(x: Array, weight: Array, eps: float) -> tuple[Array, Array, Array, Array]:
    y, rstd = rmsnorm_fwd_memory(x, weight, eps)
    return y, *quantise_rows_memory(y), rstd


@kernel
def rmsnorm_scaled_bwd(
    dweight: Array | None, dy: Array, weight: Array, y: Array, rstd: Array, residual: Array | None, *, backend: Any
) -> tuple[Array, Array, Array]:
    """dx as of rmsnorm_bwd, its codes and scale."""
    dx = rmsnorm_bwd(dweight, dy, weight, y, rstd, residual)
    return dx, *quantise_rows(dx, backend=backend)


@rmsnorm_scaled_bwd.on("phantom")
def rmsnorm_scaled_bwd_memory(
    dweight: Array | None, dy: Array, weight: Array, y: Array, rstd: Array, residual: Array | None
) -> tuple[Array, Array, Array]:
    dx = empty(y.shape, y.dtype)
    return dx, *quantise_rows_memory(dx)


def into(out: Array | None, y: Array) -> Array:
    """y, or `out` with y written into it."""
    if out is None:
        return y
    out[...] = y
    return out


def normed(op: Any, x: Array) -> tuple[Any, Array, Array]:
    """What `op` hands on, y, and rstd. op: an RMSNorm or AddRMSNorm."""
    if not op.scaled:
        y, rstd = op.k.rmsnorm_fwd(x, op.weight.value, op.eps)
        return y, y, rstd
    y, codes, scale, rstd = op.k.rmsnorm_scaled_fwd(x, op.weight.value, op.eps)
    return Scaled(y, codes, scale), y, rstd


class RMSNorm(Op):
    """y = w * x * r,  r = 1 / sqrt(mean(x^2) + eps), the mean over the last axis

    x: (..., C); w: (C,); y: (..., C). Saves y, which the map behind keeps as well, and r: (...); not x. A w nearer to 0
    than LEAST_GAIN, 2^-50, counts as that.

    backward, with xhat = y / w, and so dy * w * xhat = dy * y:
        dw += sum over rows of dy * y / w
        dx  = r * (dy * w - y / w * mean(dy * y))
    backward(..., residual=g) adds g, a gradient that x has from elsewhere, in the same pass: where x is also a residual
    stream that goes on unchanged.

    x may be a strided view, such as the query heads of a packed (B, T, heads, D): then C is D, and every head is
    normalised by itself with the same w (the q/k norm of Qwen3). `out=x` writes y over it, and y is saved apart;
    backward's `out=` takes dx likewise.

    scaled: y comes as a `Scaled` (fp8.py), for a product in FP8.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    kernels = (rmsnorm_fwd, rmsnorm_bwd)

    def __init__(
        self, weight: Param, backend: Backend, eps: float = 1e-5, name: str = "", *, scaled: bool = False
    ) -> None:
        super().__init__(backend, name)
        self.weight = weight
        self.eps = eps
        self.scaled = scaled
        if scaled:
            self.k = bind((*self.kernels, rmsnorm_scaled_fwd), backend, type(self).__name__)

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, x: Array, stash: Stash | None = None, *, out: Array | None = None) -> Any:
        y, kept, rstd = normed(self, x)
        if stash is not None:
            stash.push(self, kept, rstd)
        return into(out, y)

    def backward(
        self, dy: Array, stash: Stash, residual: Array | None = None, *, out: Array | None = None
    ) -> Array:
        y, rstd = stash.pop(self)
        return into(out, self.k.rmsnorm_bwd(self.weight.grad, dy, self.weight.value, y, rstd, residual))

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4), (3, 33)):
            eps = 1.0 if shape[-1] == 1 else 1e-5
            op = with_buffer(cls(Param("weight", shape[-1:], fill=1.0, decay=False), backend, eps), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)
