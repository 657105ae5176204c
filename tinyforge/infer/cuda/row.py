"""Decoding on a CUDA GPU: one launch for many tokens, and no wait for the host in between.

    decoder = CudaDecoder(model)
    decoder.prefill(0, prompt[:-1])
    for drawn in decoder.stream(prompt[-1:], sampling, [Stream(seed, "sample")], 200):   # blocks of ids
        ...

The kernel is `tinyforge/infer/cuda/row.cu`; `docs/kernels/decode.md` derives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from models.nanoeuler.model import NanoEuler
from tinyforge.backends.cupy_backend import processors
from tinyforge.errors import UserError
from tinyforge.infer.cuda.row_launcher import AnyPlan, Cache, Draw, Launcher, Weights, shared_limit
from tinyforge.infer.cuda.row_plan import MOST_ROWS, Layer, Plan
from tinyforge.infer.decoder import Decoder, Drawn
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.rng import Stream

BLOCK = 16
"""Tokens that `stream` yields together once it is under way."""
PASSES = 8
"""The same with speculation: passes, of which each gives a token or more."""


class DeviceDecoder(Decoder):
    """What decoders on a GPU share: the weights, prefill by the model's ops, and ids on their way out."""

    def __init__(self, model: NanoEuler, batch: int = 1, capacity: int | None = None) -> None:
        super().__init__(model, batch, capacity)
        if model.backend.name != "cupy":
            raise UserError(
                f"{type(self).__name__}: the model is on backend {model.backend.name}, wants cupy; use --backend cupy"
            )
        self.model: NanoEuler = model
        self._leaving: list[tuple[np.ndarray, Any]] = []

    def _shape(self) -> dict[str, int]:
        """The fields of `DecodePlan` that are the model's."""
        c = self.config
        return {"dim": c.dim, "hidden": c.hidden, "heads": c.heads, "kv_heads": c.kv_heads, "layers": c.layers,
                "vocab": c.vocab, "outputs": c.mtp_heads, "itemsize": self.model.backend.dtype.itemsize}  # fmt: skip

    def _weights(self, plan: AnyPlan) -> Weights[AnyPlan]:
        """A copy of the model's, in the order of the plan."""
        model: NanoEuler = self.model
        layers = [Layer(b.qkv.weight.value, b.out.weight.value, b.gate_up.weight.value, b.down.weight.value)
                  for b in model.blocks]  # fmt: skip
        norms = [param for op in (model.first_norm, *model.joints) for param in op.params()]
        gains = cupy.stack([gain.value.astype(model.backend.master_dtype) for gain in norms])
        rope = model.blocks[0].rope
        return Weights(plan, layers, model.heads.weight.value, model.embedding.weight.value, gains, rope.cos, rope.sin)

    def _fill(self, keys: Array, values: Array, past: int, tokens: Sequence[int]) -> Array:
        """Write the keys and values of one row from position `past` on; returns the ids on the device, (1, T).

        keys, values: (layers, kv_heads, capacity, head_dim).
        """
        model, c, end = self.model, self.config, past + len(tokens)
        ids = model.backend.asarray(np.asarray([tokens], np.int32))

        def attend(layer: int, qkv: Array) -> Array:
            new = qkv[0].transpose(1, 0, 2)[c.heads :]
            keys[layer, :, past:end], values[layer, :, past:end] = new[: c.kv_heads], new[c.kv_heads :]
            k, v = (cupy.ascontiguousarray(t[layer, :, :end].transpose(1, 0, 2))[None] for t in (keys, values))
            return model.blocks[layer].attention.decode(qkv[:, :, : c.heads], k, v)

        model.hidden(ids, offset=past, attend=attend)
        return ids

    def draws(self, sampling: Sampling) -> bool:
        return sampling.repetition_penalty == 1 and not sampling.logprobs

    def _copy_out(self, ids: Array) -> tuple[np.ndarray, Any]:
        """Start copying ids to the host; the host's array and the event after which it holds them."""
        pinned = cupy.cuda.alloc_pinned_memory(ids.nbytes)
        host = np.frombuffer(pinned, ids.dtype, ids.size).reshape(ids.shape)
        ids.get(out=host, blocking=False)
        arrived = cupy.cuda.Event(block=False, disable_timing=True)
        arrived.record()
        # Nobody may want it any more when it arrives: until then its memory must not be given to others.
        self._leaving = [(h, e) for h, e in self._leaving if not e.done] + [(host, arrived)]
        return host, arrived

    def _wait(self, arrived: Any) -> None:
        arrived.synchronize()


class CudaDecoder(DeviceDecoder):
    """A decoder of one row, whose passes of up to `MOST_ROWS` positions are one launch, and many passes too.

    It copies the model's weights into the order in which the kernel reads them. tuning: fields of `Plan`, e.g.
    blocks=128. Raises UserError for a model on another backend, and for a shape that the kernel does not take.
    """

    def __init__(self, model: NanoEuler, batch: int = 1, capacity: int | None = None, **tuning: int) -> None:
        super().__init__(model, batch, capacity)
        if batch != 1:
            raise UserError(f"CudaDecoder: {batch} rows, takes one; use make_decoder")
        tuning = {"blocks": processors(), "shared": shared_limit(), **tuning}
        plan = Plan(rows=MOST_ROWS, **self._shape(), **tuning)
        self.weights = self._weights(plan)
        self.cache = Cache(plan, model.backend.dtype, self.capacity)
        self.most_drafts = min(self.most_drafts, MOST_ROWS - 1)
        self._launchers: dict[int, Launcher] = {}

    def launcher(self, rows: int) -> Launcher:
        """The kernel for so many positions a pass; compiled at first use."""
        if rows not in self._launchers:
            self._launchers[rows] = Launcher(self.weights, rows)
        return self._launchers[rows]

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """By the model's own ops. Does not wait for the device."""
        self._check_room([row], len(tokens))
        if not len(tokens):
            return
        past, end = self.lengths[0], self.lengths[0] + len(tokens)
        self.cache.tokens[past:end] = self._fill(self.cache.keys, self.cache.values, past, tokens)[0]
        self.lengths[0] = end

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        new = np.asarray(tokens, np.int32)[0]
        self._check_room([0], len(new))
        past = self.lengths[0]
        self.cache.tokens[past : past + len(new)] = cupy.asarray(new)
        found = []
        for start in range(0, len(new), MOST_ROWS):
            rows = min(MOST_ROWS, len(new) - start)
            found.append(self.run(rows, heads)[0].get())
            self.lengths[0] += rows
        return np.concatenate(found)[None]

    def run(self, rows: int, outputs: int, passes: int = 1, draw: Draw | None = None, past: int | None = None) -> Array:
        """Queue passes behind `past` positions, all there are if not given; returns what `Launcher` does."""
        past = self.lengths[0] if past is None else past
        return self.launcher(rows)(self.cache, past, passes, outputs, self.config.norm_eps, draw)

    def stream(
        self, tokens: Sequence[int], sampling: Sampling, streams: Sequence[Stream], count: int
    ) -> Iterator[Drawn]:
        """As `Decoder.stream`. The first blocks are short, so that a reader sees something early: 2, 4, 8 tokens, then
        BLOCK. Greedy text is decoded with drafts, in blocks of 1, 2, 4 passes, then PASSES, and is the same text; the
        last tokens that the cache has room for, and sampled text, without.

        The device works on the next block while this one is read; the host waits once a block. One id more is yielded
        than appended: the last. Closing the generator forgets what was not yielded.
        """
        left, last = min(count, self.capacity - self.lengths[0]), int(tokens[0])
        drafts = min(sampling.drafts, self.most_drafts)
        if sampling.temperature == 0 and drafts:
            for drawn in self._speculate(last, drafts, left):
                left, last = left - drawn.ids.size, int(drawn.ids[0, -1])
                yield drawn
        yield from self._draw(last, sampling, streams[0], left)

    def _draw(self, token: int, sampling: Sampling, numbers: Stream, count: int) -> Iterator[Drawn]:
        """A token a pass."""
        past = self.lengths[0]
        self.cache.tokens[past : past + 1] = token
        queued, size = 0, 2
        flying: deque[tuple[np.ndarray, Any]] = deque()
        while queued < count or flying:
            while queued < count and len(flying) < 2:
                passes = min(size, count - queued)
                draw = Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, numbers.key,
                            numbers.position + queued)  # fmt: skip
                self.run(1, 1, passes, draw, past + queued)
                first = past + queued + 1
                flying.append(self._copy_out(self.cache.tokens[first : first + passes]))
                queued, size = queued + passes, min(2 * size, BLOCK)
            ids, arrived = flying.popleft()
            self._wait(arrived)
            self.lengths[0] += len(ids)
            yield Drawn(ids[None], None)

    def _speculate(self, token: int, drafts: int, count: int) -> Iterator[Drawn]:
        """Greedy, up to `drafts` + 1 tokens a pass; ends at `count` tokens, or where a pass has no room in the cache.

        How far a block gets is known on the device alone: the next one begins where its report says.
        """
        launcher = self.launcher(drafts + 1)
        begin = cupy.asarray(np.array([self.lengths[0], token] + [-1] * drafts, np.int32))
        size, queued = 1, 0  # passes; each gives a token at least
        flying: deque[tuple[np.ndarray, Any]] = deque()
        while count > 0:
            while queued < count and len(flying) < 2:
                passes = min(size, count - queued)
                report = launcher.speculate(self.cache, begin, passes, self.config.norm_eps)
                begin = report[-1]
                flying.append(self._copy_out(report[:-1]))
                queued, size = queued + passes, min(2 * size, PASSES)
            found, arrived = flying.popleft()
            self._wait(arrived)
            queued -= len(found)
            ids: list[int] = []
            given: list[int] = []
            for added, *choices in found.tolist():
                new = choices[: min(added, count - len(ids))]
                if new:
                    ids += new
                    given.append(len(new))
            count -= len(ids)
            self.lengths[0] += len(ids)
            if ids:
                yield Drawn(np.array([ids], np.int32), None, tuple(given))
            if not found[-1, 0]:
                return
