"""Causal depthwise convolution over time, with SiLU."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import like
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.sigmoid import sigmoid, silu_slope
from tinyforge.params import with_buffer


def _before_silu(tail: Array | None, x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
    """The convolution, (B, T, C), and its padded input, (B, K - 1 + T, C)."""
    batch, length, channels = x.shape
    taps = weight.shape[-1]
    padded = np.zeros((batch, taps - 1 + length, channels), x.dtype)
    padded[:, taps - 1 :] = x
    if tail is not None:
        padded[:, : taps - 1] = tail
    s = padded[:, :length] * weight[:, 0, 0]
    for k in range(1, taps):
        s += padded[:, k : k + length] * weight[:, 0, k]
    s += bias
    return s, padded


@kernel
def causal_conv_fwd(tail: Array | None, x: Array, weight: Array, bias: Array) -> Array:
    """tail: (B, K - 1, C), the inputs before x; replaced by the last K - 1 inputs for the next call. None: zeros."""
    s, padded = _before_silu(tail, x, weight, bias)
    if tail is not None:
        tail[...] = padded[:, x.shape[1] :]
    s *= sigmoid(s)
    return s


@kernel
def causal_conv_bwd(
    dx: Array | None, dweight: Array | None, dbias: Array | None, dy: Array, x: Array, weight: Array, bias: Array
) -> Array:
    """Returns dx, written into the first argument if that is given."""
    s, padded = _before_silu(None, x, weight, bias)
    length, taps = x.shape[1], weight.shape[-1]
    ds = silu_slope(s, sigmoid(s))
    ds *= dy
    if dbias is not None:
        dbias += ds.sum(axis=(0, 1))
    dpadded = np.zeros_like(padded)
    for k in range(taps):
        if dweight is not None:
            dweight[:, 0, k] += (ds * padded[:, k : k + length]).sum(axis=(0, 1))
        dpadded[:, k : k + length] += ds * weight[:, 0, k]
    if dx is None:
        return dpadded[:, taps - 1 :]
    dx[...] = dpadded[:, taps - 1 :]
    return dx


causal_conv_bwd.on("meta")(lambda dx, x: like(x) if dx is None else dx)


class CausalConv(Op):
    """y[t, c] = silu(s[t, c]),  s[t, c] = b[c] + sum over k of w[c, k] x[t - (K - 1) + k, c],  silu(s) = s sigmoid(s)

    x, y: (B, T, C); w: (C, 1, K), the layout of PyTorch's Conv1d with C groups; b: (C,). The inputs before the first
    position are zeros, or tail, (B, K - 1, C), which is updated for the next call. Channels are independent, and a
    position sees itself and the K - 1 before it. Saves x; backward recomputes s:
        ds = dy sigmoid(s) (1 + s (1 - sigmoid(s))),   db += sum of ds
        dw[c, k] += sum over t of ds[t, c] x[t - (K - 1) + k, c]
        dx[t, c]  = sum over k of w[c, k] ds[t + K - 1 - k, c]
    x may be a view with gaps between its rows, and so may backward's `out=`, into which dx is written.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), section 3.4.
    """

    fwd = causal_conv_fwd
    bwd = causal_conv_bwd

    def __init__(self, weight: Param, bias: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight, self.bias = weight, bias

    def forward(self, x: Array, stash: Stash | None = None, *, tail: Array | None = None) -> Array:
        self.expect(x, self.weight.shape[0])
        if stash is not None:
            if tail is not None:
                raise ValueError("CausalConv: a tail and a stash; training starts from zeros")
            stash.push(self, x)
        return self.fwd(tail, x, self.weight.value, self.bias.value)

    def backward(self, dy: Array, stash: Stash, *, out: Array | None = None) -> Array:
        (x,) = stash.pop(self)
        return self.bwd(out, self.weight.grad, self.bias.grad, dy, x, self.weight.value, self.bias.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (batch, length, channels), taps in (
            ((2, 9, 5), 4),
            ((3, 2, 7), 4),
            ((1, 1, 1), 2),
            ((0, 4, 3), 3),
            ((2, 6, 33), 1),
        ):
            weight = Param("weight", (channels, 1, taps), std=1.0)
            op = with_buffer(cls(weight, Param("bias", (channels,), fill=0.0, decay=False), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(batch, length, channels))),)
