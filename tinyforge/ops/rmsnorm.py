"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    rstd = 1.0 / np.sqrt(np.vecdot(x, x) / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    y = x * rstd[..., None]
    y *= weight
    return y, rstd


@rmsnorm_fwd.on("phantom")
def rmsnorm_fwd_memory(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    return empty(x.shape, x.dtype), empty(x.shape[:-1], wide(x.dtype))


@kernel
def rmsnorm_bwd(
    dweight: Array | None, dy: Array, weight: Array, x: Array, rstd: Array, residual: Array | None
) -> Array:
    """dx, with `residual` added where there is one."""
    width = x.shape[-1]
    dys, xs, rs = dy.reshape(-1, width), x.reshape(-1, width), rstd.reshape(-1)
    product = dys * xs
    # Both sums over dy * x are matrix-vector products: BLAS makes one pass each, with no temporary.
    if dweight is not None:
        dweight += rs @ product
    mean = product @ weight
    mean *= rs * rs
    mean /= x.dtype.type(width)
    dx = np.multiply(dys, weight)
    dx -= np.multiply(xs, mean[:, None], out=product)
    dx *= rs[:, None]
    dx = dx.reshape(x.shape)
    if residual is not None:
        dx += residual
    return dx


@rmsnorm_bwd.on("phantom")
def rmsnorm_bwd_memory(
    dweight: Array | None, dy: Array, weight: Array, x: Array, rstd: Array, residual: Array | None
) -> Array:
    return empty(x.shape, x.dtype)


def into(out: Array | None, y: Array) -> Array:
    """y, or `out` with y written into it."""
    if out is None:
        return y
    out[...] = y
    return out


class RMSNorm(Op):
    """y = w * x * r,  r = 1 / sqrt(mean(x^2) + eps), the mean over the last axis

    x: (..., C); w: (C,); y: (..., C). Saves x and r: (...).

    backward, with xhat = x * r:
        dw += sum over rows of dy * xhat
        dx  = r * (dy * w - xhat * mean(dy * w * xhat))
    backward(..., residual=g) adds g, a gradient that x has from elsewhere, in the same pass: where x is also a residual
    stream that goes on unchanged.

    x may be a strided view, such as the query heads of a packed (B, T, heads, D): then C is D, and every head is
    normalised by itself with the same w (the q/k norm of Qwen3). `out=x` writes y over it, and a copy of x is saved;
    backward's `out=` takes dx likewise.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    kernels = (rmsnorm_fwd, rmsnorm_bwd)

    def __init__(self, weight: Param, backend: Backend, eps: float = 1e-5, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight
        self.eps = eps

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, x: Array, stash: Stash | None = None, *, out: Array | None = None) -> Array:
        y, rstd = self.k.rmsnorm_fwd(x, self.weight.value, self.eps)
        if stash is not None:
            stash.push(self, x if out is None else x.copy(), rstd)
        return into(out, y)

    def backward(
        self, dy: Array, stash: Stash, residual: Array | None = None, *, out: Array | None = None
    ) -> Array:
        x, rstd = stash.pop(self)
        return into(out, self.k.rmsnorm_bwd(self.weight.grad, dy, self.weight.value, x, rstd, residual))

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4), (3, 33)):
            eps = 1.0 if shape[-1] == 1 else 1e-5
            op = with_buffer(cls(Param("weight", shape[-1:], fill=1.0, decay=False), backend, eps), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)
