"""What a launch of selective_scan.cu takes: lanes, and shared memory. Needs no GPU."""

from __future__ import annotations

from tinyforge.backends.compile import constant
from tinyforge.ops.selective_scan import CHANNELS, TILE

FILE = "ops/selective_scan.cu"
THREADS, QUARTERS = constant(FILE, "THREADS"), constant(FILE, "QUARTERS")


def states_a_lane(states: int) -> int:
    """The macro PER: a power of two."""
    return 1 << (-(-states // QUARTERS) - 1).bit_length()


def backward_bytes(states: int, itemsize: int) -> int:
    """Shared memory of a block of selective_scan_bwd: the struct Backward."""
    per = states_a_lane(states)
    sums = max(8, 2 * per)
    rows = 3 * CHANNELS + 3 * (CHANNELS + 8)  # steps and `up`; three that are padded
    return TILE * (THREADS * per + THREADS // 32 * QUARTERS * sums + rows + 2 * QUARTERS * per) * itemsize
