"""Images made smaller and larger: average and maximum pooling, and upsampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash

Shape = tuple[int, ...]
MOST_SIZE = 15
"""Of a window, whose places are numbered by one byte."""


def pooled_shape(x: Shape, size: int, stride: int) -> Shape:
    return x[0], (x[1] - size) // stride + 1, (x[2] - size) // stride + 1, x[3]


def _windows(x: Array, size: int, stride: int) -> Array:
    """(B, H, W, C) to (B, H', W', C, size^2)."""
    axes: Any = 1, 2  # NumPy 2.3's annotations allow one axis only
    seen = np.lib.stride_tricks.sliding_window_view(x, (size, size), axes)[:, ::stride, ::stride]
    return seen.reshape(*seen.shape[:4], size * size)


def _places(dx: Array, y: Shape, size: int, stride: int) -> Iterator[Array]:
    """Of each place in a window, the part of dx that the windows of y have there; no part has a number twice."""
    for i in range(size):
        for j in range(size):
            yield dx[:, i : i + stride * y[1] : stride, j : j + stride * y[2] : stride]


@kernel
def average_pool_fwd(x: Array, size: int, stride: int) -> Array:
    return _windows(x, size, stride).mean(axis=-1)


average_pool_fwd.on("meta")(lambda x, size, stride: empty(pooled_shape(x.shape, size, stride), x.dtype))


@kernel
def average_pool_bwd(dy: Array, shape: Shape, size: int, stride: int) -> Array:
    """dx, of `shape`."""
    dx = np.zeros(shape, dy.dtype)
    share = dy * dy.dtype.type(1 / size**2)
    for place in _places(dx, dy.shape, size, stride):
        place += share
    return dx


average_pool_bwd.on("meta")(lambda dy, shape: empty(shape, dy.dtype))


@kernel
def max_pool_fwd(x: Array, size: int, stride: int) -> tuple[Array, Array]:
    """The maxima, and the place of each in its window, the first of equal ones, in bytes."""
    seen = _windows(x, size, stride)
    where = seen.argmax(axis=-1)
    return np.take_along_axis(seen, where[..., None], axis=-1)[..., 0], where.astype(np.uint8)


@max_pool_fwd.on("meta")
def max_pool_fwd_memory(x: Array, size: int, stride: int) -> tuple[Array, Array]:
    shape = pooled_shape(x.shape, size, stride)
    return empty(shape, x.dtype), empty(shape, np.uint8)


@kernel
def max_pool_bwd(dy: Array, where: Array, shape: Shape, size: int, stride: int) -> Array:
    """dx, of `shape`."""
    dx = np.zeros(shape, dy.dtype)
    for number, place in enumerate(_places(dx, dy.shape, size, stride)):
        place += dy * (where == number)
    return dx


max_pool_bwd.on("meta")(lambda dy, shape: empty(shape, dy.dtype))


@kernel
def upsample_fwd(x: Array, factor: int) -> Array:
    return x.repeat(factor, axis=1).repeat(factor, axis=2)


@upsample_fwd.on("meta")
def upsample_fwd_memory(x: Array, factor: int) -> Array:
    return empty((x.shape[0], x.shape[1] * factor, x.shape[2] * factor, x.shape[3]), x.dtype)


@kernel
def upsample_bwd(dy: Array, factor: int) -> Array:
    batch, height, width, channels = dy.shape
    return dy.reshape(batch, height // factor, factor, width // factor, factor, channels).sum(axis=(2, 4))


@upsample_bwd.on("meta")
def upsample_bwd_memory(dy: Array, factor: int) -> Array:
    return empty((dy.shape[0], dy.shape[1] // factor, dy.shape[2] // factor, dy.shape[3]), dy.dtype)


class _Pool(Op):
    """size, stride: of the window, which moves by `stride` each way, by default its size. A rest at the right and the
    bottom that no window reaches is left out."""

    def __init__(self, size: int, backend: Backend, name: str = "", *, stride: int | None = None) -> None:
        super().__init__(backend, name)
        self.size, self.stride = size, size if stride is None else stride
        if not 1 <= size <= MOST_SIZE or self.stride < 1:
            raise ValueError(f"{self.name}: size {size}, stride {stride}; expected 1 to {MOST_SIZE}, and 1 or more")

    def check(self, x: Array) -> None:
        self.expect(x)
        if x.ndim != 4 or min(x.shape[1:3]) < self.size:
            raise ValueError(
                f"{self.name}: an input of {x.shape}, expected (B, H, W, C) of at least {self.size} x {self.size}"
            )

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape, size, stride in (
            ((2, 4, 6, 3), 2, None),
            ((1, 5, 5, 2), 3, 1),
            ((2, 7, 4, 1), 2, 3),
            ((0, 4, 4, 2), 2, None),
        ):
            # Numbers that lie apart: the maximum of a window has a kink where two are equal.
            x = rng.permutation(int(np.prod(shape))).reshape(shape) * 0.1
            yield cls(size, backend, stride=stride), (backend.asarray(x),)


class AveragePool2d(_Pool):
    """y[b, r, c, k] = the mean of x[b, r S + i, c S + j, k] over i, j in [0, size)

    x: (B, H, W, C); y: (B, H', W', C), H' = floor((H - size) / S) + 1, S the stride, by default the size. Saves the
    shape. backward: dx is the sum of dy / size^2 over the windows that hold the position.
    """

    fwd = average_pool_fwd
    bwd = average_pool_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.check(x)
        self.save(stash, x.shape)
        return self.fwd(x, self.size, self.stride)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (shape,) = stash.pop(self)
        return self.bwd(dy, shape, self.size, self.stride)


class MaxPool2d(_Pool):
    """y[b, r, c, k] = the maximum of x[b, r S + i, c S + j, k] over i, j in [0, size)

    x, y, S: as of `AveragePool2d`. Saves the shape, and the place of each maximum, a byte. backward: dx is the sum of
    dy over the windows whose maximum the position is; of equal numbers the first one counts.
    """

    fwd = max_pool_fwd
    bwd = max_pool_bwd

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.check(x)
        y, where = self.fwd(x, self.size, self.stride)
        self.save(stash, where, x.shape)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        where, shape = stash.pop(self)
        return self.bwd(dy, where, shape, self.size, self.stride)


class Upsample(Op):
    """y[b, r, c, k] = x[b, floor(r / f), floor(c / f), k], the nearest pixel

    x: (B, H, W, C); f: factor; y: (B, f H, f W, C). Saves nothing. backward: dx is the sum of the f^2 numbers of dy.
    """

    fwd = upsample_fwd
    bwd = upsample_bwd

    def __init__(self, factor: int, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        if factor < 1:
            raise ValueError(f"{self.name}: factor {factor}, expected 1 or more")
        self.factor = factor

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        self.expect(x)
        self.save(stash)
        return self.fwd(x, self.factor)

    def backward(self, dy: Array, stash: Stash) -> Array:
        stash.pop(self)
        return self.bwd(dy, self.factor)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape, factor in (((2, 3, 2, 3), 2), ((1, 1, 1, 1), 3), ((0, 2, 2, 1), 2)):
            yield cls(factor, backend), (backend.asarray(rng.normal(size=shape)),)
