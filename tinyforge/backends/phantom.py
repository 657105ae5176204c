"""Arrays without memory: what a training step will need, found by running it on shapes alone.

A phantom array has a shape, a dtype and an owner that counts its bytes while anything refers to it. The model, its
backward and the optimizer run on phantoms as they do on arrays; Python lets go of a phantom when it would let go of the
array, so the peak of the count is the peak of the real step. Each kernel here allocates what the CUDA one does, and
nothing else. No GPU is needed, and `base` takes a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinyforge.backends import PRECISIONS, Backend, kernel, wide
from tinyforge.errors import UserError
from tinyforge.op import Array

phantom_kernel = kernel("phantom")

GRANULE = 512
"""CuPy's memory pool hands out multiples of so many bytes."""


class Meter:
    """Bytes that phantoms hold now, and the most they have held."""

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


METER = Meter()


class _Block:
    """The memory of one allocation; views of a phantom share it."""

    def __init__(self, count: int) -> None:
        self.count = -(-count // GRANULE) * GRANULE
        METER.add(self.count)

    def __del__(self) -> None:
        METER.add(-self.count)


class Phantom(np.ndarray):
    """An array of zeros that are all one zero. Reading gives zeros, writing does nothing, arithmetic gives phantoms."""

    owner: _Block | None

    def __array_finalize__(self, source: Any) -> None:
        self.owner = getattr(source, "owner", None)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method != "__call__":
            raise TypeError(f"{ufunc.__name__}.{method} is not among what a phantom array can do")
        shape = np.broadcast_shapes(*(np.shape(x) for x in inputs))
        dtype = next(x.dtype for x in inputs if isinstance(x, Phantom))
        return out[0] if out else new(shape, dtype)

    def __setitem__(self, where: Any, value: Any) -> None:
        pass

    def fill(self, value: Any) -> None:
        pass


def new(shape: tuple[int, ...], dtype: Any) -> Phantom:
    phantom = np.broadcast_to(np.zeros((), dtype), shape).view(Phantom)
    phantom.owner = _Block(phantom.size * phantom.dtype.itemsize)
    return phantom


class PhantomBackend(Backend):
    """Stands for the CuPy backend of the same precision."""

    name = "phantom"
    xp = np

    def __init__(self, precision: str) -> None:
        policy = PRECISIONS.get(precision)
        if policy is None or "cupy" not in policy.backends:
            raise UserError(f"precision {precision!r} is not one of: {', '.join(PRECISIONS)}")
        self.precision, self.workers = policy, 1
        # float16 is as large as bfloat16, and needs no package of its own.
        self.dtype = np.dtype(np.float16 if policy.storage == "bfloat16" else policy.storage)
        self.master_dtype = np.dtype(policy.master)

    def empty(self, shape: tuple[int, ...]) -> Phantom:
        return new(shape, self.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype | None = None) -> Phantom:
        return new(shape, dtype or self.dtype)

    def asarray(self, array: Any, dtype: np.dtype | None = None) -> Phantom:
        array = np.asarray(array)
        return new(array.shape, dtype or (self.dtype if array.dtype.kind == "f" else np.dtype(np.int32)))

    def map(self, function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        return [function(item) for item in items]


@phantom_kernel
def embedding_fwd(ids: Array, weight: Array) -> Array:
    return new((*ids.shape, weight.shape[-1]), weight.dtype)


@phantom_kernel
def embedding_bwd(dy: Array, ids: Array, dweight: Array) -> None:
    pass


@phantom_kernel
def linear_fwd(x: Array, weight: Array) -> Array:
    return new((*x.shape[:-1], weight.shape[0]), x.dtype)


@phantom_kernel
def linear_bwd(dy: Array, x: Array, weight: Array, dweight: Array) -> Array:
    return new(x.shape, x.dtype)


@phantom_kernel
def rmsnorm_fwd(x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    return new(x.shape, x.dtype), new(x.shape[:-1], wide(x.dtype))


@phantom_kernel
def rmsnorm_bwd(dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    return new(x.shape, x.dtype)


@phantom_kernel
def add_rmsnorm_fwd(residual: Array, delta: Array, weight: Array, eps: float) -> tuple[Array, Array, Array]:
    return new(delta.shape, delta.dtype), *rmsnorm_fwd(delta, weight, eps)


@phantom_kernel
def add_rmsnorm_bwd(dx: Array, dy: Array, x: Array, rstd: Array, weight: Array, dweight: Array) -> Array:
    return new(x.shape, x.dtype)


@phantom_kernel
def rope(x: Array, cos: Array, sin: Array, rotated: int, out: Array | None) -> Array:
    return new(x.shape, x.dtype) if out is None else out


@phantom_kernel
def attention_fwd(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    batch, queries, heads, _ = q.shape
    return new(q.shape, q.dtype), new((batch, heads, queries), wide(q.dtype))


@phantom_kernel
def attention_bwd(
    dy: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, dq: Array, dk: Array, dv: Array
) -> None:
    new((*lse.shape, 2), lse.dtype)


@phantom_kernel
def swiglu_linear_fwd(gu: Array, weight: Array) -> Array:
    hidden = new((*gu.shape[:-1], weight.shape[1]), gu.dtype)
    return linear_fwd(hidden, weight)


@phantom_kernel
def swiglu_linear_bwd(dy: Array, gu: Array, weight: Array, dweight: Array) -> Array:
    hidden = new((*gu.shape[:-1], weight.shape[1]), gu.dtype)
    dhidden = new(hidden.shape, hidden.dtype)
    return new(gu.shape, dhidden.dtype)


@phantom_kernel
def linear_cross_entropy_fwd(h: Array, weight: Array, targets: Array, keep: bool) -> tuple[Array, Array | None]:
    heads, vocab, _ = weight.shape
    nll, residual = new((len(h), heads), wide(h.dtype)), new((len(h), heads * vocab), h.dtype)
    return new(nll.shape[1:], np.float64), residual if keep else None


@phantom_kernel
def linear_cross_entropy_bwd(dnll: Array, h: Array, residual: Array, weight: Array, dweight: Array) -> Array:
    new(weight.shape, dweight.dtype)  # dW before the heads' weights in the loss go onto it
    scaled = new(weight.shape, weight.dtype)
    return new(h.shape, scaled.dtype)


@phantom_kernel
def adamw_(
    values: Array, masters: Array, m: Array, v: Array, grads: Array, step: int, lr: float, decay: float,
    grad_scale: Any, config: Any,
) -> None:  # fmt: skip
    pass


@phantom_kernel
def clip_factor(grads: Array, limit: float, previous: Any) -> tuple[Any, Any]:
    state = new((2,), np.float64)
    return state[0], state[1]
