"""Weights of other programs, from any format: a config and tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyforge.tensors import Lazy


@dataclass(frozen=True)
class Weights:
    """Weights to read from, or to write.

    source: where they come from, for messages. config: as Hugging Face's config.json. tensors: by name.
    """

    source: Path
    config: dict[str, Any]
    tensors: Mapping[str, Lazy]
