"""Query and key norms without gain, the scale of the scores, and RoPE, in one pass over the packed qkv."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Param, Stash
from tinyforge.ops.rmsnorm import gain_of
from tinyforge.ops.rope import RoPE, rope, rows_at
from tinyforge.params import with_buffer


def factors(scale: Array | None, heads: int, rotated: int, factor: float, dtype: Any) -> Array:
    """By what each normalised head is multiplied, (rotated, 1): the queries by `scale` or `factor`, the keys by 1."""
    found = np.ones((rotated, 1), dtype)
    found[:heads, 0] = dtype.type(factor) if scale is None else gain_of(scale)
    return found


@kernel
def qk_norm_rope_fwd(
    out: Array | None,
    x: Array,
    scale: Array | None,
    cos: Array,
    sin: Array,
    heads: int,
    rotated: int,
    factor: float,
    eps: float,
) -> tuple[Array, Array]:
    """y, and the reciprocal root mean square of each head, (B, T, rotated)."""
    turned = x[:, :, :rotated]
    rstd = 1.0 / np.sqrt(np.vecdot(turned, turned) / x.dtype.type(x.shape[-1]) + x.dtype.type(eps))
    y = x.copy() if out is None else out
    np.multiply(turned, rstd[..., None] * factors(scale, heads, rotated, factor, x.dtype), out=y[:, :, :rotated])
    if out is not x:
        y[:, :, rotated:] = x[:, :, rotated:]
    return rope(y, y, cos, sin, rotated), rstd


@qk_norm_rope_fwd.on("meta")
def qk_norm_rope_fwd_memory(out: Array | None, x: Array, rotated: int) -> tuple[Array, Array]:
    return like(x) if out is None else out, empty((*x.shape[:2], rotated), wide(x.dtype))


@kernel
def qk_norm_rope_bwd(
    out: Array | None,
    dscale: Array | None,
    dy: Array,
    scale: Array | None,
    y: Array,
    rstd: Array,
    cos: Array,
    sin: Array,
    heads: int,
    rotated: int,
    factor: float,
) -> Array:
    """sin: negated, as RoPE's backward has it."""
    ours, theirs = y[:, :, :rotated], dy[:, :, :rotated]
    along, by = np.vecdot(theirs, ours)[..., None], factors(scale, heads, rotated, factor, y.dtype)
    if dscale is not None:
        dscale += along[:, :, :heads, 0].sum(axis=(0, 1)) / by[:heads, 0]
    dx = dy.copy() if out is None else out
    dx[:, :, :rotated] = rstd[..., None] * (by * theirs - ours / by * (along / y.dtype.type(y.shape[-1])))
    if out is not dy:
        dx[:, :, rotated:] = dy[:, :, rotated:]
    return rope(dx, dx, cos, sin, rotated)


@qk_norm_rope_bwd.on("meta")
def qk_norm_rope_bwd_memory(
    out: Array | None, dscale: Array | None, dy: Array, y: Array, rstd: Array, heads: int
) -> Any:
    if dscale is not None:
        _along = empty((*y.shape[:2], heads), rstd.dtype)
    return like(dy) if out is None else out


class QKNormRoPE(RoPE):
    """y_h = s_h rope(x_h r_h),  r_h = 1 / sqrt(mean(x_h^2) + eps), for each rotated head h; others are copied

    x, y: (B, T, H, D), a packed qkv. The first `heads` heads are queries, up to `rotated` keys. s_h of a query:
    `factor`, or the learned scale[h], (heads,), if there is one; of a key: 1. A score q . k / sqrt(D) is then
    s_h sqrt(D) cos(q, k). Saves y, which attention keeps anyway, and r, (B, T, rotated). `out=x` works in place.

    backward, with c = the sum of dy y over a head, and R RoPE's rotation, which keeps lengths:
        dx = r R^T (s dy - y / s c / D),   dscale[h] += the sum over b and t of c / s_h

    Sources: Henry et al., "Query-Key Normalization for Transformers" (2020); Dehghani et al., "Scaling Vision
    Transformers to 22 Billion Parameters" (2023); the form without gain, modded-nanogpt (Jordan et al., 2024).
    """

    norm_fwd = qk_norm_rope_fwd
    norm_bwd = qk_norm_rope_bwd

    def __init__(
        self,
        head_dim: int,
        positions: int,
        rotated: int,
        backend: Backend,
        theta: float = 10000.0,
        name: str = "",
        *,
        heads: int,
        scale: Param | None = None,
        factor: float = 1.0,
        eps: float = 1e-5,
        **how: Any,
    ) -> None:
        super().__init__(head_dim, positions, rotated, backend, theta, name, **how)
        self.heads, self.scale, self.factor, self.eps = heads, scale, factor, eps

    def forward(self, x: Array, stash: Stash | None = None, *, offset: Any = 0, out: Array | None = None) -> Array:
        self.expect(x, 2 * self.cos.shape[1])
        rows, scale = rows_at(offset, x.shape[1]), self.scale.value if self.scale else None
        known = (self.heads, self.rotated, self.factor, self.eps)
        y, rstd = self.norm_fwd(out, x, scale, self.cos[rows], self.sin[rows], *known)
        self.save(stash, rows, y, rstd)
        return y

    def after(self, linear: Any, x: Any, stash: Stash | None = None, *, offset: Any = 0) -> Array:
        y = linear.forward(x, stash=stash)
        y = y.reshape(*y.shape[:2], -1, 2 * self.cos.shape[1])
        return self.forward(y, stash, offset=offset, out=y)

    def backward(self, dy: Array, stash: Stash, *, out: Array | None = None) -> Array:
        rows, y, rstd = stash.pop(self)
        scale, dscale = (self.scale.value, self.scale.grad) if self.scale else (None, None)
        known = (self.cos[rows], self.minus_sin[rows], self.heads, self.rotated, self.factor)
        return self.norm_bwd(out, dscale, dy, scale, y, rstd, *known)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (b, t, h, d), heads, rotated, learned, width in (
            ((2, 5, 4, 8), 2, 3, True, 0),
            ((2, 3, 3, 6), 1, 2, False, 0),
            ((1, 7, 5, 8), 3, 4, True, 4),
            ((1, 1, 3, 2), 1, 2, True, 0),
            ((1, 0, 3, 4), 1, 2, True, 0),
        ):
            scale = Param("scale", (heads,), fill=1.5, decay=False) if learned else None
            known: dict[str, Any] = {"heads": heads, "scale": scale, "factor": 1.3, "eps": 1e-2, "width": width}
            op = cls(d, 16, rotated, backend, 100.0, **known)  # a large eps: heads of two numbers are flat else
            yield with_buffer(op, backend, rng, std=0.2), (backend.asarray(rng.normal(size=(b, t, h, d))),)
