"""The plan of decode_single.cu: which block computes which rows of which matrix, and the order of weights in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.infer.cuda.plan import TILE, DecodePlan
from tinyforge.kernel import Array

MOST_ROWS = 4
"""The most new positions of a pass."""

QUEUE_BARRIERS = 2048
"""Bytes before a block's weights (decode.cuh)."""


@dataclass(frozen=True, kw_only=True)
class RowPlan(DecodePlan):
    """How the work of decode_single.cu is spread over a GPU.

    rows: new positions per pass, 1 to 4. splits: parts into which a KV head's positions are split. refill: 16-byte
    requests of a lane between two polls for attention's results, where it copies its own weights. spin: nanoseconds
    that a thread sleeps between two polls. producers: warps that copy weights for all others, 4 on Hopper; 0: each lane
    copies its own.
    """

    rows: int
    splits: int = 3
    refill: int = 8
    spin: int = 0
    producers: int = 0

    def __post_init__(self) -> None:
        lanes, least = self.head_dim * self.itemsize / 16, 32 if self.itemsize == 2 else 16
        if lanes not in (1, 2, 4, 8, 16, 32) or self.head_dim < least:
            raise UserError(
                f"decode on cupy: head size {self.head_dim} at {self.itemsize} bytes a number, "
                f"expected a power of 2 of "
                f"at least {least} that takes at most 512 bytes; use --backend numpy"
            )
        if self.heads > 16 * self.kv_heads:
            raise UserError(
                f"decode on cupy: {self.heads} heads share {self.kv_heads} key heads, expected at most 16 to a key "
                "head; use --backend numpy"
            )
        if self.slots < self._least_slots:
            raise UserError(
                f"decode on cupy: {self.shared} bytes of shared memory per block do not hold a row of {self.hidden} "
                "numbers; use a smaller model, or --backend numpy"
            )

    @property
    def _least_slots(self) -> int:
        """Pieces of the widest tile."""
        return max(self.steps(self.dim), self.steps(self.hidden))

    @property
    def draws(self) -> bool:
        """Whether passes of one row can sample with a temperature: a block then sorts the vocabulary in shared memory.
        Without room for that they are greedy only."""
        return self._slots_beside(self._bytes_beside(self.draw_bytes)) >= self._least_slots

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return (self.warps + self.producers) * 32

    @property
    def hidden_rows(self) -> int:
        return -(-self.hidden // TILE) * TILE

    def pitch(self, columns: int) -> int:
        return (self.steps(columns) * self.warps + 1) * 4 * self.piece

    def deals(self) -> Iterator[tuple[int, int]]:
        """What is dealt out to blocks in a pass with all outputs: number of tiles, and columns (0: attention)."""
        for _ in range(self.layers):
            yield self.width // TILE, self.dim
            yield self.kv_heads * self.splits * 3, 0  # not fewer for fewer rows: one layout of weights serves all
            yield self.dim // TILE, self.dim
            yield self.hidden_rows // 4, self.dim
            yield self.dim // TILE, self.hidden
        for _ in range(self.outputs):
            yield self.vocab_rows // TILE, self.dim

    @property
    def tiles(self) -> int:
        """Tiles whose sums a block keeps at a time."""
        return max(1, min(4, self.slots // self._least_slots))

    @property
    def _other_bytes(self) -> int:
        return self._bytes_beside(self.draw_bytes if self.rows == 1 and self.draws else 512)

    def _bytes_beside(self, sampling: int) -> int:
        """Shared memory in addition to the queues: sums of four tiles, `sampling` bytes to sample a token."""
        wide = max(self.itemsize, 4)
        group = self.heads // self.kv_heads
        queries = group * (max(1, min(self.rows, 8 // group)) if self.itemsize == 2 else 1)
        attention = queries * self.warps * (self.head_dim + 2) * wide
        rotated = -(-queries // 8) * 8 * (self.head_dim + 4 * self.piece) + self.rows * 2 * self.head_dim
        attention += rotated * self.itemsize * (self.warps if self.itemsize == 2 and self.rows == 1 else 1)
        inputs = self.rows * (self.pitch(self.dim) + self.pitch(self.hidden)) * self.itemsize
        sums = self.rows * (self.warps + 2 * 4 * self.warps * TILE) * wide
        return QUEUE_BARRIERS + inputs + sums + max(attention, sampling)

    @property
    def macros(self) -> dict[str, int | str]:
        code = {"WEIGHT": self.code} if self.code else {}
        refill = self.refill * self.itemsize // self.weight_bytes  # in pieces
        own = self._macros("rows", "blocks", "splits", "spin", "producers")
        return {**own, "REFILL": refill, "DRAWS": int(self.draws), **code}

    def exchange(self, outputs: int) -> int:
        """Words that blocks compute for each other in a pass. The last rows x outputs x vocab_rows are the logits; with
        one row, the most likely token of each tile and its logit come before them."""
        per_word = max(self.itemsize, 4) // self.itemsize
        attention = (self.splits * self.dim // per_word, self.splits * self.heads)
        arrays = (self.width, *attention, self.dim, self.hidden_rows // per_word, self.dim)
        lines = sum(-(-words // 8) for words in arrays)  # of 8 words for each of 4 rows
        best = -(-2 * self.vocab_rows // TILE // 8) * 8 if self.rows == 1 else 0
        return self.layers * lines * 32 + best + self.rows * outputs * self.vocab_rows

    @property
    def hidden_order(self) -> np.ndarray:
        """(tiles of gate and up,): which four hidden units each holds. A block's tiles hold consecutive units."""
        tiles = np.arange(self.hidden_rows // 4)
        block, (most, rest) = tiles % self.blocks, divmod(len(tiles), self.blocks)
        return block * most + np.minimum(block, rest) + tiles // self.blocks

    @cached_property
    def _taken(self) -> np.ndarray:
        """(deals, blocks): units of weights per block up to the end of each of `deals`."""
        total, dealt = np.zeros(self.blocks, np.int32), 0
        found = []
        for count, columns in self.deals():
            first = (np.arange(self.blocks) - dealt) % self.blocks
            total += self.steps(columns) * np.maximum(0, -(-(count - first) // self.blocks)).astype(np.int32)
            dealt += count
            found.append(total.copy())
        return np.stack(found)

    @property
    def lengths(self) -> np.ndarray:
        """(outputs, blocks): units of weights per block in a pass with 1, 2, ... outputs."""
        return self._taken[5 * self.layers :]

    def before(self, layer: int) -> tuple[np.ndarray, int]:
        """What is dealt out before a layer: units of weights per block, (blocks,), and the number of tiles."""
        deals = 5 * layer
        units = self._taken[deals - 1] if deals else np.zeros(self.blocks, np.int32)
        return units, sum(count for count, _ in itertools.islice(self.deals(), deals))

    def arrange(self, layers: Iterable[FusedLayer], heads: Array, xp: Any) -> Array:
        """All matrices in the order in which lanes read them: (blocks, units, warps, 32 lanes, piece).

        A unit is 8 rows by 4 pieces, a piece per lane of a warp. Rows and columns are padded with zeros. heads:
        (outputs, vocab, dim). xp: the module of the matrices, numpy or cupy.
        """
        bits = np.dtype(f"u{self.weight_bytes}")  # only moved: any 16-bit type stands for bf16
        units = int(self.lengths[-1].max())
        views = (FusedLayer(*(matrix.view(bits) for matrix in layer)) for layer in layers)
        stream = xp.zeros((self.blocks, units, self.warps, 32 * self.piece), bits)
        taken, dealt = np.zeros(self.blocks, np.int64), 0
        warps = np.arange(self.warps)[None, :, None]
        for matrix, (count, columns) in zip(self._matrices(views, heads.view(bits), xp), self.deals(), strict=True):
            if matrix is not None:
                steps = self.steps(columns)
                padded = xp.zeros((count * TILE, self.padded(columns)), bits)
                padded[: len(matrix), :columns] = matrix
                tiles = padded.reshape(count, TILE, self.warps, steps, 4 * self.piece).transpose(0, 2, 3, 1, 4)
                if self.itemsize == 2:  # the pairs of a piece in the order of tensor cores: columns 0, 4, 2, 6
                    tiles = tiles.reshape(count, self.warps, steps, TILE, 4, 2, 2, 2).swapaxes(5, 6)
                tiles = tiles.reshape(count, self.warps, steps, -1)
                for start in range(0, count, self.blocks):
                    some = tiles[start : start + self.blocks]
                    owners = (dealt + start + np.arange(len(some))) % self.blocks
                    at = taken[owners][:, None, None] + np.arange(steps)
                    stream[xp.asarray(owners[:, None, None]), xp.asarray(at), xp.asarray(warps)] = some
                    taken[owners] += steps
            dealt += count
        return stream

    def arrange_scales(self, layers: Iterable[FusedLayer], heads: Array, xp: Any) -> Array:
        """The scales of rows in the order of `deals`, 8 per tile. layers, heads: as in `arrange`, of float32 and with
        one column."""
        parts = []
        for scales, (count, _) in zip(self._matrices(layers, heads, xp), self.deals(), strict=True):
            parts.append(xp.zeros(count * TILE, np.float32))
            if scales is not None:
                parts[-1][: len(scales)] = scales[:, 0]
        return xp.concatenate(parts)

    def _matrices(self, layers: Iterable[FusedLayer], heads: Array, xp: Any) -> Iterator[Array | None]:
        """The matrices in the order of `deals`, None for attention."""
        for layer in layers:
            yield layer.qkv
            yield None
            yield layer.out
            # Four rows of gate, then the same four of up: the block multiplies them.
            tiles = self.hidden_rows // 4
            columns = layer.gate_up.shape[1]
            pairs = xp.zeros((tiles, 2, 4, columns), layer.gate_up.dtype)
            order = xp.asarray(self.hidden_order)
            for part in range(2):
                padded = xp.zeros((tiles * 4, columns), layer.gate_up.dtype)
                padded[: self.hidden] = layer.gate_up[part * self.hidden : (part + 1) * self.hidden]
                pairs[:, part] = padded.reshape(tiles, 4, columns)[order]
            yield pairs.reshape(tiles * TILE, columns)
            yield layer.down
        yield from heads
