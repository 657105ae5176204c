"""A character tokenizer: one id for each character of a text, as in nanoGPT's shakespeare_char."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError
from tinyforge.tokenizers.pieces import to_utf8
from tinyforge.tokenizers.vocabulary import After, Vocabulary, are_texts

FORMAT, VERSION = "tinyforge-chars", 1


class CharTokenizer(Vocabulary):
    """Ids 0 and up are the characters in order of their code points, then the special tokens. Encoding any other
    character is a UserError."""

    def __init__(self, characters: Iterable[str], specials: Iterable[str] = ("<|endoftext|>",)) -> None:
        self.characters = sorted(set(characters))
        texts = list(specials)
        count = len(self.characters)
        tokens = [to_utf8(text) for text in (*self.characters, *texts)]
        super().__init__(tokens, {text: count + index for index, text in enumerate(texts)})
        self._codes = np.array([ord(character) for character in self.characters], np.uint32)

    @classmethod
    def of(cls, texts: Iterable[str], specials: Iterable[str] = ("<|endoftext|>",)) -> CharTokenizer:
        """The tokenizer of all characters in `texts`."""
        return cls(set().union(*texts), specials)

    def encode(self, text: str, after: After = "start") -> list[int]:
        """One id per character. `after` does not matter."""
        return self._ids(text).tolist()

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """The ids of each text, in order. Lookups are fast: `workers` is not used."""
        return map(self._ids, texts)

    def _ids(self, text: str) -> npt.NDArray[Any]:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        ids = np.searchsorted(self._codes, codes)
        known = ids < len(self._codes)
        known[known] = self._codes[ids[known]] == codes[known]
        if not known.all():
            raise UserError(
                f"{chr(codes[~known][0])!r} is none of the tokenizer's {len(self._codes)} characters; leave it out, or "
                "use another tokenizer"
            )
        return ids.astype(self.id_dtype)

    def _content(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, "specials": list(self.specials), "characters": self.characters}

    @classmethod
    def from_content(cls, content: dict[str, Any], path: Path) -> CharTokenizer:
        """The tokenizer in a file that `save` wrote, as JSON read it. Raises UserError, naming `path`."""
        characters, specials = content.get("characters"), content.get("specials")
        right = (content.get("format"), content.get("version")) == (FORMAT, VERSION)
        if not (
            right
            and are_texts(characters)
            and are_texts(specials)
            and set(map(len, characters)) == {1}
            and all(specials)
        ):
            raise UserError(f"{path} is not a character tokenizer; the file is damaged, make the tokenizer again")
        return cls(characters, specials)
