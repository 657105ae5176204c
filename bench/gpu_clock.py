"""Timing of kernels: CUDA events around many launches, in turns, and a copy to compare with.

Launches are queued after a kernel that only waits, so that the device then runs them back to back. Python's time per
launch is measured separately. Inputs rotate among sets of arrays that together are larger than the L2 cache, and so do
results.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

REPEATS, ROUNDS, WARM_UP = 20, 7, 3
CACHE_BYTES = 256 << 20  # several times the L2 of any GPU so far
COPY_BYTES = 2 << 30
CONVENTION = """\
How it is measured: contenders take turns. A turn is 20 launches in a row, timed by CUDA events, on inputs and results
that rotate so that none is still in the L2 cache; the median of seven turns counts. Launches are queued in advance, so
that Python's time does not count."""

WAIT = r"""
extern "C" __global__ void wait(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""

Launch = Callable[[int], Any]


def event_us(xp: Any, launch: Launch, repeats: int = REPEATS) -> tuple[float, float]:
    """Microseconds per launch, on the device and in Python, the mean over `repeats` in a row."""
    start, stop = xp.cuda.Event(), xp.cuda.Event()
    xp.RawKernel(WAIT, "wait")((1,), (1,), (np.int64(4_000_000),))
    start.record()
    began = time.perf_counter()
    for i in range(repeats):
        launch(i)
    queued = time.perf_counter() - began
    stop.record()
    stop.synchronize()
    return 1e3 * xp.cuda.get_elapsed_time(start, stop) / repeats, 1e6 * queued / repeats


def take_turns(xp: Any, launches: Sequence[Launch]) -> list[tuple[float, float]]:
    """`event_us` of each launch: the medians of ROUNDS turns."""
    for launch in launches:
        for i in range(WARM_UP):
            launch(i)
    rounds = [[event_us(xp, launch) for launch in launches] for _ in range(ROUNDS)]
    return [(median(us for us, _ in turns), median(us for _, us in turns)) for turns in zip(*rounds, strict=True)]


def sets_of(bytes_of_a_set: int, least: int = 1) -> int:
    """How many sets of arrays leave the cache."""
    return max(least, -(-CACHE_BYTES // bytes_of_a_set))


def rotating(call: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Launch:
    """A launch that takes the sets in turn, and keeps its results alive while later launches write elsewhere."""
    results: deque[Any] = deque(maxlen=len(sets))
    return lambda i: results.append(call(*sets[i % len(sets)]))


def copy_bandwidth(xp: Any) -> float:
    """Bytes per second, read and written together."""
    source = xp.random.randint(0, 255, COPY_BYTES, dtype=np.uint8)
    target = xp.empty_like(source)
    [(us, _)] = take_turns(xp, [lambda i: target.data.copy_from_device_async(source.data, COPY_BYTES)])
    return 2 * COPY_BYTES / us * 1e6
