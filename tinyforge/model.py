"""What models have in common: they are made of ops, and their parameters lie in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.op import Cases, Op, Param, Recompute, WithKeywords
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.rng import Stream


class Model(Op):
    """An op made of `ops`. Subclasses write forward, backward and `ops`, and a constructor of this form, which sets
    `config`, the `buffer` of all parameters, and `recompute` unless it ignores that:

        def __init__(self, config, backend, *, values=None, recompute=""):
    """

    config: Any
    buffer: ParamBuffer
    recompute: Recompute = ""

    def ops(self) -> list[Op]:
        """Every op, in about the order of forward: the order of the parameters in the buffer."""
        raise NotImplementedError(f"{type(self).__name__} does not list its ops")

    def params(self) -> list[Param]:
        return list(dict.fromkeys(p for op in self.ops() for p in op.params()))

    def initialise(self, seed: int) -> None:
        self.buffer.initialise(Stream(seed, "init"))

    def replica(self) -> Self:
        """A model with the same weights and its own gradients, for a worker of data-parallel training."""
        build: Any = type(self)
        return build(self.config, self.backend, values=self.buffer.values, recompute=self.recompute)

    def set_window(self, window: int) -> None:
        """For --window-schedule: this window in every attention that has one. Raises UserError if none has."""
        windowed: list[Any] = [op for op in self.ops() if getattr(op, "window", None)]
        if not windowed:
            raise UserError(
                f"--window-schedule: no layer of {type(self).__name__} has an attention window with this config; give "
                "it one, e.g. --set window=512, or leave the schedule out"
            )
        for op in windowed:
            op.window = window

    @classmethod
    def cases_of(
        cls, shapes: Iterable[tuple[Any, int, int]], backend: Backend, rng: np.random.Generator, std: float = 0.5
    ) -> Cases:
        """Cases for the gradient check of a model of next tokens: for each (config, batch, length) random weights, ids
        and targets, some of which are -1."""
        build: Any = cls
        for config, batch, length in shapes:
            model = with_buffer(build(config, backend), backend, rng, std)
            ids = rng.integers(0, config.vocab, (batch, length))
            targets = rng.integers(-1, config.vocab, (batch, length, config.prediction_heads))
            yield model, (backend.asarray(ids), backend.asarray(targets))

    @classmethod
    def packed_case(
        cls, config: Any, backend: Backend, rng: np.random.Generator, documents: Callable[[Array], Any]
    ) -> tuple[Op, tuple[Array, ...]]:
        """The same for two rows of nine tokens, each of several documents. documents: of their starts."""
        [(model, inputs)] = cls.cases_of([(config, 2, 9)], backend, rng, std=0.2)
        starts = np.array([[0, 0, 0, 3, 3, 5, 5, 5, 8], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
        return WithKeywords(model, documents=documents), (*inputs, backend.asarray(starts))


class NextTokenModel(Model):
    """A model of next tokens with one output head, `head`, on the states that `hidden` returns. With `make_cache` it
    generates text: see `tinyforge.infer.CausalLM`."""

    per_head, prediction_heads = True, 1
    head: Any

    def logits(self, h: Array, head: int = 0) -> Array:
        """(..., V) from the final states, (..., C)."""
        found: Array = self.head.logits(h, head)
        return found

    def fused_weights(self) -> None:
        """None: the fused decoders take the Llama shape."""
