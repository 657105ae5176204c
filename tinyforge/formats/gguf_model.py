"""Models in GGUF, the format of llama.cpp and Ollama, read and written: https://github.com/ggml-org/llama.cpp.

`ARCHITECTURES` maps their names of keys and tensors to Hugging Face's, for reading and for writing. Beyond names:

- In the llama architecture rotary pairs are neighbours, (x_2i, x_2i+1), so the rows of q and k are reordered; qwen2 and
  qwen3 keep Hugging Face's halves, (x_i, x_i+D/2).
- GPT-2's matrices are transposed: rows are outputs.
- Llama 3's RoPE scaling is a tensor, rope_freqs, that divides each pair's frequency.
- llama.cpp has a sliding window in the architectures with a `pattern` only. A model of another with a window is written
  with the window as its context, up to which both agree.
- Gemma's norms are stored with the 1 added that Hugging Face adds at run time.
- Norms, biases and GPT-2's positions are always float32. Rows that are not a whole number of blocks take the next type
  in FALLBACKS, as in llama.cpp's own converter. The output head keeps more bits: see HEADS.

`tinyforge.formats.gguf_file` is the container, `tinyforge.tokenizers.gguf_vocabulary` the tokenizer.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError, errors_in
from tinyforge.formats import gguf_file, rotary
from tinyforge.formats.weights import Weights
from tinyforge.ops import RopeScaling
from tinyforge.tensors import Lazy

FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2, "q6_K": 18, "q4_K": 14}  # for display
BLOCKS = {"q8_0": 32, "q4_0": 32, "q5_0": 32, "q6_K": 256, "q4_K": 256}  # numbers in a block
FALLBACKS = {"q4_K": "q5_0", "q6_K": "q8_0", "q4_0": "f16", "q5_0": "f16", "q8_0": "f16"}
HEADS = {"q4_0": "q8_0", "q4_K": "q6_K"}  # the type of the output head, where it is not that of other matrices
ROPE_FREQS = "rope_freqs.weight"
ROTARY = "rope.dimension_count"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp. hf: its name in config.json. sizes: keys of config.json by GGUF's keys, the latter
    without the architecture's prefix. block: the prefix of a layer's tensors in Hugging Face's names. tensors, layer:
    Hugging Face's names by GGUF's, without ".weight" and ".bias". interleaved: rotary pairs are neighbours. transposed:
    GGUF's names of a layer's transposed tensors. fixed: what config.json says of all its models. optional: as sizes, of
    keys that may be absent. plus_one: 1 is added to its norms. pattern: of that many layers the last has no window,
    unless a key says otherwise; 0 where no layer has one. partial: RoPE may turn part of a head. by_head:
    Hugging Face has the queries, keys and values of a head next to each other. merged: its
    experts' gate and up are one tensor there, rows in turn, transposed, as in gpt-oss. untied: the head is
    never tied. local_theta: rope_theta of the layers with a window, as the pattern. wide: numbers of layers of models
    whose scores are divided by the root of width / heads, not of the heads' size, if there are any."""

    hf: str
    sizes: Mapping[str, str]
    block: str
    tensors: Mapping[str, str]
    layer: Mapping[str, str]
    interleaved: bool = False
    transposed: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    plus_one: bool = False
    pattern: int = 0
    partial: bool = False
    by_head: bool = False
    merged: bool = False
    untied: bool = False
    local_theta: float = 0.0
    wide: tuple[int, ...] | None = None


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


_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_LAYER = {**_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_CAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_GEMMA = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh") | dict.fromkeys(_CAPS)
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _llama(
    hf: str,
    layer: Mapping[str, str] | None = None,
    eps: str = "",
    experts: Mapping[str, str] | None = None,
    **more: Any,
) -> Architecture:
    """eps: config.json's key of a LayerNorm's. experts: further sizes, of a mixture."""
    if experts:
        layer = {**_EXPERTS_LAYER, **(layer or {})}
    sizes = {own: theirs for own, theirs in _LLAMA_SIZES.items() if not (eps and theirs == "rms_norm_eps")}
    if eps:
        sizes["attention.layer_norm_epsilon"] = eps
    sizes |= experts or {}
    known = {"sizes": sizes, "block": "model.layers", "tensors": _LLAMA_TENSORS} | more
    return Architecture(hf, layer={**_LLAMA_LAYER, **(layer or {})}, **known)


_EXPERTS_LAYER = {"ffn_gate_inp": "mlp.gate"}
_EXPERTS_LAYER |= {f"ffn_{name}_exps": f"mlp.experts.{name}_proj" for name in ("gate", "up", "down")}
_SHARED_LAYER = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_SHARED_LAYER |= {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_OWN_WIDTH = {**_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"}
_NEOX_LAYER = {"attn_qkv": "attention.query_key_value", "attn_output": "attention.dense"}
_NEOX_LAYER |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_NEOX_TENSORS = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}


ARCHITECTURES = {
    "llama": _llama("LlamaForCausalLM", interleaved=True),
    "qwen2": _llama("Qwen2ForCausalLM"),
    "qwen3": _llama("Qwen3ForCausalLM"),
    "gemma": _llama("GemmaForCausalLM", plus_one=True, fixed=_GEMMA),
    "gemma2": _llama(
        "Gemma2ForCausalLM", _GEMMA_LAYER, plus_one=True, fixed=_GEMMA, optional=_CAPS, pattern=2, wide=(46,)
    ),
    "gemma3": _llama(
        "Gemma3ForCausalLM",
        _GEMMA_LAYER,
        plus_one=True,
        fixed=_GEMMA,
        optional={"final_logit_softcapping": "final_logit_softcapping"},
        pattern=6,
        local_theta=10000.0,
        wide=(62,),
    ),
    "phi3": _llama("Phi3ForCausalLM", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, partial=True),
    "olmo2": _llama("Olmo2ForCausalLM", _AFTER, untied=True),
    "smollm3": _llama("SmolLM3ForCausalLM", interleaved=True, fixed={"no_rope_layer_interval": 4}),
    "granite": _llama(
        "GraniteForCausalLM", interleaved=True, fixed=dict.fromkeys(_GRANITE.values(), 1.0), optional=_GRANITE
    ),
    "glm4": _llama(
        "Glm4ForCausalLM",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        partial=True,
    ),
    "nemotron": _llama(
        "NemotronForCausalLM", eps="norm_eps", plus_one=True, partial=True, untied=True, fixed={"hidden_act": "relu2"}
    ),
    "starcoder2": _llama(
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        eps="norm_epsilon",
        fixed={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "phi2": _llama(
        "PhiForCausalLM",
        {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        eps="layer_norm_eps",
        partial=True,
        untied=True,
        tensors={**_LLAMA_TENSORS, "output_norm": "model.final_layernorm"},
        fixed={"hidden_act": "gelu_new"},
    ),
    "gptneox": _llama(
        "GPTNeoXForCausalLM",
        _NEOX_LAYER,
        eps="layer_norm_eps",
        partial=True,
        untied=True,
        by_head=True,
        block="gpt_neox.layers",
        tensors=_NEOX_TENSORS,
        fixed={"hidden_act": "gelu"},
        optional={"use_parallel_residual": "use_parallel_residual"},
    ),
    "qwen2moe": _llama(
        "Qwen2MoeForCausalLM",
        _SHARED_LAYER,
        experts={**_OWN_WIDTH, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": _llama("Qwen3MoeForCausalLM", experts=_OWN_WIDTH, fixed={"norm_topk_prob": True}),
    "olmoe": _llama("OlmoeForCausalLM", experts=_EXPERTS, fixed={"norm_topk_prob": False}),
    "gpt-oss": _llama(
        "GptOssForCausalLM",
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        experts={
            **{"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
            "expert_feed_forward_length": "intermediate_size",
        },
        fixed={"swiglu_limit": 7.0},
        pattern=2,
        untied=True,
        merged=True,
    ),
    "gpt2": _GPT2,
}


def is_file(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


# --- reading ----------------------------------------------------------------------------------------------------------


def open_file(path: Path) -> Weights:
    """The weights in a .gguf file under Hugging Face's names; tensors are not read yet.

    Raises UserError for a damaged file, another architecture or type of tensor, and sizes that contradict each other.
    """
    content = gguf_file.read(path)
    name = content.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            f"{path}: its architecture is {name!r:.80}; supported: {', '.join(ARCHITECTURES)}; choose one of these"
        )
    architecture, stored = ARCHITECTURES[name], dict(content.tensors)
    values = _Values(name, content.metadata)
    with errors_in(path):
        factors = stored.pop(ROPE_FREQS, None)
        config = _config(architecture, values, stored)
        if factors:
            original = values.get("rope.scaling.original_context_length", 8192)
            config["rope_scaling"] = _llama3_scaling(config, original, factors.read())

    def lazy(own: str, tensor: gguf_file.Tensor) -> Lazy:
        change = _change(architecture, own, config, back=True)
        return _changed_shape(architecture, own, tensor.shape), _after(tensor.read, change)

    tensors = {}
    for own, tensor in stored.items():
        theirs = _to_hf(architecture, own)
        if EXPERTS in theirs and len(tensor.shape) == 3 and not architecture.merged:
            for e, part in enumerate(_experts(tensor)):
                tensors[theirs.replace(EXPERTS, f"{EXPERTS}{e}.")] = lazy(own, part)
        else:
            tensors[theirs] = lazy(own, tensor)
    return Weights(path, config, _merged(tensors) if architecture.merged else tensors)


EXPERTS = ".mlp.experts."


def _experts(tensor: gguf_file.Tensor) -> Iterator[gguf_file.Tensor]:
    """The matrices of a tensor of all experts, which lie one after the other."""
    count, size = tensor.shape[0], tensor.nbytes // max(tensor.shape[0], 1)
    for e in range(count):
        yield replace(tensor, shape=tensor.shape[1:], start=tensor.start + e * size, nbytes=size)


SINKS = ".self_attn.sinks"


def _merged(tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """gpt-oss's tensors as Hugging Face's files have them, from one for each of gate, up and down."""
    found: dict[str, Lazy] = {}

    def in_turn(gate: Lazy, up: Lazy) -> np.ndarray:
        return np.stack([gate[1](), up[1]()], axis=2).reshape(gate[0][0], 2 * gate[0][1], *gate[0][2:])

    for name, (shape, make) in tensors.items():
        base, _, kind = name.rpartition(".")
        bias = "_bias" if kind == "bias" else ""
        if base.endswith(SINKS):
            found[base] = shape, make
        elif EXPERTS not in name:
            found[name] = shape, make
        elif base.endswith("down_proj"):
            found[base + bias] = (shape, make) if bias else _turned((shape, make))
        elif base.endswith("gate_proj") and (other := name.replace("gate_proj", "up_proj")) in tensors:
            both = (shape[0], 2 * shape[1], *shape[2:]), partial(in_turn, (shape, make), tensors[other])
            found[base.replace("gate_proj", "gate_up_proj") + bias] = both if bias else _turned(both)
    return found


def _turned(lazy: Lazy) -> Lazy:
    """The matrices transposed."""
    (*lead, rows, columns), make = lazy
    return (*lead, columns, rows), lambda: make().swapaxes(-1, -2)


def _parted(tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The reverse of `_merged`."""
    found: dict[str, Lazy] = {}

    def half(make: Callable[[], np.ndarray], first: int) -> np.ndarray:
        return make()[:, first::2]

    for name, (shape, make) in tensors.items():
        base, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        lazy = (shape, make) if kind == "bias" or EXPERTS not in name else _turned((shape, make))
        if name.endswith(SINKS):
            found[f"{name}.weight"] = shape, make
        elif EXPERTS in name and base.endswith("gate_up_proj"):
            rows = (shape[0], lazy[0][1] // 2, *lazy[0][2:])
            for first, part in enumerate(("gate_proj", "up_proj")):
                found[f"{base.replace('gate_up_proj', part)}.{kind}"] = rows, partial(half, lazy[1], first)
        elif EXPERTS in name:
            found[f"{base}.{kind}"] = lazy
        else:
            found[name] = shape, make
    return found


def _stacked(tensors: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """The reverse: the matrices of all experts of a layer as one tensor."""
    found: dict[str, list[Lazy]] = {}
    for name, lazy in tensors.items():
        found.setdefault(re.sub(rf"{re.escape(EXPERTS)}\d+\.", EXPERTS, name), []).append(lazy)

    def stack(parts: list[Lazy]) -> np.ndarray:
        return np.stack([make() for _, make in parts])

    return {
        name: parts[0] if name in tensors else ((len(parts), *parts[0][0]), partial(stack, parts))
        for name, parts in found.items()
    }


class _Values:
    """An architecture's values in the metadata."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self.architecture, self.metadata = architecture, metadata

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.metadata

    def get(self, name: str, default: Any = None) -> Any:
        """The number or text of that name. UserError for another type, and for a missing one without a default."""
        key = f"{self.architecture}.{name}"
        value = self.metadata.get(key, default)
        kinds = (str,) if isinstance(default, str) else (int, float, bool)
        if type(value) is float:
            with np.errstate(over="ignore"):
                value = float(str(np.float32(value)))  # 1e-05, not the float32 next to it
        if type(value) not in kinds or (type(value) is float and not math.isfinite(value)):
            raise UserError(f"{key} is {value!r:.80}, expected a {'text' if kinds == (str,) else 'number'}")
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
        config |= {"hidden_act": "silu", "tie_word_embeddings": "output.weight" not in stored, **architecture.fixed}
        config["rope_scaling"] = _scaling(values)
        if architecture.merged:  # whose bounds of YaRN are no whole numbers, though llama.cpp rounds them
            config["rope_scaling"] = {"truncate": False, **(config["rope_scaling"] or {"rope_type": "default"})}
        if architecture.partial:
            config["partial_rotary_factor"] = values.get(ROTARY, size) / max(size, 1)
        if architecture.hf != "Qwen2ForCausalLM":
            config["attention_bias"] = any(f"blk.0.attn_{name}.bias" in stored for name in ("q", "qkv"))
            config["use_bias"] = config["qkv_bias"] = config["attention_bias"]
        config["mlp_bias"] = "blk.0.ffn_up.bias" in stored
        config |= {theirs: values.get(own) for own, theirs in architecture.optional.items() if values.has(own)}
        if architecture.pattern:
            config |= _windows(architecture, values)
        if architecture.wide is not None:
            config["query_pre_attn_scalar"] = _score_divisor(architecture, values.get("block_count"), dim, heads, size)
    for own, theirs in architecture.sizes.items():
        if architecture.partial and own == ROTARY:
            continue
        value = values.get(own, defaults.get(own))
        if config.setdefault(theirs, value) != value:
            raise UserError(
                f"{values.architecture}.{own} is {value}, expected {config[theirs]} by the other sizes; only "
                "such a model can be read"
            )
    return config


def _windows(architecture: Architecture, values: _Values) -> dict[str, Any]:
    """The layers' windows and rotary base in config.json's words."""
    layers, period = values.get("block_count"), architecture.pattern
    window = values.get("attention.sliding_window", 0)
    key = f"{values.architecture}.attention.sliding_window_pattern"
    sliding = values.metadata.get(key, period)
    if isinstance(sliding, list | np.ndarray):
        sliding = [bool(one) for one in sliding]
    elif type(sliding) is int and type(layers) is int:
        sliding = [not sliding or (i + 1) % sliding > 0 for i in range(min(layers, 1 << 10))]
    else:
        raise UserError(f"{key} is {sliding!r:.80}, expected a number")
    kinds = ["sliding_attention" if one and window else "full_attention" for one in sliding]
    found: dict[str, Any] = {"sliding_window": window, "layer_types": kinds}
    if architecture.local_theta:
        found["rope_local_base_freq"] = values.get("rope.freq_base_swa", architecture.local_theta)
    return found


def _score_divisor(architecture: Architecture, layers: int, dim: int, heads: int, size: int) -> int:
    """The number by whose root Gemma divides scores: no file says it, llama.cpp goes by the number of layers."""
    return dim // heads if layers in (architecture.wide or ()) else size


def _scaling(values: _Values) -> dict[str, Any] | None:
    kind, factor = values.get("rope.scaling.type", "linear"), values.get("rope.scaling.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "yarn":
        for key, usual in _YARN.items():  # llama.cpp reads them in other architectures than those here
            if values.get(f"rope.scaling.yarn_{key}", usual) != usual:
                raise UserError(
                    f"{values.architecture}.rope.scaling.yarn_{key}: only {usual}, the default, can be read"
                )
        attention = values.get("rope.scaling.attn_factor", 1.0) * _magnitude(factor)
        original = values.get("rope.scaling.original_context_length", values.get("context_length"))
        found = {"attention_factor": attention, "original_max_position_embeddings": original}
        return {"rope_type": "yarn", "factor": factor, **found}
    if kind != "linear":
        raise UserError(f"{values.architecture}.rope.scaling.type is {kind!r:.80}; supported: 'none', 'linear', 'yarn'")
    return {"rope_type": "linear", "factor": factor}


_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}


def _magnitude(factor: float) -> float:
    """YaRN's, which llama.cpp multiplies by attn_factor."""
    return 1 + 0.1 * math.log(max(factor, 1.0))


def _written_scaling(name: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type")
    if kind == "linear":
        found = {"type": "linear", "factor": float(rope["factor"])}
    elif kind == "llama3":
        found = {"original_context_length": rope["original_max_position_embeddings"]}
    elif kind == "yarn":
        factor = float(rope["factor"])
        found = {"type": "yarn", "factor": factor}
        found["original_context_length"] = rope["original_max_position_embeddings"]
        found["attn_factor"] = float(rope.get("attention_factor") or _magnitude(factor)) / _magnitude(factor)
        if any(rope[key] != usual for key, usual in _YARN.items()):
            raise UserError("llama.cpp's YaRN has beta_fast 32 and beta_slow 1; keep the model in our own format")
    elif kind not in (None, "default"):
        raise UserError(f"llama.cpp has no RoPE scaling {kind!r} as here; keep the model in our own format")
    else:
        found = {}
    return {f"{name}.rope.scaling.{own}": value for own, value in found.items()}


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
                expected = _factors({**config, "rope_scaling": found}, len(factors))
            if np.allclose(factors, expected, rtol=1e-5, atol=0):
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
    change = _parted if architecture.merged else _stacked
    for theirs, (shape, make) in change(weights.tensors).items():
        own = _from_hf(architecture, theirs)
        tensors[own] = _changed_shape(architecture, own, shape), _after(make, _change(architecture, own, config))
    rope = config.get("rope_scaling") or {}
    if rope.get("rope_type") == "llama3":
        factors = _factors(config, config["head_dim"] // 2)
        tensors[ROPE_FREQS] = factors.shape, lambda: factors
    if architecture.untied and "output.weight" not in tensors:
        raise UserError(f"llama.cpp's {name} has an output head of its own, the model a tied one; use our own format")
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    types = {own: _type_of(own, shape, dtype, head) for own, (shape, _) in tensors.items()}
    odd = {
        (shape[-1], asked, types[own])
        for own, (shape, _) in tensors.items()
        if (asked := HEADS.get(dtype, dtype) if own == head else dtype) != types[own] != "f32"
    }
    for row, asked, kind in sorted(odd):
        print(
            f"note: {kind}, not {asked}, for rows of {row}, which are not whole blocks of {BLOCKS[asked]}",
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
    architecture, more = ARCHITECTURES[name], {}
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if architecture.pattern:
        more = _written_windows(architecture, name, config)
    elif window and context and window < context:
        print(
            f"note: llama.cpp has no sliding window here; the context becomes the window, {window} of {context} "
            "tokens, up to which nothing changes",
            file=sys.stderr,
        )
        config["max_position_embeddings"] = window
    config.setdefault("n_inner", 4 * config.get("n_embd", 0))
    found: dict[str, Any] = {}
    for own, theirs in architecture.sizes.items():
        value = config["rotary_emb_base"] if theirs == "rope_theta" and theirs not in config else config[theirs]
        found[f"{name}.{own}"] = float(value) if own.endswith(("epsilon", "freq_base")) else value
    if architecture.partial:
        share = config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
        found[f"{name}.{ROTARY}"] = round(config["head_dim"] * share)
    found |= _written_scaling(name, config.get("rope_scaling") or config.get("rope_parameters") or {})
    for key, value in architecture.fixed.items():
        if key == "no_rope_layer_interval":
            key, value = "no_rope_layers", [int((i + 1) % value > 0) for i in range(config["num_hidden_layers"])]
        if key not in architecture.optional.values() and config.get(key, value) != value:
            raise UserError(f"llama.cpp's {name} has {key} {value}, the model {config[key]}; keep it in our own format")
    if (architecture.by_head or architecture.merged) and not config["attention_bias"]:
        raise UserError(f"llama.cpp's {name} has biases in its attention; keep the model in our own format")
    for own, theirs in architecture.optional.items():
        if config.get(theirs) is not None:
            found[f"{name}.{own}"] = config[theirs]
    return {**found, **more}


def _written_windows(architecture: Architecture, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The keys of `_windows`, those with llama.cpp's default left out. UserError for scores of another scale."""
    if architecture.wide is not None:
        sizes = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"], config["head_dim"]
        if config["query_pre_attn_scalar"] != (expected := _score_divisor(architecture, *sizes)):
            raise UserError(
                f"the model divides its scores by the root of {config['query_pre_attn_scalar']}; llama.cpp's {name} "
                f"with these sizes by that of {expected}; keep the model in our own format"
            )
    kinds = config["layer_types"]
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
    found: dict[str, Any] = {"attention.sliding_window": 0 if every == 1 else config["sliding_window"]}
    if [(i + 1) % architecture.pattern == 0 for i in range(len(kinds))] != [kind == "full_attention" for kind in kinds]:
        found["attention.sliding_window_pattern"] = every
    if architecture.local_theta and config["rope_local_base_freq"] != architecture.local_theta:
        found["rope.freq_base_swa"] = config["rope_local_base_freq"]
    return {f"{name}.{own}": value for own, value in found.items()}


def _type_of(own: str, shape: tuple[int, ...], dtype: str, head: str) -> str:
    if (
        len(shape) == 1
        or own.endswith(("_norm.weight", "ffn_gate_inp.weight", ".bias"))
        or own == "position_embd.weight"
    ):
        return "f32"
    kind = HEADS.get(dtype, dtype) if own == head else dtype
    while shape[-1] % BLOCKS.get(kind, 1):
        kind = FALLBACKS[kind]
    return kind


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


def _change(architecture: Architecture, own: str, config: Mapping[str, Any], back: bool = False) -> Change | None:
    """The change of a tensor from Hugging Face's layout to GGUF's, or `back`; None where it lies alike."""
    reorder = rotary.halves if back else rotary.pairs
    if architecture.by_head and ".attn_qkv." in own:
        heads = config["num_attention_heads"]
        split = (3, heads, -1) if back else (heads, 3, -1)
        return lambda x: x.reshape(*split, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
    if architecture.interleaved and own.endswith(("attn_q.weight", "attn_q.bias")):
        return lambda x: reorder(x, config["num_attention_heads"])
    if architecture.interleaved and own.endswith(("attn_k.weight", "attn_k.bias")):
        return lambda x: reorder(x, config["num_key_value_heads"])
    if architecture.plus_one and own.endswith("norm.weight"):
        return lambda x: x + np.float32(-1 if back else 1)
    if own.endswith(SHARED_GATE):
        return lambda x: x.reshape(1, -1) if back else x.reshape(-1)
    return np.transpose if _is_transposed(architecture, own) else None


SHARED_GATE = "ffn_gate_inp_shexp.weight"
"""A vector in .gguf, a matrix of one row in Hugging Face's files."""


def _after(make: Callable[[], np.ndarray], change: Change | None) -> Callable[[], np.ndarray]:
    return (lambda: change(make())) if change else make


def _is_transposed(architecture: Architecture, own: str) -> bool:
    return own.endswith(".weight") and own.split(".")[-2] in architecture.transposed


def _changed_shape(architecture: Architecture, own: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if own.endswith(SHARED_GATE):
        return (1, *shape) if len(shape) == 1 else shape[1:]
    return shape[::-1] if _is_transposed(architecture, own) else shape
