"""A mixture of experts: many feed-forward layers, of which each token passes through a few.

Nothing is dropped or padded. Each of a token's k choices is a row; a stable counting sort brings the rows of one expert
together, and a grouped product multiplies each expert's rows by that expert's matrix. The number of rows, tokens times
k, is known without looking at the choices; only where each expert's rows end is data, which stays on the device.

    token n, choice j   slot n k + j    slots[r]: the slot of row r     places[n, j]: the row of slot n k + j
    rows of expert e    starts[e] to starts[e + 1]                      tokens[r]: the token of row r, slots[r] // k
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.linear import Linear
from tinyforge.ops.router import TopKRouter
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.params import with_buffer

INT = np.dtype(np.int32)


@kernel
def sort_by_expert(chosen: Array, experts: int) -> tuple[Array, Array, Array, Array]:
    """chosen: (..., k) to slots and tokens (R,), places (N, k), starts (E + 1,), all int32."""
    flat, active = chosen.reshape(-1), chosen.shape[-1]
    slots = np.argsort(flat, kind="stable").astype(INT)
    places = np.empty_like(slots)
    places[slots] = np.arange(len(slots), dtype=INT)
    starts = np.append(0, np.bincount(flat, minlength=experts).cumsum()).astype(INT)
    return slots, slots // active, places.reshape(-1, active), starts


@sort_by_expert.on("meta")
def sort_by_expert_memory(chosen: Array, experts: int) -> tuple[Array, Array, Array, Array]:
    rows, active = chosen.size, chosen.shape[-1]
    return empty((rows,), INT), empty((rows,), INT), empty((rows // active, active), INT), empty((experts + 1,), INT)


# The products of rows with their expert's matrix. With tokens, row r is x[tokens[r]]; the CUDA kernels fetch it there
# and never make a gathered copy. tokens is None if x is in the order of the rows already.


@kernel
def grouped_fwd(x: Array, weight: Array, tokens: Array | None, starts: Array) -> Array:
    """y_r = W_e x_r for the rows r of expert e. weight: (E, O, I); y: (R, O)."""
    y = np.empty((len(x) if tokens is None else len(tokens), weight.shape[1]), x.dtype)
    for e, rows in _groups(starts):
        np.matmul(_rows(x, tokens, rows), weight[e].T, out=y[rows])
    return y


@grouped_fwd.on("meta")
def grouped_fwd_memory(x: Array, weight: Array, tokens: Array | None) -> Array:
    return empty((len(x) if tokens is None else len(tokens), weight.shape[1]), x.dtype)


@kernel
def grouped_bwd_input(dy: Array, weight: Array, tokens: Array | None, starts: Array) -> Array:
    """dx_r = W_e^T dy_r for the rows r of expert e. weight: (E, O, I); dx: (R, I)."""
    dx = np.empty((len(dy) if tokens is None else len(tokens), weight.shape[2]), dy.dtype)
    for e, rows in _groups(starts):
        np.matmul(_rows(dy, tokens, rows), weight[e], out=dx[rows])
    return dx


@grouped_bwd_input.on("meta")
def grouped_bwd_input_memory(dy: Array, weight: Array, tokens: Array | None) -> Array:
    return empty((len(dy) if tokens is None else len(tokens), weight.shape[2]), dy.dtype)


@kernel
def grouped_bwd_weight(
    dweight: Array, dy: Array, x: Array, dy_tokens: Array | None, x_tokens: Array | None, starts: Array
) -> None:
    """dW_e += the sum over the rows r of expert e of dy_r x_r^T. dweight: (E, O, I)."""
    for e, rows in _groups(starts):
        dweight[e] += _rows(dy, dy_tokens, rows).T @ _rows(x, x_tokens, rows)


def _groups(starts: Array) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and their rows."""
    for e, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        if stop > start:
            yield e, slice(start, stop)


def _rows(x: Array, tokens: Array | None, rows: slice) -> Array:
    return x[rows] if tokens is None else x[tokens[rows]]


@kernel
def weighted_swiglu_fwd(gu: Array, weights: Array, slots: Array) -> Array:
    """h_r = w_r swiglu(gu_r), w_r = weights[slots[r]]. gu: (R, 2H); weights: (..., k); h: (R, H)."""
    hidden = swiglu_fwd(gu)
    hidden *= weights.reshape(-1)[slots, None]
    return hidden


weighted_swiglu_fwd.on("meta")(lambda gu: empty((len(gu), gu.shape[1] // 2), gu.dtype))


@kernel
def weighted_swiglu_bwd(dh: Array, gu: Array, weights: Array, slots: Array) -> tuple[Array, Array, Array]:
    """dgu, h again, and dweights: (..., k)."""
    w = weights.reshape(-1)[slots, None]
    hidden = np.empty(dh.shape, gu.dtype)
    dgu = swiglu_bwd(hidden, dh * w, gu)
    dweights = np.empty_like(weights)
    dweights.reshape(-1)[slots] = (dh * hidden).sum(axis=-1)
    hidden *= w
    return dgu, hidden, dweights


@weighted_swiglu_bwd.on("meta")
def weighted_swiglu_bwd_memory(dh: Array, gu: Array, weights: Array) -> tuple[Array, Array, Array]:
    return empty(gu.shape, gu.dtype), empty(dh.shape, gu.dtype), empty(weights.shape, wide(gu.dtype))


@kernel
def sum_of_rows(rows: Array, places: Array, more: Array | None) -> Array:
    """y_n = the sum of the rows of token n, plus row n of `more` if that is given. rows: (R, C); y: (N, C)."""
    y = rows[places[:, 0]]
    for j in range(1, places.shape[1]):
        y += rows[places[:, j]]
    if more is not None:
        y += more
    return y


sum_of_rows.on("meta")(lambda rows, places: empty((len(places), rows.shape[1]), rows.dtype))


class MixtureOfExperts(Op):
    """y_n = sum over the k experts e that token n chooses of w_ne D_e swiglu(G_e x_n),  w from TopKRouter(x_n R^T)

    x, y: (..., C). R, the gate: (E, C); G, gate_up: (E, 2H, C); D, down: (E, C, H). Returns y, the router's usage
    (E + 1,), and starts (E + 1,) int32: where each expert's rows begin. Usage and starts are for `RouterLosses`.

    The weight multiplies the input of D_e, not its output: the result is the same, and the output rows of D_e need not
    be kept for the gradient of the weight. Saves x, the choices, and G_e x of every row; h = w swiglu(G x) is
    recomputed. backward, over the rows r of token n and expert e:

        dh_r = D_e^T dy_n,   dw_r = dh_r . swiglu(gu_r),   dgu_r = w_r swiglu_bwd(dh_r, gu_r)
        dD_e += dy_n h_r^T,   dG_e += dgu_r x_n^T,   dx_n = sum over its rows of G_e^T dgu_r, and the gate's own

    Sources: Jiang et al., "Mixtral of Experts" (2024); Gale et al., "MegaBlocks" (2022), for not dropping tokens.
    """

    sort = sort_by_expert
    product = grouped_fwd
    product_bwd_input = grouped_bwd_input
    product_bwd_weight = grouped_bwd_weight
    swiglu = weighted_swiglu_fwd
    swiglu_bwd = weighted_swiglu_bwd
    sum_rows = sum_of_rows

    def __init__(
        self,
        gate: Param,
        gate_up: Param,
        down: Param,
        active: int,
        backend: Backend,
        name: str = "",
        *,
        normalised: bool = True,
        gate_bias: Param | None = None,
    ) -> None:
        super().__init__(backend, name)
        self.gate = Linear(gate, backend, f"{self.name}.gate", bias=gate_bias)
        self.router = TopKRouter(active, backend, f"{self.name}.router", normalised=normalised)
        self.gate_up, self.down = gate_up, down

    def params(self) -> list[Param]:
        return [*self.gate.params(), self.gate_up, self.down]

    def forward(self, x: Array, stash: Stash | None = None) -> tuple[Array, Array, Array]:
        logits = self.gate.forward(x, stash)  # (..., E)
        weights, chosen, usage = self.router.forward(logits, stash)  # (..., k)
        slots, tokens, places, starts = self.sort(chosen, self.gate_up.shape[0])
        gu = self.product(x.reshape(-1, x.shape[-1]), self.gate_up.value, tokens, starts)  # (R, 2H)
        self.save(stash, x, gu, weights, slots, tokens, places, starts)
        h = self.activate(gu, weights, slots, starts)  # (R, H)
        rows = self.product(h, self.down.value, None, starts)  # (R, C)
        self.finish(rows, weights, slots, starts)
        return self.sum_rows(rows, places, None).reshape(x.shape), usage, starts

    def activate(self, gu: Array, weights: Array, slots: Array, starts: Array) -> Array:
        """w swiglu(gu): what down multiplies."""
        return self.swiglu(gu, weights, slots)

    def activate_bwd(
        self, dh: Array, gu: Array, weights: Array, slots: Array, starts: Array
    ) -> tuple[Array, Array, Array]:
        """dgu, what `activate` returned, and dweights."""
        return self.swiglu_bwd(dh, gu, weights, slots)

    def finish(self, rows: Array, weights: Array, slots: Array, starts: Array) -> None:
        """What else is done to down's rows, in place: see `BiasedExperts`."""

    def finish_bwd(
        self, dweights: Array, dy: Array, weights: Array, slots: Array, tokens: Array, starts: Array
    ) -> None:
        """The gradients of that. dy: (N, C)."""

    def backward(self, dy: tuple[Array, Array, Any], stash: Stash) -> Array:
        up, dusage, _ = dy
        dy_rows = up.reshape(-1, up.shape[-1])  # (N, C)
        x, gu, weights, slots, tokens, places, starts = stash.pop(self)
        dh = self.product_bwd_input(dy_rows, self.down.value, tokens, starts)  # (R, H)
        dgu, h, dweights = self.activate_bwd(dh, gu, weights, slots, starts)  # (R, 2H), (R, H), (..., k)
        self.finish_bwd(dweights, dy_rows, weights, slots, tokens, starts)
        if self.down.grad is not None:  # None: frozen
            self.product_bwd_weight(self.down.grad, dy_rows, h, tokens, None, starts)
        if self.gate_up.grad is not None:
            self.product_bwd_weight(self.gate_up.grad, dgu, x.reshape(dy_rows.shape), None, tokens, starts)
        rows = self.product_bwd_input(dgu, self.gate_up.value, None, starts)  # (R, C)
        dlogits = self.router.backward((dweights, None, dusage), stash)
        dx = self.gate.backward(dlogits, stash)
        return self.sum_rows(rows, places, dx.reshape(dy_rows.shape)).reshape(up.shape)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        # Experts without a row, all of them chosen, one alone, more experts than rows, no token.
        for lead, c, h, experts, active in (
            ((2, 5), 6, 4, 5, 2),
            ((3,), 4, 2, 2, 2),
            ((7,), 3, 5, 1, 1),
            ((2, 2), 2, 1, 13, 3),
            ((0,), 3, 2, 4, 2),
        ):
            gate, gate_up = Param("gate", (experts, c), std=1.0), Param("gate_up", (experts, 2 * h, c), std=1.0)
            op = cls(gate, gate_up, Param("down", (experts, c, h), std=1.0), active, backend)
            yield with_buffer(op, backend, rng), (backend.asarray(rng.normal(size=(*lead, c))),)
