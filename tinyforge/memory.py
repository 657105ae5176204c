"""How much memory is free, and how messages say it."""

from __future__ import annotations

import os
from pathlib import Path

from tinyforge.backends import Backend

OUTSIDE = 128 << 20
"""Bytes on a GPU outside of our arrays: cuBLAS's workspace, the kernels' code."""


def gib(count: int, largest: int = 0) -> str:
    """In GiB, or in MiB below a tenth of one; in a table with the unit of its `largest`."""
    return f"{count / 2**30:.2f} GiB" if max(count, largest) >= 2**30 // 10 else f"{count / 2**20:.2f} MiB"


def free_memory(backend: Backend) -> tuple[int | None, str]:
    """Bytes that arrays may still take, None if unknown; and where they lie, in words."""
    free = backend.memory().get("free")
    return (free_host_memory(), "of memory") if free is None else (max(0, free - OUTSIDE), "on the GPU")


def free_host_memory() -> int | None:
    """Bytes that this process may still allocate, on the machine or in its container; None if unknown."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = (line.split() for line in meminfo.read_text(encoding="ascii").splitlines())
        found += [int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:  # macOS: all memory, used or not
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit.is_file() and used.is_file() and (most := limit.read_text(encoding="ascii").strip()) != "max":
        found.append(int(most) - int(used.read_text(encoding="ascii")))
    return min(found, default=None)
