"""Images cut into patches, the tokens of a vision transformer."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash


@kernel
def patches_fwd(images: Array, size: int, scale: float, shift: float, dtype: Any) -> Array:
    """images: (B, K, H, W) of any dtype; returns (B, H/P W/P, K P P) of `dtype`."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // size, size, width // size, size)
    y = cut.transpose(0, 2, 4, 1, 3, 5).astype(dtype)  # (B, H/P, W/P, K, P, P)
    if (scale, shift) != (1.0, 0.0):
        y *= scale
        y += shift
    return y.reshape(batch, (height // size) * (width // size), channels * size * size)


@patches_fwd.on("meta")
def patches_fwd_memory(images: Array, size: int, dtype: Any) -> Array:
    batch, channels, height, width = images.shape
    return empty((batch, (height // size) * (width // size), channels * size * size), dtype)


@kernel
def patches_bwd(dy: Array, shape: tuple[int, ...], size: int, scale: float) -> Array:
    """The gradient of the images, of shape `shape`: each patch back in its place."""
    batch, channels, height, width = shape
    cut = dy.reshape(batch, height // size, width // size, channels, size, size)
    return np.multiply(cut.transpose(0, 3, 1, 4, 2, 5), dy.dtype.type(scale), order="C").reshape(shape)


patches_bwd.on("meta")(lambda dy, shape: empty(shape, dy.dtype))


class Patches(Op):
    """y[b, n, (k, i, j)] = scale x[b, k, r P + i, c P + j] + shift,  n = r W/P + c

    images x: (B, K, H, W), K channels, H and W multiples of P; y: (B, N, K P P), N = H/P W/P patches row by row, each
    with its channels one after the other. With the linear map after it, this is a convolution of P x P with stride P.
    Saves the shape.

    Integer images are pixels from 0 to 255: y = (x / 255 - mean) / std, and they get no gradient. Float images are not
    scaled, scale 1 and shift 0, and backward puts each patch's gradient back in its place.

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2020).
    """

    fwd = patches_fwd
    bwd = patches_bwd

    def __init__(self, size: int, backend: Backend, name: str = "", *, mean: float = 0.5, std: float = 0.5) -> None:
        super().__init__(backend, name)
        self.size, self.mean, self.std = size, mean, std

    def forward(self, images: Array, stash: Stash | None = None) -> Array:
        height, width = images.shape[2:]
        if height % self.size or width % self.size:
            raise ValueError(
                f"{self.name}: images of {height} x {width} pixels, patches of {self.size} x {self.size}; expected a "
                "whole number of patches each way: resize or pad the images"
            )
        real = images.dtype.kind not in "iu"
        self.save(stash, images.shape, real)
        scale, shift = (1.0, 0.0) if real else (1.0 / (255.0 * self.std), -self.mean / self.std)
        return self.fwd(images, self.size, scale, shift, self.backend.dtype)

    def backward(self, dy: Array, stash: Stash) -> Array | None:
        shape, real = stash.pop(self)
        return self.bwd(dy, shape, self.size, 1.0) if real else None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for size, shape in ((2, (2, 3, 4, 6)), (3, (1, 1, 3, 9)), (1, (2, 2, 3, 1)), (4, (3, 2, 8, 4))):
            yield cls(size, backend), (backend.asarray(rng.normal(size=shape)),)
        yield cls(2, backend), (backend.asarray(rng.integers(0, 256, (2, 1, 4, 2))),)
