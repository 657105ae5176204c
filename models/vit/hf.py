"""ViT in Hugging Face's names and layout. Queries, keys and values are one matrix here, three there; the convolution
that embeds patches is a matrix here, its axes (C, K, P, P) there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyforge.layout import Entry, Fields, class_count, class_names, read_fields, require, write_fields
from tinyforge.models.vit.config import Config

FIELDS: Fields = {
    "image": ("image_size", int, 224),
    "patch": ("patch_size", int, 16),
    "channels": ("num_channels", int, 3),
    "dim": ("hidden_size", int),
    "heads": ("num_attention_heads", int),
    "layers": ("num_hidden_layers", int),
    "hidden": ("intermediate_size", int),
    "dropout": ("hidden_dropout_prob", float, 0.0),
    "norm_eps": ("layer_norm_eps", float, 1e-12),
}
PREFIX = "vit."
IGNORED = r"vit\.pooler\..*"


def read_config(given: Mapping[str, Any]) -> Config:
    require(given, "hidden_act", "gelu")
    require(given, "qkv_bias", True)
    return Config(classes=class_count(given), **read_fields(given, FIELDS))


def write_config(config: Config) -> dict[str, Any]:
    kind = {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_act": "gelu", "qkv_bias": True}
    written = kind | write_fields(config, FIELDS) | {"attention_probs_dropout_prob": config.dropout}
    return written | class_names(config.classes)


def entries(config: Config) -> Iterator[Entry]:
    c = config

    def both(
        theirs: str, ours: str, *shape: int, part: slice | None = None, axes: tuple[int, ...] | None = None
    ) -> Iterator[Entry]:
        yield Entry(f"{theirs}.weight", shape, f"{ours}.weight", part, axes=axes)
        yield Entry(f"{theirs}.bias", shape[:1], f"{ours}.bias", part)

    yield Entry("vit.embeddings.cls_token", (1, 1, c.dim), "class_token", axes=(c.dim,))
    places = (c.context, c.dim)
    yield Entry("vit.embeddings.position_embeddings", (1, *places), "positions.weight", axes=places)
    pixels = c.channels, c.patch, c.patch
    matrix = (c.dim, c.channels * c.patch**2)
    yield from both("vit.embeddings.patch_embeddings.projection", "embedding", c.dim, *pixels, axes=matrix)
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"vit.encoder.layer.{i}"
        yield from both(f"{theirs}.layernorm_before", f"{ours}.norm1", c.dim)
        for number, name in enumerate(("query", "key", "value")):
            part = slice(number * c.dim, (number + 1) * c.dim)
            yield from both(f"{theirs}.attention.attention.{name}", f"{ours}.qkv", c.dim, c.dim, part=part)
        yield from both(f"{theirs}.attention.output.dense", f"{ours}.out", c.dim, c.dim)
        yield from both(f"{theirs}.layernorm_after", f"{ours}.norm2", c.dim)
        yield from both(f"{theirs}.intermediate.dense", f"{ours}.up", c.hidden, c.dim)
        yield from both(f"{theirs}.output.dense", f"{ours}.down", c.dim, c.hidden)
    yield from both("vit.layernorm", "final_norm", c.dim)
    yield from both("classifier", "head", c.classes, c.dim)
