"""The lanes and the shared memory of a launch of selective_scan.cu, computed without a GPU."""

from __future__ import annotations

from tinyforge.backends.compile import constant
from tinyforge.ops.selective_scan import CHANNELS, TILE

FILE = "ops/selective_scan.cu"
THREADS, QUARTERS, HALF = (constant(FILE, name) for name in ("THREADS", "QUARTERS", "HALF"))


def states_a_lane(states: int) -> int:
    """The macro PER: a power of two."""
    return 1 << (-(-states // QUARTERS) - 1).bit_length()


def forward_bytes(states: int, itemsize: int) -> int:
    """Shared memory of a block of selective_scan_fwd: the struct Forward."""
    rows = 2 * CHANNELS + QUARTERS * CHANNELS  # steps, and the parts of y
    return 2 * TILE * (rows + 2 * QUARTERS * states_a_lane(states)) * itemsize


def backward_bytes(states: int, itemsize: int) -> int:
    """Shared memory of a block of selective_scan_bwd: the struct Backward."""
    per = states_a_lane(states)
    sums = max(8, 2 * per)
    rows = 3 * CHANNELS + 3 * (CHANNELS + 8)  # steps and `up`; three that are padded
    later = THREADS * per + THREADS // 32 * QUARTERS * sums  # for half a tile: states, and sums over channels
    return (HALF * later + TILE * (rows + 2 * QUARTERS * per)) * itemsize
