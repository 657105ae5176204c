"""Rounding a model to four bits by the inputs that its matrices get from a text.

    round_to_text(model, tokenizer.encode(text))          then save_pretrained(..., "model.gguf", dtype="q4_0")

A pass over the text sums the second moments of each matrix's inputs, and `round_with_feedback` rounds the matrix by
them. As many matrices go together as have moments in MEMORY; the next pass sees those before it rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.ops import GELULinear, Linear, MixtureOfExperts, SwiGLULinear
from tinyforge.ops.gelu import gelu_fwd
from tinyforge.ops.swiglu import swiglu_fwd
from tinyforge.quantised_groups import GROUP, round_with_feedback

MEMORY = 1 << 29
"""Bytes of second moments at a time, at least those of one matrix."""
TOKENS, WINDOW = 8192, 512
"""Of the text, from its beginning: tokens that are read at most, and in a window."""


def round_to_text(model: Any, ids: Sequence[int]) -> int:
    """Round the linear maps inside a model of next tokens, on NumPy in fp32, in place; returns the tokens read.

    Output heads, routers, other maps to one number, experts and rows that are not whole groups stay. Deterministic for
    a number of threads. Raises UserError for less than a window of the text, or less than the context if it is shorter.
    """
    window = min(WINDOW, model.config.context)
    if len(ids) < window:
        raise UserError(f"--calibrate: the text has {len(ids)} tokens, expected at least {window}; give more text")
    windows = np.asarray(ids[: min(len(ids), TOKENS) // window * window]).reshape(-1, 1, window)
    left = _maps(model)
    while left:
        moments: dict[Any, Array] = {}
        while left and (not moments or sum(m.nbytes for m in moments.values()) + 4 * _inputs(left[0]) ** 2 <= MEMORY):
            op = left.pop(0)
            moments[op] = np.zeros((_inputs(op), _inputs(op)), np.float32)
        _sum_moments(model, windows, moments)
        for op, found in moments.items():
            value = op.weight.value
            value[...] = round_with_feedback(value, found)
        model.buffer.publish()
    return int(windows.size)


def _maps(model: Any) -> list[Any]:
    routers = {op.gate for op in model.ops() if isinstance(op, MixtureOfExperts)}
    found = {op.weight: op for op in model.ops() if isinstance(op, (Linear, SwiGLULinear, GELULinear))}
    return [op for p, op in found.items() if op not in routers and p.shape[0] > 1 and not _inputs(op) % GROUP]


def _inputs(op: Any) -> int:
    return int(op.weight.shape[-1])


def _sum_moments(model: Any, windows: np.ndarray, moments: dict[Any, Array]) -> None:
    """Add x^T x of every op's inputs, (I, I), over the text. Tokens of a large norm count by it."""

    def watched(op: Any, name: str) -> Any:
        method = getattr(op, name)

        def watch(x: Array, *rest: Any, **options: Any) -> Any:
            rows = _multiplied(op, x, options).reshape(-1, _inputs(op))
            moments[op] += rows.T @ rows
            return method(x, *rest, **options)

        return watch

    # RoPE in one kernel with the map before it calls that map's `keep` alone; so does `forward`.
    names = {op: "keep" if isinstance(op, Linear) else "forward" for op in moments}
    for op, name in names.items():
        vars(op)[name] = watched(op, name)
    try:
        for ids in windows:
            model.hidden(ids)
    finally:
        for op, name in names.items():
            del vars(op)[name]


def _multiplied(op: Any, x: Array, options: dict[str, Any]) -> Array:
    """What the op multiplies by its matrix when it is given x."""
    if isinstance(op, SwiGLULinear):
        hidden = options.get("hidden")
        return swiglu_fwd(x) if hidden is None else hidden
    if isinstance(op, GELULinear):
        return gelu_fwd(x, op.input_bias.value if op.input_bias else None, op.approximate)
    return x
