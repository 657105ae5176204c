"""BERT in Hugging Face's names and layout. Queries, keys and values are one matrix here, three there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyforge.layout import Entry, Fields, class_count, class_names, read_fields, require, write_fields
from tinyforge.models.bert.config import Config

FIELDS: Fields = {
    "dim": ("hidden_size", int),
    "heads": ("num_attention_heads", int),
    "layers": ("num_hidden_layers", int),
    "hidden": ("intermediate_size", int),
    "context": ("max_position_embeddings", int),
    "vocab": ("vocab_size", int),
    "segments": ("type_vocab_size", int, 2),
    "dropout": ("hidden_dropout_prob", float, 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", float, 0.1),
    "norm_eps": ("layer_norm_eps", float, 1e-12),
}
PREFIX = "bert."
# Position numbers; the tied output matrix, written twice; the head for next-sentence prediction; a pooler that masked
# words do not use.
IGNORED = r"bert\.embeddings\.position_ids|cls\.predictions\.decoder\..*|cls\.seq_relationship\..*|bert\.pooler\..*"
# What the files of 2018 call a norm's gain and bias.
RENAMED = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def read_config(given: Mapping[str, Any]) -> Config:
    require(given, "hidden_act", "gelu")
    require(given, "position_embedding_type", "absolute")
    require(given, "is_decoder", False)
    classifies = given.get("architectures") == ["BertForSequenceClassification"]
    trunk = given.get("architectures") == ["BertModel"]
    if not (classifies or trunk):  # which have no words to tie
        require(given, "tie_word_embeddings", True)
    return Config(classes=class_count(given) if classifies else 0, trunk=trunk, **read_fields(given, FIELDS))


def write_config(config: Config) -> dict[str, Any]:
    architecture = "BertForSequenceClassification" if config.classes else "BertForMaskedLM"
    architecture = "BertModel" if config.trunk and not config.classes else architecture
    kind = {"architectures": [architecture], "model_type": "bert", "hidden_act": "gelu"}
    written = kind | write_fields(config, FIELDS) | {"tie_word_embeddings": True, "pad_token_id": 0}
    return written | (class_names(config.classes) if config.classes else {})


def entries(config: Config) -> Iterator[Entry]:
    c = config

    def both(theirs: str, ours: str, *shape: int, part: slice | None = None) -> Iterator[Entry]:
        yield Entry(f"{theirs}.weight", shape, f"{ours}.weight", part)
        yield Entry(f"{theirs}.bias", shape[:1], f"{ours}.bias", part)

    yield Entry("bert.embeddings.word_embeddings.weight", (c.vocab, c.dim), "embedding.weight")
    yield Entry("bert.embeddings.position_embeddings.weight", (c.context, c.dim), "positions.weight")
    yield Entry("bert.embeddings.token_type_embeddings.weight", (c.segments, c.dim), "segments.weight")
    yield from both("bert.embeddings.LayerNorm", "norm", c.dim)
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"bert.encoder.layer.{i}"
        for number, name in enumerate(("query", "key", "value")):
            part = slice(number * c.dim, (number + 1) * c.dim)
            yield from both(f"{theirs}.attention.self.{name}", f"{ours}.qkv", c.dim, c.dim, part=part)
        yield from both(f"{theirs}.attention.output.dense", f"{ours}.out", c.dim, c.dim)
        yield from both(f"{theirs}.attention.output.LayerNorm", f"{ours}.norm1", c.dim)
        yield from both(f"{theirs}.intermediate.dense", f"{ours}.up", c.hidden, c.dim)
        yield from both(f"{theirs}.output.dense", f"{ours}.down", c.dim, c.hidden)
        yield from both(f"{theirs}.output.LayerNorm", f"{ours}.norm2", c.dim)
    if c.classes:
        yield from both("bert.pooler.dense", "pooler", c.dim, c.dim)
        yield from both("classifier", "head", c.classes, c.dim)
    elif not c.trunk:
        yield from both("cls.predictions.transform.dense", "transform", c.dim, c.dim)
        yield from both("cls.predictions.transform.LayerNorm", "transform.norm", c.dim)
        yield Entry("cls.predictions.bias", (c.vocab,), "head.bias")
