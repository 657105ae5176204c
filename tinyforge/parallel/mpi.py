"""MPI ranks: processes with memory of their own, on one machine or many, started by `mpirun` or `srun`.

Before each collective the ranks tell each other over their lines what they are about to do (star.py). The data goes
through MPI's nonblocking collectives, which are polled with a deadline, so that no rank waits forever. For a sum, every
rank gets all ranks' contributions to its part and adds them in the order of the ranks, and the parts are gathered.
MPI_Allreduce would be as fast, but may add in any order.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import numpy as np

from tinyforge.parallel.group import Array, Finished, Meeting, _flat, part_of, summed
from tinyforge.parallel.star import ControlChannel, Lost


class MPIGroup(Meeting, Finished):
    """The ranks of MPI's COMM_WORLD. Arrays are NumPy's."""

    shares: ClassVar = False

    def __init__(self, star: ControlChannel) -> None:
        from mpi4py import MPI

        self._comm, self._byte, self._star = MPI.COMM_WORLD.Dup(), MPI.BYTE, star
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def all_reduce_(self, array: np.ndarray, tree: bool = False) -> None:
        flat = _flat(array)
        self._star.rendezvous(("all_reduce_", array.shape, str(array.dtype)))
        self._reduce(flat, tree, 1)
        self._gather(flat, 1)

    def reduce_scatter_(self, array: np.ndarray, tree: bool = False, unit: int = 1) -> None:
        flat = _flat(array)
        self._star.rendezvous(("reduce_scatter_", array.shape, str(array.dtype)))
        self._reduce(flat, tree, unit)

    def all_gather_(self, array: np.ndarray, unit: int = 1) -> None:
        flat = _flat(array)
        self._star.rendezvous(("all_gather_", array.shape, str(array.dtype)))
        self._gather(flat, unit)

    def broadcast_(self, array: np.ndarray) -> None:
        flat = _flat(array)
        self._star.rendezvous(("broadcast_", array.shape, str(array.dtype)))
        self._wait(self._comm.Ibcast(_bytes(flat), root=0), "broadcast_")

    def close(self) -> None:
        """Nothing: `launch.joined` lets the other ranks go at the end of the run."""

    def _reduce(self, flat: np.ndarray, tree: bool, unit: int) -> None:
        """Replace the rank's own part of `flat` by that part of the sum."""
        parts = [part_of(rank, self.size, flat.size, unit) for rank in range(self.size)]
        counts, starts = [part.stop - part.start for part in parts], [part.start for part in parts]
        own, width = parts[self.rank], flat.itemsize
        got = np.empty((self.size, own.stop - own.start), flat.dtype)
        each = got.shape[1] * width
        request = self._comm.Ialltoallv(
            [_bytes(flat), ([n * width for n in counts], [n * width for n in starts]), self._byte],
            [_bytes(got.reshape(-1)), ([each] * self.size, [each * rank for rank in range(self.size)]), self._byte],
        )
        self._wait(request, "a sum")
        summed(list(got), tree, flat[own])

    def _gather(self, flat: np.ndarray, unit: int) -> None:
        parts = [part_of(rank, self.size, flat.size, unit) for rank in range(self.size)]
        width = flat.itemsize
        counts, starts = [(p.stop - p.start) * width for p in parts], [p.start * width for p in parts]
        own = flat[parts[self.rank]].copy()
        request = self._comm.Iallgatherv([_bytes(own), self._byte], [_bytes(flat), (counts, starts), self._byte])
        self._wait(request, "all_gather_")

    def _wait(self, request: Any, what: str) -> None:
        """All ranks have agreed on the call: one that is late has died or hangs in MPI."""
        if not _waited(request.Test, self._star.patience):
            raise Lost(
                f"{what} among {self.size} ranks took over {self._star.patience:.0f} s: a rank or the network "
                f"between {', '.join(self._star.names)} hangs; {self._star.advice()}"
            )


def _bytes(flat: Array) -> np.ndarray:
    return flat.view(np.uint8)


def _waited(ready: Any, timeout: float) -> bool:
    """Whether ready() becomes true within `timeout` seconds; polled often at first, then a thousand times a second."""
    until, pause = time.monotonic() + timeout, 0.0
    while not ready():
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(1e-3, pause + 1e-6)
    return True
