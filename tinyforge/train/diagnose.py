"""Find the op that made the first number that is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tinyforge.op import Op, Stash
from tinyforge.ops.fp8 import Scaled
from tinyforge.rng import Stream
from tinyforge.train.batches import Where
from tinyforge.train.data_parallel import Trainable, Worker, forward
from tinyforge.train.objectives import Batch, Objective


class _NotFinite(Exception):
    pass


def sources(rank: Worker, number: Where, counts: np.ndarray, noise: Stream) -> Any:
    """On rank 0 the list of each rank's `first_nonfinite` on its own parts of a step's batches."""
    assert rank.batches and rank.objective
    found = ""
    for index, whole in enumerate(rank.batches(number)):
        for part in rank.parts:
            drawn = noise.fork(f"{index}/{part}")
            found = found or first_nonfinite(rank.model, rank.part(whole, part), rank.objective, counts, drawn)
    return rank.group.gather_objects(found)


def first_nonfinite(
    model: Trainable, batch: Batch, objective: Objective, counts: np.ndarray, noise: Stream | None = None
) -> str:
    """Rerun the batch and check every op's results; returns e.g. "forward of blocks.2.down".

    Empty if all of them are finite: then only the sum of the gradients is not.
    """
    backend = model.ops()[0].backend
    if model.buffer.grads is None:  # sharded over the ranks; here whole gradients are needed
        model.buffer.place_grads(backend.zeros((model.buffer.size,), backend.master_dtype))
    model.buffer.grads[...] = 0  # those of the batch that failed would be blamed on the first op
    for op in model.ops():
        for p in op.params():
            if not np.isfinite(backend.to_numpy(p.value)).all():
                return f"weight {p.name}"

    def watched(op: Op, method: str) -> Callable[..., Any]:
        function = getattr(op, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            several = isinstance(result, tuple) and not isinstance(result, Scaled)
            given = (y.x if isinstance(y, Scaled) else y for y in (result if several else (result,)))
            for array in (*given, *(p.grad for p in op.params())):
                if array is not None and not np.isfinite(backend.to_numpy(array)).all():
                    raise _NotFinite(f"{method} of {op.name}")
            return result

        return run

    try:
        for op in model.ops():
            # Instance attributes shadow the class's methods; they are removed again below.
            vars(op).update(forward=watched(op, "forward"), backward=watched(op, "backward"))
        stash = Stash(noise)
        nll = forward(model, backend, batch, stash)
        model.backward(objective.weigh(nll, batch, counts, backend)[1], stash)
    except _NotFinite as found:
        return str(found)
    finally:
        for op in model.ops():
            vars(op).pop("forward", None)
            vars(op).pop("backward", None)
    return ""
