"""GELU and the linear map after it in one op, which keeps only GELU's input."""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.gelu import gelu_bwd, gelu_fwd
from tinyforge.ops.linear import add_product, linear_add_fwd, linear_bwd_bias, linear_fwd
from tinyforge.params import with_buffer


@kernel
def gelu_linear_fwd(
    u: Array, weight: Array, bias: Array | None, input_bias: Array | None, add: Array | None, approximate: str
) -> Array:
    """add: as in Linear."""
    hidden = gelu_fwd(u, input_bias, approximate)
    return linear_fwd(hidden, weight, bias) if add is None else linear_add_fwd(hidden, weight, bias, add)


@gelu_linear_fwd.on("meta")
def gelu_linear_fwd_memory(u: Array, weight: Array) -> Array:
    hidden = empty(u.shape, u.dtype)
    return empty((*u.shape[:-1], weight.shape[0]), hidden.dtype)


@kernel
def gelu_linear_bwd(
    dweight: Array | None,
    dbias: Array | None,
    dinput_bias: Array | None,
    dy: Array,
    u: Array,
    weight: Array,
    input_bias: Array | None,
    approximate: str,
    accumulate: bool = True,
) -> Array:
    rows = dy.reshape(-1, dy.shape[-1])
    hidden = None if dweight is None else np.empty(u.shape, u.dtype)
    du = gelu_bwd(hidden, dinput_bias, (rows @ weight).reshape(u.shape), u, input_bias, approximate)
    if dweight is not None and hidden is not None:
        add_product(dweight, rows.T, hidden.reshape(len(rows), weight.shape[1]), accumulate)
    if dbias is not None:
        linear_bwd_bias(dbias, rows)
    return du


@gelu_linear_bwd.on("meta")
def gelu_linear_bwd_memory(dweight: Array | None, u: Array) -> Array:
    _hidden = None if dweight is None else empty(u.shape, u.dtype)
    dhidden = empty(u.shape, u.dtype)
    return empty(u.shape, dhidden.dtype)


class GELULinear(Op):
    """y = h W^T + b,  h = gelu(u + b_in) by GELU's formula `approximate`: the reference is GELU, then Linear

    u: (..., H); W: (O, H); b: (O,), or none; b_in: (H,), or none; y: (..., O). b_in is the bias of the linear map that
    made u: added here it costs no extra pass over u. `add`: as in Linear. Saves u; h, which is as large, is recomputed
    in the pass over u that backward makes anyway:

        dh = dy W,   du = gelu_bwd(dh, u + b_in),   dW += dy^T h,   db += sum over rows of dy,
        db_in += sum over rows of du
    """

    fwd = gelu_linear_fwd
    bwd = gelu_linear_bwd
    adds = True

    def __init__(
        self,
        weight: Param,
        backend: Backend,
        name: str = "",
        *,
        bias: Param | None = None,
        input_bias: Param | None = None,
        approximate: str = "tanh",
    ) -> None:
        super().__init__(backend, name)
        self.approximate = approximate
        self.input_bias, self.weight, self.bias = input_bias, weight, bias
        weight.overwrite_grad = True

    def forward(self, u: Array, stash: Stash | None = None, *, add: Array | None = None) -> Array:
        self.expect(u, self.weight.shape[1])
        self.save(stash, u)
        bias, input_bias = (p.value if p else None for p in (self.bias, self.input_bias))
        return self.fwd(u, self.weight.value, bias, input_bias, add, self.approximate)

    def backward(self, dy: Array, stash: Stash) -> Array:
        (u,) = stash.pop(self)
        dbias, dinput_bias = (p.grad if p else None for p in (self.bias, self.input_bias))
        input_bias = self.input_bias.value if self.input_bias else None
        dweight, accumulate = self.weight.grad_with_beta()
        return self.bwd(dweight, dbias, dinput_bias, dy, u, self.weight.value, input_bias, self.approximate, accumulate)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (o, h), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
            for has_bias, has_input_bias in ((True, True), (True, False), (False, True), (False, False)):
                bias = Param("bias", (o,), fill=0.0, decay=False) if has_bias else None
                input_bias = Param("input_bias", (h,), fill=0.0, decay=False) if has_input_bias else None
                weight = Param("weight", (o, h), std=1.0)
                op = with_buffer(cls(weight, backend, bias=bias, input_bias=input_bias), backend, rng)
                yield op, (backend.asarray(rng.normal(size=(*lead, h)) * 2),)
        bias, input_bias = Param("bias", (3,), fill=0.0, decay=False), Param("input_bias", (5,), fill=0.0, decay=False)
        weight = Param("weight", (3, 5), std=1.0)
        exact = cls(weight, backend, bias=bias, input_bias=input_bias, approximate="erf")
        yield with_buffer(exact, backend, rng), (backend.asarray(rng.normal(size=(2, 4, 5)) * 2),)
