"""Launches decode.cu: some passes of a decoder with a key/value cache, queued behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

import cupy
import numpy as np

from tinyforge.backends import wide
from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import scalar
from tinyforge.infer.cuda.batch_plan import BatchPlan
from tinyforge.infer.cuda.row_plan import Layer, Plan
from tinyforge.kernel import Array


@dataclass(frozen=True)
class Draw:
    """How the kernel draws the next token. temperature 0: the most likely one. key: of a `tinyforge.rng.Stream`.

    top_k 0, top_p 1 and min_p 0 cut nothing off; min_p is relative to the most likely token. first: how many numbers of
    the stream have been used.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    key: tuple[int, int] = (0, 0)
    first: int = 0


@cache
def shared_limit(resident: int = 1) -> int:
    """Bytes of shared memory that a block may use, if so many are to run on each multiprocessor at a time."""
    device = cupy.cuda.Device().attributes
    each = device["MaxSharedMemoryPerMultiprocessor"] // resident - device["ReservedSharedMemoryPerBlock"]
    return int(min(device["MaxSharedMemoryPerBlockOptin"], each))


AnyPlan = TypeVar("AnyPlan", Plan, BatchPlan)


class Weights(Generic[AnyPlan]):
    """The matrices of a decoder as its kernel takes them, a copy of those given, and its other constants.

    layers: of `plan`. heads: (outputs, vocab, dim). embedding: (vocab, dim). gains: (2 layers + 1, dim), of the norms
    in the order of forward. cosines, sines: (positions, head_dim / 2).
    """

    def __init__(self, plan: AnyPlan, layers: Sequence[Layer], heads: Array, embedding: Array, gains: Array,
                 cosines: Array, sines: Array) -> None:  # fmt: skip
        self.dtype, self.wide = embedding.dtype, wide(embedding.dtype)
        self.plan: AnyPlan = plan
        self.matrices = plan.arrange(layers, heads, cupy)
        self.embedding = embedding
        self.gains, self.cosines, self.sines = (
            cupy.ascontiguousarray(x.astype(self.wide, copy=False)) for x in (gains, cosines, sines)
        )
        self.lengths = cupy.asarray(plan.lengths)


class Cache:
    """Keys and values of all layers, (layers, kv_heads, capacity, head_dim), and the tokens, (capacity + 1,)."""

    def __init__(self, plan: Plan, dtype: np.dtype, capacity: int) -> None:
        shape = (plan.layers, plan.kv_heads, capacity, plan.head_dim)
        self.capacity = capacity
        self.keys, self.values = (cupy.zeros(shape, dtype) for _ in range(2))
        self.tokens = cupy.zeros(capacity + 1, np.int32)


class Launcher:
    """decode.cu for one number of rows. `exchange` holds what the last launch computed."""

    def __init__(self, weights: Weights[Plan], rows: int) -> None:
        self.weights, self.plan = weights, replace(weights.plan, rows=rows)
        self.kernel = load(
            "infer/cuda/row.cu", "decode", self.plan.shared_bytes, cooperative=True, SCALAR=scalar(weights.dtype),
            **self.plan.macros,
        )  # fmt: skip
        self.exchange = cupy.empty(0, weights.wide)

    def __call__(
        self, cache: Cache, past: int, passes: int, outputs: int, eps: float, draw: Draw | None = None
    ) -> Array:
        """Positions past .. past + passes * rows - 1; returns logits, (passes, rows, outputs, vocab), on the device.

        With `draw` (one row only) each pass draws the next one's token, else tokens are those of the cache. Does not
        wait; the logits are good until the next launch.
        """
        plan = self.plan
        end = past + passes * plan.rows
        if not (past >= 0 and end <= min(cache.capacity, len(self.weights.cosines)) and 1 <= outputs <= plan.outputs):
            raise ValueError(f"decode: positions {past} to {end}, {outputs} outputs: the cache or the model has fewer")
        if draw and plan.rows != 1:
            raise ValueError(f"decode: tokens are drawn one at a time, not {plan.rows}")
        region = self._launch(cache, past, passes, outputs, eps, draw)
        found = self.exchange[: passes * region].reshape(passes, region)[:, -plan.rows * outputs * plan.vocab_rows :]
        return found.reshape(passes, plan.rows, outputs, plan.vocab_rows)[..., : plan.vocab]

    def speculate(self, cache: Cache, begin: Array, passes: int, eps: float) -> Array:
        """Greedy passes, each over the last token and rows - 1 drafts, of which it adds those that stand.

        begin: (1 + rows,) int32, positions in the cache, the last token, its drafts (-1: none), on the device. Returns
        (passes + 1, 1 + rows), on the device: for each pass how many tokens it gave (0: the cache had no room for
        `rows` more) and these tokens; the last row is the `begin` of what follows. Does not wait.
        """
        rows = self.plan.rows
        if not 2 <= rows <= self.plan.outputs:
            raise ValueError(f"decode: {rows} positions a pass, wanted 2 to {self.plan.outputs}, a head for each draft")
        report = cupy.empty((passes + 1, 1 + rows), np.int32)
        self._launch(cache, 0, passes, rows, eps, None, begin, report)
        return report

    def _launch(self, cache: Cache, past: int, passes: int, outputs: int, eps: float, draw: Draw | None,
                begin: Array | None = None, report: Array | None = None) -> int:  # fmt: skip
        """Returns the words of a pass in `exchange`."""
        plan, weights = self.plan, self.weights
        region = plan.exchange(outputs)
        if self.exchange.size < passes * region:
            self.exchange = cupy.empty(passes * region, weights.wide)
        self.exchange.data.memset_async(0xFF, passes * region * self.exchange.itemsize)
        how = draw or Draw()
        self.kernel(
            (plan.blocks,), (plan.warps * 32,),
            (weights.matrices, weights.embedding, weights.gains, weights.cosines, weights.sines, cache.keys,
             cache.values, cache.tokens, self.exchange, weights.lengths[outputs - 1],
             *map(np.int32, (weights.matrices.shape[2], plan.layers, outputs, cache.capacity, past, passes)),
             weights.wide.type(eps), np.int32(draw is not None), np.float32(how.temperature), np.int32(how.top_k),
             np.float32(how.top_p), np.float32(how.min_p), *map(np.uint32, (*how.key, how.first)),
             *(np.uintp(0) if x is None else x for x in (begin, report))),
            shared_mem=plan.shared_bytes,
        )  # fmt: skip
        return region
