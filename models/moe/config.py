"""The sizes of a mixture of experts: NanoEuler's presets with experts, and Mixtral's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyforge.errors import UserError
from tinyforge.models.llama.config import Config as LlamaConfig
from tinyforge.models.nanoeuler.config import MultiToken

OF_THE_MLP = ("norms", "parallel", "residual_scale", "activation", "gated", "mlp_bias")
"""Llama's options that a layer of experts lacks."""


@dataclass(frozen=True)
class Config(MultiToken, LlamaConfig):
    """The shape of a MoE: that of a Llama, and

    experts: SwiGLU layers of width `hidden` in each block; every token passes through `active` of them. normalised: the
    weights of the active ones sum to 1, unlike in OLMoE. shared: width of an expert that every token passes through
    next to them, times the logistic function of a number that the token chooses, as in Qwen2-MoE; 0 for none. clamp: if
    not 0, the experts and the router have biases, and a SwiGLU clamped at this number, as in gpt-oss. mtp_heads,
    mtp_weights: output heads, as in NanoEuler; published models have one. balance, router_z: weights of the router's
    two losses (see tinyforge/ops/router_losses.py); if both are 0 they are not computed.
    """

    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    layers: int = 4
    context: int = 128
    hidden: int = 172
    tied: bool = False
    experts: int = 8
    active: int = 2
    mtp_heads: int = 4
    mtp_weights: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    balance: float = 0.01
    router_z: float = 0.001
    normalised: bool = True
    shared: int = 0
    clamp: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("experts", "active")
        if self.active > self.experts:
            raise UserError(f"config: active is {self.active}, expected at most the {self.experts} experts")
        if ignored := [name for name in self.options() if name in OF_THE_MLP]:
            raise UserError(f"config: experts have no {', '.join(ignored)}; leave it out")
        if self.tied and self.mtp_heads > 1:
            raise UserError(f"config: a tied head is one, mtp_heads is {self.mtp_heads}; use tied=false or mtp_heads=1")
        if min(self.shared, self.clamp) < 0:
            raise UserError(f"config: shared {self.shared}, clamp {self.clamp}; expected 0 (none) or more")
        if min(self.balance, self.router_z) < 0:
            raise UserError(f"config: balance {self.balance}, router_z {self.router_z}; expected 0 or more")

    @property
    def term_weights(self) -> dict[str, float]:
        weights = {"balance": self.balance, "router_z": self.router_z}
        return weights if any(weights.values()) else {}


# One output head, and no loss for the size of the router's logits.
MIXTRAL: dict[str, Any] = {"mtp_heads": 1, "mtp_weights": (1.0,), "router_z": 0.0}
MIXTRAL |= {"rope_theta": 1000000.0, "balance": 0.02}
PRESETS = {
    # NanoEuler's sizes: two experts of half the width multiply as much per token as its one layer.
    "small": Config(),
    "base": Config(dim=768, heads=12, kv_heads=4, layers=16, context=512, vocab=4096, hidden=1024),
    "Mixtral-8x7B": Config(
        dim=4096, heads=32, kv_heads=8, layers=32, context=32768, vocab=32000, hidden=14336, **MIXTRAL
    ),
}
