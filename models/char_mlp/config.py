"""The sizes of a CharMLP."""

from __future__ import annotations

from dataclasses import dataclass

from tinyforge.config import MOST_REPEATED, ModelConfig
from tinyforge.errors import UserError


@dataclass(frozen=True)
class Config(ModelConfig):
    """window: tokens of context. dim: size of an embedding. hidden: width of the one hidden layer."""

    window: int = 8
    dim: int = 16
    hidden: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("window", "dim", "hidden")
        if self.window > MOST_REPEATED:
            raise UserError(f"config: window is {self.window:,}, expected at most {MOST_REPEATED:,}")


PRESETS = {"char": Config(), "wide": Config(window=16, dim=24, hidden=512)}
