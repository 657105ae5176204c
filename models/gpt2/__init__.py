"""GPT-2: LayerNorm, learned positions, GELU, a tied head; also nanoGPT's character model."""

from models.gpt2.config import PRESETS, Config
from models.gpt2.model import GPT2
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "gpt2", "GPT-2", GPT2, Config, PRESETS, "LayerNorm, learned positions, GELU, tied head",
    hf="models.gpt2.hf", architectures=("GPT2LMHeadModel",),
)  # fmt: skip
__all__ = ["GPT2", "PRESETS", "SPEC", "Config"]
