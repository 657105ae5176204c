"""NanoEuler's trunk and head 0 with Hugging Face's names: a LlamaForCausalLM, which transformers can load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tinyforge.layout import Entry
from tinyforge.models.llama import hf as llama
from tinyforge.models.nanoeuler.config import Config
from tinyforge.report import count_of


def write_config(config: Config) -> dict[str, Any]:
    return llama.write_config(config.trunk)


def entries(config: Config) -> Iterator[Entry]:
    return llama.entries(config.trunk)


def left_out(config: Config) -> str:
    extra = config.mtp_heads - 1
    return f"the {count_of(extra, 'later output head')}: Llama predicts one token" if extra else ""
