"""Decoding one row on a CUDA GPU: one launch for many tokens, without waiting for the host in between.

The kernel is decode_single.cu; docs/kernels/decode.md derives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from tinyforge.backends.compile import load
from tinyforge.backends.cupy_backend import processors, scalar, shared_limit
from tinyforge.infer.causal_lm import CausalLM, FusedWeights
from tinyforge.infer.cuda.arguments import packed, sampler, single_arguments
from tinyforge.infer.cuda.decode_single_plan import FOUR_BITS, MOST_ROWS, RowPlan
from tinyforge.infer.cuda.device import BLOCK, DeviceDecoder, DeviceWeights
from tinyforge.infer.decoder import SampledBlock
from tinyforge.infer.sampling import Sampling
from tinyforge.kernel import Array
from tinyforge.quantised import FORMATS, Quantised
from tinyforge.quantised import FOUR_BITS as INT4
from tinyforge.rng import Stream

PASSES = 8
"""Passes with drafts whose tokens `stream` yields together, after the first few."""


class Draw(NamedTuple):
    """How a row's tokens are drawn. key: of its stream. first: position in the stream of the next number."""

    sampling: Sampling
    key: tuple[int, int]
    first: int


NO_DRAW = Draw(Sampling(temperature=0), (0, 0), 0)


class RowCache:
    """Keys and values of all layers, (layers, kv_heads, capacity, head_dim), and the tokens, (capacity + 1,)."""

    def __init__(self, plan: RowPlan, dtype: np.dtype, capacity: int) -> None:
        shape = (plan.layers, plan.kv_heads, capacity, plan.head_dim)
        self.capacity = capacity
        self.keys, self.values = (cupy.zeros(shape, dtype) for _ in range(2))
        self.tokens = cupy.zeros(capacity + 1, np.int32)


class RowLauncher:
    """Launches decode_single.cu for one number of new positions per pass. `exchange`: the last launch's results."""

    def __init__(self, weights: DeviceWeights[RowPlan], rows: int) -> None:
        self.weights, self.plan = weights, replace(weights.plan, rows=rows)
        once = int(weights.matrices.nbytes > cupy.cuda.Device().attributes["L2CacheSize"])
        how = {"cooperative": True, "arch": "sm_90a" if self.plan.producers else ""}
        macros = {"SCALAR": scalar(weights.dtype), "ONCE": once, **self.plan.macros}
        self.kernel = load("infer/cuda/decode_single.cu", "decode", self.plan.shared_bytes, **how, **macros)
        self.exchange = cupy.empty(0, weights.wide)
        plan = weights.plan  # its layout is that of any number of rows
        units, tiles = plan.before(plan.layers - 1)
        self._last_layer = cupy.asarray(plan.lengths - units), cupy.asarray(units), tiles

    def __call__(
        self,
        cache: RowCache,
        past: int,
        passes: int,
        outputs: int,
        draw: Draw | None = None,
        given: Array | None = None,
    ) -> Array:
        """Compute positions past .. past + passes * rows - 1; returns their logits, (passes, rows, outputs, vocab), on
        the device, valid until the next launch. Does not wait.

        With `draw`, for one position per pass only, each pass draws the token of the next; without it there is one
        pass, over the cache's tokens. given: the stream that the last layer reads, (dim,), where all layers before it
        have computed the position; for one pass.
        """
        plan = self.plan
        end = past + passes * plan.rows
        if not (past >= 0 and end <= min(cache.capacity, len(self.weights.cos)) and 1 <= outputs <= plan.outputs):
            raise ValueError(f"decode: positions {past} to {end}, {outputs} outputs; the cache or the model has fewer")
        if draw and plan.rows != 1:
            raise ValueError(f"decode: tokens are drawn one at a time, not {plan.rows}")
        if draw and draw.sampling.temperature and not plan.draws:
            raise ValueError(f"decode: temperature {draw.sampling.temperature}, no room to sort {plan.vocab} logits")
        if passes > 1 and not draw:
            raise ValueError(f"decode: {passes} passes without a draw, expected 1")
        if given is not None and passes > 1:
            raise ValueError(f"decode: {passes} passes after a given stream, expected 1")
        region = self._launch(cache, past, passes, outputs, draw, given)
        found = self.exchange[: passes * region].reshape(passes, region)[:, -plan.rows * outputs * plan.vocab_rows :]
        return found.reshape(passes, plan.rows, outputs, plan.vocab_rows)[..., : plan.vocab]

    def speculate(self, cache: RowCache, begin: Array, passes: int, given: Array | None = None) -> Array:
        """Greedy passes, each over the last token and rows - 1 drafts, of which it appends the accepted ones.

        begin: (1 + rows,) int32 on the device: cached positions, the last token, its drafts (-1: none). given: as in
        `__call__`, where there are no drafts yet. Returns (passes + 1, 1 + rows) on the device: for each pass the
        number of its tokens (0: the cache has no room for `rows` more) and the tokens; the last row is the next
        `begin`. Does not wait.
        """
        rows = self.plan.rows
        if not 2 <= rows <= self.plan.outputs:
            raise ValueError(
                f"decode: {rows} positions a pass, expected 2 to {self.plan.outputs}, a head for each draft"
            )
        report = cupy.empty((passes + 1, 1 + rows), np.int32)
        self._launch(cache, 0, passes, rows, None, given, begin, report)
        return report

    def _launch(
        self,
        cache: RowCache,
        past: int,
        passes: int,
        outputs: int,
        draw: Draw | None,
        given: Array | None,
        begin: Array | None = None,
        report: Array | None = None,
    ) -> int:
        """Launch; returns the words of a pass in `exchange`."""
        plan, weights = self.plan, self.weights
        region = plan.exchange(outputs)
        if self.exchange.size < passes * region:
            self.exchange = cupy.empty(passes * region, weights.wide)
        self.exchange.data.memset_async(0xFF, passes * region * self.exchange.itemsize)
        gains, keys, values, scales = weights.gains, cache.keys, cache.values, weights.scales
        exchange, lengths, skipped, tiles = self.exchange, weights.lengths, None, 0
        if given is not None:
            lengths, skipped, tiles = self._last_layer
            gains, keys, values = gains[-3:], keys[-1:], values[-1:]
            scales = None if scales is None else scales[8 * tiles :]
            exchange = exchange[region - replace(plan, layers=1).exchange(outputs) :]
            given = _for_all_rows(given, weights.wide)
        how = draw or NO_DRAW
        arguments = packed(
            single_arguments(weights.wide),
            **weights.arguments,
            gains=gains,
            keys=keys,
            values=values,
            tokens=cache.tokens,
            exchange=exchange,
            lengths=lengths[outputs - 1],
            begin=begin,
            report=report,
            scales=scales,
            given=given,
            skipped=skipped,
            dealt=tiles % plan.blocks,
            stride=weights.matrices.shape[1],
            layers=len(keys),
            heads=outputs,
            capacity=cache.capacity,
            past=past,
            passes=passes,
            sampled=draw is not None,
            draw=how.first,
            how=sampler(how.sampling, how.key),
        )
        self.kernel((plan.blocks,), (plan.threads,), (arguments,), shared_mem=plan.shared_bytes)
        return region


def _for_all_rows(stream: Array, dtype: np.dtype) -> Array:
    """(dim,) as the kernel reads a stream: eight words of a row, then the same eight of the other rows."""
    words = cupy.empty((len(stream) // 8, MOST_ROWS, 8), dtype)
    words[...] = stream.reshape(-1, 1, 8)
    return words


def code_of(weights: FusedWeights, copied: bool) -> str:
    """The type of the codes that the kernel reads; "" where it reads numbers, to which codes are then converted once.

    copied: whether there are warps that copy weights, without which it reads no codes of four bits.
    """
    itemsize = weights.embedding.dtype.itemsize
    of_heads = weights.lm_heads.kind if isinstance(weights.lm_heads, Quantised) else ""
    kinds = {m.kind if isinstance(m, Quantised) else "" for layer in weights.layers for m in layer}
    if kinds == {INT4}:
        return FOUR_BITS if of_heads == "int8" and itemsize == 2 and copied else ""
    # No asynchronous copy is smaller than 4 bytes per lane, so a float64 kernel reads no codes.
    return FORMATS[of_heads].scalar if of_heads and kinds == {of_heads} and itemsize < 8 else ""


class RowDecoder(DeviceDecoder):
    """A decoder of one row. One launch makes a pass of up to `MOST_ROWS` positions, or many passes.

    It copies the model's weights into the kernel's order; one-byte weights stay so. tuning: fields of `RowPlan`, e.g.
    blocks=128. Raises UserError for a model on another backend, and for a shape that the kernel does not take.
    """

    def __init__(self, model: CausalLM, capacity: int | None = None, **tuning: int) -> None:
        super().__init__(model, 1, capacity)
        hopper = cupy.cuda.Device().compute_capability == "90"
        tuning = {"blocks": processors(), "shared": shared_limit(), "producers": 4 if hopper else 0, **tuning}
        code = code_of(self.fused, copied=tuning["producers"] > 0)
        plan = RowPlan(rows=MOST_ROWS, code=code, **self._shape(), **tuning)
        self.weights = DeviceWeights(plan, self.fused)
        self.cache = RowCache(plan, self.weights.dtype, self.capacity)
        self.most_drafts = min(self.most_drafts, MOST_ROWS - 1)
        self._launchers: dict[int, RowLauncher] = {}

    def draws(self, sampling: Sampling) -> bool:
        """With a large vocabulary only greedy."""
        return super().draws(sampling) and (sampling.temperature == 0 or replace(self.weights.plan, rows=1).draws)

    def launcher(self, rows: int) -> RowLauncher:
        """The kernel for so many positions per pass, compiled on first use."""
        if rows not in self._launchers:
            self._launchers[rows] = RowLauncher(self.weights, rows)
        return self._launchers[rows]

    def prefill(self, row: int, tokens: Sequence[int]) -> None:
        """Runs the model's own ops. Does not wait for the device."""
        self._check_room([row], len(tokens))
        if len(tokens):
            self._prefill(0, self.cache.keys, self.cache.values, tokens)

    def first(self, tokens: Sequence[int], heads: int = 1) -> np.ndarray:
        self._check_room([0], len(tokens))
        given = self._ahead(tokens)
        past = self.lengths[0]
        self.cache.tokens[past : past + 1] = tokens[-1]
        found = self.launcher(1)(self.cache, past, 1, heads, given=given)[0].get()
        self.lengths[0] += 1
        return found[None]

    def _ahead(self, tokens: Sequence[int]) -> Array | None:
        """Append all tokens but the last. Where there are several, the model's own ops compute all of them up to the
        last layer, where the first pass begins with the stream that this returns."""
        if len(tokens) == 1:
            return None
        self._check_room([0], len(tokens))
        given = self._prefill(0, self.cache.keys, self.cache.values, tokens)
        self.lengths[0] -= 1
        return given if len(self.fused.layers) > 1 else None

    def step(self, tokens: Any, heads: int = 1) -> np.ndarray:
        new = np.asarray(tokens, np.int32)[0]
        self._check_room([0], len(new))
        past = self.lengths[0]
        self.cache.tokens[past : past + len(new)] = cupy.asarray(new)
        found = []
        for start in range(0, len(new), MOST_ROWS):
            rows = min(MOST_ROWS, len(new) - start)
            found.append(self.launcher(rows)(self.cache, self.lengths[0], 1, heads)[0].get())
            self.lengths[0] += rows
        return np.concatenate(found)[None]

    def stream(
        self, tokens: Sequence[Sequence[int]], samplings: Sequence[Sampling], streams: Sequence[Stream], count: int
    ) -> Iterator[SampledBlock]:
        """See `Decoder.stream`. The first blocks are short, so that the first tokens come early: 1, 2, 4, 8 tokens,
        then BLOCK. Greedy text is decoded with drafts, in blocks of 1, 2, 4 passes, then PASSES, and stays the same
        text. Sampled text, and the last tokens that fit the cache, are decoded without drafts.

        The device computes the next block while this one is read; the host waits once per block. The last yielded id is
        not in the cache. Closing the generator drops what was not yielded.
        """
        given, last, sampling = self._ahead(tokens[0]), int(tokens[0][-1]), samplings[0]
        left = min(count, self.capacity - self.lengths[0])
        drafts = min(sampling.drafts, self.most_drafts)
        if sampling.temperature == 0 and drafts:
            for drawn in self._speculate(last, given, drafts, left):
                left, last, given = left - drawn.ids.size, int(drawn.ids[0, -1]), None
                yield drawn
        yield from self._draw(last, given, sampling, streams[0], left)

    def _draw(
        self, token: int, given: Array | None, sampling: Sampling, numbers: Stream, count: int
    ) -> Iterator[SampledBlock]:
        """Yield one token per pass."""
        launcher, start, done = self.launcher(1), self.lengths[0], 0
        self.cache.tokens[start : start + 1] = token

        def launch(passes: int, ahead: int) -> Array:
            drawn = done + ahead
            draw = Draw(sampling, numbers.key, numbers.position + drawn)
            launcher(self.cache, start + drawn, passes, 1, draw, None if drawn else given)
            return self.cache.tokens[start + drawn + 1 :][:passes]

        def left() -> int:
            return count - done

        for ids in self._two_under_way(launch, left, BLOCK):
            done += len(ids)
            self.lengths[0] += len(ids)
            yield SampledBlock(ids[None], None)

    def _speculate(self, token: int, given: Array | None, drafts: int, count: int) -> Iterator[SampledBlock]:
        """Greedy, up to `drafts` + 1 tokens per pass; ends at `count` tokens, or when a pass has no room in the cache.

        Only the device knows how far a block got: the next one begins where its report says.
        """
        launcher = self.launcher(drafts + 1)
        begin = cupy.asarray(np.array([self.lengths[0], token] + [-1] * drafts, np.int32))

        def launch(passes: int, ahead: int) -> Array:
            nonlocal begin, given
            report = launcher.speculate(self.cache, begin, passes, given)
            begin, given = report[-1], None
            return report[:-1]

        def left() -> int:
            return count  # a pass gives at least one token

        for found in self._two_under_way(launch, left, PASSES):
            ids: list[int] = []
            sizes: list[int] = []
            for added, *choices in found.tolist():
                new = choices[: min(added, count - len(ids))]
                if new:
                    ids += new
                    sizes.append(len(new))
            count -= len(ids)
            self.lengths[0] += len(ids)
            if ids:
                yield SampledBlock(np.array([ids], np.int32), None, tuple(sizes))
            if not found[-1, 0]:
                return
