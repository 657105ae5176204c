"""A tokenizer of characters: one id for each character that a text has, as nanoGPT's shakespeare_char has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError
from tinyforge.text.pieces import to_utf8
from tinyforge.text.vocabulary import After, Vocabulary

FORMAT, VERSION = "tinyforge-chars", 1


class CharTokenizer(Vocabulary):
    """Ids 0 and up are the characters in the order of their code points, then come the special tokens.

    It knows no other character: to encode one is a UserError.
    """

    def __init__(self, characters: Iterable[str], specials: Iterable[str] = ("<|endoftext|>",)) -> None:
        self.characters = sorted(set(characters))
        texts = list(specials)
        count = len(self.characters)
        tokens = [to_utf8(text) for text in (*self.characters, *texts)]
        super().__init__(tokens, {text: count + index for index, text in enumerate(texts)})
        self._codes = np.array([ord(character) for character in self.characters], np.uint32)

    @classmethod
    def of(cls, texts: Iterable[str], specials: Iterable[str] = ("<|endoftext|>",)) -> CharTokenizer:
        """With every character of `texts`."""
        return cls(set().union(*texts), specials)

    def encode(self, text: str, after: After = "start") -> list[int]:
        """One id a character. What stands before the text makes no difference."""
        return self._ids(text).tolist()

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """The ids of each text, in order. A look-up is quick: `workers` is not used."""
        return map(self._ids, texts)

    def _ids(self, text: str) -> npt.NDArray[Any]:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = np.searchsorted(self._codes, codes)
        known = ids < len(self._codes)
        known[known] = self._codes[ids[known]] == codes[known]
        if not known.all():
            raise UserError(
                f"the tokenizer knows {len(self._codes)} characters, {chr(codes[~known][0])!r} is not among them; "
                "leave it out, or use another tokenizer"
            )
        return ids.astype(self.id_dtype)

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "specials": list(self.specials), "characters": self.characters}

    @classmethod
    def from_content(cls, content: dict[str, Any], path: Path) -> CharTokenizer:
        """From what `save` wrote into the file at `path`. Raises UserError, naming it, where it is damaged."""
        characters, specials = (_texts(content.get(key)) for key in ("characters", "specials"))
        good = characters and specials is not None and set(map(len, characters)) == {1}
        if not good or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise UserError(f"{path} is not a tokenizer of characters; the file is damaged, make the tokenizer again")
        return cls(characters or (), specials or ())


def _texts(value: object) -> list[str] | None:
    """A list of texts, none of them empty; None for anything else."""
    return value if isinstance(value, list) and all(isinstance(text, str) and text for text in value) else None
