"""Llama and its kin: Mistral's window, Qwen2's biases, Qwen3's norms on queries and keys."""

from tinyforge.models.llama.config import PRESETS, Config
from tinyforge.models.llama.model import Llama
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "llama",
    "Llama",
    Llama,
    Config,
    PRESETS,
    "RMSNorm, rotary positions, grouped queries, SwiGLU",
    hf=f"{__name__}.hf",
    documents=True,
    blocks=True,
    fp8=True,
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    source='Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023); Mistral, Qwen2, Qwen3',
    backward="Rotary pairs are rotated back by the same angle. The gradient of a key or value head is the sum over the "
    "query heads that share it. The norms of queries and keys work in place on parts of the packed array.",
)
__all__ = ["PRESETS", "SPEC", "Config", "Llama"]
