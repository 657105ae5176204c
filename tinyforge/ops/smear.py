"""A gated share of the previous token's row, added to each token's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty, like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash, WithKeywords
from tinyforge.ops.sigmoid import sigmoid
from tinyforge.params import with_buffer


def before(x: Array, starts: Array | None, previous: Array | None) -> Array:
    """The row before each, (B, T, C), 0 where a text or a document begins."""
    rows = np.zeros_like(x)
    rows[:, 1:] = x[:, :-1]
    if previous is not None and x.shape[1]:
        rows[:, 0] = previous
    if starts is not None:
        rows[starts == np.arange(x.shape[1])] = 0
    return rows


@kernel
def smear_fwd(x: Array, gate: Array, scale: Array, starts: Array | None, previous: Array | None) -> tuple[Array, Array]:
    """y, and s(w . x), (B, T)."""
    shares = sigmoid(x[..., : len(gate)] @ gate)
    return x + scale * shares[..., None] * before(x, starts, previous), shares


smear_fwd.on("meta")(lambda x: (like(x), empty(x.shape[:2], wide(x.dtype))))


@kernel
def smear_bwd(
    dgate: Array | None,
    dscale: Array | None,
    dy: Array,
    x: Array,
    shares: Array,
    gate: Array,
    scale: Array,
    starts: Any,
) -> Array:
    along = np.vecdot(dy, before(x, starts, None))
    slope = along * scale * shares * (1 - shares)
    if dgate is not None:
        dgate += slope.reshape(-1) @ x[..., : len(gate)].reshape(-1, len(gate))
    if dscale is not None:
        dscale += np.vdot(along, shares)
    passed = dy * (scale * shares)[..., None]
    if starts is not None:
        passed[starts == np.arange(x.shape[1])] = 0
    dx = dy.copy()
    dx[:, :-1] += passed[:, 1:]
    dx[..., : len(gate)] += slope[..., None] * gate
    return dx


@smear_bwd.on("meta")
def smear_bwd_memory(dy: Array, shares: Array) -> Array:
    _slopes = empty((2, *shares.shape), shares.dtype)
    return like(dy)


class Smear(Op):
    """y_t = x_t + a s(w . x_t) x_{t-1},  s(z) = 1 / (1 + exp(-z))

    x, y: (B, T, C); w, `gate`: (channels,), reads the first channels; a, `scale`: (1,). Nothing is added where a text
    begins, or by `starts`, (B, T), a document; with `previous`, (B, C), a text goes on. Saves x and s, (B, T).

    backward, with c_t = dy_t . x_{t-1} and dz_t = c_t a s_t (1 - s_t):
        dx_t = dy_t + a s_{t+1} dy_{t+1} + dz_t w,   dw += sum of dz_t x_t,   da += sum of c_t s_t

    Sources: modded-nanogpt (Jordan et al., 2024); for keys, Elhage et al., "In-context Learning and Induction Heads"
    (2022).
    """

    fwd = smear_fwd
    bwd = smear_bwd

    def __init__(self, gate: Param, scale: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.gate, self.scale = gate, scale

    def forward(
        self, x: Array, stash: Stash | None = None, *, starts: Array | None = None, previous: Array | None = None
    ) -> Array:
        self.expect(x)
        if x.ndim != 3 or x.shape[2] < self.gate.size:
            raise ValueError(f"{self.name}: an input of shape {x.shape}, expected (B, T, {self.gate.size} or more)")
        y, shares = self.fwd(x, self.gate.value, self.scale.value, starts, previous)
        self.save(stash, x, shares, starts)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        x, shares, starts = stash.pop(self)
        return self.bwd(self.gate.grad, self.scale.grad, dy, x, shares, self.gate.value, self.scale.value, starts)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for shape, reads in (((2, 5, 8), 3), ((1, 1, 2), 2), ((2, 7, 5), 5), ((1, 0, 4), 1), ((1, 3, 70), 40)):
            gate, scale = Param("gate", (reads,), std=1.0), Param("scale", (1,), fill=0.7, decay=False)
            op = with_buffer(cls(gate, scale, backend), backend, rng)
            x = backend.asarray(rng.normal(size=shape))
            if shape[1] != 7:
                yield op, (x,)
                continue
            starts = np.array([[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]])
            yield WithKeywords(op, starts=lambda given: given), (x, backend.asarray(starts))
