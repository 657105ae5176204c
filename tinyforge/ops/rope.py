"""Rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty, like
from tinyforge.errors import UserError
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Stash
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


rope.on("meta")(lambda out, x: like(x) if out is None else out)


@kernel
def linear_rope_fwd(x: Array, weight: Array, cos: Array, sin: Array, rotated: int) -> Array:
    """rope(x W^T). x: (B, T, C); y: (B, T, H, D)."""
    y = linear_fwd(x, weight, None).reshape(*x.shape[:2], -1, 2 * cos.shape[1])
    return rope(y, y, cos, sin, rotated)


@linear_rope_fwd.on("meta")
def linear_rope_fwd_memory(x: Array, weight: Array, cos: Array) -> Array:
    return empty((*x.shape[:2], weight.shape[0] // (2 * cos.shape[1]), 2 * cos.shape[1]), x.dtype)


SCALINGS = ("linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies f = theta^(-2i/D) are scaled for a context longer than that of training.

    linear: f / factor, as if positions lay closer (Chen et al., "Extending Context Window of Large Language Models via
    Positional Interpolation", 2023).
    llama3: by the turns r = original_context f / 2 pi that a pair makes over the original context: f if r is above
    high_freq_factor, f / factor if it is below low_freq_factor, and between them (1 - s) f / factor + s f with
    s = (r - low_freq_factor) / (high_freq_factor - low_freq_factor) (Llama 3.1, its published `apply_scaling`, 2024).
    yarn: likewise, but between them s falls linearly with the number of the pair, and the angles' cosines and sines are
    multiplied by `attention`, by default 1 + 0.1 log(factor) (Peng et al., "YaRN", 2023).
    dynamic: theta grows so that the slowest pair's f is divided by factor n - (factor - 1), n = context /
    original_context; nothing changes up to n = 1. Here n is the model's context, not the length of each text.
    longrope: f / short[i], or f / long[i] for a context above the original; the angles as in yarn, by default with
    sqrt(1 + log(factor) / log(original_context)) (Ding et al., "LongRoPE", 2024).

    truncate: in yarn, whole numbers of pairs as bounds, as published.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    attention: float = 0.0
    context: int = 0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise UserError(f"RoPE scaling {self.kind!r} is unknown; use {', '.join(SCALINGS)}, or none at all")
        if self.factor <= 0:
            raise UserError(f"RoPE scaling: factor is {self.factor}, expected a number above 0")
        ramp = self.kind in ("llama3", "yarn")
        if ramp and not (0 < self.low_freq_factor < self.high_freq_factor and self.original_context):
            raise UserError(
                f"RoPE scaling {self.kind}: low_freq_factor {self.low_freq_factor}, high_freq_factor "
                f"{self.high_freq_factor}, original_context {self.original_context}; expected 0 < "
                f"low < high and a context"
            )
        if self.kind == "longrope" and not all(value > 0 for value in (*self.short, *self.long)):
            raise UserError("RoPE scaling longrope: a factor of 0 or less, expected numbers above 0")

    @property
    def magnitude(self) -> float:
        """By which cosines and sines are multiplied."""
        if self.kind not in ("yarn", "longrope") or self.attention:
            return self.attention or 1.0
        growth = math.log(max(self.factor, 1.0))
        return 1 + 0.1 * growth if self.kind == "yarn" else math.sqrt(1 + growth / math.log(self.original_context))

    def apply(self, frequencies: np.ndarray) -> np.ndarray:
        f, pairs = frequencies, np.arange(len(frequencies))
        if self.kind == "linear":
            return f / self.factor
        if self.kind == "dynamic":
            stretch = self.factor * max(self.context / self.original_context, 1.0) - (self.factor - 1)
            return f * stretch ** (-pairs / max(len(f) - 1, 1))
        if self.kind == "longrope":
            return f / np.array(self.long if self.context > self.original_context else self.short)
        turns = self.original_context * f / (2 * np.pi)
        if self.kind == "yarn":
            share = 1 - np.clip(self._ramp(turns, pairs), 0.0, 1.0)
        else:
            share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            share = np.clip(share, 0.0, 1.0)
        return (1 - share) * f / self.factor + share * f

    def _ramp(self, turns: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """0 at the pair with high_freq_factor turns, 1 at that with low_freq_factor. The turns fall by a constant
        factor from pair to pair."""
        fall = math.log(turns[0] / turns[1]) if len(turns) > 1 else 1.0
        low, high = (math.log(turns[0] / rate) / fall for rate in (self.high_freq_factor, self.low_freq_factor))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(pairs) - 1)
        return np.asarray((pairs - low) / (high - low or 0.001))


class GrowingTable:
    """The rows of an array in host memory, each computed when it, or one after it, is first read.

    make(first, last): the rows from `first` up to `last`.
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype, make: Callable[[int, int], np.ndarray]) -> None:
        self.shape, self._make = shape, make
        self._values = np.empty((0, shape[1]), dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> np.ndarray:
        rows = at if isinstance(at, slice) else slice(None)
        stop = rows.indices(len(self))[1]
        if stop > len(self._values):
            stop = min(len(self), max(stop, 2 * len(self._values), 256))
            new = self._make(len(self._values), stop).astype(self._values.dtype)
            self._values = np.concatenate([self._values, new])
        return self._values[at]


class _Tables:
    """The cosines and sines of RoPE's angles, (positions, D / 2)."""

    def __init__(
        self, head_dim: int, positions: int, backend: Backend, theta: float, scaling: RopeScaling | None, width: int
    ) -> None:
        self.backend = backend  # as long as it lives, no other has its id
        frequencies, magnitude = theta ** (-np.arange(0, width, 2) / width), 1.0
        if scaling is not None:
            frequencies, magnitude = scaling.apply(frequencies), scaling.magnitude
        still = np.zeros((head_dim - width) // 2)
        frequencies, magnitudes = np.append(frequencies, still), np.append(frequencies * 0 + magnitude, still + 1)

        def table(of: Callable[[np.ndarray], np.ndarray]) -> Any:
            def make(first: int, last: int) -> np.ndarray:
                return of(np.arange(first, last)[:, None] * frequencies) * magnitudes

            shape = (positions, head_dim // 2)
            if backend.name == "numpy":
                return GrowingTable(shape, backend.master_dtype, make)
            return backend.table(shape, lambda: make(0, positions))

        self.cos, self.sin, self.minus_sin = table(np.cos), table(np.sin), table(lambda angle: -np.sin(angle))


def rows_at(offset: Any, count: int) -> Any:
    """The rows of a table of positions: `count` from `offset` on, or those of an array of positions."""
    return slice(offset, offset + count) if isinstance(offset, int) else offset


_tables: WeakValueDictionary[Any, _Tables] = WeakValueDictionary()


class RoPE(Op):
    """Rotate each pair (x_i, x_{i + D/2}) of a head by the angle t * f_i, t the position, f_i = theta^(-2i/D)

        y_i         = x_i cos - x_{i+D/2} sin
        y_{i+D/2}   = x_{i+D/2} cos + x_i sin

    x: (B, T, H, D), D even; the first `rotated` heads are rotated, the rest (values, in a packed qkv) copied. Positions
    are offset .. offset+T-1, or `offset` itself if it is an array, (T,). Halves are split as in Hugging Face's Llama.
    Saves only the positions: backward rotates by -angle. `out=x` works in place. scaling: scales f for long contexts.
    width: R, if not 0 only the pairs i < R/2 are rotated, by f_i = theta^(-2i/R).

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).
    """

    rotate = rope
    linear_rotate = linear_rope_fwd

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
        width: int = 0,
    ) -> None:
        super().__init__(backend, name)
        width = width or head_dim
        if head_dim % 2 or width % 2 or not 0 < width <= head_dim:
            raise ValueError(f"RoPE: head_dim is {head_dim}, width {width}, expected even numbers: it turns pairs")
        self.rotated = rotated
        # A weak table: layers of one model share the angles, which of a long context are megabytes.
        key = (id(backend), positions, head_dim, theta, scaling, width)
        known = (head_dim, positions, backend, theta, scaling, width)
        self.tables = _tables.get(key) or _tables.setdefault(key, _Tables(*known))
        self.cos, self.sin, self.minus_sin = self.tables.cos, self.tables.sin, self.tables.minus_sin

    def forward(self, x: Array, stash: Stash | None = None, *, offset: Any = 0, out: Array | None = None) -> Array:
        self.expect(x, 2 * self.cos.shape[1])
        rows = rows_at(offset, x.shape[1])
        self.save(stash, rows)
        return self.rotate(out, x, self.cos[rows], self.sin[rows], self.rotated)

    def after(self, linear: Any, x: Array, stash: Stash | None = None, *, offset: Any = 0) -> Array:
        """forward(linear.forward(x)), x: (B, T, C), by one kernel if there is one for both. A linear map with a bias,
        one in FP8, or an adapter in its place, runs by itself."""
        dim = 2 * self.cos.shape[1]
        if type(linear) is not Linear or linear.bias is not None:
            y = linear.forward(x, stash=stash)
            y = y.reshape(*y.shape[:2], -1, dim)
            return self.forward(y, stash, offset=offset, out=y)
        linear.keep(x, stash, None)
        rows = rows_at(offset, x.shape[1])
        self.save(stash, rows)
        return self.linear_rotate(x, linear.weight.value, self.cos[rows], self.sin[rows], self.rotated)

    def backward(self, dy: Array, stash: Stash, *, out: Array | None = None) -> Array:
        return self.rotate(out, dy, *self.turn_back(stash))

    def turn_back(self, stash: Stash) -> tuple[Array, Array, int]:
        """The cosines and sines of backward, and how many heads are rotated, for an op that does it in its place."""
        (rows,) = stash.pop(self)
        return self.cos[rows], self.minus_sin[rows], self.rotated

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (b, t, h, d), rotated in (((2, 5, 3, 8), 2), ((1, 1, 1, 2), 1), ((3, 7, 2, 6), 2), ((1, 0, 2, 4), 1)):
            yield cls(d, 16, rotated, backend, theta=100.0), (backend.asarray(rng.normal(size=(b, t, h, d))),)
        yield cls(8, 16, 2, backend, theta=100.0, width=6), (backend.asarray(rng.normal(size=(2, 5, 3, 8))),)
        scaling = RopeScaling("yarn", 8.0, 1.0, 4.0, original_context=32)
        yield cls(8, 16, 2, backend, theta=100.0, scaling=scaling), (backend.asarray(rng.normal(size=(2, 5, 3, 8))),)
        scaling = RopeScaling("llama3", 8.0, original_context=32)
        yield cls(8, 16, 2, backend, theta=100.0, scaling=scaling), (backend.asarray(rng.normal(size=(2, 5, 3, 8))),)
