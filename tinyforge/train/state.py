"""The state of a run in a checkpoint: each rank writes the tensors that its optimizer owns; any number of ranks can
read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.checkpoint import MODEL, OPTIMIZER, Checkpoint, lazy, write_shard
from tinyforge.optim import AdamW
from tinyforge.parallel import Group
from tinyforge.params import check_named
from tinyforge.tensors import Lazy
from tinyforge.train.data_parallel import DataParallel, Worker

MASTERS, MOMENTS = "masters", ("m", "v")


def write(parallel: DataParallel, more: Mapping[str, np.ndarray], folder: Path) -> dict[str, str]:
    """Write the weights, the moments, and `more` next to these; returns the files' hashes. Called on rank 0.

    Raises any rank's OSError, and FloatingPointError with the name of a weight that is not finite.
    """
    rank = parallel.rank
    if rank.zero_optimizer:
        rank.group.send_object((write_shards, (str(folder),)))
        found = write_shards(rank, str(folder), more)
    else:
        found = [_write_own(rank, folder, more)]
    for number, (_, fault) in enumerate(found):
        if isinstance(fault, OSError) and number:
            raise OSError(fault.errno, f"{fault.strerror} ({rank.group.name(number)})") from fault
        if fault:
            raise fault
    return {name: digest for hashes, _ in found for name, digest in hashes.items()}


def write_shards(rank: Worker, folder: str, more: Mapping[str, np.ndarray] | None = None) -> Any:
    """On rank 0 the list of each rank's `_write_own`."""
    return rank.group.gather_objects(_write_own(rank, Path(folder), more or {}))


def _write_own(rank: Worker, folder: Path, more: Mapping[str, np.ndarray]) -> tuple[dict[str, str], Exception | None]:
    """Write what the rank's optimizer owns, a tensor at a time; returns the files' hashes, and what went wrong."""
    optimizer, hashes = rank.optimizer, dict[str, str]()
    assert optimizer is not None
    number, count = (rank.group.rank, rank.group.size) if rank.zero_optimizer else (0, 1)
    dtype = f"f{8 * rank.backend.master_dtype.itemsize}"
    beside, dtypes = lazy(more)
    fault: Exception | None = None
    for what, kinds in ((MODEL, (MASTERS,)), (OPTIMIZER, MOMENTS)):
        arrays = chain.from_iterable(map(optimizer.tensors, kinds))
        tensors: dict[str, Lazy] = {
            p.name if kind == MASTERS else f"{kind}.{p.name}": (
                optimizer.shape_of(kind, p),
                partial(_next, arrays, p.name, kind),
            )
            for kind in kinds
            for p in optimizer.owned(kind)
        }
        each = dict.fromkeys(tensors, dtype)
        if what == OPTIMIZER:
            tensors, each = tensors | beside, each | dtypes
        try:
            if not fault:
                hashes |= write_shard(folder, what, tensors, each, number, count)
        except (OSError, FloatingPointError) as error:
            fault = error
        for _ in arrays:  # even after a fault: the ranks gather together
            pass
    return hashes, fault


def _next(arrays: Iterator[np.ndarray], name: str, kind: str) -> np.ndarray:
    array = next(arrays)
    if kind == MASTERS and not np.isfinite(array).all():
        raise FloatingPointError(name)
    return array


def read_moments(optimizer: AdamW, group: Group, found: Checkpoint | None) -> None:
    """Give every rank its part of the moments that rank 0 reads from `found`, a tensor at a time. All ranks of `group`
    call it. Raises UserError."""
    backend = optimizer.backend
    moments = found.optimizer() if found else {}
    for what in MOMENTS:
        if found:
            check_named(optimizer.having(what), moments, found.path, f"{what}.", partial(optimizer.shape_of, what))
        for p in optimizer.having(what):
            if found:
                tensor = backend.asarray(moments[f"{what}.{p.name}"], backend.master_dtype)
            else:
                tensor = backend.zeros(optimizer.shape_of(what, p), backend.master_dtype)
            group.broadcast_(tensor)
            group.join()
            optimizer.take(what, p, tensor)
