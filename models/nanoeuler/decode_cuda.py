"""Decoding on a CUDA GPU: one launch for many tokens, and no wait for the host in between.

    decoder = CudaDecoder(model)
    decoder.prefill(0, prompt[:-1])
    for drawn in decoder.stream(prompt[-1:], sampling, [Stream(seed, "sample")], 200):   # blocks of ids
        ...

The kernel is `tinyforge/ops/decode.cu`; `docs/kernels/decode.md` derives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import cupy
import numpy as np

from models.nanoeuler.decode import Decoder, Drawn
from models.nanoeuler.model import NanoEuler
from models.nanoeuler.sampling import Sampling
from tinyforge.backends.cupy_backend import processors
from tinyforge.errors import UserError
from tinyforge.op import Array
from tinyforge.ops.decode_cuda import Cache, Draw, Launcher, Weights, shared_limit
from tinyforge.ops.decode_plan import MOST_ROWS, Layer, Plan
from tinyforge.rng import Stream

BLOCK = 16
"""Tokens that `stream` yields together once it is under way."""


class CudaDecoder(Decoder):
    """A decoder of one row, whose passes of up to `MOST_ROWS` positions are one launch, and many passes too.

    It copies the model's weights into the order in which the kernel reads them. tuning: fields of `Plan`, e.g.
    blocks=128. Raises UserError for a model on another backend, and for a shape that the kernel does not take.
    """

    def __init__(self, model: NanoEuler, batch: int = 1, capacity: int | None = None, **tuning: int) -> None:
        super().__init__(model, batch, capacity)
        c, backend = model.config, model.backend
        if backend.name != "cupy":
            raise UserError(f"CudaDecoder: the model is on backend {backend.name}, wants cupy; use --backend cupy")
        if batch != 1:
            raise UserError(f"CudaDecoder: {batch} rows, takes one; use make_decoder")
        self.model = model
        tuning = {"blocks": processors(), "shared": shared_limit(), **tuning}
        plan = Plan(c.dim, c.hidden, c.heads, c.kv_heads, c.layers, c.vocab, c.mtp_heads, MOST_ROWS,
                    backend.dtype.itemsize, **tuning)  # fmt: skip
        layers = [Layer(b.qkv.weight.value, b.out.weight.value, b.gate_up.weight.value, b.down.weight.value)
                  for b in model.blocks]  # fmt: skip
        norms = [param for op in (model.first_norm, *model.joints) for param in op.params()]
        gains = cupy.stack([gain.value.astype(backend.master_dtype) for gain in norms])
        rope = model.blocks[0].rope
        self.weights = Weights(plan, layers, model.heads.weight.value, model.embedding.weight.value, gains, rope.cos,
                               rope.sin)  # fmt: skip
        self.cache = Cache(plan, backend.dtype, self.capacity)
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
        model, c, past = self.model, self.config, self.lengths[0]
        end = past + len(tokens)
        ids = model.backend.asarray(np.asarray([tokens], np.int32))
        x = model.embedding.forward(ids)
        h = model.first_norm.forward(x)
        for i, block in enumerate(model.blocks):
            qkv = block.qkv.forward(h).reshape(*ids.shape, -1, c.head_dim)
            qkv = block.rope.forward(qkv, offset=past, out=qkv)
            new = qkv[0].transpose(1, 0, 2)[c.heads :]
            keys, values = self.cache.keys[i], self.cache.values[i]
            keys[:, past:end], values[:, past:end] = new[: c.kv_heads], new[c.kv_heads :]
            k, v = (cupy.ascontiguousarray(t[:, :end].transpose(1, 0, 2))[None] for t in (keys, values))
            a = block.attention.decode(qkv[:, :, : c.heads], k, v)
            x, h = model.joints[2 * i].forward(x, block.out.forward(a.reshape(x.shape)))
            x, h = model.joints[2 * i + 1].forward(x, block.down.forward(block.gate_up.forward(h)))
        self.cache.tokens[past:end] = ids[0]
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

    def draws(self, sampling: Sampling) -> bool:
        return sampling.repetition_penalty == 1 and not sampling.logprobs

    def stream(
        self, tokens: Sequence[int], sampling: Sampling, streams: Sequence[Stream], count: int
    ) -> Iterator[Drawn]:
        """As `Decoder.stream`. The first blocks have 2, 4, 8 tokens, so that a reader sees something early, then BLOCK.

        The device works on the next block while this one is read; the host waits once a block. One id more is yielded
        than appended: the last. Closing the generator forgets what was not yielded.
        """
        count = min(count, self.capacity - self.lengths[0])
        past = self.lengths[0]
        self.cache.tokens[past : past + 1] = tokens[0]
        queued, size = 0, 2
        flying: deque[tuple[np.ndarray, Any]] = deque()
        while queued < count or flying:
            while queued < count and len(flying) < 2:
                passes = min(size, count - queued)
                draw = Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, streams[0].key,
                            streams[0].position + queued)  # fmt: skip
                self.run(1, 1, passes, draw, past + queued)
                first = past + queued + 1
                flying.append(self._copy_out(self.cache.tokens[first : first + passes]))
                queued, size = queued + passes, min(2 * size, BLOCK)
            ids, arrived = flying.popleft()
            self._wait(arrived)
            self.lengths[0] += len(ids)
            yield Drawn(ids[None], None)

    def _copy_out(self, ids: Array) -> tuple[np.ndarray, Any]:
        """Start copying ids to the host; the host's array and the event after which it holds them."""
        pinned = cupy.cuda.alloc_pinned_memory(ids.nbytes)
        host = np.frombuffer(pinned, ids.dtype, ids.size)
        ids.get(out=host, blocking=False)
        arrived = cupy.cuda.Event(block=False, disable_timing=True)
        arrived.record()
        return host, arrived

    def _wait(self, arrived: Any) -> None:
        arrived.synchronize()
