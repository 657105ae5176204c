"""GGUF, the format of llama.cpp and Ollama, read and written: https://github.com/ggml-org/llama.cpp.

`ARCHITECTURES` maps their names of keys and tensors to Hugging Face's, for reading and for writing. Beyond names:

- In the llama architecture rotary pairs are neighbours, (x_2i, x_2i+1), so the rows of q and k are reordered; qwen2 and
  qwen3 keep Hugging Face's halves, (x_i, x_i+D/2).
- GPT-2's matrices are transposed: rows are outputs.
- Llama 3's RoPE scaling is a tensor, rope_freqs, that divides each pair's frequency.
- llama.cpp has no sliding window in these architectures. A model with one is written with the window as its context, up
  to which both agree.
- Norms, biases and GPT-2's positions are always float32. Rows that are not a whole number of blocks become f16, as in
  llama.cpp's own converter. q4_0 keeps the output head in q8_0, where llama.cpp has q6_K.

`tinyforge.formats.gguf_file` is the container, `tinyforge.tokenizers.gguf` the tokenizer.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.formats import gguf_file, rotary
from tinyforge.formats.weights import Weights
from tinyforge.ops import RopeScaling
from tinyforge.tensors import Lazy

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}  # general.file_type, for display
BLOCK = 32  # numbers in a block of q8_0 and q4_0
ROPE_FREQS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp. hf: its name in config.json. sizes: keys of config.json by GGUF's keys, the latter
    without the architecture's prefix. block: the prefix of a layer's tensors in Hugging Face's names. tensors, layer:
    Hugging Face's names by GGUF's, without ".weight" and ".bias". interleaved: rotary pairs are neighbours. transposed:
    GGUF's names of a layer's transposed tensors."""

    hf: str
    sizes: Mapping[str, str]
    block: str
    tensors: Mapping[str, str]
    layer: Mapping[str, str]
    interleaved: bool = False
    transposed: tuple[str, ...] = ()


_LLAMA_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_LLAMA_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2 = Architecture(
    "GPT2LMHeadModel",
    {
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "block_count": "n_layer",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
        "vocab_size": "vocab_size",
    },
    "transformer.h",
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)


def _llama(hf: str, interleaved: bool = False) -> Architecture:
    return Architecture(hf, _LLAMA_SIZES, "model.layers", _LLAMA_TENSORS, _LLAMA_LAYER, interleaved)


ARCHITECTURES = {
    "llama": _llama("LlamaForCausalLM", interleaved=True),
    "qwen2": _llama("Qwen2ForCausalLM"),
    "qwen3": _llama("Qwen3ForCausalLM"),
    "gpt2": _GPT2,
}


def is_file(path: Path) -> bool:
    return path.suffix == ".gguf"


# --- reading ----------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> Weights:
    """The weights in a .gguf file under Hugging Face's names; tensors are not read yet.

    Raises UserError for a damaged file, another architecture or type of tensor, and sizes that contradict each other.
    """
    content = gguf_file.read(path)
    name = content.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(f"{path}: its architecture is {name!r:.80}; supported: {', '.join(ARCHITECTURES)}")
    architecture, stored = ARCHITECTURES[name], dict(content.tensors)
    values = _Values(name, content.metadata)
    try:
        factors = stored.pop(ROPE_FREQS, None)
        config = _config(architecture, values, stored)
        if factors:
            original = values.get("rope.scaling.original_context_length", 8192)
            config["rope_scaling"] = _llama3_scaling(config, original, factors.read())
    except UserError as error:
        raise UserError(f"{path}: {error}") from error

    def lazy(own: str, tensor: gguf_file.Tensor) -> Lazy:
        change = _change(architecture, own, config, back=True)
        return _changed_shape(architecture, own, tensor.shape), _after(tensor.read, change)

    tensors = {_to_hf(architecture, own): lazy(own, tensor) for own, tensor in stored.items()}
    return Weights(path, config, tensors)


class _Values:
    """An architecture's values in the metadata."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.architecture, self.metadata = architecture, metadata

    def get(self, name: str, default: Any = None) -> Any:
        """The number or text of that name. UserError for another type, and for a missing one without a default."""
        key = f"{self.architecture}.{name}"
        value = self.metadata.get(key, default)
        kinds = (str,) if isinstance(default, str) else (int, float)
        if type(value) is float:
            with np.errstate(over="ignore"):
                value = float(str(np.float32(value)))  # 1e-05, not the float32 next to it
        if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
            raise UserError(f"{key} is {value!r:.80}, wanted a {'text' if kinds == (str,) else 'number'}")
        return value


def _config(architecture: Architecture, values: _Values, stored: Mapping[str, gguf_file.Tensor]) -> dict[str, Any]:
    """The content of config.json."""
    defaults: dict[str, Any] = {}
    if "token_embd.weight" in stored:
        defaults["vocab_size"] = stored["token_embd.weight"].shape[0]
    config: dict[str, Any] = {"architectures": [architecture.hf]}
    if architecture is _GPT2:
        # The file says nothing about dropout.
        config |= {"activation_function": "gelu_new", "tie_word_embeddings": True, "resid_pdrop": 0.0}
    else:
        heads, dim = values.get("attention.head_count"), values.get("embedding_length")
        size = values.get("attention.key_length", dim // heads if type(heads) is int and heads > 0 else 0)
        defaults |= {
            "attention.head_count_kv": heads,
            "attention.key_length": size,
            "attention.value_length": size,
            "rope.dimension_count": size,
            "rope.freq_base": 10000.0,
        }
        config |= {"hidden_act": "silu", "tie_word_embeddings": "output.weight" not in stored}
        config["rope_scaling"] = _linear_scaling(values)
    for own, theirs in architecture.sizes.items():
        value = values.get(own, defaults.get(own))
        if config.setdefault(theirs, value) != value:
            raise UserError(
                f"{values.architecture}.{own} is {value}, wanted {config[theirs]} by the other sizes; only "
                "such a model can be read"
            )
    return config


def _linear_scaling(values: _Values) -> dict[str, Any] | None:
    kind, factor = values.get("rope.scaling.type", "linear"), values.get("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind != "linear":
        raise UserError(f"{values.architecture}.rope.scaling.type is {kind!r:.80}; supported: 'none', 'linear'")
    return {"rope_type": "linear", "factor": factor}


def _llama3_scaling(config: Mapping[str, Any], original: float, factors: np.ndarray) -> dict[str, Any]:
    """The scaling with these factors. The file holds only them, so the published models' other settings are tried."""
    for context in (original, 8192):
        found = {
            "rope_type": "llama3",
            "factor": float(str(factors.max())),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": context,
        }
        if factors.ndim == 1 and config["head_dim"] == 2 * len(factors):
            with np.errstate(all="ignore"):
                wanted = _factors({**config, "rope_scaling": found}, len(factors))
            if np.allclose(factors, wanted, rtol=1e-5, atol=0):
                return found
    raise UserError(f"the factors in {ROPE_FREQS} are not Llama 3's; no other RoPE scaling can be read")


def _factors(config: Mapping[str, Any], pairs: int) -> np.ndarray:
    """The factors by which Llama 3's scaling divides the pairs' frequencies."""
    rope, f = config["rope_scaling"], config["rope_theta"] ** (-np.arange(pairs) / pairs)
    scaling = RopeScaling(
        "llama3",
        rope["factor"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    return f / scaling.apply(f)


# --- writing ----------------------------------------------------------------------------------------------------------


def write_file(
    path: Path, weights: Weights, metadata: Mapping[str, Any], dtype: str, others: Callable[[], None] | None = None
) -> None:
    """Write a .gguf file that llama.cpp reads.

    metadata: the tokenizer's, and other keys that are not the architecture's. dtype: one of TYPES. others(): see
    `gguf_file.write`. Tensors stored in another type are named on stderr. UserError for a model that the format cannot
    hold, and where it cannot be written.
    """
    config = dict(weights.config)
    name = _name_of(config["architectures"][0], path)
    architecture = ARCHITECTURES[name]
    tensors = {}
    for theirs, (shape, make) in weights.tensors.items():
        own = _from_hf(architecture, theirs)
        tensors[own] = _changed_shape(architecture, own, shape), _after(make, _change(architecture, own, config))
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        factors = _factors(config, config["head_dim"] // 2)
        tensors[ROPE_FREQS] = factors.shape, lambda: factors
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    types = {own: _type_of(own, shape, dtype, head) for own, (shape, _) in tensors.items()}
    odd = sorted({shape[-1] for own, (shape, _) in tensors.items() if types[own] == "f16" != dtype})
    if odd:
        print(
            f"note: f16, not {dtype}, for rows that are not whole blocks of {BLOCK}: rows of "
            f"{', '.join(map(str, odd))}",
            file=sys.stderr,
        )
    own_keys = {"general.type": "model", "general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2}
    gguf_file.write(path, name, {**own_keys, **_sizes(name, config), **metadata}, tensors, types, others)


def _name_of(hf: str, path: Path) -> str:
    # Mistral is a Llama with a window.
    hf = "LlamaForCausalLM" if hf == "MistralForCausalLM" else hf
    name = next((name for name, architecture in ARCHITECTURES.items() if architecture.hf == hf), None)
    if name is None:
        supported = ", ".join(architecture.hf for architecture in ARCHITECTURES.values())
        raise UserError(f"cannot write {path}: the model is a {hf}; .gguf files can hold {supported}")
    return name


def _sizes(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The architecture's keys."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if window and context and window < context:
        print(
            f"note: llama.cpp has no sliding window here; the context becomes the window, {window} of {context} "
            "tokens, up to which nothing changes",
            file=sys.stderr,
        )
        config["max_position_embeddings"] = window
    config.setdefault("n_inner", 4 * config.get("n_embd", 0))
    found: dict[str, Any] = {}
    for own, theirs in ARCHITECTURES[name].sizes.items():
        found[f"{name}.{own}"] = float(config[theirs]) if own.endswith(("epsilon", "freq_base")) else config[theirs]
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "linear":
        found |= {f"{name}.rope.scaling.type": "linear", f"{name}.rope.scaling.factor": float(rope["factor"])}
    elif rope:
        found[f"{name}.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _type_of(own: str, shape: tuple[int, ...], dtype: str, head: str) -> str:
    if len(shape) == 1 or own.endswith("_norm.weight") or own == "position_embd.weight":
        return "f32"
    if dtype in ("q8_0", "q4_0") and shape[-1] % BLOCK:
        return "f16"
    return "q8_0" if dtype == "q4_0" and own == head else dtype


# --- both ways --------------------------------------------------------------------------------------------------------

Change = Callable[[np.ndarray], np.ndarray]


def _to_hf(architecture: Architecture, own: str) -> str:
    """Hugging Face's name of a tensor; a name that is not in the tables stays as it is."""
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", own):
        layer, name, kind = found.groups()
        return f"{architecture.block}.{layer}.{architecture.layer[name]}.{kind}" if name in architecture.layer else own
    name, _, kind = own.rpartition(".")
    return f"{architecture.tensors[name]}.{kind}" if name in architecture.tensors else own


def _from_hf(architecture: Architecture, theirs: str) -> str:
    name, _, kind = theirs.rpartition(".")
    found = re.fullmatch(re.escape(architecture.block) + r"\.(\d+)\.(.+)", name)
    own_names = {theirs: own for own, theirs in (architecture.layer if found else architecture.tensors).items()}
    return f"blk.{found[1]}.{own_names[found[2]]}.{kind}" if found else f"{own_names[name]}.{kind}"


def _change(architecture: Architecture, own: str, config: Mapping[str, Any], back: bool = False) -> Change:
    """The change of a tensor from Hugging Face's layout to GGUF's, or `back`."""
    reorder = rotary.halves if back else rotary.pairs
    if architecture.interleaved and own.endswith("attn_q.weight"):
        return lambda x: reorder(x, config["num_attention_heads"])
    if architecture.interleaved and own.endswith("attn_k.weight"):
        return lambda x: reorder(x, config["num_key_value_heads"])
    return np.transpose if _is_transposed(architecture, own) else lambda x: x


def _after(make: Callable[[], np.ndarray], change: Change) -> Callable[[], np.ndarray]:
    return lambda: change(make())


def _is_transposed(architecture: Architecture, own: str) -> bool:
    return own.endswith(".weight") and own.split(".")[-2] in architecture.transposed


def _changed_shape(architecture: Architecture, own: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[::-1] if _is_transposed(architecture, own) else shape
