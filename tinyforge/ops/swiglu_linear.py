"""SwiGLU and the linear map behind it in one op, which keeps nothing but SwiGLU's input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.phantom import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.params import with_buffer


@kernel
def swiglu_linear_fwd(gu: Array, weight: Array) -> Array:
    hidden = swiglu_fwd(gu).reshape(-1, weight.shape[1])
    return (hidden @ weight.T).reshape(*gu.shape[:-1], weight.shape[0])


@swiglu_linear_fwd.on("phantom")
def swiglu_linear_fwd_memory(gu: Array, weight: Array) -> Array:
    hidden = empty((*gu.shape[:-1], weight.shape[1]), gu.dtype)
    return empty((*gu.shape[:-1], weight.shape[0]), hidden.dtype)


@kernel
def swiglu_linear_bwd(dweight: Array | None, dy: Array, gu: Array, weight: Array) -> Array:
    rows = dy.reshape(-1, dy.shape[-1])
    hidden = None if dweight is None else np.empty((len(rows), weight.shape[1]), gu.dtype)
    dgu = swiglu_bwd(hidden, rows @ weight, gu)
    if dweight is not None:
        dweight += rows.T @ hidden
    return dgu


@swiglu_linear_bwd.on("phantom")
def swiglu_linear_bwd_memory(dweight: Array | None, dy: Array, gu: Array, weight: Array) -> Array:
    shape = (*gu.shape[:-1], weight.shape[1])
    _hidden = None if dweight is None else empty(shape, gu.dtype)
    dhidden = empty(shape, gu.dtype)
    return empty(gu.shape, dhidden.dtype)


class SwiGLULinear(Op):
    """y = h W^T,  h = swiglu(gu): the reference is SwiGLU, then Linear

    gu: (..., 2H), the gate in the first half; W: (O, H); y: (..., O). Saves gu: h, half as large again, is computed
    again in the pass over gu that backward takes anyway:

        dh = dy W,   dgu = swiglu_bwd(dh, gu),   dW += dy^T h
    """

    kernels = (swiglu_linear_fwd, swiglu_linear_bwd)

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight

    def params(self) -> list[Param]:
        return [self.weight]

    def forward(self, gu: Array, stash: Stash | None = None) -> Array:
        if stash is not None:
            stash.push(self, gu)
        return self.k.swiglu_linear_fwd(gu, self.weight.value)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        return self.k.swiglu_linear_bwd(self.weight.grad, dy, gu, self.weight.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for (o, h), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
            op = with_buffer(cls(Param("weight", (o, h), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(*lead, 2 * h)) * 2),)
