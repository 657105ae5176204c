"""Decoding a batch on a CUDA GPU: one launch for many tokens of all rows, without waiting for the host in between.

The kernel is decode_batched.cu; docs/kernels/decode-batch.md derives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import processors, scalar, shared_limit
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import CausalLM
from tinyforge.infer.cuda.arguments import SAMPLER, batched_arguments, packed, samplers
from tinyforge.infer.cuda.decode_batched_plan import TEAM_ROWS, BatchPlan
from tinyforge.infer.cuda.device import BLOCK, DeviceDecoder, DeviceWeights
from tinyforge.infer.decoder import SampledBlock, SequenceStart
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.rng import Stream


class BatchCache:
    """Keys and values of all layers, (layers, batch, kv_heads, capacity, head_dim).

    drawn: the last token that each row drew, (batch,).
    """

    def __init__(self, plan: BatchPlan, dtype: np.dtype, capacity: int) -> None:
        shape = (plan.layers, plan.batch, plan.kv_heads, capacity, plan.head_dim)
        self.capacity = capacity
        self.keys, self.values = (cupy.zeros(shape, dtype) for _ in range(2))
        self.drawn = cupy.zeros(plan.batch, np.int32)


class Draw(NamedTuple):
    """How each row's tokens are sampled. samplers: (batch,) SAMPLER. first: the position in each row's stream of the
    next pass's number, (batch,) uint32."""

    samplers: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, samplings: Sequence[Sampling], streams: Sequence[Stream]) -> Draw:
        return cls(samplers(samplings, streams), np.array([stream.position for stream in streams], np.uint32))


class BatchLauncher:
    """Launches decode_batched.cu for one decoder."""

    def __init__(self, weights: DeviceWeights[BatchPlan]) -> None:
        self.weights, self.plan = weights, weights.plan
        plan = self.plan
        macros = {"SCALAR": scalar(weights.dtype), **plan.macros}
        file = "infer/cuda/decode_batched.cu"
        self.kernel = load(file, "decode_batch", plan.shared_bytes, cooperative=True, **macros)
        self.masked = load("infer/cuda/sample_masked.cu", "sample_masked", plan.draw_bytes, **macros)
        self.kernel.preferred_shared_memory_carveout = 100  # percent: so that all `resident` blocks fit
        self.exchange = cupy.zeros((plan.teams, plan.exchange_bytes), np.uint8)
        self.counters = cupy.empty((plan.teams, 32), np.uint32)

    def logits(self, cache: BatchCache, lengths: Sequence[int] | np.ndarray, tokens: np.ndarray, outputs: int) -> Any:
        """The logits of a pass over one token per row, (batch,), after `lengths` cached positions: (batch, outputs,
        vocab), on the device. Does not wait."""
        return self._launch(cache, lengths, tokens[None], outputs, None)[0][: self.plan.batch, :, : self.plan.vocab]

    def drawn(self, cache: BatchCache, lengths: Sequence[int] | np.ndarray, given: np.ndarray, draw: Draw) -> Array:
        """The tokens sampled in passes after `lengths` cached positions of each row: (passes, batch), on device. Does
        not wait.

        given: (passes, batch), the token that a row takes in a pass, -1 for the one it drew last.
        """
        return self._launch(cache, lengths, given, 1, draw)[1]

    @staticmethod
    def _copied(parts: Sequence[np.ndarray]) -> list[Array]:
        """Arrays of 4-byte numbers on the device, by one copy, queued after the work before it."""
        flat = [np.ascontiguousarray(part).reshape(-1).view(np.int32) for part in parts]
        together = cupy.asarray(np.concatenate(flat))
        ends = np.cumsum([part.size for part in flat]).tolist()
        return [together[start:end] for start, end in pairwise([0, *ends])]

    def _launch(
        self, cache: BatchCache, lengths: Sequence[int] | np.ndarray, given: np.ndarray, outputs: int, draw: Draw | None
    ) -> tuple[Array, Array]:
        """The logits of the last pass, and the sampled tokens."""
        logits, ids = self.empty_logits(outputs), cupy.empty(given.shape, np.int32)
        parts = [np.array(lengths, np.int32), given.astype(np.int32, copy=False), *(draw or ())]
        past, tokens, *draws = self._copied(parts)
        rules, first = draws or (None, None)
        self.launch(self.arguments(cache, past, tokens, logits, ids, rules, first))
        return logits, ids

    def empty_logits(self, outputs: int) -> Array:
        plan = self.plan
        return cupy.empty((plan.teams * TEAM_ROWS, outputs, plan.vocab_rows), self.weights.wide)

    def arguments(
        self,
        cache: BatchCache,
        past: Array,
        given: Array,
        logits: Array,
        ids: Array,
        rules: Array | None = None,
        first: Array | None = None,
    ) -> np.ndarray:
        """Of as many passes as `ids` (passes, batch) has; logits as of `empty_logits`."""
        plan, weights = self.plan, self.weights
        return packed(
            batched_arguments(weights.wide),
            **weights.arguments,
            gains=weights.gains,
            keys=cache.keys,
            values=cache.values,
            past=past,
            given=given,
            ids=cache.drawn,
            drawn=ids,
            memory=self.exchange,
            counters=self.counters,
            logits=logits,
            lengths=weights.lengths[logits.shape[1] - 1],
            samplers=rules,
            first=first,
            stride=weights.matrices.shape[2],
            layers=plan.layers,
            heads=logits.shape[1],
            batch=ids.shape[1],
            capacity=cache.capacity,
            passes=len(ids),
        )

    def launch(self, arguments: np.ndarray) -> None:
        plan = self.plan
        self.counters.data.memset_async(0, self.counters.nbytes)
        self.kernel((plan.teams * plan.team,), (plan.warps * 32,), (arguments,), shared_mem=plan.shared_bytes)


def pinned(size: int) -> np.ndarray:
    """Numbers of 4 bytes in host memory that the device copies from and to without waiting."""
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * size), np.int32, size)


class MaskedPasses:
    """Passes that are queued one by one, and sampled by masks. Their buffers and arguments are made once: making them
    takes the host longer than a small model's pass takes the device.

    A pass's copies are over once its tokens have been read, which is before the next pass is sampled."""

    def __init__(self, launcher: BatchLauncher, cache: BatchCache) -> None:
        plan, rows = launcher.plan, launcher.plan.batch
        self.launcher, self.rows, self.words = launcher, rows, -(-plan.vocab // 32)
        self.given = [pinned(2 * rows) for _ in range(2)]  # lengths, tokens; of one pass, and of the next
        self.given_there = cupy.empty(2 * rows, np.int32)
        ends = (np.array((SAMPLER.itemsize // 4, 1, 1)) * rows).cumsum().tolist()
        self.draw = pinned(ends[-1] + rows * self.words)
        self.draw_there = cupy.empty(self.draw.size, np.int32)
        self.rules, self.first, self.mask_of, self.masks = np.split(self.draw, ends)
        self.masked: Sequence[int] | None = None
        self.ids, self.found = cupy.empty((1, rows), np.int32), pinned(rows)
        self.arrived = cupy.cuda.Event(disable_timing=True)
        logits = launcher.empty_logits(1)
        past, tokens = cupy.split(self.given_there, 2)
        self.arguments = launcher.arguments(cache, past, tokens, logits, self.ids)
        rules, first, mask_of, masks = cupy.split(self.draw_there, ends)
        self.sampling = logits, masks, mask_of, rules, first, self.ids, cache.drawn
        self.launch = ((rows,), (plan.warps * 32,), self.sampling), {"shared_mem": plan.draw_bytes}

    def logits(self, lengths: Sequence[int], tokens: np.ndarray) -> None:
        """Queue a pass over one token per row, (batch,), -1 for the one it drew last. `sample` comes next."""
        self.given.reverse()
        given = self.given[0]
        given[: self.rows], given[self.rows :] = lengths, tokens
        self.given_there.data.copy_from_host_async(given.ctypes.data, given.nbytes)
        self.launcher.launch(self.arguments)

    def sample(self, draw: Draw, masked: Sequence[int], masks: np.ndarray) -> Callable[[], np.ndarray]:
        """Sample the pass's tokens. See `Decoder.queue_pass`."""
        self.rules[:], self.first[:] = draw.samplers.view(np.int32), draw.first.view(np.int32)
        if masked != self.masked:
            self.masked, self.mask_of[:] = masked, -1
            self.mask_of[list(masked)] = range(len(masked))
        used = len(masked) * self.words
        if used:
            self.masks[:used].reshape(-1, self.words)[:] = masks[:, : self.words].view(np.int32)
        size = self.draw.size - self.masks.size + used
        self.draw_there.data.copy_from_host_async(self.draw.ctypes.data, 4 * size)
        places, shared = self.launch
        self.launcher.masked(*places, **shared)
        self.ids.data.copy_to_host_async(self.found.ctypes.data, self.found.nbytes)
        self.arrived.record()
        return self.read

    def read(self) -> np.ndarray:
        """Wait for the tokens that were sampled last, (batch, 1)."""
        self.arrived.synchronize()
        return self.found[:, None].copy()


class BatchDecoder(DeviceDecoder):
    """A decoder of many rows. One launch makes a step, or many steps.

    It copies the model's weights into the kernel's order; one-byte weights are dequantised. tuning: fields of
    `BatchPlan`, e.g. blocks=128. Raises UserError for a model on another backend, and for a shape that the kernel does
    not take.

    In bf16 two blocks share a multiprocessor if there is enough memory: one computes while the other waits.
    """

    can_save = True
    piece = 256
    queues_masks = True

    def __init__(self, model: CausalLM, batch: int, capacity: int | None = None, **tuning: int) -> None:
        super().__init__(model, batch, capacity)
        plan = None
        if model.backend.dtype.itemsize == 2 and "resident" not in tuning:
            with suppress(UserError):
                plan = self._plan(resident=2, **tuning)
        plan = plan or self._plan(**tuning)
        self.launcher = BatchLauncher(DeviceWeights(plan, self.fused))
        self.cache = BatchCache(plan, self.launcher.weights.dtype, self.capacity)
        self._masked: MaskedPasses | None = None
        self._draw = Draw(np.zeros(batch, SAMPLER), np.zeros(batch, np.uint32))

    def _plan(self, resident: int = 1, **tuning: int) -> BatchPlan:
        given: dict[str, Any] = {"blocks": resident * processors(), "shared": shared_limit(resident), **tuning}
        return BatchPlan(batch=self.batch, resident=resident, **self._shape(), **given)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Runs the model's own ops. Does not wait for the device."""
        self._check_room([row], len(tokens))
        if len(tokens):
            self._prefill(row, self.cache.keys[:, row], self.cache.values[:, row], tokens)

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        new = np.asarray(tokens, np.int32)
        self._check_room(range(self.batch), new.shape[1])
        found = []
        for column in new.T:
            found.append(self.launcher.logits(self.cache, self.lengths, column, heads).get())
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
        self, tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[SampledBlock]:
        """See `Decoder.stream`; in blocks of 1, 2, 4, 8 tokens, then BLOCK. A row whose cache is full yields
        meaningless tokens while the others go on."""
        for row, new in enumerate(tokens):
            self.prefill(row, new[:-1])
        last = [new[-1] for new in tokens]
        past, done = np.array(self.lengths), 0
        count = min(count, self.capacity - int(past.min()))
        rules, first = Draw.of(samplings, streams)

        def launch(passes: int, ahead: int) -> Array:
            given = np.full((passes, self.batch), -1, np.int32)
            if not (behind := done + ahead):
                given[0] = last
            return self.launcher.drawn(self.cache, past + behind, given, Draw(rules, first + np.uint32(behind)))

        def left() -> int:
            return count - done

        for ids in self._two_under_way(launch, left, BLOCK):
            done += len(ids)
            self.lengths = np.minimum(past + done, self.capacity).tolist()
            yield SampledBlock(ids.T, None)

    def queue(self, rows: Mapping[int, SequenceStart | None], count: int) -> Callable[[], np.ndarray]:
        given = self._given(rows, count)
        found = self._later(self.launcher.drawn(self.cache, self.lengths, given, self._draw))
        self._advance(rows, count)
        return found

    def queue_pass(
        self, rows: Mapping[int, SequenceStart | None]
    ) -> Callable[[Sequence[int], np.ndarray], Callable[[], np.ndarray]]:
        given = self._given(rows, 1)
        passes = self._masked = self._masked or MaskedPasses(self.launcher, self.cache)
        passes.logits(self.lengths, given[0])
        draw = Draw(*(part.copy() for part in self._draw))
        self._advance(rows, 1)
        return lambda masked, masks: passes.sample(draw, masked, masks)

    def _given(self, rows: Mapping[int, SequenceStart | None], count: int) -> np.ndarray:
        """The tokens that rows are given in `count` passes, (count, batch); rows that start get their rules."""
        given, (rules, first) = np.full((count, self.batch), -1, np.int32), self._draw
        for row, start in rows.items():
            if start is not None:
                tokens, sampling, stream = start
                given[: len(tokens), row] = tokens
                rules[row] = samplers([sampling], [stream])[0]
                first[row] = (stream.position - len(tokens) + 1) % 2**32
        return given

    def _advance(self, rows: Iterable[int], count: int) -> None:
        """After `count` passes of some rows have been queued."""
        self._draw.first[:] += np.uint32(count)
        for row in rows:
            self.lengths[row] = min(self.lengths[row] + count, self.capacity)

    def _later(self, ids: Array) -> Callable[[], np.ndarray]:
        """A function that waits for ids, (passes, batch) on the device; it returns them as (batch, passes)."""
        host, arrived = self._copy_out(ids)

        def found() -> np.ndarray:
            self._wait(arrived)
            return host.T

        return found
