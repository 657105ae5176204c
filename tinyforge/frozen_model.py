"""A model that is only read, and its matrices in one byte a weight where that is asked for.

    model = frozen_model(partial(spec.build, config, backend))                  to be filled, as `Opened.build` does
    small = frozen_model(partial(spec.build, config, backend), "int8")
    small = quantised_copy(model, "int8")                                       of a model that is there

Nothing in the model knows of it. It is built without memory, all of it is frozen, and then one buffer is made: its
weights take their own bytes, and there are no master weights, gradients and moments: in bf16 that is 2 bytes a weight
instead of 10. With codes, an op that reads a matrix gets its numbers in the backend's precision, computed for that one
use; a decoder that has kernels for codes reads the codes.
"""

from __future__ import annotations

import weakref
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


def frozen_model(make: Callable[..., Any], weights: str = "") -> Any:
    """make: builds the model, as `make(values=...)`. weights: "int8", "fp8", or "" for the backend's precision. All of
    them are zeros."""
    if weights:
        check_format(weights)
    model = make(values=UNPLACED)
    for p in model.params():
        p.frozen = True
    for p in matrices(model) if weights else ():
        p.weights = weights
    model.buffer = ParamBuffer(model.params(), model.backend)
    # Nothing in it is learned: workers can have it as it is. Weak, or its memory would wait for a garbage collection.
    model.replica = weakref.ref(model)
    return model


def quantised_copy(model: Any, kind: str) -> Any:
    """A model with the same weights in `kind`; what it has learned is read, nothing is shared."""
    build: Callable[..., Any] = type(model)
    found = frozen_model(partial(build, model.config, model.backend), kind)
    weights = named(model.buffer, model.buffer.masters, model.backend)
    for p in found.buffer.frozen:
        found.buffer.set_master(p, weights[p.name])
    return found
