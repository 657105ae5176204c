"""What the plans of both decoding kernels share: a decoder's shape, and the queues that its weights come through.

Plain arithmetic over shapes: it runs, and is tested, without a GPU. The kernels do the same arithmetic for themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

TILE = 8
"""Rows of a matrix that are dealt out together."""
MOST_PLACES = 64
"""In a queue; those of codes are small, and a place may have barriers of its own (decode.cuh)."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan(ABC):
    """A decoder's shape, and what every kernel for it has: weights that come through a queue of each lane.

    outputs: heads of `vocab` rows each. itemsize: bytes of a stored number. blocks, warps: of the launch. shared: bytes
    of shared memory that a block may use. depth: pieces that each lane's queue holds, 0 for as many as fit. code: the
    type of weights of one byte (codes.cuh), where the kernel reads such; a piece is then so many bytes, else 16.
    """

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    outputs: int
    itemsize: int
    blocks: int
    shared: int
    warps: int = 8
    depth: int = 0
    code: str = ""

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def piece(self) -> int:
        """Numbers that a lane takes at once: 16 bytes of them."""
        return 16 // self.itemsize

    @property
    def weight_bytes(self) -> int:
        """Of a weight as it is stored."""
        return 1 if self.code else self.itemsize

    @property
    def place_bytes(self) -> int:
        """Of a place in the queues of all lanes."""
        return self.warps * 32 * self.piece * self.weight_bytes

    @property
    def vocab_rows(self) -> int:
        return -(-self.vocab // TILE) * TILE

    @property
    def width(self) -> int:
        """Rows of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def steps(self, columns: int) -> int:
        """Pieces of a tile that each lane takes."""
        return -(-columns // (self.warps * 4 * self.piece))

    def padded(self, columns: int) -> int:
        """Columns of a product, filled up to whole pieces of all lanes."""
        return self.steps(columns) * self.warps * 4 * self.piece

    @property
    def draw_bytes(self) -> int:
        """Shared memory in which a block draws a token (sampler.cuh)."""
        return 8 * max(1 << (self.vocab_rows - 1).bit_length(), self.warps * 32) + 512

    @property
    def slots(self) -> int:
        """Pieces in each lane's queue: a power of 2, so that a place is found by a mask."""
        return self._slots_beside(self._other_bytes)

    def _slots_beside(self, other_bytes: int) -> int:
        room = min((self.shared - other_bytes) // self.place_bytes, self.depth or MOST_PLACES)
        return 1 << (room.bit_length() - 1) if room > 0 else 0

    @property
    def shared_bytes(self) -> int:
        return self.slots * self.place_bytes + self._other_bytes

    @property
    @abstractmethod
    def _other_bytes(self) -> int:
        """Shared memory beside the queues."""
