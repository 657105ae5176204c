"""Root-mean-square normalisation."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like, per_row
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.params import with_buffer

LEAST_GAIN = 2.0**-50
"""A gain nearer to 0 counts as this: y is negligible, but x r can still be recovered as y over the gain."""


def gain_of(weight: Array, plus_one: bool = False) -> Array:
    """The weight, or 1 + the weight, and LEAST_GAIN where that is nearer to 0."""
    weight = weight + weight.dtype.type(1) if plus_one else weight
    return np.where(np.abs(weight) < LEAST_GAIN, weight.dtype.type(LEAST_GAIN), weight)


@kernel
def rmsnorm_fwd(x: Array, weight: Array, eps: float, plus_one: bool = False) -> tuple[Array, Array]:
    rstd = 1.0 / np.sqrt(np.vecdot(x, x) / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    y = x * rstd[..., None]
    y *= gain_of(weight, plus_one)
    return y, rstd


rmsnorm_fwd.on("meta")(lambda x: (like(x), per_row(x)))


@kernel
def rmsnorm_bwd(
    dweight: Array | None,
    dy: Array,
    weight: Array,
    y: Array,
    rstd: Array,
    residual: Array | None,
    plus_one: bool = False,
) -> Array:
    """Returns dx, plus `residual` if given."""
    width, gain = y.shape[-1], gain_of(weight, plus_one)
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


def into(out: Array | None, y: Array) -> Array:
    """y, or `out` with y written into it."""
    if out is None:
        return y
    out[...] = y
    return out


class RMSNorm(Op):
    """y = w * x * r,  r = 1 / sqrt(mean(x^2) + eps), the mean over the last axis

    x: (..., C); w: (C,); y: (..., C). Saves y, which the next map keeps anyway, and r: (...), but not x. A w nearer to
    0 than LEAST_GAIN, 2^-50, counts as LEAST_GAIN. plus_one: the gain is 1 + w in place of w, here and in backward, as
    in Gemma, whose w starts at 0.

    backward, with xhat = y / w, and so dy * w * xhat = dy * y:
        dw += sum over rows of dy * y / w
        dx  = r * (dy * w - y / w * mean(dy * y))
    backward(..., residual=g) adds g, another gradient of x, in the same pass: for an x that is also a residual stream.

    x may be a strided view, such as the query heads of a packed (B, T, heads, D): then C is D, and every head is
    normalised by itself with the same w (the q/k norm of Qwen3). `out=x` overwrites x with y, and a separate y is
    saved; backward's `out=` receives dx likewise.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
    """

    fwd = rmsnorm_fwd
    bwd = rmsnorm_bwd

    def __init__(
        self, weight: Param, backend: Backend, eps: float = 1e-5, name: str = "", *, plus_one: bool = False
    ) -> None:
        super().__init__(backend, name)
        self.weight = weight
        self.eps = eps
        self.plus_one = plus_one

    def forward(self, x: Array, stash: Stash | None = None, *, out: Array | None = None) -> Array:
        self.expect(x, self.weight.size)
        y, rstd = self.fwd(x, self.weight.value, self.eps, self.plus_one)
        self.save(stash, y, rstd)
        return into(out, y)

    def backward(self, dy: Array, stash: Stash, residual: Array | None = None, *, out: Array | None = None) -> Array:
        y, rstd = stash.pop(self)
        dx = self.bwd(self.weight.grad, dy, self.weight.value, y, rstd, residual, self.plus_one)
        return into(out, dx)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # A row of one element is flat but for eps: a large eps gives it a gradient that can be measured.
        for shape in ((2, 3, 8), (1, 1), (5, 7), (0, 4), (3, 33)):
            eps = 1.0 if shape[-1] == 1 else 1e-5
            op = with_buffer(cls(Param("weight", shape[-1:], fill=1.0, decay=False), backend, eps), backend, rng)
            yield op, (backend.asarray(rng.normal(size=shape)),)
        weight = Param("weight", (7,), fill=0.0, decay=False)
        yield (
            with_buffer(cls(weight, backend, plus_one=True), backend, rng),
            (backend.asarray(rng.normal(size=(4, 7))),),
        )
