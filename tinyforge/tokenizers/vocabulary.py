"""The protocol of tokenizers, and the part of them that does not depend on how text is split: ids to bytes, files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError
from tinyforge.files import GET_AGAIN, write_whole, writing
from tinyforge.tokenizers.pieces import to_utf8

MOST_VOCABULARY_BYTES = 1 << 26  # all tokens together; real vocabularies have a few million

ENDS = ("<|endoftext|>", "</s>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>")
"""Special tokens that end a text or a reply, as published models call them."""

# What precedes a text or its ids: nothing, a special token, or other text. SentencePiece adds a space to a text at the
# start, but not to one that follows other text.
After = Literal["start", "special", "text"]


class TextTokenizer(Protocol):
    """A tokenizer of any kind, as training, chat, evaluation and checkpoints use it.

    `specials` maps the text of each special token to its id; `bos` is the id that every text begins with, or None;
    `byte_lengths[id]` is the number of bytes of a token's text, 0 for a special token; `id_dtype` is the smallest of
    uint16 and uint32 that holds all ids.
    """

    specials: dict[str, int]
    bos: int | None
    byte_lengths: npt.NDArray[np.int64]
    id_dtype: np.dtype[Any]

    @property
    def vocab_size(self) -> int: ...
    def reserve(self, ids: int) -> None: ...
    def encode(self, text: str, after: After = "start") -> list[int]: ...
    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]: ...
    def decode(self, ids: Iterable[int], after: After = "start") -> str: ...
    def decode_bytes(self, ids: Iterable[int], after: After = "start") -> bytes: ...
    def token_bytes(self, id: int) -> bytes: ...
    def hash(self) -> str: ...
    def save(self, path: str | Path) -> None: ...


def start_ids(tokenizer: TextTokenizer) -> list[int]:
    """The ids that every text begins with: `bos`, if the tokenizer has one."""
    return [] if tokenizer.bos is None else [tokenizer.bos]


class Vocabulary:
    """The tokens of a tokenizer: their bytes by id, the special ones, and the file format."""

    def __init__(self, tokens: Sequence[bytes], specials: dict[str, int], bos: int | None = None) -> None:
        """`tokens[id]` are the bytes of a token; those of a special token are the UTF-8 of its text."""
        self.specials = specials
        self.bos = bos
        # A dict, not a list: a negative id must be an error, not an index from the end.
        self._vocab = dict(enumerate(tokens)) | {id: to_utf8(text) for text, id in specials.items()}
        self.byte_lengths: npt.NDArray[np.int64] = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self.byte_lengths[list(specials.values())] = 0
        self.id_dtype = np.dtype(np.uint16 if len(self._vocab) <= 1 << 16 else np.uint32)

    def reserve(self, ids: int) -> None:
        """Accept `ids` ids, as published models often have a few beyond the vocabulary: those have no text."""
        self.byte_lengths = np.pad(self.byte_lengths, (0, max(0, ids - len(self.byte_lengths))))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocab)

    def decode(self, ids: Iterable[int], after: After = "start") -> str:
        """Text of `ids`; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        return self.decode_bytes(ids, after).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int], after: After = "start") -> bytes:
        """Bytes of `ids`, special tokens as the bytes of their text. Raises UserError for an unknown id.

        `after` matters only for SentencePiece.
        """
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token. Raises UserError for an unknown id."""
        try:
            return self._vocab[id]
        except KeyError:
            if self.vocab_size <= id < len(self.byte_lengths):
                return b""
            raise UserError(
                f"token id {id} is not in the vocabulary: wanted 0..{self.vocab_size - 1}; "
                "use the tokenizer that the ids were made with"
            ) from None

    # --- on disk

    def _content(self) -> dict[str, Any]:
        """Everything that determines the ids, as JSON, the longest list last."""
        raise NotImplementedError

    def hash(self) -> str:
        """SHA-256, in hex, of everything that determines the ids: equal hashes encode alike. Checkpoints store it."""
        return hashlib.sha256(json.dumps(self._content(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write one readable JSON file, its last list with one item per line. An old file stays until the new one is
        complete. Raises UserError if it cannot be written."""
        content = self._content()
        last, items = content.popitem()
        head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items())
        body = ",\n".join(f"    {json.dumps(item)}" for item in items)
        with writing(f"the tokenizer {path}"):
            write_whole(Path(path), f'{{\n{head}  "{last}": [\n{body}\n  ]\n}}\n')


def are_texts(value: object) -> TypeGuard[list[str]]:
    """Whether a JSON value is a list of texts."""
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_pair(value: object) -> bool:
    """Whether a JSON value is a pair of ids."""
    return isinstance(value, list) and len(value) == 2 and all(type(id) is int for id in value)


def check_tokenizer(path: str | Path, sound: bool, cause: str) -> None:
    """UserError for a tokenizer's file that is not sound."""
    if not sound:
        raise UserError(f"cannot read the tokenizer {path}: {cause}; {GET_AGAIN}")


def fault_in_specials(content: dict[str, Any], tokens: int) -> str:
    """What is wrong with "specials" and "bos" in a file of `tokens` tokens, or ""."""
    specials, bos = content.get("specials"), content.get("bos")
    if not isinstance(specials, dict) or not all(type(id) is int and 0 <= id < tokens for id in specials.values()):
        return "specials does not map texts to ids of tokens"
    if bos is not None and (type(bos) is not int or bos not in specials.values()):
        return f"bos {bos!r:.40} is not the id of a special token"
    return ""
