"""Mamba's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError


@dataclass(frozen=True)
class Config(ModelConfig):
    """The shape of a Mamba.

    dim: width C of the residual stream. layers: blocks. expand: channels E of the scan, as a multiple of dim. state:
    size N of the state of each channel. taps: positions K that the convolution covers. rank: width R that the step
    sizes are projected from; 0 for a sixteenth of dim, rounded up. context: longest sequence; the model itself has no
    limit.
    """

    dim: int = 64
    layers: int = 6
    expand: int = 2
    state: int = 16
    taps: int = 4
    rank: int = 0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("dim", "layers", "expand", "state", "taps")
        if self.rank < 0:
            raise UserError(f"config: rank is {self.rank}, expected at least 1, or 0 for a sixteenth of dim")
        if self.state > 64:
            raise UserError(f"config: state is {self.state}, expected at most 64")

    @property
    def channels(self) -> int:
        return self.expand * self.dim

    @property
    def step_rank(self) -> int:
        return self.rank or -(-self.dim // 16)


PRESETS = {
    "char": Config(dim=76, layers=5, state=8, vocab=65),
    "130m": Config(dim=768, layers=24, context=2048, vocab=50280),
    "370m": Config(dim=1024, layers=48, context=2048, vocab=50280),
}
