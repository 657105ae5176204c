"""LoRA: a frozen linear map plus a learned low-rank product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Key, Op, Param, Stash
from tinyforge.ops.dropout import dropout
from tinyforge.ops.gelu import GELU
from tinyforge.ops.linear import linear_fwd
from tinyforge.ops.swiglu import SwiGLU
from tinyforge.params import with_buffer
from tinyforge.quantised import Quantised, plain, tiles


@kernel
def lora_fwd(
    x: Array,
    weight: Array | Quantised,
    bias: Array | None,
    a: Array,
    b: Array,
    scale: float,
    key: Key | None,
    rate: float,
) -> tuple[Array, Array]:
    """Returns y, and u = drop(x) a^T: (rows, R). key: of the dropout stream; None for no dropout. Of codes, `weight`
    is dequantised in tiles."""
    if isinstance(weight, Quantised):
        y = np.empty((*x.shape[:-1], len(weight)), x.dtype)
        for part, matrix in tiles(weight):
            y[..., part] = linear_fwd(x, matrix, None if bias is None else bias[part])
    else:
        y = linear_fwd(x, weight, bias)
    dropped = x if key is None else dropout(x, key, rate)
    u = dropped.reshape(-1, x.shape[-1]) @ a.T
    rows = y.reshape(-1, y.shape[-1])
    rows += (u * scale) @ b.T
    return y, u


@lora_fwd.on("meta")
def lora_fwd_memory(x: Array, weight: Array | Quantised, a: Array, key: Key | None) -> tuple[Array, Array]:
    _matrix = plain(weight)
    y = empty((*x.shape[:-1], weight.shape[0]), x.dtype)
    _dropped = None if key is None else empty(x.shape, x.dtype)
    return y, empty((x.size // x.shape[-1], len(a)), x.dtype)


@kernel
def lora_bwd(
    da: Array | None,
    db: Array | None,
    dy: Array,
    x: Array,
    u: Array,
    weight: Array | Quantised,
    a: Array,
    b: Array,
    scale: float,
    key: Key | None,
    rate: float,
) -> Array:
    rows = dy.reshape(-1, dy.shape[-1])
    if db is not None:
        db += (rows.T @ u) * scale
    du = (rows @ b) * scale
    mask = None if key is None else dropout(np.ones_like(x), key, rate)  # drawn once: slower than a product
    if da is not None:
        dropped = x if mask is None else x * mask
        da += du.T @ dropped.reshape(-1, x.shape[-1])
    dx = (du @ a).reshape(x.shape)
    if mask is not None:
        dx *= mask
    for part, matrix in tiles(weight):
        dx += (rows[:, part] @ matrix).reshape(x.shape)
    return dx


@lora_bwd.on("meta")
def lora_bwd_memory(x: Array, u: Array, weight: Array | Quantised, key: Key | None) -> Array:
    du = empty(u.shape, u.dtype)
    if key is not None:
        empty(x.shape, x.dtype)  # drop(x), freed before dx is allocated
    dx = empty(x.shape, du.dtype)
    if key is not None:
        dx = empty(x.shape, dx.dtype)
    _matrix = plain(weight)
    return dx


@kernel
def lora_merge(weight: Array, a: Array, b: Array, scale: float) -> Array:
    """weight + scale b a: one matrix in place of the three."""
    return weight + (b @ a) * scale


class LoRA(Op):
    """y = h W^T + bias + s drop(h) A^T B^T,  s = alpha / R

    h = x, or with `activation`, an op, h = activation(x), which is recomputed in backward as in SwiGLULinear and
    GELULinear. W may be kept as codes, see tinyforge/quantised.py: then it is dequantised for each product, and the
    gradients are those of the dequantised W. h: (..., I); W: (O, I) and bias: (O,), or none, both frozen; A: (R, I) and
    B: (O, R), learned; y: (..., O). drop is dropout at `rate`, as in Dropout. B starts at 0, and y is then that of the
    frozen map. Saves h, or the function that recomputes it, and u = drop(h) A^T, (rows, R).

    backward, with m the mask of drop (1 / (1 - rate) or 0), and no dW:
        dB += s dy^T u,   du = s dy B,   dA += du^T (m h),   dh = dy W + m (du A)

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
    """

    fwd = lora_fwd
    bwd = lora_bwd
    merge = lora_merge

    def __init__(
        self,
        weight: Param,
        a: Param,
        b: Param,
        backend: Backend,
        name: str = "",
        *,
        bias: Param | None = None,
        alpha: float,
        rate: float = 0.0,
        activation: Op | None = None,
    ) -> None:
        super().__init__(backend, name)
        (outputs, inputs), rank = weight.shape, a.shape[0]
        if a.shape != (rank, inputs) or b.shape != (outputs, rank):
            raise ValueError(f"{self.name}: W {weight.shape}, A {a.shape}, B {b.shape}; want (O, I), (R, I), (O, R)")
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{self.name}: rate is {rate}, expected 0 <= rate < 1")
        self.weight, self.a, self.b, self.bias, self.activation = weight, a, b, bias, activation
        self.scale, self.rate = alpha / rank, rate
        for p in self.params():
            p.frozen = p not in (a, b)

    def params(self) -> list[Param]:
        first = [] if self.activation is None else self.activation.params()
        return [*first, self.weight, *([] if self.bias is None else [self.bias]), self.a, self.b]

    def forward(self, x: Array, stash: Stash | None = None, *, recompute: Callable[[], Array] | None = None) -> Array:
        if self.activation is not None:
            recompute = partial(self.activation.forward, x)
            x = self.activation.forward(x, stash)
        self.expect(x, self.weight.shape[1])
        key = None if stash is None else stash.key(self, self.rate)
        bias = self.bias.value if self.bias else None
        y, u = self.fwd(x, self.weight.stored, bias, self.a.value, self.b.value, self.scale, key, self.rate)
        self.save(stash, recompute or (lambda: x), u, key)
        return y

    def backward(self, dy: Array, stash: Stash) -> Array:
        x, u, key = stash.pop(self)
        matrices = self.weight.stored, self.a.value, self.b.value
        dx = self.bwd(self.a.grad, self.b.grad, dy, x(), u, *matrices, self.scale, key, self.rate)
        return dx if self.activation is None else self.activation.backward(dx, stash)

    def merged(self) -> Array:
        """W + s B A, a new array: the weight of an equivalent plain linear map."""
        return self.merge(self.weight.value, self.a.value, self.b.value, self.scale)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (o, i, r), lead in (((5, 7, 3), (2, 3)), ((1, 1, 1), (1,)), ((6, 4, 2), (9,)), ((3, 2, 5), (0,))):
            of_gelu = Param("input_bias", (i,), fill=0.0, decay=False)
            for rate, bias, activation in (
                (0.0, None, None),
                (0.4, Param("bias", (o,), fill=0.0, decay=False), None),
                (0.4, None, SwiGLU(backend)),
                (0.0, None, GELU(backend, bias=of_gelu)),
            ):
                weight, a, b = Param("weight", (o, i)), Param("lora_a", (r, i)), Param("lora_b", (o, r))
                op = cls(weight, a, b, backend, bias=bias, alpha=1.7 * r, rate=rate, activation=activation)
                width = 2 * i if isinstance(activation, SwiGLU) else i
                yield with_buffer(op, backend, rng), (backend.asarray(rng.normal(size=(*lead, width))),)
        for rate, kind in ((0.0, "nf4"), (0.4, "nf4-double")):
            weight, a, b = Param("weight", (5, 128)), Param("lora_a", (2, 128)), Param("lora_b", (5, 2))
            weight.weights = kind
            op = cls(weight, a, b, backend, alpha=3.0, rate=rate)
            yield with_buffer(op, backend, rng), (backend.asarray(rng.normal(size=(4, 128))),)
