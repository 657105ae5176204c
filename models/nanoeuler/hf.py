"""NanoEuler's trunk and head 0 with Hugging Face's names: a LlamaForCausalLM, which transformers can load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.llama import hf as llama
from models.nanoeuler.config import Config
from tinyforge.layout import Entry


def write_config(config: Config) -> dict[str, Any]:
    return llama.write_config(config.trunk)


def entries(config: Config) -> Iterator[Entry]:
    return llama.entries(config.trunk)


def left_out(config: Config) -> str:
    extra = config.mtp_heads - 1
    return f"the {extra} later output head{'s' * (extra > 1)}: Llama predicts one token" if extra else ""
