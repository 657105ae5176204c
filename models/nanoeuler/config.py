"""NanoEuler's sizes: a frozen dataclass and its presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models.checks import DividedHeads, check_rates
from tinyforge.models.llama.config import Config as LlamaConfig


class MultiToken(ModelConfig):
    """Configs with several output heads. Fields: mtp_heads, the number of output heads; head k predicts token t + 1 +
    k. mtp_weights, the heads' weights in the loss."""

    mtp_heads: int
    mtp_weights: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("mtp_heads")
        if len(self.mtp_weights) != self.mtp_heads:
            raise UserError(
                f"config: mtp_weights has {len(self.mtp_weights)} numbers for {self.mtp_heads} heads; give one a head"
            )
        if min(self.mtp_weights) < 0 or self.mtp_weights[0] <= 0:
            raise UserError(f"config: mtp_weights {self.mtp_weights} expects no negative number and a positive first")

    @property
    def prediction_heads(self) -> int:
        return self.mtp_heads

    @property
    def head_weights(self) -> tuple[float, ...]:
        return self.mtp_weights

    def override(self, values: Mapping[str, Any]) -> Self:
        """As for every config; if only mtp_heads is given, the weights are powers of 1/2."""
        found = dict(values)
        if isinstance(heads := found.get("mtp_heads"), int) and "mtp_weights" not in found:
            found["mtp_weights"] = [0.5**k for k in range(heads)]
        if isinstance(weights := found.get("mtp_weights"), tuple | list) and all(type(w) is int for w in weights):
            found["mtp_weights"] = [float(w) for w in weights]
        return super().override(found)


@dataclass(frozen=True)
class Config(DividedHeads, MultiToken):
    """The shape of a NanoEuler.

    dim: width C of the residual stream. heads, kv_heads: query and key/value heads, each of size dim / heads.
    layers: blocks. mtp_heads: output heads, head k predicting token t + 1 + k. hidden: width of SwiGLU.
    mtp_weights: the heads' weights in the loss, normalised to sum to 1; powers of 1/2 unless given. dropout: rate in
    training, on the outputs of attention and SwiGLU, before they are added to the stream.

    The other fields are options of the trunk, see Llama's config; their defaults are NanoEuler as published.
    """

    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    layers: int = 4
    mtp_heads: int = 4
    hidden: int = 344
    mtp_weights: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    gated: bool = True
    activation: str = "silu"
    window: int = 0
    full_every: int = 0
    rotary_dim: int = 0
    attention_scale: float = 0.0
    logit_softcap: float = 0.0
    qk_scale: str = "none"
    zero_outputs: bool = False
    mix_first: bool = False
    embedding_norm: bool = False
    smear: int = 0
    value_every: int = 0
    value_gate: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self, "dropout")
        self.require_positive("dim", "heads", "kv_heads", "layers", "hidden")
        self.check_heads()
        if self.head_dim % 2:
            raise UserError(f"config: head size {self.head_dim} (dim / heads) is odd; RoPE turns pairs, make it even")
        if self.heads % self.kv_heads:
            raise UserError(f"config: heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        _ = self.trunk  # which checks the options

    @property
    def trunk(self) -> LlamaConfig:
        """The model without its heads: a Llama."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("mtp_")}
        return LlamaConfig(tied=False, **own)


FAST = Config(
    dim=768,
    heads=12,
    kv_heads=4,
    layers=12,
    context=1024,
    vocab=8192,
    hidden=3072,
    mtp_heads=1,
    mtp_weights=(1.0,),
    qk_scale="learned",
    mix_first=True,
    embedding_norm=True,
    smear=12,
    value_every=2,
    value_gate=32,
)
"""What learns most in few minutes, by a screen of nineteen choices: docs/results/fast.md has the figures.

Fewer and wider layers than `base`, one prediction head, a stream that is mixed with the embedding before each layer, a
norm of the embedding, smear, and norms of queries and keys with a learned scale. 116,412,853 parameters, and 12,582,912
in value embeddings, which no product reads.
"""
PRESETS = {
    "small": Config(),
    "base": Config(dim=768, heads=12, kv_heads=4, layers=16, context=512, vocab=4096, hidden=2048),
    "fast": FAST,
    "large": Config(dim=1024, heads=16, kv_heads=4, layers=20, context=1024, vocab=8192, hidden=2816),
    "xl": Config(dim=1536, heads=24, kv_heads=8, layers=28, context=1024, vocab=16384, hidden=4096),
    "2b": Config(dim=2048, heads=16, kv_heads=4, layers=40, context=1024, vocab=16384, hidden=5632),
}
