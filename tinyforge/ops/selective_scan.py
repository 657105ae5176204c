"""The selective scan: a linear recurrence over time whose coefficients depend on the input."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend, wide
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.sigmoid import sigmoid, silu_slope
from tinyforge.params import with_buffer

TILE = 32
"""Positions between two states that forward keeps. Backward recomputes the states between them, a tile at a time."""

CHANNELS = 32
"""Channels per block of the CUDA kernels."""


def tiles(length: int) -> int:
    return -(-length // TILE)


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _states(h: Array, dt: Array, u: Array, b: Array, a: Array) -> tuple[Array, Array]:
    """The decays and the states of a tile, both (t, B, N, E), from the state before it, (B, N, E); a: (N, E).

    Time is the first axis, so that a step accesses contiguous memory, and channels are the last: inner loops are long.
    """
    decay = dt.swapaxes(0, 1)[:, :, None] * a
    np.exp(decay, out=decay)
    states = (dt * u).swapaxes(0, 1)[:, :, None] * b.swapaxes(0, 1)[..., None]
    for t in range(len(states)):
        states[t] += decay[t] * h
        h = states[t]
    return decay, states


@kernel
def selective_scan_fwd(
    state: Array | None,
    u: Array,
    delta: Array,
    b: Array,
    c: Array,
    z: Array,
    a_log: Array,
    skip: Array,
    bias: Array,
    keep: bool,
) -> tuple[Array, Array | None]:
    """Returns y, and with `keep` the states before each tile, (B, tiles, E, N).

    state: (B, E, N), before the first position; replaced by the state after the last one. None: zeros.
    """
    batch, length, _ = u.shape
    kept = np.empty((batch, tiles(length), *a_log.shape), u.dtype) if keep else None
    a, y = -np.exp(a_log.T), np.empty(u.shape, u.dtype)
    h = np.zeros((batch, *a.shape), u.dtype) if state is None else state.swapaxes(1, 2)
    for tile in range(tiles(length)):
        now = slice(tile * TILE, (tile + 1) * TILE)
        if kept is not None:
            kept[:, tile] = h.swapaxes(1, 2)
        _, states = _states(h, _softplus(delta[:, now] + bias), u[:, now], b[:, now], a)
        h = states[-1]
        y[:, now] = (c[:, now].swapaxes(0, 1)[:, :, None] @ states)[:, :, 0].swapaxes(0, 1)
    if state is not None:
        state[...] = h.swapaxes(1, 2)
    y += skip * u
    y *= z * sigmoid(z)
    return y, kept


@selective_scan_fwd.on("meta")
def selective_scan_fwd_memory(u: Array, a_log: Array, keep: bool) -> tuple[Array, Array | None]:
    kept = empty((len(u), tiles(u.shape[1]), *a_log.shape), wide(u.dtype)) if keep else None
    return empty(u.shape, u.dtype), kept


@kernel
def selective_scan_bwd(
    dz: Array | None,
    da_log: Array | None,
    dskip: Array | None,
    dbias: Array | None,
    dy: Array,
    u: Array,
    delta: Array,
    b: Array,
    c: Array,
    z: Array,
    a_log: Array,
    skip: Array,
    bias: Array,
    kept: Array,
) -> tuple[Array, Array, Array, Array, Array]:
    """Returns du, ddelta, db, dc, dz; dz is written into the first argument if that is given."""
    a, gate = -np.exp(a_log.T), sigmoid(z)  # (N, E)
    dout = dy * (z * gate)  # the gradient of y before the gate
    dzs = np.empty(z.shape, z.dtype) if dz is None else dz
    du, ddelta, db, dc = dout * skip, np.empty(u.shape, u.dtype), np.empty_like(b), np.empty_like(c)
    if dskip is not None:
        dskip += (dout * u).sum(axis=(0, 1))
    da = np.zeros(a.shape, a.dtype)
    ahead: Array = np.zeros((len(u), *a.shape), u.dtype)  # the state's gradient from later positions
    for tile in reversed(range(kept.shape[1])):
        now = slice(tile * TILE, (tile + 1) * TILE)
        raw, start = delta[:, now] + bias, kept[:, tile].swapaxes(1, 2)
        dt = _softplus(raw)
        decay, states = _states(start, dt, u[:, now], b[:, now], a)
        dts, us, ups, bs, cs = (x.swapaxes(0, 1) for x in (dt, u[:, now], dout[:, now], b[:, now], c[:, now]))
        inner = (cs[:, :, None] @ states)[:, :, 0].swapaxes(0, 1) + skip * u[:, now]
        dzs[:, now] = dy[:, now] * inner * silu_slope(z[:, now], gate[:, now])
        dc[:, now] = (states @ ups[..., None])[..., 0].swapaxes(0, 1)
        g = ups[:, :, None] * cs[..., None]  # becomes the gradient of each state
        for t in reversed(range(len(g))):
            g[t] += ahead
            ahead = decay[t] * g[t]
        # The decays become the gradient of their exponents, g h[t-1] exp(dt a).
        decay *= g
        decay[0] *= start
        decay[1:] *= states[:-1]
        dproduct = (bs[:, :, None] @ g)[:, :, 0]  # the gradient of dt u
        db[:, now] = (g @ (dts * us)[..., None])[..., 0].swapaxes(0, 1)
        ddt = np.einsum("tbne,ne->tbe", decay, a) + dproduct * us
        da += np.einsum("tbe,tbne->ne", dts, decay)
        du[:, now] += (dproduct * dts).swapaxes(0, 1)
        ddelta[:, now] = ddt.swapaxes(0, 1) * sigmoid(raw)
    if da_log is not None:
        da_log += (da * a).T
    if dbias is not None:
        dbias += ddelta.sum(axis=(0, 1))
    return du, ddelta, db, dc, dzs


@selective_scan_bwd.on("meta")
def selective_scan_bwd_memory(
    dz: Array | None, u: Array, b: Array, c: Array, z: Array, kept: Array
) -> tuple[Array, Array, Array, Array, Array]:
    # Each block of channels writes partial sums over its channels.
    _parts = empty((2, -(-u.shape[2] // CHANNELS), *b.shape), kept.dtype)
    du, ddelta = empty(u.shape, u.dtype), empty(u.shape, u.dtype)
    return du, ddelta, empty(b.shape, b.dtype), empty(c.shape, c.dtype), empty(z.shape, z.dtype) if dz is None else dz


class SelectiveScan(Op):
    """y[t] = (C[t] . h[t] + D u[t]) silu(z[t]),   h[t] = exp(dt[t] A) h[t-1] + dt[t] u[t] B[t]

    for each of E channels, with a state h of N numbers:
        dt[t] = softplus(delta[t] + bias) > 0, the step;   A = -exp(a_log) < 0, so that each decay is in (0, 1)

    u, delta, z, y: (B, T, E); B, C: (B, T, N), shared by the channels; a_log: (E, N); D, bias: (E,). The state before
    the first position is 0, or state, (B, E, N), which is replaced by the one after the last. Inputs may be views with
    gaps between their rows. Saves its inputs, and the state before every TILE-th position; backward recomputes the
    states of a tile, so that memory for states grows with T / TILE, and no (B, T, E, N) array is ever kept.

    backward, with s the output before the gate, ds = dy silu(z), and g[t] the gradient of h[t], from the last t down:
        g[t] = ds[t] C[t] + exp(dt[t+1] A) g[t+1]
        e[t] = g[t] h[t-1] exp(dt[t] A)                      the gradient of the exponent dt[t] A
        dC[t] = sum over channels of ds[t] h[t],             dB[t] = sum over channels of g[t] dt[t] u[t]
        du[t] = D ds[t] + dt[t] (g[t] . B[t]),               ddt[t] = u[t] (g[t] . B[t]) + e[t] . A
        da_log += A sum of dt[t] e[t],                       dD += sum of ds[t] u[t]
        ddelta = ddt sigmoid(delta + bias), dbias += its sum;   dz = dy s silu'(z)
    backward(..., out=) writes dz there.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023).
    """

    fwd = selective_scan_fwd
    bwd = selective_scan_bwd

    def __init__(self, a_log: Param, skip: Param, bias: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.a_log, self.skip, self.bias = a_log, skip, bias

    def forward(
        self,
        u: Array,
        delta: Array,
        b: Array,
        c: Array,
        z: Array,
        stash: Stash | None = None,
        *,
        state: Array | None = None,
    ) -> Array:
        if stash is not None and state is not None:
            raise ValueError("SelectiveScan: a state and a stash; training starts from zeros")
        self.expect(u, self.skip.size)
        for x, shape in ((delta, u.shape), (z, u.shape), *((x, (*u.shape[:2], self.a_log.shape[1])) for x in (b, c))):
            self.expect(x, shape=shape)
        inputs = (u, delta, b, c, z, self.a_log.value, self.skip.value, self.bias.value)
        y, kept = self.fwd(state, *inputs, stash is not None)
        self.save(stash, u, delta, b, c, z, kept)
        return y

    def backward(
        self, dy: Array, stash: Stash, *, out: Array | None = None
    ) -> tuple[Array, Array, Array, Array, Array]:
        u, delta, b, c, z, kept = stash.pop(self)
        a_log, skip, bias = self.params()
        grads, values = (a_log.grad, skip.grad, bias.grad), (a_log.value, skip.value, bias.value)
        return self.bwd(out, *grads, dy, u, delta, b, c, z, *values, kept)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for batch, length, channels, size in (
            (2, 5, 3, 4),
            (1, 1, 1, 1),
            (3, 2, 5, 3),
            (0, 4, 3, 2),
            (2, 2 * TILE + 3, 2, 5),
        ):
            a_log = Param("a_log", (channels, size), std=1.0, decay=False)
            skip, bias = (
                Param("skip", (channels,), fill=1.0, decay=False),
                Param("bias", (channels,), fill=0.0, decay=False),
            )
            op = with_buffer(cls(a_log, skip, bias, backend), backend, rng)
            wide, narrow = (batch, length, channels), (batch, length, size)
            yield op, tuple(backend.asarray(rng.normal(size=s)) for s in (wide, wide, narrow, narrow, wide))
