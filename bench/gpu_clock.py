"""Timing of kernels: CUDA events around many launches, and a copy to compare with.

Launches are queued behind a kernel that only waits, so that the device then runs them back to back. Python's time per
launch is measured separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

REPEATS, ROUNDS, WARM_UP = 20, 7, 3
CACHE_BYTES = 256 << 20  # several times the L2 of any GPU so far
COPY_BYTES = 2 << 30

WAIT = r"""
extern "C" __global__ void wait(long long nanoseconds) {
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}
"""


def event_ms(xp: Any, launch: Callable[[int], Any]) -> tuple[float, float]:
    """Milliseconds per launch, on the device and in Python, the mean over REPEATS in a row."""
    start, stop = xp.cuda.Event(), xp.cuda.Event()
    xp.RawKernel(WAIT, "wait")((1,), (1,), (np.int64(4_000_000),))
    start.record()
    began = time.perf_counter()
    for i in range(REPEATS):
        launch(i)
    queued = time.perf_counter() - began
    stop.record()
    stop.synchronize()
    return xp.cuda.get_elapsed_time(start, stop) / REPEATS, 1e3 * queued / REPEATS


def timed(xp: Any, launch: Callable[[int], Any]) -> tuple[float, float]:
    for i in range(WARM_UP):
        launch(i)
    device, host = zip(*(event_ms(xp, launch) for _ in range(ROUNDS)), strict=True)
    return median(device), median(host)


def copy_bandwidth(xp: Any) -> float:
    """Bytes per second, read and written together."""
    source = xp.random.randint(0, 255, COPY_BYTES, dtype=np.uint8)
    target = xp.empty_like(source)
    ms, _ = timed(xp, lambda i: target.data.copy_from_device_async(source.data, COPY_BYTES))
    return 2 * COPY_BYTES / ms * 1e3
