"""SwiGLU with the linear maps before and after it: gate|up = x W^T, h = swiglu(gate|up), y = h D^T.

SwiGLU's pass over memory becomes part of one of the products. In forward the first map computes h along with gate|up
and passes it on; h is not kept. In backward the second map turns dh into the gradient of gate|up and recomputes h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.linear import Linear, add_product, linear_add_fwd, linear_fwd
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.params import with_buffer


@kernel
def linear_swiglu_fwd(x: Array, weight: Array) -> tuple[Array, Array]:
    """gu = x W^T, and swiglu(gu)."""
    gu = linear_fwd(x, weight, None)
    return gu, swiglu_fwd(gu)


@linear_swiglu_fwd.on("meta")
def linear_swiglu_fwd_memory(x: Array, weight: Array) -> tuple[Array, Array]:
    lead, width = x.shape[:-1], weight.shape[0]
    return empty((*lead, width), x.dtype), empty((*lead, width // 2), x.dtype)


@kernel
def swiglu_linear_fwd(gu: Array, hidden: Array | None, weight: Array, add: Array | None) -> Array:
    """hidden: swiglu(gu), if it is known already; gu is not read then. add: as in Linear."""
    hidden = swiglu_fwd(gu) if hidden is None else hidden
    return linear_fwd(hidden, weight, None) if add is None else linear_add_fwd(hidden, weight, None, add)


@swiglu_linear_fwd.on("meta")
def swiglu_linear_fwd_memory(gu: Array, hidden: Array | None, weight: Array) -> Array:
    hidden = empty((*gu.shape[:-1], weight.shape[1]), gu.dtype) if hidden is None else hidden
    return empty((*gu.shape[:-1], weight.shape[0]), hidden.dtype)


@kernel
def swiglu_linear_bwd(dweight: Array | None, dy: Array, gu: Array, weight: Array, accumulate: bool = True) -> Array:
    rows = dy.reshape(-1, dy.shape[-1])
    hidden = rows @ weight  # dh, later overwritten by h
    dgu = swiglu_bwd(None if dweight is None else hidden, hidden, gu)
    if dweight is not None:
        add_product(dweight, rows.T, hidden, accumulate)
    return dgu


@swiglu_linear_bwd.on("meta")
def swiglu_linear_bwd_memory(gu: Array, weight: Array) -> Array:
    hidden = empty((*gu.shape[:-1], weight.shape[1]), gu.dtype)
    return empty(gu.shape, hidden.dtype)


class LinearSwiGLU(Linear):
    """gu = x W^T, and with `hidden=True` also h = swiglu(gu), for the next SwiGLULinear: the same bits as there

    x: (..., I); W: (2H, I), the gate in the first half; gu: (..., 2H); h: (..., H). Saves and backward as in Linear;
    the dgu that SwiGLULinear returns includes the gradient through h.
    """

    hidden_fwd = linear_swiglu_fwd

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(weight, backend, name)

    def forward(
        self,
        x: Array,
        stash: Stash | None = None,
        *,
        recompute: Callable[[], Array] | None = None,
        add: Array | None = None,
        hidden: bool = False,
    ) -> Any:
        if not hidden:
            return super().forward(x, stash, recompute=recompute, add=add)
        self.keep(x, stash, recompute)
        return self.hidden_fwd(x, self.weight.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (o, i), lead in (((6, 7), (2, 3)), ((2, 1), (1,)), ((4, 2), (0,))):
            op = with_buffer(cls(Param("weight", (o, i), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(*lead, i))),)


class SwiGLULinear(Op):
    """y = h W^T,  h = swiglu(gu): the reference is SwiGLU, then Linear

    gu: (..., 2H), the gate in the first half; W: (O, H); y: (..., O); `hidden`: h, if it is known; `add`: as in Linear.
    Saves gu; h, which would be half as much again, is recomputed in the pass over gu that backward makes anyway:

        dh = dy W,   dgu = swiglu_bwd(dh, gu),   dW += dy^T h
    """

    fwd = swiglu_linear_fwd
    bwd = swiglu_linear_bwd
    adds = True

    def __init__(self, weight: Param, backend: Backend, name: str = "") -> None:
        super().__init__(backend, name)
        self.weight = weight
        weight.overwrite_grad = True

    def forward(
        self, gu: Array, stash: Stash | None = None, *, hidden: Array | None = None, add: Array | None = None
    ) -> Array:
        self.expect(gu, 2 * self.weight.shape[1])
        self.save(stash, gu)
        return self.fwd(gu, hidden, self.weight.value, add)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (gu,) = stash.pop(self)
        dweight, accumulate = self.weight.grad_with_beta()
        return self.bwd(dweight, dy, gu, self.weight.value, accumulate)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (o, h), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
            op = with_buffer(cls(Param("weight", (o, h), std=1.0), backend), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(*lead, 2 * h)) * 2),)


def swiglu_mlp(before: Any, after: Any, x: Array, stash: Stash | None, **add: Array) -> Array:
    """after(before(x)), where LinearSwiGLU passes h on to SwiGLULinear; with an adapter in place of either, only gu is
    passed on. add: for after's forward, as in Linear."""
    if isinstance(before, LinearSwiGLU) and isinstance(after, SwiGLULinear):
        gu, hidden = before.forward(x, stash, hidden=True)
        return after.forward(gu, stash, hidden=hidden, **add)
    y: Array = after.forward(before.forward(x, stash=stash), stash=stash, **add)
    return y
