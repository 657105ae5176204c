"""A character-level MLP: the smallest useful model, and the one to copy for a model of your own."""

from tinyforge.models.char_mlp.config import PRESETS, Config
from tinyforge.models.char_mlp.model import CharMLP
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "char_mlp",
    "CharMLP",
    CharMLP,
    Config,
    PRESETS,
    "An MLP on the last few characters",
    source='Bengio et al., "A Neural Probabilistic Language Model" (2003)',
    backward="A token is in several windows: its embedding's gradient is the sum over them.",
)
__all__ = ["PRESETS", "SPEC", "CharMLP", "Config"]
