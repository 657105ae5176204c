"""A mixture of experts: Mixtral's model, and NanoEuler with experts."""

from models.moe.config import PRESETS, Config
from models.moe.model import MoE
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "moe", "MoE", MoE, Config, PRESETS, "Llama with a mixture of experts in each layer, Mixtral's shape",
    hf="models.moe.hf", architectures=("MixtralForCausalLM",),
)  # fmt: skip
__all__ = ["PRESETS", "SPEC", "Config", "MoE"]
