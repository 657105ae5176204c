"""The published architectures that are options of Llama's block: how each names them in config.json and in its files.

A family is an entry of `FAMILIES`, and a peer in tests/formats/test_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.layout import Fields, read_fields, require, setting, write_fields
from tinyforge.models.llama.config import Config

LAYER = {
    **{"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    **{"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj"},
    **{"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm", "sinks": "self_attn.sinks"},
    **{"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    **{"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    **{"embedding": "model.embed_tokens", "positions": "model.embed_positions", "blocks": "model.layers"},
    **{"final_norm": "model.norm", "heads": "lm_head"},
}
"""Hugging Face's names of a layer's tensors by ours, and of those around the layers."""
AROUND = {
    "attention_norm": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
NO_PADDING = {"pad_token_id": None}
"""Where transformers' default is an id, which a smaller vocabulary lacks."""
BIASES = ("qkv_bias", "out_bias")
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
"""Ours by Hugging Face's names; of several, the first is written."""
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Given(Mapping[str, Any]):
    """Several contents of config.json as one: the first value that is not null."""

    maps: tuple[Mapping[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        found = [value for given in self.maps if (value := given.get(name)) is not None]
        if not found:
            raise KeyError(name)
        return found[0]

    def __iter__(self) -> Iterator[str]:
        return iter({name for given in self.maps for name in given})

    def __len__(self) -> int:
        return sum(1 for _ in self)


def is_null(given: Mapping[str, Any], name: str) -> bool:
    """Whether config.json has the key, as null: the family's default does not apply."""
    first = given.maps[0] if isinstance(given, Given) else given
    return name in first and first[name] is None


@dataclass(frozen=True)
class Family:
    """A published architecture. architecture, kind: its name and its model_type in config.json. fixed: options that
    all its models have. fields: options that are numbers or texts of config.json. defaults: of keys that are absent
    there. layer: names of tensors where they differ from `LAYER`. merged: which of qkv and gate_up are one tensor;
    by_head: qkv has the queries, keys and values of a head next to each other. interleaved: rotary pairs are
    neighbours. plus_one: a norm's gain is 1 and what the files have. eps: the key of norm_eps. biases:
    attention_bias stands for `BIASES`. keys: of config.json, by Llama's. activation: its key, of a family that may
    have several.

    read(given), write(config): the options that `fields` do not cover, and the reverse. free: these options. holds:
    whether it can have a config's values of its options.
    """

    architecture: str
    kind: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    merged: tuple[str, ...] = ()
    by_head: bool = False
    plus_one: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    activation: str = ""
    interleaved: bool = False
    eps: str = "rms_norm_eps"
    biases: bool = False
    free: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda given: {}
    write: Callable[[Config], dict[str, Any]] = lambda config: {}
    holds: Callable[[Config], bool] = lambda config: True

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        biases = dict.fromkeys(BIASES, setting(given, "attention_bias", bool, False)) if self.biases else {}
        activation = {}
        if self.activation:
            require(given, self.activation, *ACTIVATIONS)
            activation = {"activation": ACTIVATIONS[setting(given, self.activation, str, "silu")]}
        return {**self.fixed, **biases, **activation, **read_fields(given, self.fields), **self.read(given)}

    def lacks(self, config: Config) -> list[str]:
        """The config's options that it cannot have."""
        return [name for name in config.options() if name not in self.known]

    @property
    def known(self) -> set[str]:
        """The options that it has."""
        activation = ("activation",) if self.activation else ()
        return {*self.fixed, *self.fields, *self.free, *(BIASES if self.biases else ()), *activation}

    def fits(self, config: Config) -> bool:
        """Whether it has all options of the config, and the config all of its fixed ones."""
        fixed = all(getattr(config, name) == value for name, value in self.fixed.items())
        biases = not self.biases or config.qkv_bias == config.out_bias
        return fixed and biases and not self.lacks(config) and self.holds(config)

    def written(self, config: Config) -> dict[str, Any]:
        biases = {"attention_bias": config.qkv_bias} if self.biases else {}
        own = self.defaults.get(self.activation, "")
        names = {ours: theirs for theirs, ours in (*reversed(ACTIVATIONS.items()), (own, ACTIVATIONS.get(own, "")))}
        activation = {self.activation: names[config.activation]} if self.activation else {}
        return {**biases, **activation, **write_fields(config, self.fields), **self.write(config)}


# --- windows ----------------------------------------------------------------------------------------------------------


def layer_kinds(given: Mapping[str, Any], usual: Callable[[int], bool]) -> list[str]:
    """layer_types; where it is absent, usual(i) says whether layer i has the sliding window."""
    kinds, layers = given.get("layer_types"), setting(given, "num_hidden_layers", int)
    if kinds is None:
        return [SLIDING if usual(i) else FULL for i in range(min(layers, 1 << 10))]
    if not (isinstance(kinds, list) and all(kind in (SLIDING, FULL) for kind in kinds)):
        raise UserError(f"config.json: layer_types is not a list of texts, {SLIDING!r} or {FULL!r}; get the file again")
    return kinds


def windows(given: Mapping[str, Any], kinds: list[str]) -> dict[str, int]:
    """window and full_every, of layers of these kinds."""
    if SLIDING not in kinds:
        return {}
    every = kinds.index(FULL) + 1 if FULL in kinds else 0
    if every and any((kind == FULL) != ((i + 1) % every == 0) for i, kind in enumerate(kinds)):
        raise UserError(
            "config.json: layers with and without a sliding window in no regular order; supported: the window in all, "
            "in none, or in all but every n-th"
        )
    return {"window": setting(given, "sliding_window", int), "full_every": every}


def written_windows(config: Config) -> dict[str, Any]:
    kinds = [SLIDING if config.window_of(i) else FULL for i in range(config.layers)]
    return {"sliding_window": config.window, "layer_types": kinds}


WINDOWS = ("window", "full_every")


def every_layer(given: Mapping[str, Any]) -> dict[str, int]:
    """Mistral: the window is in all layers."""
    return {"window": setting(given, "sliding_window", int, 0)}


def every_layer_written(config: Config) -> dict[str, Any]:
    return {"sliding_window": config.window or None}


# --- rotary positions -------------------------------------------------------------------------------------------------


def written_rope(c: Config) -> dict[str, Any] | None:
    """rope_scaling."""
    if c.rope_scaling == "none":
        return None
    rope: dict[str, Any] = {"rope_type": c.rope_scaling, "factor": c.rope_factor}
    if c.rope_scaling == "llama3":
        rope |= {"low_freq_factor": c.rope_low_freq, "high_freq_factor": c.rope_high_freq}
    if c.rope_scaling == "yarn":
        rope |= {"beta_slow": c.rope_low_freq, "beta_fast": c.rope_high_freq, "truncate": c.rope_truncate}
    if c.rope_scaling == "longrope":
        rope |= {"short_factor": list(c.rope_short), "long_factor": list(c.rope_long)}
    if c.rope_attention:
        rope["attention_factor"] = c.rope_attention
    return (
        rope
        if c.rope_scaling in ("linear", "dynamic")
        else {**rope, "original_max_position_embeddings": c.original_context}
    )


# --- families ---------------------------------------------------------------------------------------------------------


def _qwen(given: Mapping[str, Any]) -> dict[str, int]:
    """The window is in the layers from max_window_layers on."""
    first = setting(given, "max_window_layers", int, 28)
    kinds = layer_kinds(given, lambda i: i >= first)
    return windows(given, kinds) if given.get("use_sliding_window") else {}


def _qwen_written(config: Config) -> dict[str, Any]:
    found: dict[str, Any] = {"use_sliding_window": config.window > 0, "max_window_layers": 0}
    if config.window:
        found |= written_windows(config) if config.full_every else {"sliding_window": config.window}
    return found


def _qwen2_written(config: Config) -> dict[str, Any]:
    if config.head_dim * config.heads != config.dim:
        raise UserError(f"Qwen2ForCausalLM has head_dim = dim / heads, the model {config.head_dim}")
    return _qwen_written(config)


def _gemma_scale(dim: int) -> float:
    """sqrt(dim) in float32, as transformers and llama.cpp have it."""
    return float(np.float32(dim**0.5))


def _gemma(given: Mapping[str, Any]) -> dict[str, Any]:
    # The first Gemma's files say "gelu" in hidden_act, and mean the formula with tanh.
    require(given, "hidden_activation", "gelu_pytorch_tanh")
    require(given, "attention_bias", False)
    return {"embedding_scale": _gemma_scale(setting(given, "hidden_size", int))}


def _gemma_written(config: Config) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma_holds(config: Config) -> bool:
    return config.embedding_scale == _gemma_scale(config.dim)


def _gemma2_and_3(given: Mapping[str, Any], every: int) -> dict[str, Any]:
    """every: of that many layers the last has no window, where config.json does not say it."""
    require(given, "use_bidirectional_attention", False, None)
    scalar = setting(given, "query_pre_attn_scalar", float, 256.0)
    if scalar <= 0:
        raise UserError(f"config.json: query_pre_attn_scalar is {scalar}, expected a number above 0")
    kinds = layer_kinds(given, lambda i: (i + 1) % every > 0)
    return {**_gemma(given), **windows(given, kinds), "attention_scale": scalar**-0.5}


def _gemma2(given: Mapping[str, Any]) -> dict[str, Any]:
    # null is none, and an absent key the published models' number.
    caps = {"attention_softcap": ("attn_logit_softcapping", 50.0), "logit_softcap": ("final_logit_softcapping", 30.0)}
    found = {
        ours: setting(given, name, float, 0.0 if is_null(given, name) else cap) for ours, (name, cap) in caps.items()
    }
    return {**_gemma2_and_3(given, 2), **found}


def _gemma2_written(config: Config) -> dict[str, Any]:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    whole = round(scalar)
    found = {"query_pre_attn_scalar": whole if whole**-0.5 == config.attention_scale else scalar}
    found |= {"attn_logit_softcapping": config.attention_softcap or None}
    found |= {"final_logit_softcapping": config.logit_softcap or None}
    return {**_gemma_written(config), **written_windows(config), **found}


def _gemma3(given: Mapping[str, Any]) -> dict[str, Any]:
    rope = given.get("rope_parameters")
    local = rope.get(SLIDING) if isinstance(rope, dict) else None
    if isinstance(local, dict):
        require(local, "rope_type", "default")
        theta = setting(local, "rope_theta", float, 10000.0)
    else:
        theta = setting(given, "rope_local_base_freq", float, 10000.0)
    every = setting(given, "sliding_window_pattern", int, 6)
    cap = setting(given, "final_logit_softcapping", float, 0.0)
    return {**_gemma2_and_3(given, max(every, 1)), "local_rope_theta": theta, "logit_softcap": cap}


def _gemma3_written(config: Config) -> dict[str, Any]:
    return {**_gemma2_written(config), "rope_local_base_freq": config.local_rope_theta}


def _granite(given: Mapping[str, Any]) -> dict[str, float]:
    divisor = setting(given, "logits_scaling", float, 1.0)
    if min(divisor, setting(given, "attention_multiplier", float, 1.0)) <= 0:
        raise UserError("config.json: logits_scaling and attention_multiplier are not above 0; get the file again")
    return {"logit_scale": 1 / divisor}


def _olmo3(given: Mapping[str, Any]) -> dict[str, Any]:
    rope, theta = given.get("rope_parameters"), setting(given, "rope_theta", float, 10000.0)
    if isinstance(rope, dict) and isinstance(local := rope.get(SLIDING), dict):
        require(local, "rope_type", "default")
        theta = setting(local, "rope_theta", float, 10000.0)
    kinds = layer_kinds(given, lambda i: (i + 1) % 4 > 0)
    return {**windows(given, kinds), "local_rope_theta": theta}


def _olmo3_written(config: Config) -> dict[str, Any]:
    rope = {
        SLIDING: {"rope_type": "default", "rope_theta": config.local_rope_theta},
        FULL: {**(written_rope(config) or {"rope_type": "default"}), "rope_theta": config.rope_theta},
    }
    return {**written_windows(config), **NO_PADDING, "rope_parameters": rope, "rope_scaling": None}


def _smollm3(given: Mapping[str, Any]) -> dict[str, Any]:
    layers = min(setting(given, "num_hidden_layers", int), 1 << 10)
    every = setting(given, "no_rope_layer_interval", int, 4)
    ropes = given.get("no_rope_layers") or [int((i + 1) % max(every, 1) != 0) for i in range(layers)]
    if not isinstance(ropes, list) or not all(rope in (0, 1) for rope in ropes):
        raise UserError(f"config.json: no_rope_layers is {ropes!r:.80}, expected a list of 0 and 1")
    every = ropes.index(0) + 1 if 0 in ropes else 0
    if every and any(rope != ((i + 1) % every > 0) for i, rope in enumerate(ropes)):
        raise UserError("config.json: no_rope_layers has no regular order; supported: none, or every n-th layer")
    require(given, "use_sliding_window", False)
    return {"no_rope_every": every}


def _smollm3_written(config: Config) -> dict[str, Any]:
    ropes = [int(config.has_rope(i)) for i in range(config.layers)]
    return {"no_rope_layers": ropes, "use_sliding_window": False, **NO_PADDING}


def _phi3_written(config: Config) -> dict[str, Any]:
    if config.head_dim * config.heads != config.dim:
        raise UserError(f"Phi3ForCausalLM has head_dim = dim / heads, the model {config.head_dim}")
    return {**every_layer_written(config), **NO_PADDING, "original_max_position_embeddings": config.original_context}


def _exaone4(given: Mapping[str, Any]) -> dict[str, Any]:
    if is_null(given, "sliding_window"):
        return {}
    every = setting(given, "sliding_window_pattern", int, 4)
    found = windows(given, layer_kinds(given, lambda i: (i + 1) % max(every, 1) > 0))
    return {**found, "no_rope_every": found.get("full_every", 1)}


def _exaone4_written(config: Config) -> dict[str, Any]:
    window = config.window if config.window or config.no_rope_every else None
    return {**written_windows(config), "sliding_window": window, "sliding_window_pattern": config.full_every or 4}


def _exaone4_holds(config: Config) -> bool:
    """Layers without a window have no RoPE, unless none has one."""
    return config.no_rope_every == config.full_every if config.window else config.no_rope_every in (0, 1)


def _stablelm(given: Mapping[str, Any]) -> dict[str, Any]:
    require(given, "qk_layernorm", False)
    return {}


def _cohere(given: Mapping[str, Any]) -> dict[str, Any]:
    require(given, "use_qk_norm", False, None)
    return {}


def _cohere2(given: Mapping[str, Any]) -> dict[str, Any]:
    found = windows(given, layer_kinds(given, lambda i: (i + 1) % 4 > 0))
    return {**found, "no_rope_every": found.get("full_every", 1)}


def _glm_written(config: Config) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, **NO_PADDING}


def _nemotron(given: Mapping[str, Any]) -> dict[str, Any]:
    require(given, "hidden_act", "relu2")
    return {}


def _gptj(given: Mapping[str, Any]) -> dict[str, Any]:
    size = setting(given, "n_embd", int) // max(setting(given, "n_head", int), 1)
    turned = size if is_null(given, "rotary_dim") else setting(given, "rotary_dim", int, 64)
    return {"rotary_dim": 0 if turned == size else turned}


def _opt(given: Mapping[str, Any]) -> dict[str, Any]:
    require(given, "_remove_final_layer_norm", False)
    require(given, "layer_norm_elementwise_affine", True)
    dim, before = setting(given, "hidden_size", int), setting(given, "do_layer_norm_before", bool, True)
    width = setting(given, "word_embed_proj_dim", int, dim)
    return {"norms": "before" if before else "sum", "embedding_dim": 0 if width == dim else width}


def _opt_written(config: Config) -> dict[str, Any]:
    shape = {"do_layer_norm_before": config.norms == "before", "word_embed_proj_dim": config.embedding_width}
    return {**NO_PADDING, **shape}


def _opt_holds(config: Config) -> bool:
    return _of_one_size(config) and _equal_biases(config) and config.norm_eps == 1e-5


def _of_one_size(config: Config) -> bool:
    """Heads of dim / heads, as many for keys as for queries."""
    return config.head_dim * config.heads == config.dim and config.kv_heads == config.heads


def _equal_biases(config: Config) -> bool:
    return config.qkv_bias == config.out_bias == config.mlp_bias


PLAIN: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False}
"""GPT-2's parts: LayerNorm, and an MLP without a gate."""
DENSE: Fields = {ours: ("use_bias", bool, True) for ours in ("qkv_bias", "out_bias", "mlp_bias")}
GPTJ_KEYS = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
GPTJ_KEYS |= {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
MLP_BIAS: Fields = {"mlp_bias": ("mlp_bias", bool, False)}
OLMO = {"norms": "after", "qk_norm": True, "qk_norm_width": True}
GEMMA = {"norm_plus_one": True, "activation": "gelu_tanh"}
GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "rms_norm_eps": 1e-6}
GLM_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5}
COHERE: dict[str, Any] = {
    "eps": "layer_norm_eps",
    "interleaved": True,
    "biases": True,
    "defaults": {"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "sliding_window": 4096},
    "fields": {"logit_scale": ("logit_scale", float, 0.0625)},
}

FAMILIES = (
    Family("LlamaForCausalLM", "llama", fields=MLP_BIAS, biases=True),
    Family("MistralForCausalLM", "mistral", free=("window",), read=every_layer, write=every_layer_written),
    Family("Qwen2ForCausalLM", "qwen2", {"qkv_bias": True}, free=WINDOWS, read=_qwen, write=_qwen2_written),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        {"qk_norm": True},
        defaults={"head_dim": 128},
        free=WINDOWS,
        biases=True,
        read=_qwen,
        write=_qwen_written,
    ),
    Family(
        "GemmaForCausalLM",
        "gemma",
        GEMMA,
        defaults=GEMMA_DEFAULTS,
        free=("embedding_scale",),
        read=_gemma,
        write=_gemma_written,
        holds=_gemma_holds,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {**GEMMA, "norms": "both"},
        defaults={**GEMMA_DEFAULTS, "sliding_window": 4096},
        layer=AROUND,
        free=("embedding_scale", "attention_scale", "attention_softcap", "logit_softcap", *WINDOWS),
        read=_gemma2,
        write=_gemma2_written,
        holds=_gemma_holds,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**GEMMA, "norms": "both", "qk_norm": True},
        defaults={**GEMMA_DEFAULTS, "sliding_window": 4096, "rope_theta": 1000000.0},
        layer=AROUND,
        free=("embedding_scale", "attention_scale", "logit_softcap", "local_rope_theta", *WINDOWS),
        read=_gemma3,
        write=_gemma3_written,
        holds=lambda config: _gemma_holds(config) and config.local_rope_theta > 0,
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        defaults={"rms_norm_eps": 1e-5},
        merged=("qkv", "gate_up"),
        free=("window", "rotary_dim"),
        read=every_layer,
        write=_phi3_written,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        OLMO,
        defaults={"rms_norm_eps": 1e-5},
        layer=AROUND,
        biases=True,
        write=lambda config: NO_PADDING,
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        OLMO,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        layer=AROUND,
        free=(*WINDOWS, "local_rope_theta"),
        biases=True,
        read=_olmo3,
        write=_olmo3_written,
        holds=lambda config: config.local_rope_theta > 0,
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        fields=MLP_BIAS,
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
        free=("no_rope_every",),
        biases=True,
        read=_smollm3,
        write=_smollm3_written,
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        fields={
            **MLP_BIAS,
            "embedding_scale": ("embedding_multiplier", float, 1.0),
            "residual_scale": ("residual_multiplier", float, 1.0),
            "attention_scale": ("attention_multiplier", float, 1.0),
        },
        free=("logit_scale",),
        biases=True,
        read=_granite,
        write=lambda config: {"logits_scaling": 1 / config.logit_scale},
        holds=lambda config: config.attention_scale > 0,
    ),
    Family(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        GEMMA,
        defaults={**GEMMA_DEFAULTS, "sliding_window": 4096},
        layer={"norm2": AROUND["norm2"]},
        free=("embedding_scale", "attention_scale", "attention_softcap", "logit_softcap", *WINDOWS),
        read=_gemma2,
        write=_gemma2_written,
        holds=_gemma_holds,
    ),
    Family(
        "MinistralForCausalLM",
        "ministral",
        defaults={"sliding_window": 4096},
        free=WINDOWS,
        read=lambda given: windows(given, layer_kinds(given, lambda i: True)),
        write=written_windows,
    ),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        fields={
            **MLP_BIAS,
            "qkv_bias": ("attention_bias", bool, True),
            "out_bias": ("attention_out_bias", bool, False),
        },
        defaults={"head_dim": 128},
        write=lambda config: NO_PADDING,
    ),
    Family(
        "Exaone4ForCausalLM",
        "exaone4",
        {"norms": "after", "qk_norm": True},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        layer=AROUND,
        free=(*WINDOWS, "no_rope_every"),
        read=_exaone4,
        write=_exaone4_written,
        holds=_exaone4_holds,
    ),
    Family(
        "GlmForCausalLM",
        "glm",
        fields={"qkv_bias": ("attention_bias", bool, True)},
        defaults=GLM_DEFAULTS,
        merged=("gate_up",),
        interleaved=True,
        free=("rotary_dim",),
        write=_glm_written,
    ),
    Family(
        "Glm4ForCausalLM",
        "glm4",
        {"norms": "both"},
        {"qkv_bias": ("attention_bias", bool, True)},
        GLM_DEFAULTS,
        {"attention_norm": "post_self_attn_layernorm", "mlp_norm": "post_mlp_layernorm"},
        merged=("gate_up",),
        interleaved=True,
        free=("rotary_dim",),
        write=_glm_written,
    ),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        {"norm": "layer", "norm_bias": True},
        {"qkv_bias": ("use_qkv_bias", bool, False), "parallel": ("use_parallel_residual", bool, False)},
        {"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
        eps="layer_norm_eps",
        free=("rotary_dim",),
        read=_stablelm,
    ),
    Family(
        "CohereForCausalLM",
        "cohere",
        {"norm": "layer", "parallel": True},
        read=_cohere,
        write=lambda config: NO_PADDING,
        **COHERE,
    ),
    Family(
        "Cohere2ForCausalLM",
        "cohere2",
        {"norm": "layer", "parallel": True},
        free=(*WINDOWS, "no_rope_every"),
        read=_cohere2,
        write=lambda config: {**written_windows(config), **NO_PADDING},
        holds=lambda config: bool(config.no_rope_every or config.window) and _exaone4_holds(config),
        **COHERE,
    ),
    Family(
        "NemotronForCausalLM",
        "nemotron",
        {**PLAIN, "activation": "relu2"},
        MLP_BIAS,
        {"partial_rotary_factor": 0.5, "norm_eps": 1e-5, "hidden_act": "relu2"},
        eps="norm_eps",
        biases=True,
        plus_one=True,
        activation="hidden_act",
        free=("rotary_dim",),
        read=_nemotron,
    ),
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        PLAIN,
        DENSE,
        {"norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {"up": "mlp.c_fc", "down": "mlp.c_proj"},
        eps="norm_epsilon",
        activation="hidden_act",
        free=("window",),
        read=every_layer,
        write=every_layer_written,
        holds=_equal_biases,
    ),
    Family(
        "PhiForCausalLM",
        "phi",
        {**PLAIN, **dict.fromkeys(("parallel", "qkv_bias", "out_bias", "mlp_bias", "head_bias"), True)},
        defaults={"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
        layer={"out": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "final_norm": "model.final_layernorm"},
        eps="layer_norm_eps",
        activation="hidden_act",
        free=("rotary_dim",),
        read=_stablelm,
        holds=lambda config: config.head_dim * config.heads == config.dim,
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {**PLAIN, "mlp_bias": True},
        {f"parallel{part}": ("use_parallel_residual", bool, True) for part in ("", "_norms")},
        {"rotary_pct": 0.25, "layer_norm_eps": 1e-5, "attention_bias": True, "hidden_act": "gelu"},
        {
            **{"qkv": "attention.query_key_value", "out": "attention.dense"},
            **{"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "embedding": "gpt_neox.embed_in"},
            **{"blocks": "gpt_neox.layers", "final_norm": "gpt_neox.final_layer_norm", "heads": "embed_out"},
        },
        merged=("qkv",),
        by_head=True,
        keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        eps="layer_norm_eps",
        biases=True,
        activation="hidden_act",
        free=("rotary_dim",),
        holds=lambda config: _of_one_size(config) and config.parallel == config.parallel_norms,
    ),
    Family(
        "GPTJForCausalLM",
        "gptj",
        {**PLAIN, "mlp_bias": True, "parallel": True, "head_bias": True},
        defaults={"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"},
        layer={
            **{"norm1": "ln_1", "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "out": "attn.out_proj"},
            **{"up": "mlp.fc_in", "down": "mlp.fc_out", "embedding": "transformer.wte"},
            **{"blocks": "transformer.h", "final_norm": "transformer.ln_f"},
        },
        keys=GPTJ_KEYS,
        interleaved=True,
        eps="layer_norm_epsilon",
        activation="activation_function",
        free=("rotary_dim",),
        read=_gptj,
        write=lambda config: {"rotary_dim": config.rotary_dim or config.head_dim},
        holds=_of_one_size,
    ),
    Family(
        "OPTForCausalLM",
        "opt",
        {**PLAIN, "learned_positions": True, "no_rope_every": 1},
        {ours: ("enable_bias", bool, True) for ours in DENSE},
        {"tie_word_embeddings": True, "activation_function": "relu", "layer_norm_eps": 1e-5},
        {
            **{"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm", "out": "self_attn.out_proj"},
            **{"up": "fc1", "down": "fc2", "embedding": "model.decoder.embed_tokens"},
            **{"positions": "model.decoder.embed_positions", "blocks": "model.decoder.layers"},
            **{"final_norm": "model.decoder.final_layer_norm", "project_in": "model.decoder.project_in"},
            "project_out": "model.decoder.project_out",
        },
        keys={"intermediate_size": "ffn_dim"},
        eps="layer_norm_eps",
        activation="activation_function",
        free=("norms", "embedding_dim"),
        read=_opt,
        write=_opt_written,
        holds=_opt_holds,
    ),
)
BY_NAME = {family.architecture: family for family in FAMILIES}


def family_of(config: Config) -> Family:
    """The family that a config is written as: its own, or the first that has its options. UserError if none has."""
    for family in FAMILIES:
        if family.kind == config.family or (not config.family and family.fits(config)):
            return family
    raise UserError(
        f"no Hugging Face architecture has just these options: {', '.join(config.options()) or config.family}; keep "
        "the model in our own format"
    )
