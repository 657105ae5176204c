"""A MoE with Hugging Face's names: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss. All but the experts is laid out as
in Llama.

Files hold an expert's matrices separately: gate, up and down, which Mixtral calls w1, w3 and w2. Here the experts of a
layer are one array, with gate and up as one matrix. transformers merges them likewise when it reads, and splits them
when it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tinyforge.errors import UserError
from tinyforge.layout import Entry, Fields, read_fields, require, setting, write_fields
from tinyforge.models.llama import hf as llama
from tinyforge.models.llama.families import (
    BY_NAME,
    WINDOWS,
    Family,
    Given,
    every_layer,
    every_layer_written,
    layer_kinds,
    windows,
    written_rope,
    written_windows,
)
from tinyforge.models.moe.config import Config
from tinyforge.ops.mixture_biased import ALPHA
from tinyforge.report import count_of

PREFIX, IGNORED = llama.PREFIX, llama.IGNORED


@dataclass(frozen=True)
class Experts:
    """What an architecture calls its experts. base: all but them. hidden: the key of their width. block: the
    layer's name. names: of gate, up and down; empty for gpt-oss, where all experts are one tensor. count: the key
    and the default of their number, and the default of the active ones. shared: the key of the shared expert's
    width."""

    base: Family
    hidden: str
    block: str
    names: tuple[str, ...]
    count: tuple[str, int, int]
    shared: str = ""

    @property
    def fields(self) -> Fields:
        key, experts, active = self.count
        return {
            "hidden": (self.hidden, int),
            "experts": (key, int, experts),
            "active": ("num_experts_per_tok", int, active),
            "balance": ("router_aux_loss_coef", float, 0.001),
            **({"shared": (self.shared, int)} if self.shared else {}),
            **({} if self.names else {"clamp": ("swiglu_limit", float, 7.0)}),
        }


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    {"qk_norm": True, "qk_norm_width": True},
    defaults={"rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.01},
    biases=True,
)
_QWEN2 = replace(BY_NAME["Qwen2ForCausalLM"], fixed={}, fields={"qkv_bias": ("qkv_bias", bool, True)})


def _gpt_oss_written(config: Any) -> dict[str, Any]:
    rope = {**(written_rope(config) or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    return {**written_windows(config), "rope_parameters": rope, "rope_scaling": None}


_GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    {"sinks": True},
    defaults={
        **{"rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "head_dim": 64, "rope_theta": 150000.0},
        **{"num_key_value_heads": 8, "swiglu_limit": 7.0},
        "rope_scaling": {  # where the file says nothing
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    free=WINDOWS,
    biases=True,
    read=lambda given: windows(given, layer_kinds(given, lambda i: i % 2 == 0)),
    write=_gpt_oss_written,
)
_MIXTRAL = Family("MixtralForCausalLM", "mixtral", free=("window",), read=every_layer, write=every_layer_written)
ARCHITECTURES = {
    "MixtralForCausalLM": Experts(
        _MIXTRAL, "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"), ("num_local_experts", 8, 2)
    ),
    "Qwen2MoeForCausalLM": Experts(
        _QWEN2, "moe_intermediate_size", "mlp", _PROJECTIONS, ("num_experts", 60, 4), "shared_expert_intermediate_size"
    ),
    "Qwen3MoeForCausalLM": Experts(
        BY_NAME["Qwen3ForCausalLM"], "moe_intermediate_size", "mlp", _PROJECTIONS, ("num_experts", 128, 8)
    ),
    "GptOssForCausalLM": Experts(_GPT_OSS, "intermediate_size", "mlp", (), ("num_local_experts", 128, 4)),
    "OlmoeForCausalLM": Experts(_OLMOE, "intermediate_size", "mlp", _PROJECTIONS, ("num_experts", 64, 8)),
}


def read_config(given: Mapping[str, Any]) -> Config:
    architecture = given["architectures"][0]
    experts, more = ARCHITECTURES[architecture], {"router_z": 0.0, "mtp_heads": 1, "mtp_weights": (1.0,)}
    require(given, "router_jitter_noise", 0.0, 0)
    require(given, "decoder_sparse_step", 1)
    require(given, "mlp_only_layers", None, [])
    require(given, "clip_qkv", None)
    if not experts.names:
        require(given, "swiglu_alpha", ALPHA)
    elif architecture != "MixtralForCausalLM":
        more["normalised"] = setting(given, "norm_topk_prob", bool, False)
    also = {"intermediate_size": given.get(experts.hidden), "num_experts": given.get("num_local_experts")}
    given = Given((given, also))
    shared = asdict(llama.read_config(given, experts.base))
    config = Config(**shared | read_fields(Given((given, experts.base.defaults)), experts.fields) | more)
    # Where ours is 0 there is no such part, and the model would be one of another architecture.
    for ours, key in (("shared", experts.shared), ("clamp", "" if experts.names else "swiglu_limit")):
        if key and not getattr(config, ours):
            raise UserError(f"config.json: {key} is 0, expected more than 0 for {architecture}")
    return config


def architecture_of(config: Config) -> str:
    """The first that has the options of the config. UserError if none has."""
    for name, experts in ARCHITECTURES.items():
        normalised = config.normalised or name != "MixtralForCausalLM"
        if experts.base.fits(config) and normalised and bool(experts.shared) == (config.shared > 0):
            if bool(experts.names) != (config.clamp == 0):
                continue
            return name
    options = [*config.options(), *["weights that are not normalised"] * (not config.normalised)]
    options += ["a shared expert"] * (config.shared > 0)
    raise UserError(f"no Hugging Face mixture of experts has {', '.join(options)}; keep the model in our own format")


def write_config(config: Config) -> dict[str, Any]:
    name = architecture_of(config)
    experts = ARCHITECTURES[name]
    kind: Any = {"architectures": [name], "model_type": name.removesuffix("ForCausalLM").lower()}
    written = {**llama.write_config(config, experts.base), **kind, **write_fields(config, experts.fields)}
    if not experts.names:
        written |= {"model_type": "gpt_oss", "swiglu_alpha": ALPHA, "pad_token_id": None}
    elif name != "MixtralForCausalLM":
        written |= {"norm_topk_prob": config.normalised, "pad_token_id": None}
    if name.startswith("Qwen"):
        kind = name.removesuffix("MoeForCausalLM").lower() + "_moe"
        written |= {"model_type": kind, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return written


def entries(config: Config) -> Iterator[Entry]:
    c, experts = config, ARCHITECTURES[architecture_of(config)]
    gate, up, down = experts.names or ("", "", "")
    for entry in llama.entries(config, experts.base):
        at, found, tensor = entry.theirs.partition(".mlp.")
        if not found:
            yield entry
        elif tensor == "down_proj.weight":  # the last of Llama's feed-forward layer: here the experts are
            layer, theirs = entry.ours.rpartition(".down")[0], f"{at}.{experts.block}"
            if not experts.names:
                yield Entry(f"{theirs}.router.weight", (c.experts, c.dim), f"{layer}.gate.weight")
                yield Entry(f"{theirs}.router.bias", (c.experts,), f"{layer}.gate.bias")
                for name, outputs, inputs in (("gate_up", 2 * c.hidden, c.dim), ("down", c.dim, c.hidden)):
                    at, shape = f"{theirs}.experts.{name}_proj", (c.experts, inputs, outputs)
                    yield Entry(at, shape, f"{layer}.{name}.weight", transposed=True)
                    yield Entry(f"{at}_bias", (c.experts, outputs), f"{layer}.{name}.bias")
                continue
            yield Entry(f"{theirs}.gate.weight", (c.experts, c.dim), f"{layer}.gate.weight")
            for e in range(c.experts):
                for name, rows in ((gate, slice(0, c.hidden)), (up, slice(c.hidden, 2 * c.hidden))):
                    yield Entry(
                        f"{theirs}.experts.{e}.{name}.weight", (c.hidden, c.dim), f"{layer}.gate_up.weight", (e, rows)
                    )
                yield Entry(f"{theirs}.experts.{e}.{down}.weight", (c.dim, c.hidden), f"{layer}.down.weight", e)
            if c.shared:
                at = f"{theirs}.shared_expert"
                for name, rows in ((gate, slice(0, c.shared)), (up, slice(c.shared, 2 * c.shared))):
                    yield Entry(f"{at}.{name}.weight", (c.shared, c.dim), f"{layer}.shared_up.weight", rows)
                yield Entry(f"{at}.{down}.weight", (c.dim, c.shared), f"{layer}.shared_down.weight")
                yield Entry(f"{at}_gate.weight", (1, c.dim), f"{layer}.shared_gate.weight")


def left_out(config: Config) -> str:
    extra = config.mtp_heads - 1
    return f"the {count_of(extra, 'later output head')}: such a model predicts one token" if extra else ""
