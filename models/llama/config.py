"""Llama's sizes, and those of its kin: Mistral, Qwen2, Qwen3, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models.checks import check_rates

ROPE_SCALINGS = ("none", "linear", "llama3")


@dataclass(frozen=True)
class Config(ModelConfig):
    """The shape of a Llama.

    dim: width C of the residual stream. heads, kv_heads: query and key/value heads, each of size head_dim; 0 stands for
    dim / heads. layers: blocks. hidden: width of SwiGLU. tied: the output head is the embedding. qkv_bias: Qwen2's
    biases on queries, keys and values. qk_norm: Qwen3's norms on each query and key head. window: positions that a
    token attends to, including itself, as in Mistral; 0 for all.

    rope_scaling stretches the rotary angles to a longer context: "none"; "linear" divides all frequencies by
    rope_factor (Chen et al., 2023); "llama3" divides those with a wavelength above original_context / rope_low_freq,
    leaves those below original_context / rope_high_freq, and blends between (Llama 3.1).

    dropout: rate in training, on the outputs of a block's two halves, before they are added to the stream.
    """

    dim: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 0
    layers: int = 5
    context: int = 512
    vocab: int = 512
    hidden: int = 172
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: str = "none"
    rope_factor: float = 1.0
    rope_low_freq: float = 1.0
    rope_high_freq: float = 4.0
    original_context: int = 8192
    dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("dim", "heads", "kv_heads", "layers", "hidden", "original_context")
        if self.head_dim == 0:
            if self.dim % self.heads:
                raise UserError(f"config: dim {self.dim} is not divisible by heads {self.heads}; give head_dim")
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        self.require_positive("head_dim")
        if self.head_dim % 2:
            raise UserError(f"config: head_dim {self.head_dim} is odd; RoPE turns pairs, make it even")
        if self.heads % self.kv_heads:
            raise UserError(f"config: heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        check_rates(self, "dropout")
        if self.window < 0:
            raise UserError(f"config: window is {self.window}, wants 0 (none) or more")
        if self.rope_scaling not in ROPE_SCALINGS:
            raise UserError(f"config: rope_scaling is {self.rope_scaling!r}; supported: {', '.join(ROPE_SCALINGS)}")
        if not self.rope_factor >= 1 or not 0 < self.rope_low_freq < self.rope_high_freq:
            raise UserError(
                f"config: rope_factor {self.rope_factor}, rope_low_freq {self.rope_low_freq}, rope_high_freq "
                f"{self.rope_high_freq}; wants a factor of 1 or more, and low below high"
            )

    def override(self, values: Mapping[str, Any]) -> Self:
        """As for every config; a head_dim of dim / heads is updated with the two."""
        follows = self.head_dim * self.heads == self.dim
        return super().override({"head_dim": 0, **values} if follows else values)


PRESETS = {
    # llama2.c's models, trained on TinyStories.
    "stories260K": Config(),
    "stories15M": Config(dim=288, heads=6, kv_heads=6, layers=6, context=256, vocab=32000, hidden=768),
    "stories42M": Config(dim=512, heads=8, kv_heads=8, layers=8, context=1024, vocab=32000, hidden=1376),
    "stories110M": Config(dim=768, heads=12, kv_heads=12, layers=12, context=1024, vocab=32000, hidden=2048),
    "SmolLM2-135M": Config(
        dim=576, heads=9, kv_heads=3, layers=30, context=8192, vocab=49152, hidden=1536, rope_theta=100000.0
    ),
    "TinyLlama-1.1B": Config(
        dim=2048, heads=32, kv_heads=4, layers=22, context=2048, vocab=32000, hidden=5632, tied=False
    ),
    "Qwen2.5-0.5B": Config(
        dim=896,
        heads=14,
        kv_heads=2,
        layers=24,
        context=32768,
        vocab=151936,
        hidden=4864,
        qkv_bias=True,
        rope_theta=1000000.0,
        norm_eps=1e-6,
    ),
}
