"""SwiGLU: a gated activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty, like
from tinyforge.backends.numpy_backend import row_blocks
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Stash
from tinyforge.ops.sigmoid import one_plus_exp, silu_slope


@kernel
def swiglu_fwd(gu: Array) -> Array:
    half = gu.shape[-1] // 2
    rows = gu.reshape(-1, 2 * half)
    y = np.empty((len(rows), half), gu.dtype)
    for part in row_blocks(len(rows), rows.itemsize * 2 * half):
        out = y[part]
        out[...] = rows[part, :half]
        out /= one_plus_exp(out)
        out *= rows[part, half:]
    return y.reshape(*gu.shape[:-1], half)


swiglu_fwd.on("meta")(lambda gu: empty((*gu.shape[:-1], gu.shape[-1] // 2), gu.dtype))


@kernel
def swiglu_bwd(hidden: Array | None, dy: Array, gu: Array) -> Array:
    """Returns dgu. y is recomputed and written into `hidden`, of its shape, if given; hidden may be dy itself."""
    half = gu.shape[-1] // 2
    rows, dys = gu.reshape(-1, 2 * half), dy.reshape(-1, half)
    dgu = np.empty(rows.shape, gu.dtype)
    for part in row_blocks(len(rows), rows.itemsize * 4 * half):
        # Passes over a contiguous copy of the gate take half the time of those over every second half of a row.
        gate, up = rows[part, :half].copy(), rows[part, half:]
        s = one_plus_exp(gate)
        silu = gate / s
        np.divide(1, s, out=s)
        slope = silu_slope(gate, s)
        slope *= dys[part]
        np.multiply(slope, up, out=dgu[part, :half])
        np.multiply(dys[part], silu, out=dgu[part, half:])
        if hidden is not None:
            np.multiply(silu, up, out=hidden[part])
    return dgu.reshape(gu.shape)


swiglu_bwd.on("meta")(lambda gu: like(gu))


class SwiGLU(Op):
    """y = silu(g) * u,  silu(g) = g * s(g),  s(g) = 1 / (1 + exp(-g))

    gu: (..., 2H), the gate g in the first half, u in the second; y: (..., H). Saves gu; backward recomputes s:
        dg = dy * u * s * (1 + g * (1 - s)),  du = dy * g * s

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    fwd = swiglu_fwd
    bwd = swiglu_bwd

    def forward(self, gu: Array, stash: Stash | None = None) -> Array:
        self.expect(gu, gu.shape[-1] // 2 * 2)
        if stash is not None:
            stash.push(self, gu)
        return self.fwd(gu)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        return self.bwd(None, dy, gu)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 10), (1, 2), (7, 6), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)
