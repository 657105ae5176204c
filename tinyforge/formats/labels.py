"""The names of an image model's classes: its checkpoints and exports hold them where other models have a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.files import read_json
from tinyforge.tokenizers.vocabulary import After, Vocabulary, are_texts

FORMAT, VERSION = "tinyforge-labels", 1


class Labels(Vocabulary):
    """One id for each class, whose token is the class's name. Encoding a text is a UserError."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__([name.encode() for name in self.names], {})

    def encode(self, text: str, after: After = "start") -> list[int]:
        raise UserError("this model reads images, not text; give it some with recipes/classify.py")

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "labels": list(self.names)}

    @classmethod
    def load(cls, path: Path) -> Labels:
        """The labels in a file that `save` wrote. Raises UserError, naming `path`."""
        content = read_json(path, "the names of classes")
        names = content.get("labels")
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION) or not are_texts(names):
            raise UserError(f"{path} does not hold names of classes; the file is damaged, use another checkpoint")
        return cls(names)
