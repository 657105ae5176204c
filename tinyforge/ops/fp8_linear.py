"""Linear maps with products in FP8 (fp8.py), for --precision fp8.

    FP8Linear          qkv: forward in FP8; backward in bf16
    FP8LinearSwiGLU    gate|up: forward, dx and dW in FP8
    FP8SwiGLULinear    down: dh = dy W in FP8; forward and dW in bf16, because h, SwiGLU's result, has the largest
                       outliers (Fishman et al., "Scaling FP8 training to trillion-token LLMs", 2024), and its scale is
                       not known where it is computed

An op quantises the arrays that it is given; what another op has quantised comes as a `Scaled` or an `FP8Gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, Kernels, kernel
from tinyforge.op import Cases, Param, Stash
from tinyforge.ops import fp8
from tinyforge.ops.linear import Linear, add_product
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.ops.swiglu_linear import LinearSwiGLU, SwiGLULinear
from tinyforge.params import with_buffer


@kernel
def fp8_product(
    codes: Array, scale: Array, weight: Array, weight_scale: Array, e5m2: bool, *, backend: Any = None
) -> Array:
    """y = codes weight^T, times both scales. codes: (..., K), in e5m2 or e4m3; scale: (...) or (1,); weight: (N, K);
    y: (..., N)."""
    kind = scale.dtype
    y = codes.reshape(-1, codes.shape[-1]).astype(kind, copy=False) @ weight.astype(kind, copy=False).T
    y *= scale.reshape(-1, 1) * weight_scale
    return y.reshape(*codes.shape[:-1], len(weight))


@fp8_product.on("meta")
def fp8_product_memory(codes: Array, weight: Array, *, backend: Any) -> Array:
    return empty((*codes.shape[:-1], len(weight)), backend.dtype)


@kernel
def fp8_product_swiglu(
    codes: Array, scale: Array, weight: Array, weight_scale: Array, *, backend: Any = None
) -> tuple[Array, Array]:
    """gu = x W^T, and swiglu(gu)."""
    gu = fp8_product(codes, scale, weight, weight_scale, False, backend=backend)
    return gu, swiglu_fwd(gu)


@fp8_product_swiglu.on("meta")
def fp8_product_swiglu_memory(codes: Array, weight: Array, *, backend: Any) -> tuple[Array, Array]:
    lead, width = codes.shape[:-1], len(weight)
    return empty((*lead, width), backend.dtype), empty((*lead, width // 2), backend.dtype)


@kernel
def fp8_weight_gradient(
    dweight: Array, transposed: Array, scale: Array, x_transposed: Array, x_scale: Array, accumulate: bool = True
) -> None:
    """dweight += dy^T x, from dy^T and x^T. accumulate: from `Param.grad_with_beta`."""
    kind = dweight.dtype
    dy = transposed.astype(kind, copy=False) * (scale * x_scale)
    add_product(dweight, dy, x_transposed.astype(kind, copy=False).T, accumulate)


@kernel
def weight_gradient(dweight: Array, dy: Array, x: Array, accumulate: bool = True) -> None:
    """dweight += dy^T x. accumulate: from `Param.grad_with_beta`."""
    add_product(dweight, dy.reshape(-1, dy.shape[-1]).T, x.reshape(-1, x.shape[-1]), accumulate)


class FP8Weights(Kernels):
    """Quantises the weights of a model's FP8 ops together; the model calls `refresh` at the start of its forward."""

    quantise_all = fp8.quantise_weights

    def __init__(self, ops: Sequence[Any], backend: Backend) -> None:
        self.maps = [op for op in ops if isinstance(op, _FP8Map)]
        self.bind_kernels(backend)
        for op in self.maps:
            op.refreshed = True

    def refresh(self) -> None:
        if self.maps:
            self.quantise_all([op.fp8_weight for op in self.maps], [op.weight.value for op in self.maps])


class _FP8Map(Kernels):
    """What the three ops share. fp8_weight: the weight's codes. refreshed: `FP8Weights` quantises it; otherwise each
    forward does."""

    product = fp8_product
    quantise = fp8.quantise_rows
    quantise_weight = fp8.quantise_weights
    weight: Param
    fp8_weight: fp8.FP8Weight
    refreshed = False

    def scaled(self, x: Array | fp8.Scaled) -> fp8.Scaled:
        return x if isinstance(x, fp8.Scaled) else fp8.Scaled(x, *self.quantise(x))

    def quantised_weight(self) -> fp8.FP8Weight:
        if not self.refreshed:
            self.quantise_weight([self.fp8_weight], [self.weight.value])
        return self.fp8_weight


class FP8Linear(_FP8Map, Linear):
    """y = x W^T, x and W in FP8: the reference is Linear

    x: (..., I), or a Scaled; W: (O, I); y: (..., O). Saves x. backward: as in Linear, in bf16. There is no bias and no
    `add`.
    """

    reference = Linear
    adds = False

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        self.fp8_weight = fp8.fp8_weight_of(weight, backend, codes=True)

    def forward(
        self,
        x: Any,
        stash: Stash | None = None,
        *,
        recompute: Callable[[], Array] | None = None,
        add: Array | None = None,
    ) -> Array:
        assert add is None, "adds is False"
        x, weight = self.scaled(x), self.quantised_weight()
        self.keep(x.x, stash, recompute)
        return self.product(x.codes, x.scale, weight.codes, weight.scale, False)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield from _cases(cls, backend, rng, lambda o, i: (o, i), lambda i: i)


class FP8LinearSwiGLU(_FP8Map, LinearSwiGLU):
    """gu = x W^T, and with `hidden=True` also h = swiglu(gu), in FP8: the reference is LinearSwiGLU

    x: (..., I), or a Scaled; W: (2H, I), the gate in the first half; gu: (..., 2H); h: (..., H). Saves x and the scale
    of each row. backward: dx and dW in FP8, from dgu or an FP8Gradient.
    """

    reference = LinearSwiGLU
    hidden_product = fp8_product_swiglu
    fp8_weight_bwd = fp8_weight_gradient
    largest = fp8.largest_scale
    transpose = fp8.quantise_transposed
    adds = False

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)
        self.fp8_weight = fp8.fp8_weight_of(weight, backend, codes=True, transposed=True)

    def forward(
        self,
        x: Any,
        stash: Stash | None = None,
        *,
        recompute: Callable[[], Array] | None = None,
        add: Array | None = None,
        hidden: bool = False,
    ) -> Any:
        assert add is None, "adds is False"
        (x, codes, scale), weight = self.scaled(x), self.quantised_weight()
        self.save(stash, *((None, None) if self.weight.frozen else (recompute or (lambda: x), scale)))
        factors = (codes, scale, weight.codes, weight.scale)
        return self.hidden_product(*factors) if hidden else self.product(*factors, False)

    def backward(self, dy: Any, stash: Stash) -> Array:
        x, rows = stash.pop(self)
        if not isinstance(dy, fp8.FP8Gradient):
            scale = self.largest(self.quantise(dy)[1])
            codes, transposed = self.transpose(dy, scale, True)
            dy = fp8.FP8Gradient(codes, transposed, scale)
        if x is not None:
            scale = self.largest(rows)
            _, transposed = self.transpose(x(), scale, False)
            dweight, accumulate = self.weight.grad_with_beta()
            self.fp8_weight_bwd(dweight, dy.transposed, dy.scale, transposed, scale, accumulate)
            del transposed
        return self.product(dy.codes, dy.scale, self.fp8_weight.transposed, self.fp8_weight.scale, True)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield from _cases(cls, backend, rng, lambda o, i: (2 * o, i), lambda i: i)


class FP8SwiGLULinear(_FP8Map, SwiGLULinear):
    """y = h W^T,  h = swiglu(gu), with dh = dy W in FP8: the reference is SwiGLULinear

    Shapes, and what is saved, as there. Forward and dW are in bf16. backward: dy may be a Scaled. gives_fp8: dgu is an
    FP8Gradient, for the FP8LinearSwiGLU before it, with the largest of dy's scales.
    """

    reference = SwiGLULinear
    weight_bwd = weight_gradient
    gu_bwd = swiglu_bwd
    gu_bwd_fp8 = fp8.swiglu_bwd_fp8
    largest = fp8.largest_scale

    def __init__(self, weight: Param, backend: Backend, name: str = "", *, gives_fp8: bool = False) -> None:
        super().__init__(weight, backend, name)
        self.gives_fp8 = gives_fp8
        self.fp8_weight = fp8.fp8_weight_of(weight, backend, transposed=True)

    def forward(
        self, gu: Array, stash: Stash | None = None, *, hidden: Array | None = None, add: Array | None = None
    ) -> Array:
        if stash is not None:
            self.quantised_weight()
        return super().forward(gu, stash, hidden=hidden, add=add)

    def backward(self, dy: Any, stash: Stash) -> Any:
        (gu,) = stash.pop(self)
        dy, (dweight, accumulate) = self.scaled(dy), self.weight.grad_with_beta()
        codes = dy.codes.reshape(dy.scale.size, dy.codes.shape[-1])
        dh = self.product(codes, dy.scale, self.fp8_weight.transposed, self.fp8_weight.scale, False)
        hidden = None if dweight is None else dh  # where h overwrites dh
        dgu: Any
        if self.gives_fp8:
            scale = self.largest(dy.scale)
            codes, transposed = self.gu_bwd_fp8(hidden, dh, gu, scale)
            dgu = fp8.FP8Gradient(codes, transposed, scale)
        else:
            dgu = self.gu_bwd(hidden, dh, gu)
        if dweight is not None:
            self.weight_bwd(dweight, dy.x, dh, accumulate)
        return dgu

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        yield from _cases(cls, backend, rng, lambda o, i: (o, i), lambda i: 2 * i)


def _cases(
    kind: Any,
    backend: Backend,
    rng: np.random.Generator,
    shape: Callable[[int, int], tuple[int, int]],
    width: Callable[[int], int],
) -> Cases:
    """shape: of the weight, of o and i. width: of the input, of i."""
    times = fp8.MULTIPLE if backend.fp8 else 1
    for (o, i), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
        op = with_buffer(kind(Param("weight", shape(o * times, i * times), std=1.0), backend), backend, rng)
        yield op, (backend.asarray(rng.normal(size=(*lead, width(i * times)))),)
