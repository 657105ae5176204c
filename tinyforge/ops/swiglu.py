"""SwiGLU: a gated activation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.numpy_backend import numpy_kernel
from tinyforge.op import Array, Op, Stash


class SwiGLU(Op):
    """y = silu(g) * u,  silu(g) = g * s(g),  s(g) = 1 / (1 + exp(-g))

    gu: (..., 2H), the gate g in the first half, u in the second; y: (..., H). Saves gu; backward recomputes s:
        dg = dy * u * s * (1 + g * (1 - s)),  du = dy * g * s

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    kernels = ("swiglu_fwd", "swiglu_bwd")

    def forward(self, gu: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, gu)
        return self.k.swiglu_fwd(gu)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        return self.k.swiglu_bwd(dy, gu)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for shape in ((2, 3, 10), (1, 2), (7, 6), (0, 4)):
            yield cls(backend), (backend.asarray(rng.normal(size=shape) * 2),)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) in a new array; exp overflows to inf for x below -88 in fp32, and 1 / inf = 0 is right."""
    s = np.negative(x)
    with np.errstate(over="ignore"):
        np.exp(s, out=s)
    s += 1
    return np.reciprocal(s, out=s)


@numpy_kernel
def swiglu_fwd(gu: Array) -> Array:
    half = gu.shape[-1] // 2
    gate, up = gu[..., :half], gu[..., half:]
    y = sigmoid(gate)
    y *= gate
    y *= up
    return y


@numpy_kernel
def swiglu_bwd(dy: Array, gu: Array) -> Array:
    half = gu.shape[-1] // 2
    gate, up = gu[..., :half], gu[..., half:]
    dgu = np.empty(gu.shape, gu.dtype)
    dgate, dup = dgu[..., :half], dgu[..., half:]
    s = sigmoid(gate)
    silu = gate * s
    np.multiply(dy, silu, out=dup)
    # s (1 + g (1 - s)) = s + silu (1 - s) = s + silu - silu s
    np.subtract(1, s, out=dgate)
    dgate *= silu
    dgate += s
    dgate *= up
    dgate *= dy
    return dgu
