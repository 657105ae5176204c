"""What the plans of both decoding kernels share: a decoder's shape, and the queues for its weights.

Plain arithmetic on shapes, which runs and is tested without a GPU. The kernels repeat this arithmetic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

TILE = 8
"""Rows of a matrix that are assigned together."""
MOST_PLACES = 64
"""Slots in a queue: codes take small slots, and a slot may have its own barriers (decode.cuh)."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan(ABC):
    """A decoder's shape, and the queue of weights that each lane has in every kernel.

    outputs: heads of `vocab` rows each. itemsize: bytes of a stored number. blocks, warps: of the launch. shared: bytes
    of shared memory per block. depth: pieces per lane's queue, 0 for as many as fit. code: the type of one-byte weights
    (codes.cuh), where the kernel reads them; a piece is then that many bytes, else 16.
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
        """Numbers that a lane takes at once, 16 bytes."""
        return 16 // self.itemsize

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stored weight."""
        return 1 if self.code else self.itemsize

    @property
    def place_bytes(self) -> int:
        """Bytes of a slot in the queues of all lanes."""
        return self.warps * 32 * self.piece * self.weight_bytes

    @property
    def vocab_rows(self) -> int:
        return -(-self.vocab // TILE) * TILE

    @property
    def width(self) -> int:
        """Rows of q, k and v together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def steps(self, columns: int) -> int:
        """Pieces of a tile per lane."""
        return -(-columns // (self.warps * 4 * self.piece))

    def padded(self, columns: int) -> int:
        """Columns of a product, padded to whole pieces for all lanes."""
        return self.steps(columns) * self.warps * 4 * self.piece

    @property
    def draw_bytes(self) -> int:
        """Shared memory for drawing a token (sampler.cuh)."""
        return 8 * max(1 << (self.vocab_rows - 1).bit_length(), self.warps * 32) + 512

    @property
    def slots(self) -> int:
        """Slots in each lane's queue: a power of 2, so that an index is a mask."""
        return self._slots_beside(self._other_bytes)

    def _slots_beside(self, other_bytes: int) -> int:
        room = min((self.shared - other_bytes) // self.place_bytes, self.depth or MOST_PLACES)
        return 1 << (room.bit_length() - 1) if room > 0 else 0

    @property
    def shared_bytes(self) -> int:
        return self.slots * self.place_bytes + self._other_bytes

    def _macros(self, *names: str) -> dict[str, int]:
        """The macros of both kernels, each named as its field here, and those of `names`."""
        common = ("dim", "hidden", "heads", "kv_heads", "head_dim", "vocab", "warps", "tiles", *names)
        return {name.upper(): int(getattr(self, name)) for name in common} | {"DEPTH": self.slots}

    @property
    @abstractmethod
    def _other_bytes(self) -> int:
        """Shared memory in addition to the queues."""
