"""What stands where a text model has its tokenizer: the names of the classes that an image model chooses among."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError
from tinyforge.text.vocabulary import After, Vocabulary

FORMAT, VERSION = "tinyforge-labels", 1


class Labels(Vocabulary):
    """One id for each class, its token the class's name. It reads no text: to encode one is a UserError."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__([name.encode() for name in self.names], {})

    def encode(self, text: str, after: After = "start") -> list[int]:
        raise UserError("this model reads images, not text; give it some with recipes/classify.py")

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """Raises UserError at the first text."""
        return (np.array(self.encode(text)) for text in texts)

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "labels": list(self.names)}

    @classmethod
    def from_content(cls, content: dict[str, Any], path: Path) -> Labels:
        """From what `save` wrote into the file at `path`. Raises UserError, naming it, where it is damaged."""
        names = content.get("labels")
        good = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if content.get("version") != VERSION or not isinstance(names, list) or not good:
            raise UserError(f"{path} holds no names of classes; the file is damaged, use another checkpoint")
        return cls(names)
