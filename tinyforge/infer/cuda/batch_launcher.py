"""Launches decode_batch.cu: some passes of a decoder of many rows, queued behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import scalar
from tinyforge.infer.cuda.batch_plan import TEAM_ROWS, BatchPlan
from tinyforge.infer.cuda.row_launcher import Weights
from tinyforge.kernel import Array


class BatchCache:
    """Keys and values of all layers, (layers, batch, kv_heads, capacity, head_dim).

    tokens: the next one of each row, (batch,). positions: how many are filled, (batch,).
    """

    def __init__(self, plan: BatchPlan, dtype: np.dtype, capacity: int) -> None:
        shape = (plan.layers, plan.batch, plan.kv_heads, capacity, plan.head_dim)
        self.capacity = capacity
        self.keys, self.values = (cupy.zeros(shape, dtype) for _ in range(2))
        self.tokens, self.positions = (cupy.zeros(plan.batch, np.int32) for _ in range(2))


@dataclass(frozen=True)
class BatchDraw:
    """How the kernel draws the next token of each row; as `decode_cuda.Draw`.

    keys: (batch, 2) and first: (batch,), of each row's stream, uint32 on the device.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    keys: Array
    first: Array

    @classmethod
    def of(cls, temperature: float, top_k: int, top_p: float, min_p: float, keys: Sequence[tuple[int, int]],
           first: Sequence[int]) -> BatchDraw:  # fmt: skip
        numbers = (cupy.asarray(np.array(n, np.uint32)) for n in (keys, first))
        return cls(temperature, top_k, top_p, min_p, *numbers)


class BatchLauncher:
    """decode_batch.cu for one decoder."""

    def __init__(self, weights: Weights[BatchPlan]) -> None:
        self.weights, self.plan = weights, weights.plan
        plan = self.plan
        self.kernel = load(
            "infer/cuda/batch.cu", "decode_batch", plan.shared_bytes, cooperative=True, SCALAR=scalar(weights.dtype),
            **plan.macros,
        )  # fmt: skip
        self.kernel.preferred_shared_memory_carveout = 100  # percent: room for all blocks that are to be resident
        self.exchange = cupy.zeros((plan.teams, plan.exchange_bytes), np.uint8)
        self.counters = cupy.empty((plan.teams, 32), np.uint32)
        self.nothing = BatchDraw.of(0, 0, 1, 0, [(0, 0)] * plan.batch, [0] * plan.batch)

    def logits(self, cache: BatchCache, outputs: int, eps: float) -> Array:
        """Take `cache.tokens` at `cache.positions`; (batch, outputs, vocab), on the device. Does not wait."""
        rows = self.plan.teams * TEAM_ROWS
        logits = cupy.empty((rows, outputs, self.plan.vocab_rows), self.weights.wide)
        self._launch(cache, outputs, eps, logits, cache.tokens, 0, 1, None)
        return logits[: self.plan.batch, :, : self.plan.vocab]

    def drawn(self, cache: BatchCache, passes: int, done: int, eps: float, draw: BatchDraw) -> Array:
        """Draw `passes` tokens for each row, the last of which become `cache.tokens`; (passes, batch), on the device.

        done: tokens drawn since `cache.positions` and `draw.first` were right. Does not wait.
        """
        logits = cupy.empty((self.plan.teams * TEAM_ROWS, 1, self.plan.vocab_rows), self.weights.wide)
        ids = cupy.empty((passes, self.plan.batch), np.int32)
        self._launch(cache, 1, eps, logits, ids, done, passes, draw)
        return ids

    def _launch(self, cache: BatchCache, outputs: int, eps: float, logits: Array, ids: Array, done: int, passes: int,
                draw: BatchDraw | None) -> None:  # fmt: skip
        plan, weights, how = self.plan, self.weights, draw or self.nothing
        self.counters.data.memset_async(0, self.counters.nbytes)
        self.kernel(
            (plan.teams * plan.team,), (plan.warps * 32,),
            (weights.matrices, weights.embedding, weights.gains, weights.cosines, weights.sines, cache.keys,
             cache.values, cache.positions, cache.tokens, ids, self.exchange, self.counters, logits,
             weights.lengths[outputs - 1],
             *map(np.int32, (weights.matrices.shape[2], plan.layers, outputs, plan.batch, cache.capacity, done,
                             passes)),
             weights.wide.type(eps), np.int32(draw is not None), np.float32(how.temperature), np.int32(how.top_k),
             np.float32(how.top_p), np.float32(how.min_p), how.keys, how.first),
            shared_mem=plan.shared_bytes,
        )  # fmt: skip
