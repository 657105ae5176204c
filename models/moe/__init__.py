"""A mixture of experts: Mixtral's model, and NanoEuler with experts."""

from tinyforge.models.moe.config import PRESETS, Config
from tinyforge.models.moe.model import MoE
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "moe",
    "MoE",
    MoE,
    Config,
    PRESETS,
    "Llama with a mixture of experts in each layer, Mixtral's shape",
    hf=f"{__name__}.hf",
    documents=True,
    blocks=True,
    architectures=("MixtralForCausalLM",),
    source='Jiang et al., "Mixtral of Experts" (2024)',
    backward="The choice of experts has no gradient; the weights of the chosen ones have a softmax's. Rows sorted by "
    "expert go through grouped products. The router's two losses send one gradient to all layers.",
)
__all__ = ["PRESETS", "SPEC", "Config", "MoE"]
