"""GPT-2 in Hugging Face's names and layout.

Its linear maps are `Conv1D`, whose weights are the transposes of ours. It always has biases: a model without them is
written with zeros, which changes no output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyforge.errors import UserError
from tinyforge.layout import Entry, Fields, read_fields, require, setting, write_fields
from tinyforge.models.gpt2.config import Config

FIELDS: Fields = {
    "dim": ("n_embd", int),
    "heads": ("n_head", int),
    "layers": ("n_layer", int),
    "context": ("n_positions", int),
    "vocab": ("vocab_size", int),
    "dropout": ("resid_pdrop", float, 0.1),
    "norm_eps": ("layer_norm_epsilon", float, 1e-5),
}
PREFIX = "transformer."
IGNORED = r".*\.attn\.(masked_)?bias"  # the causal mask, which older files hold


def read_config(given: Mapping[str, Any]) -> Config:
    require(given, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    require(given, "scale_attn_weights", True)
    require(given, "scale_attn_by_inverse_layer_idx", False)
    require(given, "add_cross_attention", False)
    require(given, "tie_word_embeddings", True)
    dim = setting(given, "n_embd", int)
    if (inner := setting(given, "n_inner", int, 4 * dim)) != 4 * dim:
        raise UserError(f"config.json: n_inner is {inner}; supported: 4 n_embd, {4 * dim}")
    return Config(**read_fields(given, FIELDS))


def write_config(config: Config) -> dict[str, Any]:
    dropout = {name: config.dropout for name in ("embd_pdrop", "attn_pdrop")}
    fixed = {"activation_function": "gelu_new", "tie_word_embeddings": True}
    kind = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    return kind | fixed | write_fields(config, FIELDS) | dropout


def entries(config: Config) -> Iterator[Entry]:
    c = config

    def linear(theirs: str, ours: str, inputs: int, outputs: int) -> Iterator[Entry]:
        yield Entry(f"{theirs}.weight", (inputs, outputs), f"{ours}.weight", transposed=True)
        yield Entry(f"{theirs}.bias", (outputs,), f"{ours}.bias" if c.bias else "")

    def norm(theirs: str, ours: str) -> Iterator[Entry]:
        yield Entry(f"{theirs}.weight", (c.dim,), f"{ours}.weight")
        yield Entry(f"{theirs}.bias", (c.dim,), f"{ours}.bias" if c.bias else "")

    yield Entry("transformer.wte.weight", (c.vocab, c.dim), "embedding.weight")
    yield Entry("transformer.wpe.weight", (c.context, c.dim), "positions.weight")
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        yield from norm(f"{theirs}.ln_1", f"{ours}.norm1")
        yield from linear(f"{theirs}.attn.c_attn", f"{ours}.qkv", c.dim, 3 * c.dim)
        yield from linear(f"{theirs}.attn.c_proj", f"{ours}.out", c.dim, c.dim)
        yield from norm(f"{theirs}.ln_2", f"{ours}.norm2")
        yield from linear(f"{theirs}.mlp.c_fc", f"{ours}.up", c.dim, 4 * c.dim)
        yield from linear(f"{theirs}.mlp.c_proj", f"{ours}.down", 4 * c.dim, c.dim)
    yield from norm("transformer.ln_f", "final_norm")
