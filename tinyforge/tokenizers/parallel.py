"""A parallel map over many items that keeps their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import chain, islice
from typing import Any, TypeVar

from tinyforge.backends.workers import CAN_FORK, Worker, cores
from tinyforge.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

FEW = 4  # items; fewer are faster without processes
ADVICE = "free memory, or run again with one worker (--workers 1)"


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> Iterator[Result]:
    """function(item) for each item, in order, on `workers` processes (default: one per core).

    `function` may keep state between calls, such as a cache: each worker has its own copy, taken after the first item,
    which runs here. A worker has one item at a time, and an item is taken only when a worker is free. Where processes
    cannot be forked the workers are threads. With one worker or a few items none are started.

    Raises what `function` raises, and UserError if a worker dies, and for fewer than one worker.
    """
    if workers is None:
        workers = cores()
    if workers < 1:
        raise UserError(f"workers: got {workers}, expected 1 or more; leave it out for one on each core")
    items = iter(items)
    yield from map(function, islice(items, 1))
    few = list(islice(items, FEW - 1))
    if workers == 1 or len(few) < FEW - 1:
        yield from map(function, chain(few, items))
        return

    pool: list[Any] = []
    busy: deque[Any] = deque()
    try:
        for item in chain(few, items):
            if len(pool) < workers:
                worker = Worker(function if CAN_FORK else deepcopy(function), ADVICE)
                pool.append(worker)
                worker.send(item)
                busy.append(worker)
            else:
                worker = busy.popleft()
                result = worker.receive()
                worker.send(item)
                busy.append(worker)
                yield result
        while busy:
            yield busy.popleft().receive()
    finally:
        for worker in pool:
            worker.close()
