"""Llama and its kin, from Mistral and Qwen to Gemma, Phi-3, OLMo and Granite: see families.py."""

from tinyforge.models.llama.config import PRESETS, Config
from tinyforge.models.llama.families import FAMILIES
from tinyforge.models.llama.model import Llama
from tinyforge.registry import Defaults, ModelSpec, gpt3_rate

SPEC = ModelSpec(
    "llama",
    "Llama",
    Llama,
    Config,
    PRESETS,
    "RMSNorm, rotary positions, grouped queries, SwiGLU",
    hf=f"{__name__}.hf",
    pretraining={
        "stories260K": Defaults({"lr": 1e-3}, "as llama2.c trained it"),
        "stories15M": (llama2c := Defaults({"lr": 5e-4}, "as llama2.c's train.py")),
        "stories42M": llama2c,
        "stories110M": llama2c,
        "SmolLM2-135M": gpt3_rate(6e-4, "125 million"),
        "Qwen2.5-0.5B": gpt3_rate(3e-4, "350 million"),
        "TinyLlama-1.1B": Defaults({"lr": 4e-4, "warmup": 0.05}, "as TinyLlama was trained"),
        "Llama-3.1-8B": Defaults({"lr": 3e-4}, "as Llama 3's 8 B was trained"),
    },
    documents=True,
    blocks=True,
    fp8=True,
    architectures={family.architecture: len(family.known) for family in FAMILIES},
    source='Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023)',
    backward="Rotary pairs are rotated back by the same angle. The gradient of a key or value head is the sum over the "
    "query heads that share it. The norms of queries and keys work in place on parts of the packed array. A norm after "
    "a branch passes the stream's gradient through its Jacobian before the branch gets it, and one of their sum before "
    "both get it; softcaps multiply by 1 - tanh^2. Parallel branches get the same gradient, and what they return is "
    "added to it; a squared ReLU has the slope 2 max(x, 0).",
)
__all__ = ["PRESETS", "SPEC", "Config", "Llama"]
