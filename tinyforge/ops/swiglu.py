"""SwiGLU: a gated activation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty, like
from tinyforge.backends.numpy_backend import row_blocks
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash
from tinyforge.ops.sigmoid import one_plus_exp


@kernel
def swiglu_fwd(gu: Array) -> Array:
    half = gu.shape[-1] // 2
    rows = gu.reshape(-1, 2 * half)
    y = np.empty((len(rows), half), gu.dtype)
    for part, (other,) in _blocks(y, 1):
        out = y[part]
        out[...] = rows[part, :half]
        out /= one_plus_exp(out, other)
        other[...] = rows[part, half:]
        out *= other
    return y.reshape(*gu.shape[:-1], half)


swiglu_fwd.on("meta")(lambda gu: empty((*gu.shape[:-1], gu.shape[-1] // 2), gu.dtype))


@kernel
def swiglu_bwd(hidden: Array | None, dy: Array, gu: Array) -> Array:
    """Returns dgu. y is recomputed and written into `hidden`, of its shape, if given; hidden may be dy itself."""
    half = gu.shape[-1] // 2
    rows, dys = gu.reshape(-1, 2 * half), dy.reshape(-1, half)
    dgu = np.empty(rows.shape, gu.dtype)
    for part, (gate, s, slope, other) in _blocks(dys, 4):
        gate[...] = rows[part, :half]
        np.divide(1, one_plus_exp(gate, s), out=s)
        np.subtract(1, s, out=slope)
        np.add(1, gate, out=other)
        slope *= other
        slope += s  # times s, the derivative: see silu_slope
        other[...] = rows[part, half:]
        slope *= other
        if hidden is None:
            s *= dys[part]
        else:
            other *= s
            s *= dys[part]
            np.multiply(other, gate, out=hidden[part])
        slope *= s
        gate *= s
        dgu[part, :half], dgu[part, half:] = slope, gate
    return dgu.reshape(gu.shape)


def _blocks(rows: Array, count: int) -> Iterator[tuple[slice, Array]]:
    """Slices of rows that stay in the core's cache, and for each `count` arrays of its shape to compute in, reused.

    A pass in place over such an array takes half the time of one that writes to a third, and a quarter of one over
    every second half of a row: halves are copied out, and in.
    """
    made = np.empty((count, 0, rows.shape[-1]), rows.dtype)
    for part in row_blocks(len(rows), rows.itemsize * 2 * count * rows.shape[-1]):
        length = part.stop - part.start
        if length > made.shape[1]:
            made = np.empty((count, length, rows.shape[-1]), rows.dtype)
        yield part, made[:, :length]


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
        self.save(stash, gu)
        return self.fwd(gu)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        return self.bwd(None, dy, gu)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 10), (1, 2), (7, 6), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)
