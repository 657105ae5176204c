"""The plan of decode_batched.cu: which block computes which rows of a matrix, and the order of weights in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.infer.cuda.plan import TILE, DecodePlan
from tinyforge.kernel import Array

TEAM_ROWS = 16
"""Rows of the batch that go through the layers together: those of a tensor core product."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan(DecodePlan):
    """How the work of decode_batched.cu is spread over a GPU.

    batch: rows. blocks: those that the device runs at once, `resident` of them per multiprocessor, split evenly among
    the teams. tiles: the most whose sums a block keeps at a time.
    """

    batch: int
    tiles: int = 4
    resident: int = 1

    def __post_init__(self) -> None:
        sizes = [size for size in (8, 16, 32, 64, 128) if size >= {2: 32, 4: 16}.get(self.itemsize, 8)]
        if self.head_dim not in sizes:
            raise UserError(
                f"decode of a batch on cupy: head size {self.head_dim} at {self.itemsize} bytes a number, expected one "
                f"of {', '.join(map(str, sizes))}; use --backend numpy"
            )
        if self.heads > 16 * self.kv_heads:
            raise UserError(
                f"decode of a batch on cupy: {self.heads} heads share {self.kv_heads} key heads, expected at most 16 "
                "to a key head; use --backend numpy"
            )
        if self.teams > self.blocks:
            raise UserError(
                f"decode of a batch on cupy: {self.batch} rows, expected at most {self.blocks * TEAM_ROWS} on this "
                "device; use a smaller batch"
            )
        if self.slots < max(self.steps(self.dim), self.steps(self.hidden)):
            raise UserError(
                f"decode of a batch on cupy: {self.shared} bytes of shared memory per block do not hold {TILE} rows of "
                f"{max(self.dim, self.hidden)} numbers; use a smaller model, or --backend numpy"
            )

    @property
    def teams(self) -> int:
        return -(-self.batch // TEAM_ROWS)

    @property
    def team(self) -> int:
        """Blocks of a team."""
        return self.blocks // self.teams

    @property
    def hidden_tiles(self) -> int:
        """Tiles of gate and up, with four rows of each."""
        return -(-self.hidden // 4)

    def products(self) -> Iterator[tuple[int, int]]:
        """The products of a pass with all outputs: number of tiles, and columns."""
        for _ in range(self.layers):
            yield self.width // TILE, self.dim
            yield self.dim // TILE, self.dim
            yield self.hidden_tiles, self.dim
            yield self.dim // TILE, self.hidden
        for _ in range(self.outputs):
            yield self.vocab_rows // TILE, self.dim

    def shares(self, count: int) -> np.ndarray:
        """(team + 1,): the first of `count` tiles of each block of a team, and the end."""
        return count * np.arange(self.team + 1) // self.team

    @property
    def _other_bytes(self) -> int:
        """Shared memory in addition to the queues."""
        wide, group = max(self.itemsize, 4), self.heads // self.kv_heads
        sums = 2 * self.warps * self.tiles * 128 * wide
        attention = self.warps * group * (self.head_dim + 2) * wide
        columns = -(-self.dim // TILE // self.team) * TILE  # of the residual stream, owned by a block
        numbers = (TEAM_ROWS + 2 * self.layers + 1) * columns + TEAM_ROWS * (self.head_dim + 1)
        return max(sums, attention, self.draw_bytes) + numbers * wide + 2 * TEAM_ROWS * 4

    @property
    def exchange_bytes(self) -> int:
        """Bytes that the blocks of a team compute for each other."""
        numbers = TEAM_ROWS * (2 * self.padded(self.dim) + self.padded(self.hidden) + self.dim)
        squares = TEAM_ROWS * self.dim // TILE
        return -(-(numbers * self.itemsize + squares * max(self.itemsize, 4)) // 128) * 128

    @property
    def macros(self) -> dict[str, int]:
        return self._macros("team", "resident")

    @cached_property
    def lengths(self) -> np.ndarray:
        """(outputs, team): units of weights per block in a pass with 1, 2, ... outputs."""
        units = [self.steps(columns) * np.diff(self.shares(count)) for count, columns in self.products()]
        return np.cumsum(units, axis=0).astype(np.int32)[-self.outputs :]

    @cached_property
    def rope_order(self) -> np.ndarray:
        """Rows of q, k and v in the order of their tiles: the two of a RoPE pair are neighbours."""
        pairs = np.arange(self.width).reshape(-1, 2, self.head_dim // 2)
        return pairs.swapaxes(1, 2).reshape(-1)

    @cached_property
    def hidden_order(self) -> np.ndarray:
        """(hidden rounded up to 16,): the hidden unit of each column of `down`, in the order in which the kernel writes
        them: of four tiles with four units each, one tile's units fill the registers of the same lanes."""
        units = np.arange(-(-self.hidden // 16) * 16)
        tile, unit = units // 4, units % 4
        order = np.empty_like(units)
        order[tile // 4 * 16 + unit // 2 * 8 + tile % 4 * 2 + unit % 2] = units
        return order

    def arrange(self, layers: Iterable[FusedLayer], heads: Array, xp: Any) -> Array:
        """All matrices in the order in which lanes read them: (team, warps, units, 32 lanes, piece).

        A unit is 8 rows by 4 pieces, a piece per lane of a warp. Rows and columns are padded with zeros. heads:
        (outputs, vocab, dim). xp: the module of the matrices, numpy or cupy.
        """
        bits = np.dtype(f"u{self.itemsize}")  # only moved: any 16-bit type stands for bf16
        views = (FusedLayer(*(matrix.view(bits) for matrix in layer)) for layer in layers)
        stream = xp.zeros((self.team, self.warps, int(self.lengths[-1].max()), 32 * self.piece), bits)
        taken = np.zeros(self.team, np.int64)
        for matrix, (count, columns) in zip(self._matrices(views, heads.view(bits), xp), self.products(), strict=True):
            steps = self.steps(columns)
            padded = xp.zeros((count * TILE, self.padded(columns)), bits)
            padded[: len(matrix), : matrix.shape[1]] = matrix
            # On tensor cores a lane's piece is four pairs: columns 2 c, 2 c + 1 and the same + 8, of two steps.
            pieces = (2, 2, 4, 2) if self.itemsize == 2 else (1, 1, 4, self.piece)
            tiles = padded.reshape(count, TILE, self.warps, steps, *pieces).transpose(2, 0, 3, 1, 6, 4, 5, 7)
            tiles = tiles.reshape(self.warps, count * steps, -1)
            for block, (start, end) in enumerate(pairwise(self.shares(count).tolist())):
                units = (end - start) * steps
                stream[block, :, taken[block] : taken[block] + units] = tiles[:, start * steps : end * steps]
                taken[block] += units
        return stream

    def _matrices(self, layers: Iterable[FusedLayer], heads: Array, xp: Any) -> Iterator[Array]:
        """The matrices in the order of `products`."""
        rope_order, hidden_order = xp.asarray(self.rope_order), xp.asarray(self.hidden_order)
        for layer in layers:
            yield layer.qkv[rope_order]
            yield layer.out
            # Gate and up of a hidden unit are neighbours, so that a block that has one has the other.
            gate_up = xp.zeros((self.hidden_tiles * 4, 2, self.dim), layer.gate_up.dtype)
            for part in range(2):
                gate_up[: self.hidden, part] = layer.gate_up[part * self.hidden : (part + 1) * self.hidden]
            yield gate_up.reshape(-1, self.dim)
            down = xp.zeros((self.dim, len(hidden_order)), layer.down.dtype)
            down[:, : self.hidden] = layer.down
            yield down[:, hidden_order]
        yield from heads
