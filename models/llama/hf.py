"""Llama and its kin in Hugging Face's names and layout.

Queries, keys and values are one matrix here, rows in this order, and so are gate and up. Rotary halves, (x_i, x_i+D/2),
are Hugging Face's own layout: no row moves. families.py has what the architectures differ in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.layout import Entry, Fields, Given, read_fields, require, setting, write_fields
from tinyforge.models.llama.config import Config
from tinyforge.models.llama.families import BY_NAME, LAYER, Family, family_of
from tinyforge.models.llama.rope import read_rope, written_rope

FIELDS: Fields = {
    "dim": ("hidden_size", int),
    "hidden": ("intermediate_size", int),
    "layers": ("num_hidden_layers", int),
    "heads": ("num_attention_heads", int),
    "vocab": ("vocab_size", int),
    "context": ("max_position_embeddings", int),
    "norm_eps": ("rms_norm_eps", float, 1e-6),
    "tied": ("tie_word_embeddings", bool, False),
}
PREFIX = ("model.", "gpt_neox.", "transformer.")
IGNORED = r".*\.rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias|.*\.attention\.(masked_)?bias"  # causal masks too


def read_config(given: Mapping[str, Any], family: Family | None = None) -> Config:
    """family: of the options, if it is not that of config.json's architecture."""
    architecture, own = given["architectures"][0], family is None
    family = family or BY_NAME[architecture]
    given = Given((given, family.defaults))
    if family.keys:
        given = Given((*given.maps, {ours: given.get(theirs) for ours, theirs in family.keys.items()}))
    if "activation" not in family.known:
        require(given, "hidden_act", "silu")
    dim, heads = setting(given, "hidden_size", int), setting(given, "num_attention_heads", int)
    if not family.fixed.get("gated", True):
        given = Given((*given.maps, {"intermediate_size": 4 * dim}))
    context = setting(given, "max_position_embeddings", int)
    if heads < 1:
        raise UserError(f"config.json: num_attention_heads is {heads}, expected at least 1")
    kv_heads = setting(given, "num_key_value_heads", int, heads)
    head_dim = setting(given, "head_dim", int, dim // heads)
    fields = {**FIELDS, "norm_eps": (family.eps, float, 1e-6)}
    known = read_fields(given, fields) | read_rope(given, context, head_dim) | family.options(given)
    config = Config(kv_heads=kv_heads, head_dim=head_dim, **known)
    if lacks := family.lacks(config):
        raise UserError(f"config.json: a {architecture} has no {', '.join(lacks)}; get the file again")
    # Without options and tensors of its own a family is a Llama.
    plain = not (config.options() or family.layer or family.merged or family.interleaved)
    if not own or plain or family_of(config) is family:
        return config
    return replace(config, family=family.kind)


def write_config(config: Config, family: Family | None = None) -> dict[str, Any]:
    family, c = family or family_of(config), config
    fields = {**FIELDS, "norm_eps": (family.eps, float)}
    given = {"hidden_act": "silu", **write_fields(config, fields), "num_key_value_heads": config.kv_heads}
    given |= {"head_dim": config.head_dim, "rope_theta": config.rope_theta, "rope_scaling": written_rope(config)}
    if c.rotary_dim or {"partial_rotary_factor", "rotary_pct"} & family.defaults.keys():
        given["partial_rotary_factor"] = (c.rotary_dim or c.head_dim) / c.head_dim
    given = {family.keys.get(name, name): value for name, value in given.items()} | family.written(config)
    return {"architectures": [family.architecture], "model_type": family.kind, **given}


def entries(config: Config, family: Family | None = None) -> Iterator[Entry]:
    c, family = config, family or family_of(config)
    names, merged, interleaved = {**LAYER, **family.layer}, family.merged, family.interleaved
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    head_norms = {"q_norm": q, "k_norm": kv} if c.qk_norm_width else dict.fromkeys(("q_norm", "k_norm"), c.head_dim)
    norms = {
        "before": ("norm1",) if c.parallel and not c.parallel_norms else ("norm1", "norm2"),
        "both": ("norm1", "attention_norm", "norm2", "mlp_norm"),
        "after": ("attention_norm", "mlp_norm"),
        "sum": ("norm1", "norm2"),
    }[c.norms]

    def linear(i: int, name: str, rows: slice, columns: int, ours: str, bias: bool) -> Iterator[Entry]:
        theirs, ours = f"{names['blocks']}.{i}.{names[name]}", f"blocks.{i}.{ours}"
        height, part = rows.stop - rows.start, rows if rows != whole[ours.rpartition(".")[2]] else None
        order = rotary_order(c, interleaved, rows) if ours.endswith(".qkv") else None
        if family.by_head and ours.endswith(".qkv"):
            together = np.arange(height).reshape(c.heads, 3, c.head_dim).swapaxes(0, 1).reshape(-1)
            order = together if order is None else together[order]
        yield Entry(f"{theirs}.weight", (height, columns), f"{ours}.weight", part, order=order)
        if bias:
            yield Entry(f"{theirs}.bias", (height,), f"{ours}.bias", part, order=order)

    def norm(theirs: str, ours: str) -> Iterator[Entry]:
        for kind in ("weight", "bias") if c.norm_bias else ("weight",):
            plus = float(family.plus_one and kind == "weight")
            yield Entry(f"{theirs}.{kind}", (c.dim,), f"{ours}.{kind}", plus=plus)

    whole = {
        "qkv": slice(0, q + 2 * kv),
        "out": slice(0, c.dim),
        "gate_up": slice(0, 2 * c.hidden),
        "up": slice(0, c.hidden),
        "down": slice(0, c.dim),
    }
    heads = {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)}
    halves = {"gate": slice(0, c.hidden), "up": slice(c.hidden, 2 * c.hidden)}
    yield Entry(f"{names['embedding']}.weight", (c.vocab, c.embedding_width), "embedding.weight")
    if c.embedding_dim:
        for name, shape in (("project_in", (c.dim, c.embedding_dim)), ("project_out", (c.embedding_dim, c.dim))):
            yield Entry(f"{names[name]}.weight", shape, f"{name}.weight")
    if c.learned_positions:
        yield Entry(f"{names['positions']}.weight", (c.context + 2, c.dim), "positions.weight")
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"{names['blocks']}.{i}"
        for name, rows in ({"qkv": whole["qkv"]} if "qkv" in merged else heads).items():
            yield from linear(i, name, rows, c.dim, "qkv", c.qkv_bias)
        for name, size in head_norms.items() if c.qk_norm else ():
            order = rotary_order(c, interleaved, slice(0, size))
            yield Entry(f"{theirs}.{names[name]}.weight", (size,), f"{ours}.{name}.weight", order=order)
        if c.sinks:
            yield Entry(f"{theirs}.{names['sinks']}", (c.heads,), f"{ours}.sinks")
        yield from linear(i, "out", whole["out"], q, "out", c.out_bias)
        for name in norms:
            yield from norm(f"{theirs}.{names[name]}", f"{ours}.{name}")
        one = "gate_up" if c.gated else "up"
        for name, rows in ({one: whole[one]} if "gate_up" in merged or not c.gated else halves).items():
            yield from linear(i, name, rows, c.dim, one, c.mlp_bias)
        yield from linear(i, "down", whole["down"], c.hidden, "down", c.mlp_bias)
    if c.norms != "sum":
        yield from norm(names["final_norm"], "final_norm")
    if not c.tied:
        yield Entry(f"{names['heads']}.weight", (c.vocab, c.embedding_width), "heads.weight", 0)
    if c.head_bias:
        yield Entry(f"{names['heads']}.bias", (c.vocab,), "heads.bias")


def rotary_order(c: Config, interleaved: bool, rows: slice) -> np.ndarray | None:
    """The numbers of their rows of q, k and v in our order; None where it is the same.

    Here a head's pairs are (i, i + D/2). Theirs lie within the first rotary_dim numbers R, as (i, i + R/2), or as
    neighbours, (2i, 2i + 1); the rest of a head is not rotated, and takes the places of the slowest pairs.
    """
    size, turned = c.head_dim, c.rotary_dim or c.head_dim
    keys = (c.heads + c.kv_heads) * size
    if rows.start >= keys or (turned == size and not interleaved):
        return None
    head, half = np.arange(size), turned // 2
    first, second = (head[0:turned:2], head[1:turned:2]) if interleaved else (head[:half], head[half:turned])
    middle = (turned + size) // 2
    order = np.concatenate([first, head[turned:middle], second, head[middle:]])
    numbers = np.arange(rows.stop - rows.start)
    ours = numbers[: max(0, min(len(numbers), keys - rows.start))]
    return np.concatenate([ours.reshape(-1, size)[:, order].reshape(-1), numbers[len(ours) :]])
