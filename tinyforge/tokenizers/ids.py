"""A model without a tokenizer: it takes ids, and returns ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.tokenizers.vocabulary import After, Vocabulary, check_tokenizer

FORMAT, VERSION = "tinyforge-ids", 1
MOST_IDS = 1 << 24


class Ids(Vocabulary):
    """`count` ids without a text. Encoding a text is a UserError; ids decode to nothing."""

    def __init__(self, count: int) -> None:
        super().__init__([b""] * count, {})

    def encode(self, text: str, after: After = "start") -> list[int]:
        raise UserError("this model has no tokenizer: it takes ids, not text; put its tokenizer.json next to it")

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "count": self.vocab_size, "tokens": []}

    @classmethod
    def from_content(cls, content: dict[str, Any], path: str | Path) -> Ids:
        """From a file that `save` wrote. Raises UserError, naming `path`."""
        count: Any = content.get("count")
        check_tokenizer(path, type(count) is int and 0 < count <= MOST_IDS, f"got {count!r:.40} ids")
        return cls(count)
