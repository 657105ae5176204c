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
from tinyforge.quantised_groups import GROUP

MOST_ROWS = 4
"""The most new positions of a pass."""
AT_ONCE, PART = 24, 4
"""Products of more steps are made in parts of at most so many units (decode_single.cu)."""
FOUR_BITS = "four_bits"
"""The code of weights of four bits (codes.cuh)."""

QUEUE_BARRIERS = 2048
"""Bytes before a block's weights (decode.cuh)."""


@dataclass(frozen=True, kw_only=True)
class RowPlan(DecodePlan):
    """How the work of decode_single.cu is spread over a GPU.

    rows: new positions per pass, 1 to 4. splits: parts into which a KV head's positions are split. refill: 16-byte
    requests of a lane between two polls for attention's results, where it copies its own weights. spin: nanoseconds
    that a thread sleeps between two polls. producers: warps that copy weights for all others, 4 on Hopper; 0: each lane
    copies its own. line: units that are copied together, 0: chosen by shape. code: `FOUR_BITS` too, with producers:
    a unit of weights then has `span` steps of a tile, and the groups' scales after the codes; a unit of the heads,
    whose codes have a byte, has half as many steps.
    """

    rows: int
    splits: int = 3
    refill: int = 8
    spin: int = 0
    producers: int = 0
    line: int = 0

    def __post_init__(self) -> None:
        lanes, least = self.head_dim * self.itemsize / 16, 32 if self.itemsize == 2 else 16
        if lanes not in (1, 2, 4, 8, 16, 32) or self.head_dim < least:
            raise UserError(
                f"decode on cupy: head size {self.head_dim} at {self.itemsize} bytes a number, expected a power of 2 "
                f"of at least {least} that takes at most 512 bytes; use --backend numpy"
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
    def grouped(self) -> bool:
        """Whether weights have four bits, in groups of `GROUP` numbers."""
        return self.code == FOUR_BITS

    @property
    def span(self) -> int:
        """Steps of a unit: four, or two where the padding of four would add more than a twentieth."""
        if not self.grouped:
            return 1
        width = self.warps * 4 * self.piece
        weights = ((self.width + self.dim + 2 * self.hidden, self.dim), (self.dim, self.hidden))
        four, two = (sum(rows * -(-c // (n * width)) * n for rows, c in weights) for n in (4, 2))
        return 4 if four <= 1.05 * two else 2

    def steps(self, columns: int) -> int:
        width = self.warps * 4 * self.piece * self.span
        return -(-columns // width) * self.span

    def units(self, columns: int, *, of_heads: bool = False) -> int:
        """Units of weights of a tile, each a slot of the queues."""
        return self.steps(columns) * (1 + of_heads * self.grouped) // self.span

    @property
    def units_a_line(self) -> int:
        """Units that are copied together. Large models use more of them than threads can start to copy."""
        return self.line or (4 if self.producers and self.dim > TILE * self.blocks else 1)

    @property
    def place_bytes(self) -> int:
        return self.warps * 32 * self.span * 9 // 2 if self.grouped else super().place_bytes

    @property
    def _least_slots(self) -> int:
        """The most units that are multiplied at one time: of a tile, or a part of one."""
        each = self.units(self.dim, of_heads=True), self.units(self.dim), self.units(self.hidden)
        return (
            self.units_a_line
            - 1
            + max(min(n, PART) if self.grouped or (self.itemsize == 2 and n > AT_ONCE) else n for n in each)
        )

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
        if self.grouped:
            return min(8, self.warps * 32 // (TILE * self.rows))  # a thread finishes a row of a tile
        behind = self.units_a_line - 1  # used, but not empty, as they share a line with the next
        return max(1, min(4, (self.slots - behind) // (self._least_slots - behind)))

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
        # Tensor cores take a row of hidden numbers from registers.
        row = self.pitch(self.dim) + (self.pitch(self.hidden) if self.itemsize > 2 else 0)
        inputs = self.rows * row * self.itemsize
        sums = self.rows * (self.warps + 2 * (8 if self.grouped else 4) * self.warps * TILE) * wide
        return QUEUE_BARRIERS + inputs + sums + max(attention, sampling)

    @property
    def macros(self) -> dict[str, int | str]:
        code = {"WEIGHT": self.code} if self.code else {}
        refill = self.refill * self.itemsize // self.weight_bytes  # in pieces
        own = self._macros("rows", "blocks", "splits", "spin", "producers", "span") | {"COPIED": self.units_a_line}
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
        for i, (count, columns) in enumerate(self.deals()):
            units = self.units(columns, of_heads=i >= 5 * self.layers)
            first = (np.arange(self.blocks) - dealt) % self.blocks
            total += units * np.maximum(0, -(-(count - first) // self.blocks)).astype(np.int32)
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
        views = (FusedLayer(*(matrix.view(bits) for matrix in layer)) for layer in layers)
        found = self._streams((self.warps, 32 * self.piece), bits, xp)
        for i, matrix in enumerate(self._matrices(views, heads.view(bits), xp)):
            found.put(i, None if matrix is None else self._tiles(matrix, xp))
        return found.stream

    def arrange_groups(self, layers: Iterable[tuple[FusedLayer, FusedLayer]], heads: Array, xp: Any) -> Array:
        """The same of codes of four bits: (blocks, units, bytes). layers: of codes and of scales, as
        `quantise_groups` returns them; heads: of a byte each, (outputs, vocab, dim).

        A unit: a word for each lane of a warp and step, of the eight columns of its piece; then the scales.
        """
        found = self._streams((self.place_bytes,), np.dtype(np.uint8), xp)
        codes_and_scales = zip(
            *(self._matrices(part, heads if k == 0 else heads[..., :1], xp) for k, part in enumerate(_unzip(layers))),
            strict=True,
        )
        for i, (codes, scales) in enumerate(codes_and_scales):
            if codes is None:
                found.put(i, None)
            elif i < 5 * self.layers:
                found.put(i, self._grouped_tiles(codes, scales, xp))
            else:
                tiles = self._tiles(codes.view(np.uint8), xp)
                count, _, steps, _ = tiles.shape
                half = self.span // 2  # steps of a unit; a lane's pieces of a unit lie together
                units = tiles.reshape(count, self.warps, steps // half, half, 32, self.piece).transpose(
                    0, 2, 1, 4, 3, 5
                )
                found.put(i, units.reshape(count, steps // half, -1))
        return found.stream

    def _tiles(self, matrix: Array, xp: Any) -> Array:
        """(tiles, units, warps, numbers of the lanes of a warp); for four bits (tiles, warps, steps, numbers)."""
        count, columns = -(-len(matrix) // TILE), matrix.shape[1]
        steps = self.steps(columns)
        padded = xp.zeros((count * TILE, self.padded(columns)), matrix.dtype)
        padded[: len(matrix), :columns] = matrix
        tiles = padded.reshape(count, TILE, self.warps, steps, 4 * self.piece).transpose(0, 2, 3, 1, 4)
        if self.itemsize == 2:  # the pairs of a piece in the order of tensor cores: columns 0, 4, 2, 6
            tiles = tiles.reshape(count, self.warps, steps, TILE, 4, 2, 2, 2).swapaxes(5, 6)
        tiles = tiles.reshape(count, self.warps, steps, -1)
        return tiles if self.grouped else tiles.swapaxes(1, 2)

    def _grouped_tiles(self, codes: Array, scales: Array, xp: Any) -> Array:
        """(tiles, units, bytes) of codes, (rows, columns / 2), and scales, (rows, columns / GROUP)."""
        count, groups = -(-len(codes) // TILE), scales.shape[1]
        steps = self.steps(groups * GROUP)
        units, every = steps // self.span, self.warps * steps  # groups of a row, padded
        padded = xp.zeros((count * TILE, every, GROUP // 2), np.uint8)
        padded[: len(codes), :groups] = codes.reshape(len(codes), groups, GROUP // 2)
        # Byte j of a group has columns j and j + 16, so a lane has the lower bits of eight bytes, or the upper ones.
        nibbles = xp.stack([padded & 15, padded >> 4], axis=2).reshape(-1, 4, 8).astype(np.uint32)
        words = xp.zeros(nibbles.shape[:2], np.uint32)
        for place, column in enumerate((0, 4, 2, 6, 1, 5, 3, 7)):  # of the pairs of a piece, see `Codes`
            words |= nibbles[..., column] << np.uint32(4 * place)
        words = words.reshape(count, TILE, self.warps, units, self.span, 4).transpose(0, 3, 2, 1, 5, 4)
        halves = xp.zeros((count * TILE, every), np.float16)
        halves[: len(scales), :groups] = scales
        halves = halves.reshape(count, TILE, self.warps, units, self.span).transpose(0, 3, 2, 1, 4)
        parts = [xp.ascontiguousarray(x).reshape(count, units, -1).view(np.uint8) for x in (words, halves)]
        return xp.concatenate(parts, axis=2)

    def _streams(self, shape: tuple[int, ...], dtype: np.dtype, xp: Any) -> _Streams:
        return _Streams(self, xp.zeros((self.blocks, int(self.lengths[-1].max()), *shape), dtype), xp)

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


class _Streams:
    """The units of weights of each block, which grow by one matrix after the other. stream: (blocks, units, ...)."""

    def __init__(self, plan: RowPlan, stream: Array, xp: Any) -> None:
        self.stream, self._plan, self._xp = stream, plan, xp
        self._taken, self._dealt = np.zeros(plan.blocks, np.int64), 0
        self._counts = [count for count, _ in plan.deals()]

    def put(self, deal: int, tiles: Array | None) -> None:
        """Deal out the tiles of number `deal` of `RowPlan.deals`, (tiles, units, ...), None for attention. The last
        axis may be shorter than a unit's."""
        blocks = self._plan.blocks
        if tiles is not None:
            for start in range(0, len(tiles), blocks):
                some = tiles[start : start + blocks]
                owners = (self._dealt + start + np.arange(len(some))) % blocks
                at = self._taken[owners][:, None] + np.arange(some.shape[1])
                here = self._xp.asarray(owners[:, None]), self._xp.asarray(at)
                self.stream[..., : some.shape[-1]][here] = some
                self._taken[owners] += some.shape[1]
        self._dealt += self._counts[deal]


def _unzip(pairs: Iterable[tuple[FusedLayer, FusedLayer]]) -> tuple[Iterator[FusedLayer], Iterator[FusedLayer]]:
    first, second = itertools.tee(pairs)
    return (codes for codes, _ in first), (scales for _, scales in second)
