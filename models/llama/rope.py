"""Rotary positions in config.json: what the `RopeScaling`s are called there, for reading and for writing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tinyforge.config import fits
from tinyforge.errors import UserError
from tinyforge.layout import Fields, Given, read_fields, setting, write_fields
from tinyforge.models.llama.config import Config

SLIDING, FULL = "sliding_attention", "full_attention"
"""The kinds of layers that may have rotary positions of their own."""
SCALINGS: dict[str, Fields] = {
    "linear": {},
    "llama3": {"rope_low_freq": ("low_freq_factor", float), "rope_high_freq": ("high_freq_factor", float)},
    "yarn": {
        "rope_low_freq": ("beta_slow", float, 1.0),
        "rope_high_freq": ("beta_fast", float, 32.0),
        "rope_truncate": ("truncate", bool, True),
    },
    "dynamic": {},
    "longrope": {},
}
"""The fields that each has besides the factor and the original context."""
FACTORS = {"rope_short": "short_factor", "rope_long": "long_factor"}
"""LongRoPE's, one for each pair."""


def read_rope(given: Mapping[str, Any], context: int, head_dim: int) -> dict[str, Any]:
    """Our rope_ fields: from rope_parameters, or, as older files have it, rope_theta and rope_scaling."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: rope_scaling is {rope!r}, expected an object")
    if isinstance(rope.get(FULL), dict):  # one for each kind of layer
        rope = rope[FULL]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *SCALINGS):
        raise UserError(f"config.json: rope_type is {kind!r}; supported: 'default', {', '.join(map(repr, SCALINGS))}")
    both = Given((rope, given))
    found: dict[str, Any] = {"rope_theta": setting(both, "rope_theta", float, 10000.0)}
    rotary = int(head_dim * setting(both, "partial_rotary_factor", float, 1.0))
    if rotary != head_dim:
        found["rotary_dim"] = rotary
    if kind == "default":
        return found
    original = setting(both, "original_max_position_embeddings", int, context)
    if kind == "dynamic":
        original = context  # transformers reads max_position_embeddings alone
    factor = setting(rope, "factor", float, context / max(original, 1) if kind in ("yarn", "longrope") else None)
    found |= {"rope_scaling": kind, "rope_factor": factor, **read_fields(rope, SCALINGS[kind])}
    if kind != "linear":
        found["original_context"] = original
    if kind in ("yarn", "longrope"):
        found["rope_attention"] = setting(rope, "attention_factor", float, _attention_factor(rope, factor))
    if kind == "longrope":
        found |= {ours: _factors(rope, theirs) for ours, theirs in FACTORS.items()}
    return found


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Of YaRN as DeepSeek writes it; 0 where that is absent, for the default."""
    over, under = (setting(rope, name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    growth = 0.1 * math.log(max(factor, 1.0))
    return (1 + over * growth) / (1 + under * growth) if over and under else 0.0


def _factors(rope: Mapping[str, Any], name: str) -> tuple[float, ...]:
    given: Any = rope.get(name)
    if not fits(given, ()):
        raise UserError(f"config.json: {name} is {given!r:.80}, expected a list of numbers")
    return tuple(map(float, given))


def written_rope(config: Config) -> dict[str, Any] | None:
    """rope_scaling."""
    kind = config.rope_scaling
    if kind == "none":
        return None
    rope = {"rope_type": kind, "factor": config.rope_factor, **write_fields(config, SCALINGS[kind])}
    if kind == "longrope":
        rope |= {theirs: list(getattr(config, ours)) for ours, theirs in FACTORS.items()}
    if config.rope_attention:
        rope["attention_factor"] = config.rope_attention
    if kind not in ("linear", "dynamic"):
        rope["original_max_position_embeddings"] = config.original_context
    return rope


def rope_parameters(config: Config) -> dict[str, Any]:
    """The same as newer files have it."""
    return {**(written_rope(config) or {"rope_type": "default"}), "rope_theta": config.rope_theta}
