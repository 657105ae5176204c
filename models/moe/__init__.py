"""A mixture of experts: Mixtral's model, and NanoEuler with experts."""

from tinyforge.models.moe.config import PRESETS, Config
from tinyforge.models.moe.hf import ARCHITECTURES
from tinyforge.models.moe.model import MoE
from tinyforge.registry import SMALL, ModelSpec, gpt3_rate

SPEC = ModelSpec(
    "moe",
    "MoE",
    MoE,
    Config,
    PRESETS,
    "Llama with a mixture of experts in each layer, Mixtral's shape",
    hf=f"{__name__}.hf",
    pretraining={
        "small": SMALL,
        "base": gpt3_rate(6e-4, "125 million"),  # the parameters that a token uses
        "Mixtral-8x7B": gpt3_rate(1e-4, "13 billion"),
    },
    documents=True,
    blocks=True,
    architectures={name: len(experts.base.known) + len(experts.fields) for name, experts in ARCHITECTURES.items()},
    source='Jiang et al., "Mixtral of Experts" (2024)',
    backward="The choice of experts has no gradient; the weights of the chosen ones have a softmax's. Rows sorted by "
    "expert go through grouped products. The router's two losses send one gradient to all layers. A shared expert's gate gets the "
    "inner product of the expert's output and its gradient. The score of an attention sink gets minus its probability "
    "times the inner product of the output and its gradient.",
)
__all__ = ["PRESETS", "SPEC", "Config", "MoE"]
