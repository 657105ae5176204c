"""GPT-2's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tinyforge.config import ModelConfig
from tinyforge.models.checks import DividedHeads, check_rates


@dataclass(frozen=True)
class Config(DividedHeads, ModelConfig):
    """The shape of a GPT-2.

    dim: width C of the residual stream. heads: attention heads, each of size dim / heads. layers: blocks. dropout: rate
    in training, after the embedding, on the attention probabilities, and on what attention and the MLP add to the
    stream. bias: whether linear maps and norms have one.
    """

    dim: int = 768
    heads: int = 12
    layers: int = 12
    context: int = 1024
    vocab: int = 50257
    dropout: float = 0.0
    bias: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("dim", "heads", "layers")
        self.check_heads()
        check_rates(self, "dropout")


PRESETS = {
    # nanoGPT's config/train_shakespeare_char.py; 65 characters are in tiny Shakespeare.
    "char": Config(dim=384, heads=6, layers=6, context=256, vocab=65, dropout=0.2, bias=False),
    "124m": Config(),
    "355m": Config(dim=1024, heads=16, layers=24),
}
