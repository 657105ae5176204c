"""GeGLU: a gated activation with GELU."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash
from tinyforge.ops.gelu import gelu_bwd, gelu_fwd


@kernel
def geglu_fwd(gu: Array, approximate: str) -> Array:
    half = gu.shape[-1] // 2
    return gelu_fwd(gu[..., :half], None, approximate) * gu[..., half:]


geglu_fwd.on("meta")(lambda gu: empty((*gu.shape[:-1], gu.shape[-1] // 2), gu.dtype))


@kernel
def geglu_bwd(dy: Array, gu: Array, approximate: str) -> Array:
    half = gu.shape[-1] // 2
    dgu = np.empty(gu.shape, gu.dtype)
    hidden = np.empty(dy.shape, gu.dtype)
    dgu[..., :half] = gelu_bwd(hidden, None, dy * gu[..., half:], gu[..., :half], None, approximate)
    np.multiply(dy, hidden, out=dgu[..., half:])
    return dgu


geglu_bwd.on("meta")(lambda gu: like(gu))


class GeGLU(Op):
    """y = gelu(g) * u,  gelu(g) = g Phi(g)

    gu: (..., 2H), the gate g in the first half, u in the second; y: (..., H). approximate: the formula of Phi, "tanh"
    or "erf", see `GELU`. Saves gu. backward, with Phi' the derivative of the formula in use:
        dg = dy * u * (Phi(g) + g * Phi'(g)),  du = dy * gelu(g)

    Source: Shazeer, "GLU Variants Improve Transformer" (2020).
    """

    fwd = geglu_fwd
    bwd = geglu_bwd

    def __init__(self, backend: Backend, approximate: str = "tanh", name: str = "") -> None:
        super().__init__(backend, name)
        if approximate not in ("tanh", "erf"):
            raise ValueError(f"{self.name}: approximate is {approximate!r}, expected 'tanh' or 'erf'")
        self.approximate = approximate

    def forward(self, gu: Array, stash: Stash | None = None) -> Array:
        self.expect(gu, gu.shape[-1] // 2 * 2)
        self.save(stash, gu)
        return self.fwd(gu, self.approximate)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        return self.bwd(dy, gu, self.approximate)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for approximate in ("tanh", "erf"):
            for shape in ((2, 3, 10), (1, 2), (7, 6), (0, 4)):
                yield cls(backend, approximate), (backend.asarray(rng.normal(size=shape) * 2),)
