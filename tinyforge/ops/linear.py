"""Linear map, with or without a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import numpy as np

from tinyforge.backends import Backend
from tinyforge.backends.meta import empty
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.params import with_buffer


@kernel
def linear_fwd(x: Array, weight: Array, bias: Array | None) -> Array:
    y = x.reshape(-1, x.shape[-1]) @ weight.T
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.shape[0])


@linear_fwd.on("meta")
def linear_fwd_memory(x: Array, weight: Array) -> Array:
    return empty((*x.shape[:-1], weight.shape[0]), x.dtype)


@kernel
def linear_add_fwd(x: Array, weight: Array, bias: Array | None, add: Array) -> Array:
    """x W^T + bias + add, rounded once."""
    y = linear_fwd(x, weight, bias)
    y += add
    return y


linear_add_fwd.on("meta")(linear_fwd_memory)


@kernel
def linear_bwd_bias(dbias: Array, dy: Array) -> None:
    """dbias += the sum over the rows of dy, for ops that add a bias."""
    dbias += dy.reshape(-1, dy.shape[-1]).sum(axis=0)


@kernel
def linear_bwd(
    dweight: Array | None, dbias: Array | None, dy: Array, x: Array | None, weight: Array, accumulate: bool = True
) -> Array:
    """x is only needed for dweight. accumulate: from `Param.grad_with_beta`, for dweight."""
    rows = dy.reshape(-1, dy.shape[-1])
    if dweight is not None and x is not None:
        add_product(dweight, rows.T, x.reshape(-1, x.shape[-1]), accumulate)
    if dbias is not None:
        linear_bwd_bias(dbias, rows)
    return (rows @ weight).reshape(*dy.shape[:-1], weight.shape[1])


def add_product(out: Array, a: Array, b: Array, accumulate: bool) -> None:
    """out += a b, or out = a b, on NumPy."""
    if accumulate:
        out += a @ b
    else:
        np.matmul(a, b, out=out)


linear_bwd.on("meta")(lambda dy, weight: empty((*dy.shape[:-1], weight.shape[1]), dy.dtype))


def made(op: Op, shape: tuple[int, ...], bias: bool) -> tuple[Param, Param | None]:
    """The weight of an op that was made from sizes, N(0, 1 / inputs), and its bias, 0; after the op's name, if any."""
    if not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
        raise ValueError(f"{op.name}: sizes {shape}, expected whole numbers of 1 or more")
    prefix = "" if op.name == type(op).__name__ else f"{op.name}."
    weight = Param(f"{prefix}weight", shape)
    return weight, Param(f"{prefix}bias", shape[:1], fill=0.0, decay=False) if bias else None


def sizes_of(
    kind: str, weight: Any, rest: tuple[Any, ...], named: dict[str, Any], sizes: tuple[str, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The sizes after the first among an op's arguments, which are taken out of `named`, and the others: from the
    backend on. Raises TypeError without a backend or with too few sizes."""
    if isinstance(weight, Param):
        sizes = ()
    given = (*rest[: len(sizes)], *(named.pop(size) for size in sizes[len(rest) :] if size in named))
    rest = rest[len(sizes) :]
    if len(given) < len(sizes) or not isinstance(rest[0] if rest else named.get("backend"), Backend):
        expected = ", ".join(("weight: Param" if isinstance(weight, Param) else "out", *sizes, "backend"))
        raise TypeError(f"{kind}: no backend, or a size too few; expected {kind}({expected})")
    return given, rest


class Linear(Op):
    """y = x W^T + b

    x: (..., I); W: (O, I); b: (O,), or none; y: (..., O). Saves x; or `recompute`, a function that recomputes x from
    what other ops have saved anyway, which trades time for memory (Chen et al., "Training Deep Nets with Sublinear
    Memory Cost", 2016). With a frozen W nothing is saved.

    add: (..., O), added to y, such as the residual stream: this saves a pass over memory and a rounding compared with
    adding it afterwards. Its gradient is dy.

    Made from sizes, `Linear(out, inputs, backend)`, its parameters are `name`.weight, which starts at N(0, 1 / inputs),
    and `name`.bias, which starts at 0.

    backward: dx = dy W, dW += dy^T x, db += sum over rows of dy, with all leading axes folded into one.
    """

    fwd = linear_fwd
    bwd = linear_bwd
    add_fwd = linear_add_fwd
    adds = True

    @overload
    def __init__(self, weight: Param, backend: Backend, name: str = "", *, bias: Param | None = None) -> None: ...
    @overload
    def __init__(self, weight: int, inputs: int, backend: Backend, name: str = "", *, bias: bool = True) -> None: ...
    def __init__(self, weight: Any, *rest: Any, bias: Any = None, **named: Any) -> None:
        """(weight: Param, backend, name, bias=Param or None), or (out: int, inputs: int, backend, name, bias=True)."""
        inputs, rest = sizes_of(type(self).__name__, weight, rest, named, ("inputs",))
        super().__init__(*rest, **named)
        if not isinstance(weight, Param):
            weight, bias = made(self, (weight, *inputs), bias is None or bool(bias))
        self.weight: Param = weight
        self.bias: Param | None = bias
        weight.overwrite_grad = True

    def forward(
        self,
        x: Array,
        stash: Stash | None = None,
        *,
        recompute: Callable[[], Array] | None = None,
        add: Array | None = None,
    ) -> Array:
        self.keep(x, stash, recompute)
        bias = self.bias.value if self.bias else None
        if add is not None:
            return self.add_fwd(x, self.weight.value, bias, add)
        return self.fwd(x, self.weight.value, bias)

    def keep(self, x: Array, stash: Stash | None, recompute: Callable[[], Array] | None) -> None:
        self.expect(x, self.weight.shape[1])
        self.save(stash, None if self.weight.frozen else recompute or (lambda: x))

    def backward(self, dy: Array, stash: Stash) -> Array:
        (x,) = stash.pop(self)
        dbias = self.bias.grad if self.bias else None
        dweight, accumulate = self.weight.grad_with_beta()
        return self.bwd(dweight, dbias, dy, x and x(), self.weight.value, accumulate)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for (o, i), lead in (((5, 7), (2, 3)), ((1, 1), (1,)), ((6, 4), (9,)), ((3, 2), (0,))):
            for bias in (None, Param("bias", (o,), fill=0.0, decay=False)):
                op = with_buffer(cls(Param("weight", (o, i), std=1.0), backend, bias=bias), backend, rng)
                yield op, (backend.asarray(rng.normal(size=(*lead, i))),)
