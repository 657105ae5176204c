"""The published architectures that are options of Llama's block: how each names them in config.json and in its files.

A family is an entry of `FAMILIES`, and a peer in tests/formats/test_parity.py. An option that is one key of config.json
is an entry of its `fields`; what takes more than a key is a `Part`, which several families may share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.layout import Fields, is_null, read_fields, require, setting, write_fields
from tinyforge.models.llama.config import Config
from tinyforge.models.llama.rope import FULL, SLIDING, rope_parameters

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
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "swish": "silu"}
"""Ours by Hugging Face's names; of several, the first is written."""


@dataclass(frozen=True)
class Part:
    """Options of a family that are more than a key each. options: their names. read(given), write(config): from
    config.json, and the reverse. holds: whether config.json can say the config's values of them."""

    options: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda given: {}
    write: Callable[[Config], dict[str, Any]] = lambda config: {}
    holds: Callable[[Config], bool] = lambda config: True


@dataclass(frozen=True)
class Family:
    """A published architecture. architecture, kind: its name and its model_type in config.json. parts, fields: its
    options; several fields of one key have one value. fixed: options that all its models have. defaults: of keys that
    are absent in config.json. only: the values of a key that can be read, the first of them the default. says: what is
    written for every model. keys: of config.json, by Llama's. eps: the key of norm_eps. layer: names of tensors where
    they differ from `LAYER`. merged: which of qkv and gate_up are one tensor; by_head: qkv has the queries, keys and
    values of a head next to each other. interleaved: rotary pairs are neighbours. plus_one: a norm's gain is 1 and
    what the files have.
    """

    architecture: str
    kind: str
    parts: tuple[Part, ...] = ()
    fields: Fields = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    says: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    layer: Mapping[str, str] = field(default_factory=dict)
    merged: tuple[str, ...] = ()
    by_head: bool = False
    interleaved: bool = False
    plus_one: bool = False

    def kin(self, architecture: str, kind: str, *parts: Part, **more: Any) -> Family:
        """A family that has what this one has, and more."""
        own: dict[str, Any] = {name: {**getattr(self, name), **value} for name, value in more.items()}
        return replace(self, architecture=architecture, kind=kind, parts=(*self.parts, *parts), **own)

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for name, values in self.only.items():
            require(given, name, *values)
        found = {**self.fixed, **read_fields(given, self.fields)}
        for part in self.parts:
            found |= part.read(given)
        return found

    def written(self, config: Config) -> dict[str, Any]:
        found = {**self.says, **write_fields(config, self.fields)}
        for part in self.parts:
            found |= part.write(config)
        return found

    @property
    def known(self) -> set[str]:
        """The options that it has."""
        return {*self.fixed, *self.fields, *(name for part in self.parts for name in part.options)}

    def lacks(self, config: Config) -> list[str]:
        """The config's options that it cannot have."""
        return [name for name in config.options() if name not in self.known]

    def fits(self, config: Config) -> bool:
        """Whether it has all options of the config, and the config all of its fixed ones."""
        fixed = all(getattr(config, name) == value for name, value in self.fixed.items())
        values = {(key, getattr(config, ours)) for ours, (key, *_) in self.fields.items()}
        one_a_key = len(values) == len({key for key, _ in values})
        return fixed and one_a_key and not self.lacks(config) and all(part.holds(config) for part in self.parts)


def activation(key: str, default: str) -> Part:
    def read(given: Mapping[str, Any]) -> dict[str, str]:
        require(given, key, *ACTIVATIONS)
        return {"activation": ACTIVATIONS[setting(given, key, str, default)]}

    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())} | {ACTIVATIONS[default]: default}
    return Part(("activation",), read, lambda config: {key: names[config.activation]})


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


def sliding(every: int) -> Part:
    """Of so many layers the last has no window, where config.json does not say it; 0: all have it."""

    def read(given: Mapping[str, Any]) -> dict[str, int]:
        period = setting(given, "sliding_window_pattern", int, every)
        return windows(given, layer_kinds(given, lambda i: not period or (i + 1) % period > 0))

    return Part(WINDOWS, read, written_windows)


def qwen_windows(usual: Callable[[int, int], bool]) -> Part:
    """usual(i, max_window_layers): whether layer i has the window, where config.json does not say it."""

    def read(given: Mapping[str, Any]) -> dict[str, int]:
        first = setting(given, "max_window_layers", int, 28)
        kinds = layer_kinds(given, lambda i: usual(i, first))
        return windows(given, kinds) if given.get("use_sliding_window") else {}

    def written(config: Config) -> dict[str, Any]:
        found = {"use_sliding_window": config.window > 0, "max_window_layers": 0}
        return found | (written_windows(config) if config.window else {})

    return Part(WINDOWS, read, written)


def _cohere2(given: Mapping[str, Any]) -> dict[str, Any]:
    """Layers without a window have no RoPE."""
    found = sliding(4).read(given)
    return {**found, "no_rope_every": found.get("full_every", 1)}


def _cohere2_holds(config: Config) -> bool:
    return bool(config.no_rope_every or config.window) and _exaone4_holds(config)


def _exaone4(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same, but a model without windows has RoPE."""
    return {} if is_null(given, "sliding_window") else _cohere2(given)


def _exaone4_written(config: Config) -> dict[str, Any]:
    window = config.window if config.window or config.no_rope_every else None
    return {**written_windows(config), "sliding_window": window, "sliding_window_pattern": config.full_every or 4}


def _exaone4_holds(config: Config) -> bool:
    return config.no_rope_every == config.full_every if config.window else config.no_rope_every in (0, 1)


WINDOWS = ("window", "full_every")
QWEN_WINDOWS = qwen_windows(lambda i, first: i >= first)
EVERY_LAYER = Part(
    ("window",),
    lambda given: {"window": setting(given, "sliding_window", int, 0)},
    lambda config: {"sliding_window": config.window or None},
)
"""Mistral's window, in all layers."""


# --- rotary positions -------------------------------------------------------------------------------------------------


def local_theta(key: str, write: Callable[[Config], dict[str, Any]]) -> Part:
    """rope_theta of the layers with a window. key: of files without rope_parameters of them."""

    def read(given: Mapping[str, Any]) -> dict[str, float]:
        rope, name = given.get("rope_parameters"), key
        if isinstance(rope, dict) and isinstance(rope.get(SLIDING), dict):
            given, name = rope[SLIDING], "rope_theta"
            require(given, "rope_type", "default")
        return {"local_rope_theta": setting(given, name, float, 10000.0)}

    return Part(("local_rope_theta",), read, write, lambda config: config.local_rope_theta > 0)


def _olmo3_rope(config: Config) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta}
    return {"rope_parameters": {SLIDING: local, FULL: rope_parameters(config)}, "rope_scaling": None}


def _smollm3(given: Mapping[str, Any]) -> dict[str, Any]:
    layers = min(setting(given, "num_hidden_layers", int), 1 << 10)
    require(given, "layer_types", None, [FULL] * layers)
    every = setting(given, "no_rope_layer_interval", int, 4)
    ropes = given.get("no_rope_layers") or [int((i + 1) % max(every, 1) != 0) for i in range(layers)]
    if not isinstance(ropes, list) or not all(rope in (0, 1) for rope in ropes):
        raise UserError(f"config.json: no_rope_layers is {ropes!r:.80}, expected a list of 0 and 1")
    every = ropes.index(0) + 1 if 0 in ropes else 0
    if every and any(rope != ((i + 1) % every > 0) for i, rope in enumerate(ropes)):
        raise UserError("config.json: no_rope_layers has no regular order; supported: none, or every n-th layer")
    return {"no_rope_every": every}


def _smollm3_written(config: Config) -> dict[str, Any]:
    return {"no_rope_layers": [int(config.has_rope(i)) for i in range(config.layers)]}


def _gptj(given: Mapping[str, Any]) -> dict[str, Any]:
    size = setting(given, "n_embd", int) // max(setting(given, "n_head", int), 1)
    turned = size if is_null(given, "rotary_dim") else setting(given, "rotary_dim", int, 64)
    return {"rotary_dim": 0 if turned == size else turned}


ROTARY = Part(("rotary_dim",))
"""A part of a head is rotated, by Llama's key or that of `Family.keys`."""


# --- sizes and scales -------------------------------------------------------------------------------------------------


def _check_divided(config: Config) -> dict[str, Any]:
    if not _is_divided(config):
        raise UserError(
            f"this architecture has head_dim = dim / heads, the model {config.head_dim}; keep it in our own format"
        )
    return {}


def _is_divided(config: Config) -> bool:
    return config.head_dim * config.heads == config.dim


def _of_one_size(config: Config) -> bool:
    return _is_divided(config) and config.kv_heads == config.heads


def _gemma_scale(dim: int) -> float:
    """sqrt(dim) in float32, as transformers and llama.cpp have it."""
    return float(np.float32(max(dim, 0) ** 0.5))


def _score_scale(given: Mapping[str, Any]) -> dict[str, Any]:
    scalar = setting(given, "query_pre_attn_scalar", float, 256.0)
    if scalar <= 0:
        raise UserError(f"config.json: query_pre_attn_scalar is {scalar}, expected a number above 0")
    return {"attention_scale": scalar**-0.5}


def _score_scale_written(config: Config) -> dict[str, Any]:
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    whole = round(scalar)
    return {"query_pre_attn_scalar": whole if whole**-0.5 == config.attention_scale else scalar}


def softcap(ours: str, key: str, default: float) -> Part:
    """null is none, and an absent key the published models' number."""
    return Part(
        (ours,),
        lambda given: {ours: setting(given, key, float, 0.0 if is_null(given, key) else default)},
        lambda config: {key: getattr(config, ours) or None},
    )


def _granite(given: Mapping[str, Any]) -> dict[str, float]:
    divisor = setting(given, "logits_scaling", float, 1.0)
    if min(divisor, setting(given, "attention_multiplier", float, 1.0)) <= 0:
        raise UserError("config.json: logits_scaling and attention_multiplier are not above 0; get the file again")
    return {"logit_scale": 1 / divisor}


def _opt(given: Mapping[str, Any]) -> dict[str, Any]:
    dim, before = setting(given, "hidden_size", int), setting(given, "do_layer_norm_before", bool, True)
    width = setting(given, "word_embed_proj_dim", int, dim)
    return {"norms": "before" if before else "sum", "embedding_dim": 0 if width == dim else width}


def _opt_written(config: Config) -> dict[str, Any]:
    return {"do_layer_norm_before": config.norms == "before", "word_embed_proj_dim": config.embedding_width}


EMBEDDING_SCALE = Part(
    ("embedding_scale",),
    lambda given: {"embedding_scale": _gemma_scale(setting(given, "hidden_size", int))},
    holds=lambda config: config.embedding_scale == _gemma_scale(config.dim),
)
SCORE_SCALE = Part(("attention_scale",), _score_scale, _score_scale_written)
DIVIDED = Part(write=_check_divided)
"""Heads of dim / heads, in a family in whose stead no other is tried."""
ONE_SIZE = Part(holds=_of_one_size)
"""Heads of dim / heads, as many for keys as for queries."""


# --- families ---------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"norm": "layer", "norm_bias": True, "gated": False}
"""GPT-2's parts: LayerNorm, and an MLP without a gate."""
BIASES: Fields = dict.fromkeys(("qkv_bias", "out_bias"), ("attention_bias", bool, False))
MLP_BIAS: Fields = {"mlp_bias": ("mlp_bias", bool, False)}
NO_QK_NORM = {"qk_layernorm": (False,)}


def _dense(key: str) -> Fields:
    """One key for all biases of a layer's linear maps."""
    return dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), (key, bool, True))


_GEMMA = Family(
    "GemmaForCausalLM",
    "gemma",
    (EMBEDDING_SCALE,),
    fixed={"norm_plus_one": True, "activation": "gelu_tanh"},
    defaults={"tie_word_embeddings": True, "head_dim": 256, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    # The first Gemma's files say "gelu" in hidden_act, and mean the formula with tanh.
    only={
        **{"hidden_act": ("gelu_pytorch_tanh", "gelu"), "hidden_activation": ("gelu_pytorch_tanh",)},
        "attention_bias": (False,),
        "use_bidirectional_attention": (False, None),
    },
    says=dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh"),
)
_CAPPED = (
    *(sliding(2), SCORE_SCALE, softcap("attention_softcap", "attn_logit_softcapping", 50.0)),
    softcap("logit_softcap", "final_logit_softcapping", 30.0),
)
_OLMO2 = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    fields=BIASES,
    fixed={"norms": "after", "qk_norm": True, "qk_norm_width": True},
    defaults={"rms_norm_eps": 1e-5},
    says=NO_PADDING,
    layer=AROUND,
)
_GLM = Family(
    "GlmForCausalLM",
    "glm",
    (ROTARY,),
    fields={"qkv_bias": ("attention_bias", bool, True)},
    defaults={"head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
    says=NO_PADDING,
    merged=("gate_up",),
    interleaved=True,
)
_COHERE = Family(
    "CohereForCausalLM",
    "cohere",
    fields={**BIASES, "logit_scale": ("logit_scale", float, 0.0625)},
    fixed={"norm": "layer", "parallel": True},
    defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "sliding_window": 4096},
    only={"use_qk_norm": (False, None)},
    says=NO_PADDING,
    eps="layer_norm_eps",
    interleaved=True,
)

FAMILIES = (
    Family("LlamaForCausalLM", "llama", fields={**BIASES, **MLP_BIAS}),
    Family("MistralForCausalLM", "mistral", (EVERY_LAYER,)),
    Family("Qwen2ForCausalLM", "qwen2", (QWEN_WINDOWS, DIVIDED), fixed={"qkv_bias": True}),
    Family(
        "Qwen3ForCausalLM", "qwen3", (QWEN_WINDOWS,), fields=BIASES, fixed={"qk_norm": True}, defaults={"head_dim": 128}
    ),
    _GEMMA,
    _GEMMA.kin("Gemma2ForCausalLM", "gemma2", *_CAPPED, fixed={"norms": "both"}, layer=AROUND),
    _GEMMA.kin(
        "Gemma3ForCausalLM",
        "gemma3_text",
        *(sliding(6), SCORE_SCALE, softcap("logit_softcap", "final_logit_softcapping", 0.0)),
        local_theta("rope_local_base_freq", lambda config: {"rope_local_base_freq": config.local_rope_theta}),
        fixed={"norms": "both", "qk_norm": True},
        defaults={"rope_theta": 1000000.0},
        says={"attn_logit_softcapping": None},
        layer=AROUND,
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        (
            *(EVERY_LAYER, ROTARY, DIVIDED),
            Part(write=lambda config: {"original_max_position_embeddings": config.original_context}),
        ),
        defaults={"rms_norm_eps": 1e-5},
        says=NO_PADDING,
        merged=("qkv", "gate_up"),
    ),
    _OLMO2,
    _OLMO2.kin(
        "Olmo3ForCausalLM",
        "olmo3",
        *(sliding(4), local_theta("rope_theta", _olmo3_rope)),
        defaults={"sliding_window": 4096},
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        (Part(("no_rope_every",), _smollm3, _smollm3_written),),
        fields={**BIASES, **MLP_BIAS},
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4},
        only={"use_sliding_window": (False,)},
        says={"use_sliding_window": False, **NO_PADDING},
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        (
            Part(
                ("logit_scale",),
                _granite,
                lambda config: {"logits_scaling": 1 / config.logit_scale},
                lambda config: config.attention_scale > 0,
            ),
        ),
        fields={
            **BIASES,
            **MLP_BIAS,
            "embedding_scale": ("embedding_multiplier", float, 1.0),
            "residual_scale": ("residual_multiplier", float, 1.0),
            "attention_scale": ("attention_multiplier", float, 1.0),
        },
    ),
    _GEMMA.kin("VaultGemmaForCausalLM", "vaultgemma", *_CAPPED, layer={"norm2": AROUND["norm2"]}),
    Family("MinistralForCausalLM", "ministral", (sliding(0),), defaults={"sliding_window": 4096}),
    Family(
        "SeedOssForCausalLM",
        "seed_oss",
        fields={
            **MLP_BIAS,
            "qkv_bias": ("attention_bias", bool, True),
            "out_bias": ("attention_out_bias", bool, False),
        },
        defaults={"head_dim": 128},
        says=NO_PADDING,
    ),
    Family(
        "Exaone4ForCausalLM",
        "exaone4",
        (Part((*WINDOWS, "no_rope_every"), _exaone4, _exaone4_written, _exaone4_holds),),
        fixed={"norms": "after", "qk_norm": True},
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        layer=AROUND,
    ),
    _GLM,
    _GLM.kin(
        "Glm4ForCausalLM",
        "glm4",
        fixed={"norms": "both"},
        layer={"attention_norm": "post_self_attn_layernorm", "mlp_norm": "post_mlp_layernorm"},
    ),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        (ROTARY,),
        fields={"qkv_bias": ("use_qkv_bias", bool, False), "parallel": ("use_parallel_residual", bool, False)},
        fixed={"norm": "layer", "norm_bias": True},
        defaults={"layer_norm_eps": 1e-5, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
        only=NO_QK_NORM,
        eps="layer_norm_eps",
    ),
    _COHERE,
    _COHERE.kin(
        "Cohere2ForCausalLM", "cohere2", Part((*WINDOWS, "no_rope_every"), _cohere2, written_windows, _cohere2_holds)
    ),
    Family(
        "NemotronForCausalLM",
        "nemotron",
        (ROTARY,),
        fields={**BIASES, **MLP_BIAS},
        fixed={**PLAIN, "activation": "relu2"},
        defaults={"partial_rotary_factor": 0.5, "norm_eps": 1e-5},
        only={"hidden_act": ("relu2",)},
        says={"hidden_act": "relu2"},
        eps="norm_eps",
        plus_one=True,
    ),
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        (EVERY_LAYER, activation("hidden_act", "gelu_pytorch_tanh")),
        fields=_dense("use_bias"),
        fixed=PLAIN,
        defaults={"norm_epsilon": 1e-5, "tie_word_embeddings": True},
        eps="norm_epsilon",
        layer={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    Family(
        "PhiForCausalLM",
        "phi",
        (ROTARY, activation("hidden_act", "gelu_new"), Part(holds=_is_divided)),
        fixed={**PLAIN, **dict.fromkeys(("parallel", "qkv_bias", "out_bias", "mlp_bias", "head_bias"), True)},
        defaults={"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
        only=NO_QK_NORM,
        eps="layer_norm_eps",
        layer={"out": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "final_norm": "model.final_layernorm"},
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        (ROTARY, activation("hidden_act", "gelu"), ONE_SIZE),
        fields={**BIASES, **dict.fromkeys(("parallel", "parallel_norms"), ("use_parallel_residual", bool, True))},
        fixed={**PLAIN, "mlp_bias": True},
        defaults={"rotary_pct": 0.25, "layer_norm_eps": 1e-5, "attention_bias": True},
        keys={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        eps="layer_norm_eps",
        layer={
            **{"qkv": "attention.query_key_value", "out": "attention.dense"},
            **{"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "embedding": "gpt_neox.embed_in"},
            **{"blocks": "gpt_neox.layers", "final_norm": "gpt_neox.final_layer_norm", "heads": "embed_out"},
        },
        merged=("qkv",),
        by_head=True,
    ),
    Family(
        "GPTJForCausalLM",
        "gptj",
        (
            *(activation("activation_function", "gelu_new"), ONE_SIZE),
            Part(("rotary_dim",), _gptj, lambda config: {"rotary_dim": config.rotary_dim or config.head_dim}),
        ),
        fixed={**PLAIN, "mlp_bias": True, "parallel": True, "head_bias": True},
        defaults={"layer_norm_epsilon": 1e-5},
        keys={
            **{"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
            **{"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
        },
        eps="layer_norm_epsilon",
        layer={
            **{"norm1": "ln_1", "q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "out": "attn.out_proj"},
            **{"up": "mlp.fc_in", "down": "mlp.fc_out", "embedding": "transformer.wte"},
            **{"blocks": "transformer.h", "final_norm": "transformer.ln_f"},
        },
        interleaved=True,
    ),
    Family(
        "OPTForCausalLM",
        "opt",
        (
            *(activation("activation_function", "relu"), ONE_SIZE),
            Part(("norms", "embedding_dim"), _opt, _opt_written, lambda config: config.norm_eps == 1e-5),
        ),
        fields=_dense("enable_bias"),
        fixed={**PLAIN, "learned_positions": True, "no_rope_every": 1},
        defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5},
        only={"_remove_final_layer_norm": (False,), "layer_norm_elementwise_affine": (True,)},
        says=NO_PADDING,
        keys={"intermediate_size": "ffn_dim"},
        eps="layer_norm_eps",
        layer={
            **{"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm", "out": "self_attn.out_proj"},
            **{"up": "fc1", "down": "fc2", "embedding": "model.decoder.embed_tokens"},
            **{"positions": "model.decoder.embed_positions", "blocks": "model.decoder.layers"},
            **{"final_norm": "model.decoder.final_layer_norm", "project_in": "model.decoder.project_in"},
            "project_out": "model.decoder.project_out",
        },
    ),
)
BY_NAME = {family.architecture: family for family in FAMILIES}


def family_of(config: Config) -> Family:
    """The family that a config is written as: its own, or the first that has its options. UserError if none has."""
    for family in FAMILIES:
        if config.family in ("", family.kind) and family.fits(config):
            return family
    raise UserError(
        f"no Hugging Face architecture has just these options: {', '.join(config.options()) or config.family}; keep "
        "the model in our own format"
    )
