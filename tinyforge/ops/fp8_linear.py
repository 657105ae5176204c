"""Linear maps whose products are those of numbers of 8 bits (fp8.py), for --precision fp8.

    qkv         y = x W^T in FP8; backward in bf16
    gate|up     y = x W^T, dx = dy W and dW += dy^T x in FP8
    down        dh = dy W in FP8; y = h W^T and dW in bf16: h, SwiGLU's result, has the largest outliers (Fishman et
                al., "Scaling FP8 training to trillion-token LLMs", 2024), and its scale is not known where it is made

Each op takes a `Scaled`, or a `Gradient8`, from who has rounded already; else it rounds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, Kernel, bind, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.fp8 import (
    MULTIPLE,
    Gradient8,
    Scaled,
    Weight8,
    largest_scale,
    quantise_rows,
    quantise_weights,
    swiglu_bwd_turned,
    turn_rows,
    weight8,
)
from tinyforge.ops.linear import Linear, add_product
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.ops.swiglu_linear import LinearSwiGLU, SwiGLULinear
from tinyforge.params import with_buffer


@kernel
def fp8_product(
    bits: Array, scale: Array, weight: Array, weight_scale: Array, coarse: bool, *, backend: Any
) -> Array:
    """a b^T of rows and a weight in 8 bits, times both scales. bits: (..., K), e5m2 if coarse; scale: (...) or (1,);
    weight: (N, K); the result: (..., N)."""
    kind = scale.dtype
    y = bits.reshape(-1, bits.shape[-1]).astype(kind, copy=False) @ weight.astype(kind, copy=False).T
    y *= scale.reshape(-1, 1) * weight_scale
    return y.reshape(*bits.shape[:-1], len(weight))


@fp8_product.on("phantom")
def fp8_product_memory(
    bits: Array, scale: Array, weight: Array, weight_scale: Array, coarse: bool, *, backend: Any
) -> Array:
    return empty((*bits.shape[:-1], len(weight)), backend.dtype)


@kernel
def fp8_product_swiglu(
    bits: Array, scale: Array, weight: Array, weight_scale: Array, *, backend: Any
) -> tuple[Array, Array]:
    """gu = x W^T, and swiglu(gu)."""
    gu = fp8_product(bits, scale, weight, weight_scale, False, backend=backend)
    return gu, swiglu_fwd(gu)


@fp8_product_swiglu.on("phantom")
def fp8_product_swiglu_memory(
    bits: Array, scale: Array, weight: Array, weight_scale: Array, *, backend: Any
) -> tuple[Array, Array]:
    lead, width = bits.shape[:-1], len(weight)
    return empty((*lead, width), backend.dtype), empty((*lead, width // 2), backend.dtype)


@kernel
def fp8_weight_gradient(
    dweight: Array, turned: Array, scale: Array, x_turned: Array, x_scale: Array, accumulate: bool = True
) -> None:
    """dweight += dy^T x, of both turned. accumulate: as of `Param.summed_in`."""
    kind = dweight.dtype
    add_product(dweight, turned.astype(kind, copy=False) * (scale * x_scale), x_turned.astype(kind, copy=False).T,
                accumulate)  # fmt: skip


@fp8_weight_gradient.on("phantom")
def fp8_weight_gradient_memory(
    dweight: Array, turned: Array, scale: Array, x_turned: Array, x_scale: Array, accumulate: bool = True
) -> None:
    pass


@kernel
def weight_gradient(dweight: Array, dy: Array, x: Array, accumulate: bool = True) -> None:
    """dweight += dy^T x. accumulate: as of `Param.summed_in`."""
    add_product(dweight, dy.reshape(-1, dy.shape[-1]).T, x.reshape(-1, x.shape[-1]), accumulate)


@weight_gradient.on("phantom")
def weight_gradient_memory(dweight: Array, dy: Array, x: Array, accumulate: bool = True) -> None:
    pass


class WeightsIn8Bits:
    """Rounds the weights of several ops by one launch. A model calls `refresh` where its forward begins."""

    def __init__(self, maps: Sequence[Any], backend: Backend) -> None:
        self.maps = [op for op in maps if isinstance(op, FP8Linear | FP8LinearSwiGLU | FP8SwiGLULinear)]
        self.k = bind((quantise_weights,), backend, "WeightsIn8Bits")
        for op in self.maps:
            op.keeps = True

    def refresh(self) -> None:
        if self.maps:
            self.k.quantise_weights([op.in_8_bits for op in self.maps], [op.weight.value for op in self.maps])


class _InFP8:
    """What the three ops share. in_8_bits: the weight. keeps: somebody else rounds it when it has changed."""

    weight: Param
    in_8_bits: Weight8
    k: Any
    keeps = False

    def scaled(self, x: Array | Scaled) -> Scaled:
        return x if isinstance(x, Scaled) else Scaled(x, *self.k.quantise_rows(x))

    def rounded_weight(self) -> Weight8:
        if not self.keeps:
            self.k.quantise_weights([self.in_8_bits], [self.weight.value])
        return self.in_8_bits


class FP8Linear(_InFP8, Linear):
    """y = x W^T, x and W in FP8: the reference is Linear

    x: (..., I), or Scaled; W: (O, I); y: (..., O). Saves x. backward as Linear, in bf16. Neither bias nor `add`.
    """

    kernels = (*Linear.kernels, fp8_product, quantise_rows, quantise_weights)

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        self.adds = False
        self.in_8_bits = weight8(weight, backend, straight=True)

    def forward(
        self, x: Any, stash: Stash | None = None, *, recompute: Callable[[], Array] | None = None,
        add: Array | None = None,
    ) -> Array:  # fmt: skip
        x, weight = self.scaled(x), self.rounded_weight()
        self.keep(x.x, stash, recompute)
        y: Array = self.k.fp8_product(x.bits, x.scale, weight.straight, weight.scale, False)
        return y

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        yield from _cases(cls, backend, rng, lambda o, i: (o, i), lambda i: i)


class FP8LinearSwiGLU(_InFP8, LinearSwiGLU):
    """gu = x W^T, and with `hidden=True` also h = swiglu(gu), in FP8: the reference is LinearSwiGLU

    x: (..., I), or Scaled; W: (2H, I), the gate in the first half; gu: (..., 2H); h: (..., H). Saves x and the scale of
    each row. backward: dx and dW in FP8, from dgu, or from a Gradient8.
    """

    kernels = (
        *LinearSwiGLU.kernels, fp8_product, fp8_product_swiglu, fp8_weight_gradient, quantise_rows, quantise_weights,
        largest_scale, turn_rows,
    )  # fmt: skip

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        self.adds = False
        self.in_8_bits = weight8(weight, backend, straight=True, turned=True)

    def forward(
        self, x: Any, stash: Stash | None = None, *, recompute: Callable[[], Array] | None = None,
        add: Array | None = None, hidden: bool = False,
    ) -> Any:  # fmt: skip
        (x, bits, scale), weight = self.scaled(x), self.rounded_weight()
        if stash is not None:
            stash.push(self, *((None, None) if self.weight.frozen else (recompute or (lambda: x), scale)))
        factors = (bits, scale, weight.straight, weight.scale)
        return self.k.fp8_product_swiglu(*factors) if hidden else self.k.fp8_product(*factors, False)

    def backward(self, dy: Any, stash: Stash) -> Array:
        x, rows = stash.pop(self)
        if not isinstance(dy, Gradient8):
            scale = self.k.largest_scale(self.k.quantise_rows(dy)[1])
            bits, turned = self.k.turn_rows(dy, scale, True)
            dy = Gradient8(bits, turned, scale)
        if x is not None:
            scale = self.k.largest_scale(rows)
            _, turned = self.k.turn_rows(x(), scale, False)
            dweight, accumulate = self.weight.summed_in()
            self.k.fp8_weight_gradient(dweight, dy.turned, dy.scale, turned, scale, accumulate)
            del turned
        dx: Array = self.k.fp8_product(dy.bits, dy.scale, self.in_8_bits.turned, self.in_8_bits.scale, True)
        return dx

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        yield from _cases(cls, backend, rng, lambda o, i: (2 * o, i), lambda i: i)


class FP8SwiGLULinear(_InFP8, SwiGLULinear):
    """y = h W^T,  h = swiglu(gu), with dh = dy W in FP8: the reference is SwiGLULinear

    Shapes and what is saved as there; forward and dW are in bf16. backward: dy may be a Scaled. hands_on: give dgu as a
    Gradient8, with the largest scale of dy, to the FP8LinearSwiGLU before.
    """

    kernels: ClassVar[tuple[Kernel[..., Any], ...]] = (
        *SwiGLULinear.kernels, fp8_product, weight_gradient, swiglu_bwd, swiglu_bwd_turned, quantise_rows,
        quantise_weights, largest_scale,
    )  # fmt: skip

    def __init__(self, weight: Param, backend: Backend, name: str = "", *, hands_on: bool = False) -> None:
        super().__init__(weight, backend, name)
        self.hands_on = hands_on
        self.in_8_bits = weight8(weight, backend, turned=True)

    def forward(
        self, gu: Array, stash: Stash | None = None, *, hidden: Array | None = None, add: Array | None = None
    ) -> Array:
        if stash is not None:
            self.rounded_weight()
        return super().forward(gu, stash, hidden=hidden, add=add)

    def backward(self, dy: Any, stash: Stash) -> Any:
        (gu,) = stash.pop(self)
        dy, (dweight, accumulate) = self.scaled(dy), self.weight.summed_in()
        bits = dy.bits.reshape(dy.scale.size, dy.bits.shape[-1])
        dh = self.k.fp8_product(bits, dy.scale, self.in_8_bits.turned, self.in_8_bits.scale, False)
        hidden = None if dweight is None else dh  # h comes in the place of dh
        dgu: Any
        if self.hands_on:
            scale = self.k.largest_scale(dy.scale)
            bits, turned = self.k.swiglu_bwd_turned(hidden, dh, gu, scale)
            dgu = Gradient8(bits, turned, scale)
        else:
            dgu = self.k.swiglu_bwd(hidden, dh, gu)
        if dweight is not None:
            self.k.weight_gradient(dweight, dy.x, dh, accumulate)
        return dgu

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        yield from _cases(cls, backend, rng, lambda o, i: (o, i), lambda i: 2 * i)


def _cases(
    kind: Any, backend: Backend, rng: np.random.Generator, shape: Callable[[int, int], tuple[int, int]],
    width: Callable[[int], int],
) -> Iterator[tuple[Op, tuple[Any, ...]]]:  # fmt: skip
    """shape: of the weight, of o and i. width: of the input, of i."""
    times = MULTIPLE if backend.fp8 else 1
    for (o, i), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
        op = with_buffer(kind(Param("weight", shape(o * times, i * times), std=1.0), backend), backend, rng)
        yield op, (backend.asarray(rng.normal(size=(*lead, width(i * times)))),)
