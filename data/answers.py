"""Exact match on the questions of the built-in world, which have one right answer each."""

from __future__ import annotations

import numpy as np

from tinyforge.data.world import KINDS, instructions, is_correct
from tinyforge.formats import Loaded
from tinyforge.infer import make_decoder
from tinyforge.train.tuning import answer


def exact_match(loaded: Loaded, count: int, seed: int) -> dict[str, float]:
    """The share of greedy replies that are right, on `count` held-out instructions, by kind and overall."""
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    decoder = make_decoder(loaded.model, spare_memory=True)
    for example in instructions("val", count, seed):
        reply = answer(loaded, example.instruction, example.input, decoder=decoder)
        right[example.kind].append(is_correct(example, reply))
    scores = {kind: float(np.mean(results)) for kind, results in right.items()}
    return {**scores, "all": float(np.mean([r for results in right.values() for r in results]))}
