"""Groups of parameters that can learn at rates of their own, and the rules that derive the rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tinyforge.errors import UserError
from tinyforge.op import Param

GROUPS = ("matrices", "embeddings", "value_embeddings", "heads", "scalars")
RULES = ("plain", "width-batch")
WIDTH, TOKENS = 768, 1 << 19
"""Width of the residual stream, and tokens of a step, at which the rule "width-batch" changes nothing."""


def group_of(param: Param) -> str:
    """The group of a parameter: "scalars" are what is not decayed (gains, biases); embeddings, positions and segments,
    value embeddings, and output heads are known by their names; "matrices" are all others."""
    if not param.decay:
        return "scalars"
    name = param.name
    if "value_embedding" in name:
        return "value_embeddings"
    if any(word in name for word in ("embedding", "positions", "segments")):
        return "embeddings"
    return "heads" if "head" in name and not param.matrices else "matrices"


def read_factors(items: Sequence[str]) -> dict[str, float]:
    """The factors of --group-rates, GROUP=FACTOR each. Raises UserError."""
    found: dict[str, float] = {}
    for item in items:
        name, _, text = item.partition("=")
        try:
            factor = float(text)
        except ValueError:
            factor = math.nan
        if name in found or name not in GROUPS or not 0 < factor < math.inf:
            raise UserError(
                f"--group-rates: {item!r} expects GROUP=FACTOR with a group of {', '.join(GROUPS)}, each once, and a "
                "factor above 0, e.g. --group-rates embeddings=10"
            )
        found[name] = factor
    return found


def group_rates(factors: Sequence[str], rule: str, width: int) -> tuple[tuple[str, float], ...]:
    """`AdamWConfig.group_rates` from --group-rates and --rate-rule, for a model of this width: sqrt(768 / width) times
    the factor for embeddings, value embeddings and heads by the rule "width-batch".

    Source: Karpathy, nanochat (2025), for the root of the width.
    """
    found = read_factors(factors)
    if rule == "width-batch":
        for name in ("embeddings", "value_embeddings", "heads"):
            found[name] = found.get(name, 1.0) * math.sqrt(WIDTH / width)
    return tuple((name, found[name]) for name in GROUPS if found.get(name, 1.0) != 1.0)


def check_groups(factors: Sequence[str], params: Sequence[Param]) -> None:
    """Raises UserError for a factor of --group-rates whose group none of these parameters is in."""
    there = {group_of(p) for p in params}
    for name in read_factors(factors):
        if name not in there:
            has = ", ".join(name for name in GROUPS if name in there)
            raise UserError(f"--group-rates: this model has no {name}, only {has}; leave {name} out")


def batch_factor(rule: str, tokens: int) -> float:
    """The factor of all rates in a step of so many tokens: sqrt(tokens / 2^19) by the rule "width-batch", else 1.

    Source: Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (2022), for the root.
    """
    return math.sqrt(tokens / TOKENS) if rule == "width-batch" else 1.0


def describe_rates(rates: Sequence[tuple[str, float]], lr: float, rule: str, params: Sequence[Param]) -> str:
    """The line that a run begins with: the peak rate of each group that the model has, and how it is derived."""
    factor_of, there = dict(rates), {group_of(p) for p in params}
    each = [f"{name} {lr * factor_of.get(name, 1.0):g}" for name in GROUPS if name in there]
    how = "--lr x the factor of --group-rates"
    if rule == "width-batch":
        how += f", x sqrt({WIDTH} / width) for embeddings and heads, x sqrt(tokens of the step / {TOKENS:,}) for all"
    return f"learning rates: {', '.join(each)} ({how})"
