"""Weights of others, whatever their files: a config and tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Weights:
    """Weights to read from, or to write.

    source: where they come from, for messages. config: as Hugging Face's config.json. tensors: for each name the shape
    and a function that makes the tensor, so that one at a time is in memory.
    """

    source: Path
    config: dict[str, Any]
    tensors: Mapping[str, tuple[tuple[int, ...], Callable[[], np.ndarray]]]
