"""Llama and its kin in Hugging Face's names and layout.

Queries, keys and values are one matrix here, rows in this order, and so are gate and up. Rotary halves, (x_i, x_i+D/2),
are Hugging Face's own layout: no row moves. A config's options decide its architecture, and the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyforge.errors import UserError
from tinyforge.layout import Entry, require, setting
from tinyforge.models.llama.config import Config

PREFIX = "model."
IGNORED = r".*\.rotary_emb\.inv_freq"


def read_config(given: Mapping[str, Any]) -> Config:
    architecture = given["architectures"][0]
    qwen2, qwen3 = architecture == "Qwen2ForCausalLM", architecture == "Qwen3ForCausalLM"
    require(given, "hidden_act", "silu")
    require(given, "attention_bias", False)
    require(given, "mlp_bias", False)
    dim, heads = setting(given, "hidden_size", int), setting(given, "num_attention_heads", int)
    context = setting(given, "max_position_embeddings", int)
    if heads < 1:
        raise UserError(f"config.json: num_attention_heads is {heads}, wants at least 1")
    return Config(
        dim=dim,
        heads=heads,
        kv_heads=setting(given, "num_key_value_heads", int, heads),
        head_dim=setting(given, "head_dim", int, 128 if qwen3 else dim // heads),
        layers=setting(given, "num_hidden_layers", int),
        context=context,
        vocab=setting(given, "vocab_size", int),
        hidden=setting(given, "intermediate_size", int),
        tied=setting(given, "tie_word_embeddings", bool, False),
        qkv_bias=qwen2,
        qk_norm=qwen3,
        window=_window(given, architecture),
        norm_eps=setting(given, "rms_norm_eps", float, 1e-6),
        **_rope(given, context),
    )


def _window(given: Mapping[str, Any], architecture: str) -> int:
    """The sliding window of all layers, 0 for none. Mistral has it in all layers; Qwen from max_window_layers on."""
    layers, kinds = setting(given, "num_hidden_layers", int), given.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise UserError("config.json: layer_types is not a list of texts; get the file again")
    if architecture == "MistralForCausalLM":
        sliding = given.get("sliding_window") is not None
    elif architecture.startswith("Qwen") and given.get("use_sliding_window"):
        first = setting(given, "max_window_layers", int, 28)
        kinds = kinds or ["sliding_attention" if i >= first else "full_attention" for i in range(min(layers, 1 << 10))]
        sliding = "sliding_attention" in kinds
    else:
        sliding, kinds = False, None
    if kinds and len(set(kinds)) > 1:
        raise UserError("config.json: layers with and without a sliding window; supported: all, or none")
    return setting(given, "sliding_window", int) if sliding else 0


def _rope(given: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Our rope_ fields: from rope_parameters, or, as older files have it, rope_theta and rope_scaling."""
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UserError(f"config.json: rope_scaling is {rope!r}, wants an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UserError(f"config.json: rope_type is {kind!r}; supported: 'default', 'linear', 'llama3'")
    require({**given, **rope}, "partial_rotary_factor", 1.0, None)
    theta = setting({**given, **rope}, "rope_theta", float, 10000.0)
    if kind == "default":
        return {"rope_theta": theta}
    found = {"rope_theta": theta, "rope_scaling": kind, "rope_factor": setting(rope, "factor", float)}
    if kind == "llama3":
        found["rope_low_freq"] = setting(rope, "low_freq_factor", float)
        found["rope_high_freq"] = setting(rope, "high_freq_factor", float)
        found["original_context"] = setting(rope, "original_max_position_embeddings", int, context)
    return found


def write_config(config: Config) -> dict[str, Any]:
    if config.qkv_bias and config.qk_norm:
        raise UserError("no Hugging Face architecture has both qkv_bias and qk_norm; keep the model in our own format")
    rope: dict[str, Any] | None = None
    if config.rope_scaling != "none":
        rope = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if rope and config.rope_scaling == "llama3":
        rope |= {
            "low_freq_factor": config.rope_low_freq,
            "high_freq_factor": config.rope_high_freq,
            "original_max_position_embeddings": config.original_context,
        }
    given = {
        "hidden_act": "silu",
        "hidden_size": config.dim,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied,
    }
    if config.qkv_bias or config.qk_norm:
        kind = "qwen2" if config.qkv_bias else "qwen3"
        given |= {"use_sliding_window": config.window > 0, "max_window_layers": 0}
        if config.qkv_bias and config.head_dim * config.heads != config.dim:
            raise UserError(f"Qwen2ForCausalLM has head_dim = dim / heads, the model {config.head_dim}")
    else:
        kind = "mistral" if config.window else "llama"
    if config.window:
        given["sliding_window"] = config.window
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind] + "ForCausalLM"
    return {"architectures": [architecture], "model_type": kind, **given}


def entries(config: Config) -> Iterator[Entry]:
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield Entry("model.embed_tokens.weight", (c.vocab, c.dim), "embedding.weight")
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for name, start, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
            part = slice(start, start + rows)
            yield Entry(f"{theirs}.self_attn.{name}_proj.weight", (rows, c.dim), f"{ours}.qkv.weight", part)
            if c.qkv_bias:
                yield Entry(f"{theirs}.self_attn.{name}_proj.bias", (rows,), f"{ours}.qkv.bias", part)
        if c.qk_norm:
            yield Entry(f"{theirs}.self_attn.q_norm.weight", (c.head_dim,), f"{ours}.q_norm.weight")
            yield Entry(f"{theirs}.self_attn.k_norm.weight", (c.head_dim,), f"{ours}.k_norm.weight")
        yield Entry(f"{theirs}.self_attn.o_proj.weight", (c.dim, q), f"{ours}.out.weight")
        yield Entry(f"{theirs}.input_layernorm.weight", (c.dim,), f"{ours}.norm1.weight")
        yield Entry(f"{theirs}.post_attention_layernorm.weight", (c.dim,), f"{ours}.norm2.weight")
        for name, part in (("gate", slice(0, c.hidden)), ("up", slice(c.hidden, 2 * c.hidden))):
            yield Entry(f"{theirs}.mlp.{name}_proj.weight", (c.hidden, c.dim), f"{ours}.gate_up.weight", part)
        yield Entry(f"{theirs}.mlp.down_proj.weight", (c.dim, c.hidden), f"{ours}.down.weight")
    yield Entry("model.norm.weight", (c.dim,), "final_norm.weight")
    if not c.tied:
        yield Entry("lm_head.weight", (c.vocab, c.dim), "heads.weight", 0)
