"""NanoEuler's trunk and head 0 in Hugging Face's names: a LlamaForCausalLM, which transformers loads as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.llama import hf as llama
from models.llama.config import Config as LlamaConfig
from models.nanoeuler.config import Config
from tinyforge.layout import Entry


def as_llama(config: Config) -> LlamaConfig:
    """The Llama of the same shape, with one untied head."""
    c = config
    return LlamaConfig(
        dim=c.dim, heads=c.heads, kv_heads=c.kv_heads, layers=c.layers, context=c.context, vocab=c.vocab,
        hidden=c.hidden, tied=False, norm_eps=c.norm_eps, rope_theta=c.rope_theta,
    )  # fmt: skip


def write_config(config: Config) -> dict[str, Any]:
    return llama.write_config(as_llama(config))


def entries(config: Config) -> Iterator[Entry]:
    return llama.entries(as_llama(config))


def left_out(config: Config) -> str:
    extra = config.mtp_heads - 1
    return f"the {extra} later output head{'s' * (extra > 1)}: Llama predicts one token" if extra else ""
