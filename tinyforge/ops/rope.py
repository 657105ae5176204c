"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Stash
from tinyforge.ops.linear import Linear, linear_fwd


@lru_cache(maxsize=8)
def quarter_turn(dim: int, dtype: Any) -> Array:
    """The matrix R with x R = (-x_right, x_left): each pair turned by 90 degrees."""
    half = np.eye(dim // 2)
    zero = np.zeros_like(half)
    return np.block([[zero, half], [-half, zero]]).astype(dtype)


@kernel
def rope(out: Array | None, x: Array, cos: Array, sin: Array, rotated: int) -> Array:
    """cos, sin: (T, D/2). y = x cos + (x R) sin, R a quarter turn: exact, since each entry of x R is one entry of x.

    This processes whole rows of all heads at a time: loops over half a head (16 numbers in the small preset) take NumPy
    three times as long. Heads that are not rotated have cos = 1 and sin = 0.
    """
    dim = x.shape[-1]
    cosines, sines = np.ones(x.shape[1:], x.dtype), np.zeros(x.shape[1:], x.dtype)
    cosines[:, :rotated] = np.tile(cos, 2)[:, None]
    sines[:, :rotated] = np.tile(sin, 2)[:, None]
    turned = (x.reshape(-1, dim) @ quarter_turn(dim, x.dtype)).reshape(x.shape)
    turned *= sines
    out = np.multiply(x, cosines, out=out)
    out += turned
    return out


@rope.on("meta")
def rope_memory(out: Array | None, x: Array) -> Array:
    return empty(x.shape, x.dtype) if out is None else out


@kernel
def linear_rope_fwd(x: Array, weight: Array, cos: Array, sin: Array, rotated: int) -> Array:
    """rope(x W^T). x: (B, T, C); y: (B, T, H, D)."""
    y = linear_fwd(x, weight, None).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return rope(y, y, cos, sin, rotated)


@linear_rope_fwd.on("meta")
def linear_rope_fwd_memory(x: Array, weight: Array, cos: Array) -> Array:
    return empty((*x.shape[:2], weight.shape[0] // (2 * cos.shape[1]), 2 * cos.shape[1]), x.dtype)


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies f = theta^(-2i/D) are scaled for a context longer than that of training.

    linear: f / factor, as if positions lay closer (Chen et al., "Extending Context Window of Large Language Models via
    Positional Interpolation", 2023).
    llama3: by the turns r = original_context f / 2 pi that a pair makes over the original context: f if r is above
    high_freq_factor, f / factor if it is below low_freq_factor, and between them (1 - s) f / factor + s f with
    s = (r - low_freq_factor) / (high_freq_factor - low_freq_factor) (Llama 3.1, its published `apply_scaling`, 2024).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise UserError(f"RoPE scaling {self.kind!r} is unknown; use linear or llama3, or none at all")
        if self.factor <= 0:
            raise UserError(f"RoPE scaling: factor is {self.factor}, wants a number above 0")
        if self.kind == "llama3" and not (0 < self.low_freq_factor < self.high_freq_factor and self.original_context):
            raise UserError(
                f"RoPE scaling llama3: low_freq_factor {self.low_freq_factor}, high_freq_factor "
                f"{self.high_freq_factor}, original_context {self.original_context}; wants 0 < low < high and a context"
            )

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_context * frequencies / (2 * np.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = np.clip(share, 0.0, 1.0)
        return (1 - share) * frequencies / self.factor + share * frequencies


class RoPE(Op):
    """Rotate each pair (x_i, x_{i + D/2}) of a head by the angle t * f_i, t the position, f_i = theta^(-2i/D)

        y_i         = x_i cos - x_{i+D/2} sin
        y_{i+D/2}   = x_{i+D/2} cos + x_i sin

    x: (B, T, H, D), D even; the first `rotated` heads are rotated, the rest (values, in a packed qkv) copied. Positions
    are offset .. offset+T-1. Halves are split as in Hugging Face's Llama. Saves only the positions: backward rotates by
    -angle. `out=x` works in place. scaling: scales f for long contexts.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """

    kernels = (rope, linear_rope_fwd)

    def __init__(
        self,
        head_dim: int,
        positions: int,
        rotated: int,
        backend: Backend,
        theta: float = 10000.0,
        name: str = "",
        *,
        scaling: RopeScaling | None = None,
    ) -> None:
        super().__init__(backend, name)
        if head_dim % 2:
            raise ValueError(f"RoPE: head_dim is {head_dim}, wants an even number: it turns pairs")
        self.rotated = rotated
        shape = (positions, head_dim // 2)

        def angle() -> np.ndarray:
            frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
            if scaling is not None:
                frequencies = scaling.apply(frequencies)
            return np.arange(positions)[:, None] * frequencies

        self.cos = backend.table(shape, lambda: np.cos(angle()))
        self.sin = backend.table(shape, lambda: np.sin(angle()))
        self.minus_sin = backend.table(shape, lambda: -np.sin(angle()))

    def forward(self, x: Array, stash: Stash | None = None, *, offset: int = 0, out: Array | None = None) -> Array:
        rows = slice(offset, offset + x.shape[1])
        if stash is not None:
            stash.push(self, rows)
        return self.k.rope(out, x, self.cos[rows], self.sin[rows], self.rotated)

    def after(self, linear: Any, x: Array, stash: Stash | None = None, *, offset: int = 0) -> Array:
        """forward(linear.forward(x)), x: (B, T, C), by one kernel if there is one for both. A linear map with a bias,
        one in FP8, or an adapter in its place, runs by itself."""
        dim = 2 * self.cos.shape[1]
        if type(linear) is not Linear or linear.bias is not None:
            y = linear.forward(x, stash=stash)
            y = y.reshape(*y.shape[:2], -1, dim)
            return self.forward(y, stash, offset=offset, out=y)
        linear.keep(x, stash, None)
        rows = slice(offset, offset + x.shape[1])
        if stash is not None:
            stash.push(self, rows)
        return self.k.linear_rope_fwd(x, linear.weight.value, self.cos[rows], self.sin[rows], self.rotated)

    def backward(self, dy: Array, stash: Stash, *, out: Array | None = None) -> Array:
        return self.k.rope(out, dy, *self.turn_back(stash))

    def turn_back(self, stash: Stash) -> tuple[Array, Array, int]:
        """The cosines and sines of backward, and how many heads are rotated, for an op that does it in its place."""
        (rows,) = stash.pop(self)
        return self.cos[rows], self.minus_sin[rows], self.rotated

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for (b, t, h, d), rotated in (((2, 5, 3, 8), 2), ((1, 1, 1, 2), 1), ((3, 7, 2, 6), 2), ((1, 0, 2, 4), 1)):
            yield cls(d, 16, rotated, backend, theta=100.0), (backend.asarray(rng.normal(size=(b, t, h, d))),)
        scaling = RopeScaling("llama3", 8.0, original_context=32)
        yield cls(8, 16, 2, backend, theta=100.0, scaling=scaling), (backend.asarray(rng.normal(size=(2, 5, 3, 8))),)
