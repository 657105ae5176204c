"""A model for inference only, optionally with its matrices in one byte per weight.

    model = frozen_model(partial(spec.build, config, backend))                  to be filled, as `Opened.build` does
    small = frozen_model(partial(spec.build, config, backend), "int8")
    small = quantised_copy(model, "int8")                                       of an existing model

The model's own code does not change. It is built without memory, all of its parameters are frozen, and then one buffer
is made, without master weights, gradients and moments: in bf16 that is 2 bytes per weight instead of 10. Where weights
are codes, an op that reads a matrix gets it dequantised to the backend's precision for that one use; a decoder with
kernels for codes reads the codes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from tinyforge.errors import UserError
from tinyforge.op import Param
from tinyforge.ops import GELULinear, Linear, LinearCrossEntropy, LoRA, MixtureOfExperts, SwiGLULinear
from tinyforge.params import UNPLACED, ParamBuffer, named
from tinyforge.quantised import FOUR_BITS, GROUPS, KINDS, check_format


def matrices(model: Any) -> list[Param]:
    """The parameters that are quantised: matrices of linear maps, experts and output heads, a tied embedding included.
    All others are small, or are looked up rather than multiplied."""
    found: list[Param] = []
    for op in model.ops():
        if isinstance(op, (Linear, SwiGLULinear, GELULinear, LinearCrossEntropy, LoRA)):
            found.append(op.weight)
        elif isinstance(op, MixtureOfExperts):
            found += [op.gate_up, op.down]
    return list(dict.fromkeys(found))


def set_format(model: Any, kind: str, *, heads: str) -> None:
    """Choose the format of the matrices, before their buffer is made. heads: that of the output heads, "" for the
    backend's precision: an error of a logit is not averaged by later layers, so they keep more bits, as in GGUF's q4_0.
    Four bits leave rows that are not whole groups in int8."""
    for p in matrices(model):
        p.weights = "int8" if p.shape[-1] % GROUPS.get(kind, 1) else kind
    for op in model.ops():
        if isinstance(op, LinearCrossEntropy):
            op.weight.weights = heads


def frozen_model(make: Callable[..., Any], weights: str = "") -> Any:
    """A model whose weights are zeros, to be filled. make: builds it, as `make(values=...)`. weights: "int8", "fp8",
    "int4", which leaves output heads and rows that are not whole groups in int8, or "" for the backend's precision."""
    if weights:
        check_format(weights, KINDS)
    model = make(values=UNPLACED)
    if weights == FOUR_BITS and model.backend.name not in ("numpy", "cupy"):
        raise UserError(f"--weights int4 is for numpy and cupy, got backend {model.backend.name}; use int8 or fp8")
    for p in model.params():
        p.frozen = True
    if weights:
        set_format(model, weights, heads="int8" if weights in GROUPS else weights)
    model.buffer = ParamBuffer(model.params(), model.backend)
    # Nothing in it is learned, so workers can share it. A weak reference: a cycle would keep its memory until the next
    # garbage collection.
    model.replica = weakref.ref(model)
    return model


def quantised_copy(model: Any, kind: str) -> Any:
    """A copy of the model with its learned weights in the format `kind`."""
    build: Callable[..., Any] = type(model)
    found = frozen_model(partial(build, model.config, model.backend), kind)
    weights = named(model.buffer, model.buffer.masters, model.backend)
    for p in found.buffer.frozen:
        found.buffer.set_master(p, weights[p.name])
    return found
