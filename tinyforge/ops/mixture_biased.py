"""Experts with biases and a clamped SwiGLU: those of gpt-oss."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Param
from tinyforge.ops.mixture import MixtureOfExperts, weighted_swiglu_bwd_memory
from tinyforge.ops.sigmoid import sigmoid
from tinyforge.params import with_buffer

ALPHA = 1.702
"""Of the gate: x s(ALPHA x) is close to GELU."""


def _experts(starts: Array) -> Array:
    """The expert of each row, (R,)."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def _clamped(gu: Array, bias: Array, starts: Array, limit: float) -> tuple[Array, Array, Array, Array]:
    """The gate and 1 + up after the clamp, and where it lets a gradient through."""
    biased = gu + bias[_experts(starts)]
    gate, up = biased[:, ::2], biased[:, 1::2]
    return np.minimum(gate, limit), np.clip(up, -limit, limit) + 1, gate <= limit, np.abs(up) <= limit


@kernel
def clamped_swiglu_fwd(gu: Array, bias: Array, weights: Array, slots: Array, starts: Array, limit: float) -> Array:
    """h_r = w_r g s(1.702 g) (1 + u). gu: (R, 2H), bias: (E, 2H), g and u in turn; weights: (..., k); h: (R, H)."""
    gate, up, *_ = _clamped(gu, bias, starts, limit)
    hidden = sigmoid(ALPHA * gate)
    hidden *= gate
    hidden *= up
    hidden *= weights.reshape(-1)[slots, None]
    return hidden


clamped_swiglu_fwd.on("meta")(lambda gu: empty((len(gu), gu.shape[1] // 2), gu.dtype))


@kernel
def clamped_swiglu_bwd(
    dh: Array, gu: Array, bias: Array, weights: Array, slots: Array, starts: Array, limit: float
) -> tuple[Array, Array, Array]:
    """dgu, h again, and dweights: (..., k)."""
    gate, up, gate_on, up_on = _clamped(gu, bias, starts, limit)
    w = weights.reshape(-1)[slots, None]
    s = sigmoid(ALPHA * gate)
    hidden, dgu, upstream = gate * s * up, np.empty(gu.shape, gu.dtype), dh * w
    dgu[:, ::2] = upstream * up * (s + ALPHA * gate * s * (1 - s)) * gate_on
    dgu[:, 1::2] = upstream * gate * s * up_on
    dweights = np.empty_like(weights)
    dweights.reshape(-1)[slots] = (dh * hidden).sum(axis=-1)
    hidden *= w
    return dgu, hidden, dweights


clamped_swiglu_bwd.on("meta")(weighted_swiglu_bwd_memory)


@kernel
def expert_bias_fwd(rows: Array, bias: Array, weights: Array, slots: Array, starts: Array) -> None:
    """rows_r += w_r b_e, in place. rows: (R, C); bias: (E, C)."""
    rows += weights.reshape(-1)[slots, None] * bias[_experts(starts)]


@kernel
def expert_bias_bwd(dweights: Array, dy: Array, bias: Array, slots: Array, tokens: Array, starts: Array) -> None:
    """dw_r += dy_n . b_e, n the row's token. dy: (N, C)."""
    dweights.reshape(-1)[slots] += np.vecdot(dy[tokens], bias[_experts(starts)])


@kernel
def sum_by_expert(
    dbias: Array, x: Array, tokens: Array | None, weights: Array | None, slots: Array, starts: Array
) -> None:
    """db_e += the sum over its rows r of x_r, or of w_r x_n. dbias: (E, C); with tokens, row r is x[tokens[r]]."""
    rows = x if tokens is None else x[tokens]
    if weights is not None:
        rows = rows * weights.reshape(-1)[slots, None]
    for e, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        dbias[e] += rows[start:stop].sum(axis=0)


class BiasedExperts(MixtureOfExperts):
    """y_n = sum over the k experts e that token n chooses of w_ne (D_e f(G_e x_n + g_e) + d_e),  w from x_n R^T + r

    f(g, u) = c s(1.702 c) (1 + min(max(u, -limit), limit)),  c = min(g, limit);  g and u are in turn the rows of G_e

    x, y, R, G, D, and what is returned, as in MixtureOfExperts; r: (E,); g, gate_up_bias: (E, 2H); d, down_bias:
    (E, C). Saves the same. backward, besides: dg_e += the sum of dgu over its rows, dd_e += that of w dy_n,
    dw += dy_n . d_e; nothing passes where the clamp holds.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025).
    """

    clamped = clamped_swiglu_fwd
    clamped_bwd = clamped_swiglu_bwd
    add_bias = expert_bias_fwd
    add_bias_bwd = expert_bias_bwd
    sum_rows_of = sum_by_expert

    def __init__(
        self,
        gate: tuple[Param, Param],
        gate_up: tuple[Param, Param],
        down: tuple[Param, Param],
        active: int,
        backend: Backend,
        name: str = "",
        *,
        limit: float,
        normalised: bool = True,
    ) -> None:
        """gate, gate_up, down: a matrix and its bias each."""
        maps = gate[0], gate_up[0], down[0]
        super().__init__(*maps, active, backend, name, normalised=normalised, gate_bias=gate[1])
        self.gate_up_bias, self.down_bias, self.limit = gate_up[1], down[1], limit

    def params(self) -> list[Param]:
        return [*super().params(), self.gate_up_bias, self.down_bias]

    def activate(self, gu: Array, weights: Array, slots: Array, starts: Array) -> Array:
        return self.clamped(gu, self.gate_up_bias.value, weights, slots, starts, self.limit)

    def activate_bwd(
        self, dh: Array, gu: Array, weights: Array, slots: Array, starts: Array
    ) -> tuple[Array, Array, Array]:
        found = self.clamped_bwd(dh, gu, self.gate_up_bias.value, weights, slots, starts, self.limit)
        if not self.gate_up_bias.frozen:
            self.sum_rows_of(self.gate_up_bias.grad, found[0], None, None, slots, starts)
        return found

    def finish(self, rows: Array, weights: Array, slots: Array, starts: Array) -> None:
        self.add_bias(rows, self.down_bias.value, weights, slots, starts)

    def finish_bwd(
        self, dweights: Array, dy: Array, weights: Array, slots: Array, tokens: Array, starts: Array
    ) -> None:
        self.add_bias_bwd(dweights, dy, self.down_bias.value, slots, tokens, starts)
        if not self.down_bias.frozen:
            self.sum_rows_of(self.down_bias.grad, dy, tokens, weights, slots, starts)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # A clamp that holds for some, or for none; experts without a row; no token.
        for lead, c, h, experts, active, limit in (
            ((2, 5), 6, 4, 5, 2, 1.0),
            ((3,), 4, 2, 2, 2, 7.0),
            ((2, 2), 2, 1, 13, 3, 0.5),
            ((0,), 3, 2, 4, 2, 1.0),
        ):
            shapes = ((experts, c), (experts, 2 * h, c), (experts, c, h))
            maps: list[tuple[Param, Param]] = []
            for name, shape in zip(("gate", "gate_up", "down"), shapes, strict=True):
                rows = (experts,) if name == "gate" else shape[:2]
                maps.append((Param(name, shape, std=1.0), Param(f"{name}_bias", rows, fill=0.0, decay=False)))
            op = cls(maps[0], maps[1], maps[2], active, backend, limit=limit)
            yield with_buffer(op, backend, rng), (backend.asarray(rng.normal(size=(*lead, c))),)
