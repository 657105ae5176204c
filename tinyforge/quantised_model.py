"""A model for inference whose matrices are kept in one byte a weight.

    small = quantised_model(partial(spec.build, config, backend), "int8")       to be filled, as `Opened.build` does
    small = quantised_copy(model, "int8")                                       of a model that is there

Nothing in the model knows of it. It is built without memory, all of it is frozen, and then one buffer is made: its
weights take their own bytes, and there are no master weights, gradients and moments. An op that reads a matrix gets its
numbers in the backend's precision, computed for that one use; a decoder that has kernels for codes reads the codes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tinyforge.op import Param
from tinyforge.ops import GELULinear, Linear, LinearCrossEntropy, MixtureOfExperts, SwiGLULinear
from tinyforge.params import UNPLACED, ParamBuffer, named
from tinyforge.quantised import check_format


def matrices(model: Any) -> list[Param]:
    """What is quantised: the matrices of linear maps, experts, and output heads, a tied embedding with them. All else
    is small, or is looked up and not multiplied by."""
    found: list[Param] = []
    for op in model.ops():
        if isinstance(op, (Linear, SwiGLULinear, GELULinear, LinearCrossEntropy)):
            found.append(op.weight)
        elif isinstance(op, MixtureOfExperts):
            found += [op.gate_up, op.down]
    return list(dict.fromkeys(found))


def quantised_model(make: Callable[..., Any], kind: str) -> Any:
    """make: builds the model, as `make(values=...)`. kind: "int8" or "fp8". The weights are zeros."""
    check_format(kind)
    model = make(values=UNPLACED)
    for p in model.params():
        p.frozen = True
    for p in matrices(model):
        p.weights = kind
    model.buffer = ParamBuffer(model.params(), model.backend)
    model.replica = lambda: model  # nothing in it is learned: workers can have it as it is
    return model


def quantised_copy(model: Any, kind: str) -> Any:
    """A model with the same weights in `kind`; what it has learned is read, nothing is shared."""
    build: Callable[..., Any] = type(model)
    found = quantised_model(partial(build, model.config, model.backend), kind)
    weights = named(model.buffer, model.buffer.masters, model.backend)
    for p in found.buffer.frozen:
        found.buffer.set_master(p, weights[p.name])
    return found
