"""llama2.c's .bin files, read and written: https://github.com/karpathy/llama2.c, `legacy_export` and `run.c`.

    header      7 int32: dim, hidden, layers, heads, kv_heads, vocab (negative: the head is not tied), context
    float32     embedding (V, C); for all layers: attention norm, q, k, v, out, MLP norm, gate, down, up;
                final norm; cos and sin of the angles (context, D/2); the head (V, C) where it is not tied

Rotary pairs are neighbours there, (x_2i, x_2i+1), while Hugging Face and this project pair (x_i, x_i+D/2), so the rows
of q and k are reordered. Otherwise the model is a LlamaForCausalLM, and this module presents it as one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import writing, written_whole
from tinyforge.formats import rotary
from tinyforge.formats.weights import Weights

HEADER = struct.Struct("<7i")
SIZES = {
    "dim": ("hidden_size", 1 << 16),
    "hidden": ("intermediate_size", 1 << 20),
    "layers": ("num_hidden_layers", 1 << 10),
    "heads": ("num_attention_heads", 1 << 10),
    "kv_heads": ("num_key_value_heads", 1 << 10),
    "vocab": ("vocab_size", 1 << 24),
    "context": ("max_position_embeddings", 1 << 24),
}
"""The header's sizes: their keys in config.json, and the largest that are plausible; a file that claims more is
something else."""
EPS, THETA = 1e-5, 10000.0  # as in run.c
FIXED = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": EPS, "rope_theta": THETA, "rope_scaling": None}
_MAGIC = 0x616B3432  # "ak42": versions 1 and 2


def is_file(path: Path) -> bool:
    return path.suffix.lower() == ".bin"


def open_file(path: Path) -> Weights:
    """The weights in a .bin file, as a LlamaForCausalLM; tensors are not read yet.

    Raises UserError for a file of another kind or version, impossible sizes, and a wrong length.
    """
    try:
        with open(path, "rb") as opened:
            head = opened.read(HEADER.size)
        length = path.stat().st_size
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check the path") from error
    # A header's first number is the dim, at most 65,536, so its upper two bytes are 0.
    if (head[:2] == b"PK" or head[:1] == b"\x80") and head[2:4] != b"\0\0":
        raise UserError(
            f"{path} is a pickle, which can run code when it is read; supported: llama2.c's .bin, safetensors"
        )
    if len(head) < HEADER.size:
        raise UserError(f"{path} has {length} bytes, llama2.c's header alone {HEADER.size}; get the file again")
    if int.from_bytes(head[:4], "little") == _MAGIC:
        raise UserError(f"{path} is of llama2.c's version 1 or 2; supported: version 0, which run.c reads")
    sizes = dict(zip(SIZES, HEADER.unpack(head), strict=True))
    tied, sizes["vocab"] = sizes["vocab"] > 0, abs(sizes["vocab"])
    for name, (_, limit) in SIZES.items():
        if not 1 <= sizes[name] <= limit:
            raise UserError(f"{path}: its header says {name} {sizes[name]}, expected 1 to {limit}; is it llama2.c's?")
    config = _config(sizes, tied)
    if sizes["dim"] % sizes["heads"] or sizes["heads"] % sizes["kv_heads"] or config["head_dim"] % 2:
        raise UserError(
            f"{path}: its header says dim {sizes['dim']}, {sizes['heads']} heads, {sizes['kv_heads']} key/value heads, "
            "which do not divide; is it llama2.c's?"
        )
    places, offset = {}, HEADER.size
    for tensor, shape in layout(config):
        if tensor is not None:
            places[tensor] = (shape, _reader(path, offset, shape, _heads(tensor, config)))
        offset += 4 * math.prod(shape)
    if offset != length:
        raise UserError(f"{path} has {length:,} bytes, its header expects {offset:,}; get the file again")
    return Weights(path, config, places)


def check(path: Path, config: dict[str, Any]) -> None:
    """UserError for a model that the format cannot hold; `path` is for the message."""
    head_dim = config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    for name, value in {**FIXED, "head_dim": head_dim}.items():
        if config.get(name) != value:
            raise UserError(
                f"cannot write {path}: llama2.c's format has {name} {value}, the model has {config.get(name)}; "
                "use --format hf"
            )


def write_file(path: Path, weights: Weights) -> None:
    """Write a .bin file that run.c reads. UserError for a model that it cannot hold, and where it cannot be written."""
    config = weights.config
    check(path, config)
    head_dim, context = config["head_dim"], config["max_position_embeddings"]
    angle = np.arange(context)[:, None] * THETA ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = iter((np.cos(angle), np.sin(angle)))
    sizes = {name: config[key] for name, (key, _) in SIZES.items()}
    sizes["vocab"] *= 1 if config["tie_word_embeddings"] else -1
    with writing(path), written_whole(path) as partial, open(partial, "wb") as out:
        out.write(HEADER.pack(*sizes.values()))
        for tensor, _ in layout(config):
            values = next(angles) if tensor is None else weights.tensors[tensor][1]()
            if tensor is not None and (heads := _heads(tensor, config)):
                values = rotary.pairs(values, heads)
            np.ascontiguousarray(values, "<f4").tofile(out)


def layout(config: dict[str, Any]) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """The tensors in file order, by Hugging Face's names; None for the tables of angles."""
    dim, hidden, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    width, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (vocab, dim)
    for name, shape in (
        ("input_layernorm", (dim,)),
        ("self_attn.q_proj", (width, dim)),
        ("self_attn.k_proj", (kv, dim)),
        ("self_attn.v_proj", (kv, dim)),
        ("self_attn.o_proj", (dim, width)),
        ("post_attention_layernorm", (dim,)),
        ("mlp.gate_proj", (hidden, dim)),
        ("mlp.down_proj", (dim, hidden)),
        ("mlp.up_proj", (hidden, dim)),
    ):
        for layer in range(config["num_hidden_layers"]):
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (dim,)
    for _ in ("cos", "sin"):
        yield None, (config["max_position_embeddings"], config["head_dim"] // 2)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, dim)


def _config(sizes: dict[str, int], tied: bool) -> dict[str, Any]:
    return {
        **FIXED,
        "model_type": "llama",
        "hidden_act": "silu",
        **{key: sizes[name] for name, (key, _) in SIZES.items()},
        "head_dim": sizes["dim"] // sizes["heads"],
        "tie_word_embeddings": tied,
    }


def _heads(name: str, config: dict[str, Any]) -> int:
    """The number of heads with rotary pairs in a tensor, 0 for none."""
    if name.endswith("q_proj.weight"):
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if name.endswith("k_proj.weight") else 0


def _reader(path: Path, offset: int, shape: tuple[int, ...], heads: int) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        stored = np.fromfile(path, "<f4", math.prod(shape), offset=offset).reshape(shape)
        return rotary.halves(stored, heads) if heads else stored

    return read
