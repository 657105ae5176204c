"""Ops one after the other, as one op."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops.activations import ReLU, Tanh
from tinyforge.ops.linear import Linear
from tinyforge.params import with_buffer


class Sequential(Op):
    """y = f_n(... f_2(f_1(x)))

    ops: f_1 to f_n, each with one input and one output. Saves what they save. backward runs theirs in reverse. The
    number of an op is put in front of its name and of its parameters' names, "0.weight":
    Sequential(Linear(8, 2, backend), ReLU(backend), Linear(1, 8, backend)).
    """

    def __init__(self, *ops: Op, name: str = "") -> None:
        if not ops:
            raise ValueError("Sequential: no op was given, expected one or more")
        for number, op in enumerate(ops):
            if not isinstance(op, Op):
                raise TypeError(
                    f"Sequential: argument {number} is of {type(op).__name__}, expected an op: Sequential(*ops)"
                )
        super().__init__(ops[0].backend, name)
        self.ops = ops
        first: dict[Any, int] = {
            named: number for number, op in reversed([*enumerate(ops)]) for named in (op, *op.params())
        }
        for named, number in first.items():  # an op or a parameter that comes twice is numbered once
            named.name = f"{number}.{named.name}"

    def params(self) -> list[Param]:
        return list(dict.fromkeys(p for op in self.ops for p in op.params()))

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        for op in self.ops:
            x = op.forward(x, stash=stash)
        return x

    def backward(self, dy: Array, stash: Stash) -> Array:
        for op in reversed(self.ops):
            dy = op.backward(dy, stash)
        return dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for rows in (3, 1, 0):
            op = cls(Linear(5, 4, backend), Tanh(backend), Linear(2, 5, backend))
            yield with_buffer(op, backend, rng), (backend.asarray(rng.normal(size=(rows, 4))),)
        yield cls(ReLU(backend)), (backend.asarray(np.abs(rng.normal(size=(2, 3))) + 0.1),)
