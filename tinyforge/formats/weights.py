"""Weights of other programs, from any format: a config and tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinyforge.tensors import Lazy


class Recorded(dict[str, Any]):
    """The content of a file, which knows what of it has been read: its other keys are lost in a conversion."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.seen: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    @property
    def unread(self) -> list[str]:
        return sorted(self.keys() - self.seen)


@dataclass(frozen=True)
class Weights:
    """Weights to read from, or to write.

    source: where they come from, for messages. config: as Hugging Face's config.json. tensors: by name. ignored: names
    of tensors that no model needs, filled in when they are matched with one.
    """

    source: Path
    config: dict[str, Any]
    tensors: Mapping[str, Lazy]
    ignored: list[str] = field(default_factory=list)
