"""A MoE with Hugging Face's names: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, gpt-oss. All but the experts is laid out as
in Llama.

Files hold an expert's matrices separately: gate, up and down, which Mixtral calls w1, w3 and w2. Here the experts of a
layer are one array, with gate and up as one matrix. transformers merges them likewise when it reads, and splits them
when it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tinyforge.errors import UserError
from tinyforge.layout import Entry, Fields, Given, read_fields, require, write_fields
from tinyforge.models.llama import hf as llama
from tinyforge.models.llama.families import (
    BIASES,
    BY_NAME,
    DIVIDED,
    EVERY_LAYER,
    NO_PADDING,
    Family,
    Part,
    qwen_windows,
    sliding,
    windows,
)
from tinyforge.models.llama.rope import SLIDING, rope_parameters
from tinyforge.models.moe.config import Config
from tinyforge.ops.mixture_biased import ALPHA
from tinyforge.report import count_of

PREFIX, IGNORED = llama.PREFIX, llama.IGNORED
NEVER_0 = ("shared", "clamp")
"""Options that no model of an architecture with them has as 0: that is the number of one without the part."""


@dataclass(frozen=True)
class Experts:
    """What an architecture calls its experts. base: all but them. hidden: the key of their width. block: the
    layer's name. names: of gate, up and down; empty for gpt-oss, where all experts are one tensor. count: the key
    and the default of their number, and the default of the active ones. options: further fields."""

    base: Family
    hidden: str
    block: str
    names: tuple[str, ...]
    count: tuple[str, int, int]
    options: Fields = field(default_factory=dict)

    @property
    def fields(self) -> Fields:
        key, experts, active = self.count
        return {
            "hidden": (self.hidden, int),
            "experts": (key, int, experts),
            "active": ("num_experts_per_tok", int, active),
            "balance": ("router_aux_loss_coef", float, 0.001),
            **self.options,
        }

    def fits(self, config: Config) -> bool:
        """Whether it has all options of the config, and the config all parts that it has."""
        parts = all((getattr(config, name) > 0) == (name in self.options) for name in NEVER_0)
        return self.base.fits(config) and parts and (config.normalised or "normalised" in self.options)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NORMALISED: Fields = {"normalised": ("norm_topk_prob", bool, False)}
_SHARED: Fields = {"shared": ("shared_expert_intermediate_size", int)}
_QWEN: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], **NO_PADDING}
_MIXTRAL = Family("MixtralForCausalLM", "mixtral", (EVERY_LAYER,))
_QWEN2 = replace(
    BY_NAME["Qwen2ForCausalLM"],
    architecture="Qwen2MoeForCausalLM",
    kind="qwen2_moe",
    parts=(qwen_windows(lambda i, first: i < first and i % 2 == 0), DIVIDED),
    fields={"qkv_bias": ("qkv_bias", bool, True)},
    fixed={},
    says=_QWEN,
)
_QWEN3 = replace(
    BY_NAME["Qwen3ForCausalLM"],
    architecture="Qwen3MoeForCausalLM",
    kind="qwen3_moe",
    parts=(
        Part(
            ("window",),
            lambda given: windows(given, [SLIDING]) if given.get("use_sliding_window") else {},
            lambda config: {"use_sliding_window": config.window > 0, "sliding_window": config.window},
        ),
    ),
    defaults={},
    says=_QWEN,
)
_GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    (sliding(2), Part(write=lambda config: {"rope_parameters": rope_parameters(config), "rope_scaling": None})),
    fields=BIASES,
    fixed={"sinks": True},
    defaults={
        **{"rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "head_dim": 64, "rope_theta": 150000.0},
        **{"num_key_value_heads": 8, "swiglu_limit": 7.0},
        "rope_scaling": {  # where the file says nothing
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    },
    only={"swiglu_alpha": (ALPHA,)},
    says={"swiglu_alpha": ALPHA, **NO_PADDING},
)
_OLMOE = Family(
    "OlmoeForCausalLM",
    "olmoe",
    fields=BIASES,
    fixed={"qk_norm": True, "qk_norm_width": True},
    defaults={"rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.01},
    says=NO_PADDING,
)
ARCHITECTURES = {
    experts.base.architecture: experts
    for experts in (
        Experts(_MIXTRAL, "intermediate_size", "block_sparse_moe", ("w1", "w3", "w2"), ("num_local_experts", 8, 2)),
        Experts(
            *(_QWEN2, "moe_intermediate_size", "mlp", _PROJECTIONS, ("num_experts", 60, 4)), {**_NORMALISED, **_SHARED}
        ),
        Experts(*(_QWEN3, "moe_intermediate_size", "mlp", _PROJECTIONS, ("num_experts", 128, 8), _NORMALISED)),
        Experts(
            *(_GPT_OSS, "intermediate_size", "mlp", (), ("num_local_experts", 128, 4)),
            {"clamp": ("swiglu_limit", float, 7.0)},
        ),
        Experts(_OLMOE, "intermediate_size", "mlp", _PROJECTIONS, ("num_experts", 64, 8), _NORMALISED),
    )
}


def read_config(given: Mapping[str, Any]) -> Config:
    architecture = given["architectures"][0]
    experts = ARCHITECTURES[architecture]
    require(given, "router_jitter_noise", 0.0, 0)
    require(given, "decoder_sparse_step", 1)
    require(given, "mlp_only_layers", None, [])
    require(given, "clip_qkv", None)
    also = {"intermediate_size": given.get(experts.hidden), "num_experts": given.get("num_local_experts")}
    given = Given((given, also))
    shared = asdict(llama.read_config(given, experts.base))
    own = read_fields(Given((given, experts.base.defaults)), experts.fields)
    config = Config(**{**shared, **own, "router_z": 0.0, "mtp_heads": 1, "mtp_weights": (1.0,)})
    for name in NEVER_0:
        if name in experts.options and not getattr(config, name):
            raise UserError(f"config.json: {experts.options[name][0]} is 0, expected more than 0 for {architecture}")
    return config


def experts_of(config: Config) -> Experts:
    """The first that has the options of the config. UserError if none has."""
    for experts in ARCHITECTURES.values():
        if experts.fits(config):
            return experts
    options = [*config.options(), *["weights that are not normalised"] * (not config.normalised)]
    options += ["a shared expert"] * (config.shared > 0)
    raise UserError(f"no Hugging Face mixture of experts has {', '.join(options)}; keep the model in our own format")


def write_config(config: Config) -> dict[str, Any]:
    experts = experts_of(config)
    return {**llama.write_config(config, experts.base), **write_fields(config, experts.fields)}


def entries(config: Config) -> Iterator[Entry]:
    c, experts = config, experts_of(config)
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
