"""Linear maps whose products are those of numbers of 8 bits (fp8.py), for --precision fp8.

In FP8 are y = x W^T and dx = dy W. The gradient of the weight is a sum over all tokens, whose scales differ, and stays
in bf16, and so does the product behind SwiGLU, whose output has the largest outliers (Fishman et al., "Scaling FP8
training to trillion-token LLMs", 2024): it is the recipe that torchao calls rowwise, with weight gradients in high
precision. Each op takes a `Scaled` from who has rounded x already, or x, which it rounds itself.
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
    BYTE,
    E5M2,
    MULTIPLE,
    Scaled,
    Weight8,
    product,
    quantise_rows,
    quantise_weights,
    rounded,
    weight8,
)
from tinyforge.ops.linear import Linear
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.ops.swiglu_linear import LinearSwiGLU, SwiGLULinear
from tinyforge.params import with_buffer


@kernel
def fp8_linear_fwd(bits: Array, scale: Array, weight: Weight8, *, backend: Any) -> Array:
    return product(bits, scale, weight.straight, weight.scale)


@fp8_linear_fwd.on("phantom")
def fp8_linear_fwd_memory(bits: Array, scale: Array, weight: Weight8, *, backend: Any) -> Array:
    return empty((*bits.shape[:-1], len(weight.straight)), backend.dtype)


@kernel
def fp8_linear_swiglu_fwd(bits: Array, scale: Array, weight: Weight8, *, backend: Any) -> tuple[Array, Array]:
    """gu = x W^T, and swiglu(gu)."""
    gu = product(bits, scale, weight.straight, weight.scale)
    return gu, swiglu_fwd(gu)


@fp8_linear_swiglu_fwd.on("phantom")
def fp8_linear_swiglu_fwd_memory(
    bits: Array, scale: Array, weight: Weight8, *, backend: Any
) -> tuple[Array, Array]:
    lead, width = bits.shape[:-1], len(weight.straight)
    return empty((*lead, width), backend.dtype), empty((*lead, width // 2), backend.dtype)


@kernel
def fp8_linear_bwd(
    dweight: Array | None, dy: Array, bits: Array, scale: Array, coarse: bool, x: Array | None, weight: Weight8, *,
    backend: Any,
) -> Array:  # fmt: skip
    """dx by the bits of dy; dweight by dy itself and x. coarse: as of `Scaled`."""
    if dweight is not None and x is not None:
        dweight += dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    return product(bits, scale, weight.turned, weight.scale)


@fp8_linear_bwd.on("phantom")
def fp8_linear_bwd_memory(
    dweight: Array | None, dy: Array, bits: Array, scale: Array, coarse: bool, x: Array | None, weight: Weight8, *,
    backend: Any,
) -> Array:  # fmt: skip
    return empty((*dy.shape[:-1], len(weight.turned)), backend.dtype)


@kernel
def fp8_swiglu_linear_bwd(
    dweight: Array | None, dy: Array, bits: Array, scale: Array, gu: Array, weight: Weight8, *, backend: Any
) -> tuple[Array, Array]:
    """dgu, and dgu / scale in e5m2."""
    rows = dy.reshape(-1, dy.shape[-1])
    hidden = product(bits.reshape(rows.shape), scale, weight.turned, weight.scale)  # dh, in whose place h comes
    dgu = swiglu_bwd(None if dweight is None else hidden, hidden, gu)
    if dweight is not None:
        dweight += rows.T @ hidden
    return dgu, rounded(dgu * (1 / scale[..., None]), E5M2, backend)


@fp8_swiglu_linear_bwd.on("phantom")
def fp8_swiglu_linear_bwd_memory(
    dweight: Array | None, dy: Array, bits: Array, scale: Array, gu: Array, weight: Weight8, *, backend: Any
) -> tuple[Array, Array]:
    hidden = None if dweight is None else empty((*gu.shape[:-1], len(weight.turned)), gu.dtype)
    dgu = empty(gu.shape, gu.dtype), empty(gu.shape, BYTE)
    del hidden
    return dgu


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

    kernels = (*Linear.kernels, fp8_linear_fwd, quantise_rows, quantise_weights)

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        self.adds = False
        self.in_8_bits = weight8(weight, backend, straight=True)

    def forward(
        self, x: Any, stash: Stash | None = None, *, recompute: Callable[[], Array] | None = None,
        add: Array | None = None,
    ) -> Array:  # fmt: skip
        x = self.scaled(x)
        self.keep(x.x, stash, recompute)
        y: Array = self.k.fp8_linear_fwd(x.bits, x.scale, self.rounded_weight())
        return y

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        yield from _cases(cls, backend, rng, lambda o, i: (o, i), lambda i: i)


class FP8LinearSwiGLU(_InFP8, LinearSwiGLU):
    """gu = x W^T, and with `hidden=True` also h = swiglu(gu), x and W in FP8: the reference is LinearSwiGLU

    x: (..., I), or Scaled; W: (2H, I), the gate in the first half; gu: (..., 2H); h: (..., H). Saves x. backward: dx
    from dgu in FP8, which may come as a Scaled; dW in bf16.
    """

    kernels = (
        *LinearSwiGLU.kernels, fp8_linear_fwd, fp8_linear_swiglu_fwd, fp8_linear_bwd, quantise_rows, quantise_weights,
    )  # fmt: skip

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        self.adds = False
        self.in_8_bits = weight8(weight, backend, straight=True, turned=True)

    def forward(
        self, x: Any, stash: Stash | None = None, *, recompute: Callable[[], Array] | None = None,
        add: Array | None = None, hidden: bool = False,
    ) -> Any:  # fmt: skip
        x = self.scaled(x)
        self.keep(x.x, stash, recompute)
        run = self.k.fp8_linear_swiglu_fwd if hidden else self.k.fp8_linear_fwd
        return run(x.bits, x.scale, self.rounded_weight())

    def backward(self, dy: Any, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        dy = self.scaled(dy)
        dx: Array = self.k.fp8_linear_bwd(self.weight.grad, *dy, x and x(), self.in_8_bits)
        return dx

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        yield from _cases(cls, backend, rng, lambda o, i: (2 * o, i), lambda i: i)


class FP8SwiGLULinear(_InFP8, SwiGLULinear):
    """y = h W^T,  h = swiglu(gu), with dh = dy W in FP8: the reference is SwiGLULinear

    Shapes and what is saved as there; forward is in bf16. backward: dy may be a Scaled. hands_on: give dgu as a Scaled
    to the FP8LinearSwiGLU before, in e5m2 with the scale of dy: dgu, at most some hundred times dy, is rounded where it
    is made, before the whole row is known.
    """

    kernels: ClassVar[tuple[Kernel[..., Any], ...]] = (
        *SwiGLULinear.kernels, fp8_swiglu_linear_bwd, quantise_rows, quantise_weights,
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
        dy = self.scaled(dy)
        dgu, bits = self.k.fp8_swiglu_linear_bwd(self.weight.grad, *dy[:3], gu, self.in_8_bits)
        return Scaled(dgu, bits, dy.scale, coarse=True) if self.hands_on else dgu

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
