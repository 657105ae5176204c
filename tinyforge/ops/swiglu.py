"""SwiGLU: a gated activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.backends.numpy_backend import row_blocks
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Stash

# s(g) = (1 + tanh(g / 2)) / 2: unlike exp(-g), tanh never overflows.


@kernel
def swiglu_fwd(gu: Array) -> Array:
    half = gu.shape[-1] // 2
    rows = gu.reshape(-1, 2 * half)
    y = np.empty((len(rows), half), gu.dtype)
    for part in row_blocks(len(rows), rows.itemsize * 2 * half):
        gate, up, out = rows[part, :half], rows[part, half:], y[part]
        halved = gate * gate.dtype.type(0.5)
        np.tanh(halved, out=out)
        out += 1
        out *= halved
        out *= up
    return y.reshape(*gu.shape[:-1], half)


@swiglu_fwd.on("meta")
def swiglu_fwd_memory(gu: Array) -> Array:
    return empty((*gu.shape[:-1], gu.shape[-1] // 2), gu.dtype)


@kernel
def swiglu_bwd(hidden: Array | None, dy: Array, gu: Array) -> Array:
    """Returns dgu. y is recomputed and written into `hidden`, of its shape, if given; hidden may be dy itself."""
    half = gu.shape[-1] // 2
    rows, dys = gu.reshape(-1, 2 * half), dy.reshape(-1, half)
    dgu = np.empty(rows.shape, gu.dtype)
    for part in row_blocks(len(rows), rows.itemsize * 4 * half):
        up, dgate, dup = rows[part, half:], dgu[part, :half], dgu[part, half:]
        silu = rows[part, :half] * gu.dtype.type(0.5)
        s = np.tanh(silu)
        s += 1
        silu *= s
        s *= gu.dtype.type(0.5)
        np.multiply(dys[part], silu, out=dup)
        # s (1 + g (1 - s)) = s - s silu + silu
        s -= s * silu
        s += silu
        s *= up
        np.multiply(dys[part], s, out=dgate)
        if hidden is not None:
            np.multiply(silu, up, out=hidden[part])
    return dgu.reshape(gu.shape)


@swiglu_bwd.on("meta")
def swiglu_bwd_memory(gu: Array) -> Array:
    return empty(gu.shape, gu.dtype)


class SwiGLU(Op):
    """y = silu(g) * u,  silu(g) = g * s(g),  s(g) = 1 / (1 + exp(-g))

    gu: (..., 2H), the gate g in the first half, u in the second; y: (..., H). Saves gu; backward recomputes s:
        dg = dy * u * s * (1 + g * (1 - s)),  du = dy * g * s

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    kernels = (swiglu_fwd, swiglu_bwd)

    def forward(self, gu: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, gu)
        return self.k.swiglu_fwd(gu)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        return self.k.swiglu_bwd(None, dy, gu)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 10), (1, 2), (7, 6), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)
