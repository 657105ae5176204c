"""The sum of two arrays, each times a learned number: how a layer mixes the residual stream with its beginning."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def mix_fwd(x: Array, first: Array, a: Array, b: Array) -> Array:
    y = x * a
    y += first * b
    return y


@kernel
def mix_bwd(
    da: Array | None, db: Array | None, dfirst: Array | None, dy: Array, x: Array, first: Array, a: Array, b: Array
) -> tuple[Array, Array]:
    """dx, and the gradient of `first`, in the memory of dfirst, to which it is added, if that is given."""
    for gradient, factor in ((da, x), (db, first)):
        if gradient is not None:
            gradient += np.vdot(dy, factor)
    part = dy * b
    if dfirst is None:
        return dy * a, part
    dfirst += part
    return dy * a, dfirst


mix_bwd.on("meta")(lambda dfirst, dy: (like(dy), like(dy) if dfirst is None else dfirst))


class Mix(Op):
    """y = a x + b x0

    x, x0, y: (...); a, b: (1,), learned. Saves x and x0. backward, with sums over all numbers:
        dx = a dy,   dx0 = b dy,   da += sum of dy x,   db += sum of dy x0
    backward(..., into=g) adds dx0 to g: x0, the stream before the first layer, has a part in every layer.

    Sources: Jordan et al., "modded-nanogpt" (2024); Zhou et al., "Value Residual Learning For Alleviating Attention
    Concentration In Transformers" (2024), of values; nanochat (Karpathy, 2025).
    """

    fwd = mix_fwd
    bwd = mix_bwd

    def __init__(self, a: Param, b: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.a, self.b = a, b

    def forward(self, x: Array, first: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        self.expect(first, shape=x.shape)
        self.save(stash, x, first)
        return self.fwd(x, first, self.a.value, self.b.value)

    def backward(self, dy: Array, stash: Stash, *, into: Array | None = None) -> tuple[Array, Array]:
        x, first = stash.pop(self)
        return self.bwd(self.a.grad, self.b.grad, into, dy, x, first, self.a.value, self.b.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4), (3, 700)):
            a, b = (Param(name, (1,), fill=fill, decay=False) for name, fill in (("a", 1.0), ("b", 0.5)))
            op = with_buffer(cls(a, b, backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)), backend.asarray(rng.normal(size=shape)))
