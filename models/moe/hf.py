"""A MoE with Hugging Face's names: a MixtralForCausalLM. All but the experts is laid out as in Llama.

Files hold an expert's matrices separately: w1 is the gate, w3 up, w2 down. Here the experts of a layer are one array,
with gate and up as one matrix. transformers merges them likewise when it reads, and splits them when it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tinyforge.errors import UserError
from tinyforge.layout import Entry, require, setting
from tinyforge.models.llama import hf as llama
from tinyforge.models.moe.config import Config
from tinyforge.report import count_of

PREFIX, IGNORED = llama.PREFIX, llama.IGNORED


def read_config(given: Mapping[str, Any]) -> Config:
    require(given, "router_jitter_noise", 0.0, 0)
    shared = asdict(llama.read_config(given))
    return Config(
        **shared
        | {
            "window": setting(given, "sliding_window", int, 0),
            "experts": setting(given, "num_local_experts", int, 8),
            "active": setting(given, "num_experts_per_tok", int, 2),
            "balance": setting(given, "router_aux_loss_coef", float, 0.001),
            "router_z": 0.0,
            "mtp_heads": 1,
            "mtp_weights": (1.0,),
        }
    )


def write_config(config: Config) -> dict[str, Any]:
    if config.qkv_bias or config.qk_norm:
        raise UserError("MixtralForCausalLM has neither qkv_bias nor qk_norm; keep the model in our own format")
    return {
        **llama.write_config(config),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": config.window or None,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.active,
        "router_aux_loss_coef": config.balance,
    }


def entries(config: Config) -> Iterator[Entry]:
    c = config
    for entry in llama.entries(config):
        at, found, tensor = entry.theirs.partition(".mlp.")
        if not found:
            yield entry
        elif tensor == "down_proj.weight":  # the last of Llama's feed-forward layer: here the experts are
            layer, theirs = entry.ours.rpartition(".down")[0], f"{at}.block_sparse_moe"
            yield Entry(f"{theirs}.gate.weight", (c.experts, c.dim), f"{layer}.gate.weight")
            for e in range(c.experts):
                for name, rows in (("w1", slice(0, c.hidden)), ("w3", slice(c.hidden, 2 * c.hidden))):
                    yield Entry(
                        f"{theirs}.experts.{e}.{name}.weight", (c.hidden, c.dim), f"{layer}.gate_up.weight", (e, rows)
                    )
                yield Entry(f"{theirs}.experts.{e}.w2.weight", (c.dim, c.hidden), f"{layer}.down.weight", e)


def left_out(config: Config) -> str:
    extra = config.mtp_heads - 1
    return f"the {count_of(extra, 'later output head')}: Mixtral predicts one token" if extra else ""
