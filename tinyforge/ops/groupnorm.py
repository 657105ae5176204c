"""Group normalisation of images, with the activation after it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash, WithKeywords
from tinyforge.ops.sigmoid import sigmoid, silu_slope
from tinyforge.params import with_buffer


def pixels(x: Array) -> Array:
    """(B, ..., C) as (B, P, C)."""
    return x.reshape(len(x), math.prod(x.shape[1:-1]), x.shape[-1])


def over_pixels(x: Array) -> Array:
    """(B, P, C) to its sums over P, (B, C): a product with ones, which is faster than a sum."""
    return np.ones(x.shape[1], x.dtype) @ x


def over_groups(sums: Array, groups: int, count: int) -> Array:
    """(B, C), sums over `count` pixels, to the means of each group, (B, C), repeated for the channels of a group."""
    batch, channels = sums.shape
    width = channels // groups
    means = sums.reshape(batch, groups, width).sum(axis=-1) / sums.dtype.type(count * width)
    return np.repeat(means, width, axis=-1)


@kernel
def groupnorm_fwd(
    x: Array, shift: Array | None, weight: Array, bias: Array, groups: int, eps: float, silu: bool
) -> tuple[Array, Array, Array]:
    """x: (B, ..., C); shift: (B, C), or None; returns y, and the mean and 1 / deviation of each group, (B, G)."""
    rows = pixels(x) if shift is None else pixels(x) + shift[:, None]
    count = rows.shape[1]
    mean = over_groups(over_pixels(rows), groups, count)
    y = rows - mean[:, None]
    rstd = 1 / np.sqrt(over_groups(over_pixels(y * y), groups, count) + x.dtype.type(eps))
    y *= (rstd * weight)[:, None]
    y += bias
    if silu:
        y *= sigmoid(y)
    every = slice(None, None, x.shape[-1] // groups)
    return y.reshape(x.shape), mean[:, every].copy(), rstd[:, every].copy()


@groupnorm_fwd.on("meta")
def groupnorm_fwd_memory(x: Array, groups: int) -> tuple[Array, Array, Array]:
    stats = (len(x), groups), wide(x.dtype)
    return like(x), empty(*stats), empty(*stats)


@kernel
def groupnorm_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dy: Array,
    weight: Array,
    bias: Array,
    x: Array,
    shift: Array | None,
    mean: Array,
    rstd: Array,
    silu: bool,
) -> tuple[Array, Array | None]:
    """Returns dx, and dshift if there is a shift."""
    groups, width = mean.shape[1], x.shape[-1] // mean.shape[1]
    xhat = pixels(x) if shift is None else pixels(x) + shift[:, None]
    r = np.repeat(rstd, width, axis=-1)
    xhat = xhat - np.repeat(mean, width, axis=-1)[:, None]
    xhat *= r[:, None]
    dz = pixels(dy)
    if silu:
        z = xhat * weight
        z += bias
        dz = silu_slope(z, sigmoid(z)) * dz
    count = xhat.shape[1]
    along, sums = over_pixels(dz * xhat), over_pixels(dz)  # (B, C)
    if dweight is not None:
        dweight += along.sum(axis=0)
    if dbias is not None:
        dbias += sums.sum(axis=0)
    dx = dz * weight
    dx -= over_groups(sums * weight, groups, count)[:, None]
    xhat *= over_groups(along * weight, groups, count)[:, None]
    dx -= xhat
    dx *= r[:, None]
    return dx.reshape(x.shape), None if shift is None else over_pixels(dx)


@groupnorm_bwd.on("meta")
def groupnorm_bwd_memory(x: Array, shift: Array | None) -> tuple[Array, Array | None]:
    _partial = empty((len(x), 2 * x.shape[-1]), wide(x.dtype))
    return like(x), None if shift is None else like(shift)


class GroupNorm(Op):
    """z = w * (v - mean(v)) * r + b,  r = 1 / sqrt(var(v) + eps),  v = x + shift;   y = z, or z s(z) with silu

    x, y: (B, ..., C), such as images (B, H, W, C); w, b: (C,); groups: G, which divides C. The mean and the variance
    are those of the C / G channels of a group over all positions of one image. silu: the activation y = z s(z),
    s(z) = 1 / (1 + exp(-z)), in the same pass. shift: (B, C), a keyword of forward, added at every position first, such
    as an embedding of the time. Saves x, the shift, and mean and r: (B, G).

    backward, with dz = dy, or with silu dy s (1 + z (1 - s)), and g = dz * w:
        dw += sum of dz * xhat,   db += sum of dz,   dx = r * (g - mean(g) - xhat * mean(g * xhat))
    and with a shift (dx, dshift), dshift = the sum of dx over the positions.

    Source: Wu and He, "Group Normalization" (2018).
    """

    fwd = groupnorm_fwd
    bwd = groupnorm_bwd

    def __init__(
        self,
        weight: Param,
        bias: Param,
        groups: int,
        backend: Backend,
        eps: float = 1e-5,
        name: str = "",
        *,
        silu: bool = False,
    ) -> None:
        super().__init__(backend, name)
        if weight.size % groups:
            raise ValueError(
                f"{self.name}: {weight.size} channels in {groups} groups; expected a divisor of the channels"
            )
        self.weight, self.bias, self.groups, self.eps, self.silu = weight, bias, groups, eps, silu

    def forward(self, x: Array, stash: Stash | None = None, *, shift: Array | None = None) -> Array:
        self.expect(x, self.weight.size)
        if shift is not None:
            self.expect(shift, shape=(x.shape[0], self.weight.size))
        y, mean, rstd = self.fwd(x, shift, self.weight.value, self.bias.value, self.groups, self.eps, self.silu)
        self.save(stash, x, shift, mean, rstd)
        return y

    def backward(self, dy: Array, stash: Stash) -> Any:
        x, shift, mean, rstd = stash.pop(self)
        dx, dshift = self.bwd(
            self.weight.grad, self.bias.grad, dy, self.weight.value, self.bias.value, x, shift, mean, rstd, self.silu
        )
        return dx if shift is None else (dx, dshift)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape, groups, silu in (
            ((2, 3, 3, 6), 3, False),
            ((1, 2, 4), 1, True),
            ((3, 2, 2, 4), 2, True),
            ((0, 3, 2), 1, True),
        ):
            for shifted in (False, True):
                channels = shape[-1:]
                weight, bias = (Param(name, channels, fill=1.0, decay=False) for name in ("weight", "bias"))
                op: Op = with_buffer(cls(weight, bias, groups, backend, silu=silu), backend, rng)
                inputs = [backend.asarray(rng.normal(size=shape))]
                if shifted:
                    op = WithKeywords(op, shift=lambda given: given)
                    inputs.append(backend.asarray(rng.normal(size=(shape[0], *channels))))
                yield op, tuple(inputs)
