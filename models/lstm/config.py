"""The sizes of an LSTM."""

from __future__ import annotations

from dataclasses import dataclass

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models.checks import check_rates


@dataclass(frozen=True)
class Config(ModelConfig):
    """dim: size of an embedding, and of each layer's h and c. layers. dropout: rate in training, on the input of
    each layer and the output of the last, never along time. reset: id of a token after which a new text begins, with a
    zero state; -1 for none. context: longest sequence; the model itself has no limit."""

    dim: int = 110
    layers: int = 2
    dropout: float = 0.0
    reset: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("dim", "layers")
        check_rates(self, "dropout")
        if not -1 <= self.reset < self.vocab:
            raise UserError(f"config: reset is {self.reset}, expected an id below vocab {self.vocab}, or -1 for none")


PRESETS = {"char": Config(vocab=65), "wide": Config(dim=512, layers=2, dropout=0.2, vocab=65)}
