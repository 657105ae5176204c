"""One layer of long short-term memory (LSTM)."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash, WithKeywords
from tinyforge.ops.linear import linear_bwd, linear_fwd
from tinyforge.ops.sigmoid import sigmoid
from tinyforge.params import with_buffer


@kernel
def lstm_fwd(gates: Array, h: Array, c: Array, weight: Array, fresh: Array | None) -> tuple[Array, Array]:
    """Returns y and the cells, (B, T, H) each. gates: (B, T, 4 H), W x + b, overwritten with activated i, f, g, o."""
    batch, length, four = gates.shape
    width = four // 4
    y, cells = np.empty((2, batch, length, width), gates.dtype)
    for t in range(length):
        if fresh is not None:
            stays = (fresh[:, t, None] == 0).astype(gates.dtype)
            h, c = h * stays, c * stays
        now = gates[:, t]
        now += h @ weight.T
        g = np.tanh(now[:, 2 * width : 3 * width])
        now[...] = sigmoid(now)
        now[:, 2 * width : 3 * width] = g
        i, f, g, o = np.split(now, 4, axis=1)
        c = np.multiply(f, c, out=cells[:, t])
        c += i * g
        h = np.multiply(o, np.tanh(c), out=y[:, t])
    return y, cells


@lstm_fwd.on("meta")
def lstm_fwd_memory(gates: Array, h: Array) -> tuple[Array, Array]:
    shape = (*gates.shape[:2], h.shape[1])
    return empty(shape, gates.dtype), empty(shape, gates.dtype)


@kernel
def lstm_bwd(
    dweight: Array | None,
    dy: Array,
    dc: Array | None,
    gates: Array,
    y: Array,
    cells: Array,
    h: Array,
    c: Array,
    weight: Array,
    fresh: Array | None,
) -> tuple[Array, Array, Array]:
    """The gradients of the gates before activation, (B, T, 4 H), and of h and c, the state before the first position.
    dc: of the last cell, None for 0."""
    batch, length, width = y.shape
    dgates = np.empty_like(gates)
    dh, dc = np.zeros((batch, width), y.dtype), np.zeros((batch, width), y.dtype) if dc is None else dc
    before = np.concatenate([h[:, None], y[:, :-1]], axis=1)  # each position's h[t-1]
    if fresh is not None:
        before *= (fresh == 0)[..., None]
    for t in reversed(range(length)):
        i, f, g, o = np.split(gates[:, t], 4, axis=1)
        up, squashed = dy[:, t] + dh, np.tanh(cells[:, t])
        dc = dc + up * o * (1 - squashed * squashed)
        last = cells[:, t - 1] if t else c
        stays = 1 if fresh is None else (fresh[:, t, None] == 0).astype(y.dtype)
        of_i, of_f, of_g = dc * g * i * (1 - i), dc * last * stays * f * (1 - f), dc * i * (1 - g * g)
        now = np.concatenate([of_i, of_f, of_g, up * squashed * o * (1 - o)], axis=1, out=dgates[:, t])
        dc = dc * f * stays
        dh = now @ weight * stays
    if dweight is not None:
        rows = batch * length
        dweight += dgates.reshape(rows, 4 * width).T @ before.reshape(rows, width)
    return dgates, dh, dc


@lstm_bwd.on("meta")
def lstm_bwd_memory(gates: Array, y: Array, h: Array, c: Array) -> tuple[Array, Array, Array]:
    _before = empty(y.shape, y.dtype)
    return empty(gates.shape, y.dtype), empty(h.shape, y.dtype), empty(c.shape, y.dtype)


class LSTM(Op):
    """h[t] = o tanh(c[t]),   c[t] = f c[t-1] + i g,   with i, f, o = sigmoid and g = tanh of
    W x[t] + U h[t-1] + b, (4 H,) in the order i, f, g, o; all products of vectors elementwise

    x: (B, T, I); h, c: (B, H), the state before the first position; W: (4 H, I); U: (4 H, H); b: (4 H,). Returns y,
    (B, T, H), every h[t], and the last c, (B, H). fresh: (B, T) integers; where it is not 0 a text begins, and h[t-1]
    and c[t-1] count as 0. PyTorch's LSTM has two biases; b is their sum.

    W x + b of all positions is one product, before the loop over time. Saves x, h, c, y, and i, f, g, o and c[t] of
    every position. backward, from the last t down, with dh, dc the gradients of h[t], c[t] from y and position t + 1:
        dc += dh o (1 - tanh(c)^2)
        di' = dc g i (1 - i),  df' = dc c[t-1] f (1 - f),  dg' = dc i (1 - g^2),  do' = dh tanh(c) o (1 - o)
        dc[t-1] = dc f,   dh[t-1] = d' U,   with d' = (di', df', dg', do')
    then, over all positions at once, dW += d'^T x,  dU += d'^T h[t-1],  db += sum of d',  dx = d' W.
    backward's dy is (dy, dc); dc None for 0.

    Sources: Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997); the forget gate: Gers et al., "Learning to
    Forget" (2000).
    """

    gates_fwd = linear_fwd
    gates_bwd = linear_bwd
    fwd = lstm_fwd
    bwd = lstm_bwd

    def __init__(self, inputs: Param, recurrent: Param, bias: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.inputs, self.recurrent, self.bias = inputs, recurrent, bias

    def forward(
        self, x: Array, h: Array, c: Array, fresh: Array | None = None, stash: Stash | None = None
    ) -> tuple[Array, Array]:
        self.expect(x, self.inputs.shape[1])
        for state in (h, c):
            self.expect(state, shape=(x.shape[0], self.recurrent.shape[1]))
        gates = self.gates_fwd(x, self.inputs.value, self.bias.value)
        y, cells = self.fwd(gates, h, c, self.recurrent.value, fresh)
        self.save(stash, x, h, c, gates, y, cells, fresh)
        return y, cells[:, -1]

    def backward(self, dy: tuple[Array, Array | None], stash: Stash) -> tuple[Array, Array, Array, None]:
        x, h, c, gates, y, cells, fresh = stash.pop(self)
        up, dc = dy
        dgates, dh, dc = self.bwd(self.recurrent.grad, up, dc, gates, y, cells, h, c, self.recurrent.value, fresh)
        return self.gates_bwd(self.inputs.grad, self.bias.grad, dgates, x, self.inputs.value), dh, dc, None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for batch, length, size, width in ((2, 5, 3, 4), (1, 1, 1, 1), (3, 9, 7, 5), (0, 2, 3, 2)):
            shapes = (4 * width, size), (4 * width, width), (4 * width,)
            inputs, recurrent, bias = map(Param, ("inputs", "recurrent", "bias"), shapes)
            op = with_buffer(cls(inputs, recurrent, bias, backend), backend, rng)
            sizes = (batch, length, size), (batch, width), (batch, width)
            fresh = rng.random((batch, length)) < (0.3 if length > 1 else 0)
            given = *(backend.asarray(rng.normal(size=shape)) for shape in sizes), backend.asarray(fresh)
            yield op, given
            yield WithKeywords(op, fresh=lambda given: None), given
