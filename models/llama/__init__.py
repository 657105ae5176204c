"""Llama and its kin: Mistral's window, Qwen2's biases, Qwen3's norms on queries and keys."""

from models.llama.config import PRESETS, Config
from models.llama.model import Llama
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "llama", "Llama", Llama, Config, PRESETS, "RMSNorm, rotary positions, grouped queries, SwiGLU",
    hf="models.llama.hf",
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
)  # fmt: skip
__all__ = ["PRESETS", "SPEC", "Config", "Llama"]
