"""Greedy replies: to show, and their exact match on the built-in world's questions, which have one right answer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tinyforge.data.alpaca import Record
from tinyforge.data.preferences import Pair
from tinyforge.data.talk import REPLIES, talk
from tinyforge.data.world import KINDS, Instruction, instructions, is_correct
from tinyforge.formats import Loaded
from tinyforge.infer import make_decoder
from tinyforge.train.tuning import answer

LONGEST = 80  # tokens of the longest reply, with room for a wrong one


def exact_match(loaded: Loaded, count: int, seed: int) -> dict[str, float]:
    """The share of greedy replies that are right, on `count` held-out instructions, by kind and overall."""
    right = _right(loaded, instructions("val", count, seed))
    scores = {kind: float(np.mean(right[kind])) for kind in KINDS}
    return {**scores, "all": float(np.mean([r for results in right.values() for r in results]))}


def talk_match(loaded: Loaded, count: int, seed: int) -> dict[str, float]:
    """The same on `count` held-out lines of small talk: by kind, those declined included, and the world's questions in
    one line as "question"."""
    right = _right(loaded, talk("val", count, seed))
    named = {kind: right.pop(kind) for kind in REPLIES if kind in right}
    named["question"] = [r for results in right.values() for r in results]
    return {kind: float(np.mean(results)) for kind, results in named.items() if results}


def answered(loaded: Loaded, example: Record | Pair) -> str:
    """The last question of an example and the greedy reply, to be shown."""
    asked = f"{example.instruction} {example.input}".strip().replace("\n", " ")
    reply = answer(loaded, example.instruction, example.input, history=example.history, system=example.system)
    return f"  {asked} -> {reply}".replace("\n", "\n  ")


def _right(loaded: Loaded, examples: Iterable[Instruction]) -> dict[str, list[bool]]:
    """Whether the greedy reply to each example is right, by kind."""
    right: dict[str, list[bool]] = {}
    decoder = make_decoder(loaded.model, spare_memory=True)
    for example in examples:
        reply = answer(loaded, example.instruction, example.input, LONGEST, decoder)
        right.setdefault(example.kind, []).append(is_correct(example, reply))
    return right
