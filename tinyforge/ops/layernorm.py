"""Layer normalisation with gain and optional bias."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like, per_row
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def layernorm_fwd(x: Array, weight: Array, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    mean = x.mean(axis=-1)
    y = x - mean[..., None]
    rstd = 1.0 / np.sqrt(np.vecdot(y, y) / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    y *= rstd[..., None]
    y *= weight
    if bias is not None:
        y += bias
    return y, mean, rstd


layernorm_fwd.on("meta")(lambda x: (like(x), per_row(x), per_row(x)))


@kernel
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
    """residual: another gradient of x, which is added to dx."""
    rows = (-1, dy.shape[-1])
    xhat = x - mean[..., None]
    xhat *= rstd[..., None]
    if dweight is not None:
        dweight += (dy * xhat).reshape(rows).sum(axis=0)
    if dbias is not None:
        dbias += dy.reshape(rows).sum(axis=0)
    g = dy * weight
    along = np.vecdot(g, xhat)[..., None] / dy.dtype.type(dy.shape[-1])
    g -= g.mean(axis=-1, keepdims=True)
    g -= xhat * along
    g *= rstd[..., None]
    if residual is not None:
        g += residual
    return g


class LayerNorm(Op):
    """y = w * xhat + b,  xhat = (x - mean(x)) * r,  r = 1 / sqrt(var(x) + eps), over the last axis

    x, y: (..., C); w: (C,); b: (C,), or none. The variance divides by C. Saves x, and mean and r: (...).

    backward, with g = dy * w:
        dw += sum over rows of dy * xhat,   db += sum over rows of dy
        dx  = r * (g - mean(g) - xhat * mean(g * xhat))

    backward(..., residual=g) adds g, another gradient of x, in the same pass: for an x that is also a residual stream.

    Source: Ba, Kiros, Hinton, "Layer Normalization" (2016).
    """

    fwd = layernorm_fwd
    bwd = layernorm_bwd

    def __init__(self, weight: Param, bias: Param | None, backend: Backend, eps: float = 1e-5, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight, self.bias = weight, bias
        self.eps = eps

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x, self.weight.size)
        bias = self.bias.value if self.bias else None
        y, mean, rstd = self.fwd(x, self.weight.value, bias, self.eps)
        self.save(stash, x, mean, rstd)
        return y

    def backward(self, dy: Array, stash: Stash, residual: Array | None = None) -> Array:
        x, mean, rstd = stash.pop(self)
        dbias = self.bias.grad if self.bias else None
        return self.bwd(self.weight.grad, dbias, dy, self.weight.value, x, mean, rstd, residual)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4)):
            for bias in (Param("bias", shape[-1:], fill=0.0, decay=False), None):
                weight = Param("weight", shape[-1:], fill=1.0, decay=False)
                op = with_buffer(cls(weight, bias, backend), backend, rng)
                yield op, (backend.asarray(rng.normal(size=shape) + 1),)
