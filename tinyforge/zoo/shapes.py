"""The shapes of a model, layer by layer, from a real pass on arrays without memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from tinyforge.backends.meta import MetaBackend
from tinyforge.config import ModelConfig
from tinyforge.op import Op
from tinyforge.ops.rope import RoPE
from tinyforge.registry import ModelSpec
from tinyforge.train.plan import Plan, plan_step

LAYER = re.compile(r"(.*?\.)?(\d+)\.(.+)")  # blocks.3.qkv


@dataclass(frozen=True)
class Step:
    """One op of a pass. output: its shape. params: the names, without layer and op, and shapes of its parameters,
    except those of an earlier op."""

    name: str
    kind: str
    output: tuple[int, ...]
    params: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Layer:
    """The ops of a layer, or of several equal layers. name: "blocks.0"; "" for an op outside the layers."""

    name: str
    count: int
    steps: tuple[Step, ...]


def count_parameters(spec: ModelSpec, config: ModelConfig) -> int:
    return _count(spec.build, config)


@cache
def _count(build: Callable[..., Any], config: ModelConfig) -> int:
    return build(config, MetaBackend("fp32")).buffer.count


def trace(
    spec: ModelSpec, config: ModelConfig, precision: str, batch_size: int, seq_len: int
) -> tuple[list[Layer], Plan]:
    """The layers of a training step, in the order of forward, and its memory plan."""
    steps: list[Step] = []
    watched: list[Op] = []

    def build(*args: Any, **options: Any) -> Any:
        model = spec.build(*args, **options)
        watched.extend(dict.fromkeys(model.ops()))
        seen: set[int] = set()
        for op in watched:
            _record(op, steps, seen)
        return model

    try:
        plan = plan_step(replace(spec, build=build), config, precision, batch_size, seq_len)
    finally:
        # An op that holds its own bound forward is a cycle, and its meta arrays would count until garbage collection.
        for op in watched:
            del op.forward
            vars(op).pop("after", None)
    return _layers(steps), plan


def _record(op: Op, steps: list[Step], seen: set[int]) -> None:
    """Make an op's forward record its step. seen: ids of the parameters recorded so far."""
    forward: Callable[..., Any] = op.forward

    def note(op: Op, output: tuple[int, ...]) -> None:
        own = [p for p in op.params() if id(p) not in seen]
        seen.update(map(id, own))
        params = tuple((_short(p.name.removeprefix(f"{op.name}.")), p.shape) for p in own)
        steps.append(Step(op.name, type(op).__name__, output, params))

    def recording(*args: Any, **options: Any) -> Any:
        result = forward(*args, **options)
        first = result[0] if isinstance(result, tuple) else result
        note(op, tuple(first.shape))
        return result

    op.forward = recording  # type: ignore[method-assign]
    if not isinstance(op, RoPE):
        return
    after = op.after

    def recording_after(linear: Op, *args: Any, **options: Any) -> Any:
        known = len(steps)
        result = after(linear, *args, **options)
        if len(steps) == known:  # one kernel for both ops: neither forward was called
            note(linear, (*result.shape[:2], result.shape[2] * result.shape[3]))
            note(op, tuple(result.shape))
        return result

    op.after = recording_after  # type: ignore[method-assign]


def _short(name: str) -> str:
    """A name without its layer, so that layers can be compared."""
    found = LAYER.fullmatch(name)
    return found[3] if found else name


def _layers(steps: list[Step]) -> list[Layer]:
    """Steps grouped by layer; equal neighbouring layers become one."""

    def layer_of(step: Step) -> str:
        found = LAYER.fullmatch(step.name)
        return f"{found[1] or ''}{found[2]}" if found else ""

    layers: list[Layer] = []
    for name, group in groupby(steps, layer_of):
        own = tuple(replace(step, name=step.name.removeprefix(f"{name}.")) for step in group)
        if layers and name and own == layers[-1].steps:
            layers[-1] = replace(layers[-1], count=layers[-1].count + 1)
        else:
            layers.append(Layer(name, 1, own))
    return layers
