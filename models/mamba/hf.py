"""Mamba in Hugging Face's names and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyforge.layout import Entry, Fields, read_fields, require, setting, write_fields
from tinyforge.models.mamba.config import Config

FIELDS: Fields = {
    "dim": ("hidden_size", int),
    "layers": ("num_hidden_layers", int),
    "state": ("state_size", int, 16),
    "taps": ("conv_kernel", int, 4),
    "context": ("max_position_embeddings", int, 2048),  # theirs has no limit; it was trained on 2,048
    "vocab": ("vocab_size", int),
    "norm_eps": ("layer_norm_epsilon", float, 1e-5),
}
PREFIX = "backbone."
IGNORED = r"(?!)"  # nothing


def read_config(given: Mapping[str, Any]) -> Config:
    require(given, "hidden_act", "silu")
    require(given, "use_bias", False)
    require(given, "use_conv_bias", True)
    require(given, "tie_word_embeddings", True)
    dim, rank = setting(given, "hidden_size", int), given.get("time_step_rank")
    channels = setting(given, "intermediate_size", int, setting(given, "expand", int, 2) * dim)
    rank = 0 if rank in (None, "auto") else setting(given, "time_step_rank", int)
    return Config(expand=channels // max(dim, 1), rank=rank, **read_fields(given, FIELDS))


def write_config(config: Config) -> dict[str, Any]:
    kind = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_act": "silu"}
    fixed = {"use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True}
    sizes = {"expand": config.expand, "intermediate_size": config.channels, "time_step_rank": config.step_rank}
    return kind | write_fields(config, FIELDS) | sizes | fixed


def entries(config: Config) -> Iterator[Entry]:
    c = config
    channels, rank = c.channels, c.step_rank
    yield Entry("backbone.embeddings.weight", (c.vocab, c.dim), "embedding.weight")
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"backbone.layers.{i}"
        yield Entry(f"{theirs}.norm.weight", (c.dim,), f"{ours}.norm.weight")
        for name, shape, place in (
            ("A_log", (channels, c.state), "scan.a_log"),
            ("D", (channels,), "scan.skip"),
            ("conv1d.weight", (channels, 1, c.taps), "conv.weight"),
            ("conv1d.bias", (channels,), "conv.bias"),
            ("in_proj.weight", (2 * channels, c.dim), "input.weight"),
            ("x_proj.weight", (rank + 2 * c.state, channels), "select.weight"),
            ("dt_proj.weight", (channels, rank), "step.weight"),
            ("dt_proj.bias", (channels,), "scan.bias"),
            ("out_proj.weight", (c.dim, channels), "out.weight"),
        ):
            yield Entry(f"{theirs}.mixer.{name}", shape, f"{ours}.{place}")
    yield Entry("backbone.norm_f.weight", (c.dim,), "final_norm.weight")
