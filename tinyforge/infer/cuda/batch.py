"""Decoding a batch on a CUDA GPU: one launch for many tokens of all rows, and no wait for the host in between.

The kernel is batch.cu; docs/kernels/decode-batch.md derives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import processors, scalar, shared_limit
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.cuda.batch_plan import TEAM_ROWS, BatchPlan, samplers
from tinyforge.infer.cuda.device import BLOCK, DeviceDecoder, DeviceWeights
from tinyforge.infer.decoder import Drawn
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.rng import Stream


class BatchCache:
    """Keys and values of all layers, (layers, batch, kv_heads, capacity, head_dim).

    tokens: the next one of each row, (batch,). positions: how many are filled, (batch,).
    """

    def __init__(self, plan: BatchPlan, dtype: np.dtype, capacity: int) -> None:
        shape = (plan.layers, plan.batch, plan.kv_heads, capacity, plan.head_dim)
        self.capacity = capacity
        self.keys, self.values = (cupy.zeros(shape, dtype) for _ in range(2))
        self.tokens, self.positions = (cupy.zeros(plan.batch, np.int32) for _ in range(2))


class Draw(NamedTuple):
    """How each row's tokens are drawn, on the device. samplers: `batch_plan.samplers`, as bytes. first: how many
    numbers of each row's stream have been used, (batch,) uint32."""

    samplers: Array
    first: Array

    @classmethod
    def of(cls, samplings: Sequence[Sampling], streams: Sequence[Stream]) -> Draw:
        first = np.array([stream.position for stream in streams], np.uint32)
        return cls(cupy.asarray(samplers(samplings, streams).view(np.uint8)), cupy.asarray(first))


class BatchLauncher:
    """batch.cu for one decoder."""

    def __init__(self, weights: DeviceWeights[BatchPlan]) -> None:
        self.weights, self.plan = weights, weights.plan
        plan = self.plan
        self.kernel = load(
            "infer/cuda/batch.cu", "decode_batch", plan.shared_bytes, cooperative=True, SCALAR=scalar(weights.dtype),
            **plan.macros,
        )  # fmt: skip
        self.kernel.preferred_shared_memory_carveout = 100  # percent: room for all blocks that are to be resident
        self.exchange = cupy.zeros((plan.teams, plan.exchange_bytes), np.uint8)
        self.counters = cupy.empty((plan.teams, 32), np.uint32)

    def logits(self, cache: BatchCache, outputs: int) -> Array:
        """Take `cache.tokens` at `cache.positions`; (batch, outputs, vocab), on the device. Does not wait."""
        rows = self.plan.teams * TEAM_ROWS
        logits = cupy.empty((rows, outputs, self.plan.vocab_rows), self.weights.wide)
        self._launch(cache, outputs, logits, cache.tokens, 0, 1, None)
        return logits[: self.plan.batch, :, : self.plan.vocab]

    def drawn(self, cache: BatchCache, passes: int, done: int, draw: Draw) -> Array:
        """Draw `passes` tokens for each row, the last of which become `cache.tokens`; (passes, batch), on the device.

        done: tokens drawn since `cache.positions` and `draw.first` were right. Does not wait.
        """
        logits = cupy.empty((self.plan.teams * TEAM_ROWS, 1, self.plan.vocab_rows), self.weights.wide)
        ids = cupy.empty((passes, self.plan.batch), np.int32)
        self._launch(cache, 1, logits, ids, done, passes, draw)
        return ids

    def _launch(self, cache: BatchCache, outputs: int, logits: Array, ids: Array, done: int, passes: int,
                draw: Draw | None) -> None:  # fmt: skip
        plan, weights = self.plan, self.weights
        self.counters.data.memset_async(0, self.counters.nbytes)
        self.kernel(
            (plan.teams * plan.team,), (plan.warps * 32,),
            (weights.matrices, weights.embedding, weights.gains, weights.cos, weights.sin, cache.keys, cache.values,
             cache.positions, cache.tokens, ids, self.exchange, self.counters, logits, weights.lengths[outputs - 1],
             *map(np.int32, (weights.matrices.shape[2], plan.layers, outputs, plan.batch, cache.capacity, done,
                             passes)),
             weights.norm_eps, *(draw or (np.uintp(0), np.uintp(0)))),
            shared_mem=plan.shared_bytes,
        )  # fmt: skip


class BatchDecoder(DeviceDecoder):
    """A decoder of many rows, of which each step is one launch, and many steps too.

    It copies the model's weights into the order in which the kernel reads them. tuning: fields of `BatchPlan`, e.g.
    blocks=128. Raises UserError for a model on another backend, and for a shape that the kernel does not take.

    In bf16 two blocks share a multiprocessor, where there is memory enough: one computes while the other waits.
    """

    can_save = True
    piece = 256

    def __init__(self, model: CausalLM, batch: int, capacity: int | None = None, **tuning: int) -> None:
        super().__init__(model, batch, capacity)
        plan = None
        if model.backend.dtype.itemsize == 2 and "resident" not in tuning:
            with suppress(UserError):
                plan = self._plan(resident=2, **tuning)
        plan = plan or self._plan(**tuning)
        self.launcher = BatchLauncher(DeviceWeights(plan, self.fused))
        self.cache = BatchCache(plan, self.launcher.weights.dtype, self.capacity)

    def _plan(self, resident: int = 1, **tuning: int) -> BatchPlan:
        given = {"blocks": resident * processors(), "shared": shared_limit(resident), **tuning}
        return BatchPlan(batch=self.batch, resident=resident, **self._shape(), **given)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """By the model's own ops. Does not wait for the device."""
        self._check_room([row], len(tokens))
        if len(tokens):
            self._prefill(row, self.cache.keys[:, row], self.cache.values[:, row], tokens)

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        new = np.asarray(tokens, np.int32)
        self._check_room(range(self.batch), new.shape[1])
        found = []
        for column in new.T:
            self._place(column)
            found.append(self.launcher.logits(self.cache, heads).get())
            self.lengths = [length + 1 for length in self.lengths]
        return np.stack(found, axis=1)

    def saved(self, row: int, start: int) -> tuple[Array, Array]:
        here = slice(start, self.lengths[row])
        return self.cache.keys[:, row, :, here].copy(), self.cache.values[:, row, :, here].copy()

    def restore(self, row: int, saved: tuple[Array, Array], length: int) -> None:
        here = slice(self.lengths[row], length)
        self.cache.keys[:, row, :, here], self.cache.values[:, row, :, here] = saved
        self.lengths[row] = length

    def stream(
        self, tokens: Sequence[int], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[Drawn]:
        """As `Decoder.stream`, in blocks as those of `RowDecoder.stream`.

        A row whose cache is full gives tokens that mean nothing, while the others go on.
        """
        past, done = list(self.lengths), 0
        count = min(count, self.capacity - min(past))
        self._place(np.asarray(tokens, np.int32))
        draw = Draw.of(samplings, streams)

        def launch(passes: int, ahead: int) -> Array:
            return self.launcher.drawn(self.cache, passes, done + ahead, draw)

        def left() -> int:
            return count - done

        for ids in self._two_under_way(launch, left, 2, BLOCK):
            done += len(ids)
            self.lengths = [min(length + done, self.capacity) for length in past]
            yield Drawn(ids.T, None)

    def _place(self, tokens: np.ndarray) -> None:
        """Tell the device where each row stands, and its next token."""
        self.cache.tokens.set(tokens)
        self.cache.positions.set(np.array(self.lengths, np.int32))
