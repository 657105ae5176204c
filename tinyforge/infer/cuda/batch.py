"""Decoding a batch on a CUDA GPU: one launch for many tokens of all rows, and no wait for the host in between.

The kernel is `tinyforge/infer/cuda/batch.cu`; `docs/kernels/decode-batch.md` derives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from models.nanoeuler.model import NanoEuler
from tinyforge.backends.cupy_backend import processors
from tinyforge.errors import UserError
from tinyforge.infer.cuda.batch_launcher import BatchCache, BatchDraw, BatchLauncher
from tinyforge.infer.cuda.batch_plan import BatchPlan
from tinyforge.infer.cuda.row import BLOCK, DeviceDecoder
from tinyforge.infer.cuda.row_launcher import shared_limit
from tinyforge.infer.decoder import Drawn
from tinyforge.infer.sampling import Sampling
from tinyforge.rng import Stream


class CudaBatchDecoder(DeviceDecoder):
    """A decoder of many rows, of which each step is one launch, and many steps too.

    It copies the model's weights into the order in which the kernel reads them. tuning: fields of `BatchPlan`, e.g.
    blocks=128. Raises UserError for a model on another backend, and for a shape that the kernel does not take.

    In bf16 two blocks share a multiprocessor, where there is memory enough: one computes while the other waits.
    """

    def __init__(self, model: NanoEuler, batch: int, capacity: int | None = None, **tuning: int) -> None:
        super().__init__(model, batch, capacity)
        plan = None
        if model.backend.dtype.itemsize == 2 and "resident" not in tuning:
            with suppress(UserError):
                plan = self._plan(resident=2, **tuning)
        plan = plan or self._plan(**tuning)
        self.launcher = BatchLauncher(self._weights(plan))
        self.cache = BatchCache(plan, model.backend.dtype, self.capacity)

    def _plan(self, resident: int = 1, **tuning: int) -> BatchPlan:
        given = {"blocks": resident * processors(), "shared": shared_limit(resident), **tuning}
        return BatchPlan(batch=self.batch, resident=resident, **self._shape(), **given)

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """By the model's own ops. Does not wait for the device."""
        self._check_room([row], len(tokens))
        if not len(tokens):
            return
        self._fill(self.cache.keys[:, row], self.cache.values[:, row], self.lengths[row], tokens)
        self.lengths[row] += len(tokens)

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        new = np.asarray(tokens, np.int32)
        self._check_room(range(self.batch), new.shape[1])
        found = []
        for column in new.T:
            self._place(column)
            found.append(self.launcher.logits(self.cache, heads, self.config.norm_eps).get())
            self.lengths = [length + 1 for length in self.lengths]
        return np.stack(found, axis=1)

    def stream(
        self, tokens: Sequence[int], sampling: Sampling, streams: Sequence[Stream], count: int
    ) -> Iterator[Drawn]:
        """As `Decoder.stream`, in blocks as those of `CudaDecoder.stream`.

        A row whose cache is full gives tokens that mean nothing, while the others go on.
        """
        past, drawn = list(self.lengths), 0
        count = min(count, self.capacity - min(past))
        self._place(np.asarray(tokens, np.int32))
        draw = BatchDraw.of(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
                            [stream.key for stream in streams], [stream.position for stream in streams])  # fmt: skip
        queued, size = 0, 2
        flying: deque[tuple[np.ndarray, Any]] = deque()
        while queued < count or flying:
            while queued < count and len(flying) < 2:
                passes = min(size, count - queued)
                ids = self.launcher.drawn(self.cache, passes, queued, self.config.norm_eps, draw)
                flying.append(self._copy_out(ids))
                queued, size = queued + passes, min(2 * size, BLOCK)
            ids, arrived = flying.popleft()
            self._wait(arrived)
            drawn += len(ids)
            self.lengths = [min(length + drawn, self.capacity) for length in past]
            yield Drawn(ids.T, None)

    def _place(self, tokens: np.ndarray) -> None:
        """Tell the device where each row stands, and its next token."""
        self.cache.tokens.set(tokens)
        self.cache.positions.set(np.array(self.lengths, np.int32))
