"""BERT in Hugging Face's names and layout. Queries, keys and values are one matrix here, three there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tinyforge.layout import Entry, require, setting
from tinyforge.models.bert.config import Config

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
    require(given, "tie_word_embeddings", True)
    labels = given.get("id2label")
    classifies = given.get("architectures") == ["BertForSequenceClassification"]
    return Config(
        dim=setting(given, "hidden_size", int),
        heads=setting(given, "num_attention_heads", int),
        layers=setting(given, "num_hidden_layers", int),
        hidden=setting(given, "intermediate_size", int),
        context=setting(given, "max_position_embeddings", int),
        vocab=setting(given, "vocab_size", int),
        segments=setting(given, "type_vocab_size", int, 2),
        # transformers writes no labels for its default, two.
        classes=(len(labels) if isinstance(labels, dict) and labels else 2) if classifies else 0,
        dropout=setting(given, "hidden_dropout_prob", float, 0.1),
        attention_dropout=setting(given, "attention_probs_dropout_prob", float, 0.1),
        norm_eps=setting(given, "layer_norm_eps", float, 1e-12),
    )


def write_config(config: Config) -> dict[str, Any]:
    c = config
    written: dict[str, Any] = {
        "architectures": ["BertForSequenceClassification" if c.classes else "BertForMaskedLM"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": c.dim,
        "num_attention_heads": c.heads,
        "num_hidden_layers": c.layers,
        "intermediate_size": c.hidden,
        "max_position_embeddings": c.context,
        "vocab_size": c.vocab,
        "type_vocab_size": c.segments,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "layer_norm_eps": c.norm_eps,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    }
    if c.classes:
        written["id2label"] = {str(i): f"LABEL_{i}" for i in range(c.classes)}
        written["label2id"] = {f"LABEL_{i}": i for i in range(c.classes)}
    return written


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
    else:
        yield from both("cls.predictions.transform.dense", "transform", c.dim, c.dim)
        yield from both("cls.predictions.transform.LayerNorm", "transform.norm", c.dim)
        yield Entry("cls.predictions.bias", (c.vocab,), "head.bias")
