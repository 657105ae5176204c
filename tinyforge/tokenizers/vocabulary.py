"""The protocol of tokenizers, and the part of them that does not depend on how text is split: ids to bytes, files."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError
from tinyforge.files import GET_AGAIN, write_whole, writing
from tinyforge.tokenizers.pieces import to_utf8

MOST_VOCABULARY_BYTES = 1 << 26  # all tokens together; real vocabularies have a few million
MOST_NESTED = 50  # groups in a regular expression

ENDS = ("<|endoftext|>", "</s>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>")
"""Special tokens that end a text or a reply, as published models call them."""

# What precedes a text or its ids: nothing, a special token, or other text. SentencePiece adds a space to a text at the
# start, but not to one that follows other text.
After = Literal["start", "special", "text"]


class TextTokenizer(Protocol):
    """A tokenizer of any kind, as training, chat, evaluation and checkpoints use it.

    `specials` maps the text of each special token to its id, `user_defined` that of each token which its text becomes
    before all else; `bos` is the id that every text begins with, or None; `byte_lengths[id]` is the number of bytes of
    a token's text, 0 for a special token; `id_dtype` is the smallest of uint16 and uint32 that holds all ids.
    """

    specials: dict[str, int]
    user_defined: dict[str, int]
    bos: int | None
    id_dtype: np.dtype[Any]

    @property
    def byte_lengths(self) -> npt.NDArray[np.int64]: ...
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


def id_of(tokenizer: TextTokenizer, text: object) -> int | None:
    """The id of a special or user-defined token. Published vocabularies have the ends of replies as either."""
    return tokenizer.specials.get(text, tokenizer.user_defined.get(text)) if isinstance(text, str) else None


def texts_by_id(tokenizer: TextTokenizer) -> dict[int, str]:
    """The text of each special and user-defined token, by its id."""
    return {id: text for text, id in [*tokenizer.user_defined.items(), *tokenizer.specials.items()]}


class Vocabulary:
    """The tokens of a tokenizer: their bytes by id, the special ones, and the file format."""

    def __init__(
        self,
        tokens: Sequence[bytes] | Callable[[], Sequence[bytes]],
        specials: dict[str, int],
        bos: int | None = None,
        user_defined: dict[str, int] | None = None,
        size: int = 0,
    ) -> None:
        """`tokens[id]` are the bytes of a token; those of a special token are the UTF-8 of its text. A function makes
        `size` of them when the first are asked for: text is encoded without them.

        user_defined: tokens by text that are split off before all else, the longest of those that begin first. Unlike a
        special token's, their text in a text becomes their id.
        """
        self.specials = specials
        self.bos = bos
        self.user_defined = user_defined or {}
        self._tokens = tokens
        self._size = size if callable(tokens) else len(tokens)
        self.id_dtype = np.dtype(np.uint16 if self._size <= 1 << 16 else np.uint32)

    @cached_property
    def _vocab(self) -> list[bytes]:
        found = list(self._tokens() if callable(self._tokens) else self._tokens)
        for text, id in self.specials.items():
            found[id] = to_utf8(text)
        return found

    @cached_property
    def byte_lengths(self) -> npt.NDArray[np.int64]:
        found = np.fromiter(map(len, self._vocab), np.int64, self._size)
        found[list(self.specials.values())] = 0
        return found

    @cached_property
    def _split_user_defined(self) -> Callable[[str], list[str]]:
        """A text as other text and user-defined tokens in turn, the former first and last."""
        return re.compile(f"({any_of(self.user_defined)})").split

    def _between_user_defined(
        self, encode: Callable[[Iterable[str]], Iterator[npt.NDArray[Any]]], texts: Iterable[str]
    ) -> Iterator[npt.NDArray[Any]]:
        """The ids of texts, where `encode` has no user-defined tokens."""
        layouts: deque[list[str]] = deque()

        def others() -> Iterator[str]:
            for text in texts:
                parts = self._split_user_defined(text)
                layouts.append(parts[1::2])
                yield from parts[::2]

        found: list[Any] = []
        for ids in encode(others()):
            found.append(ids)
            if len(layouts[0]) * 2 < len(found):
                layouts.popleft()
                yield np.concatenate(found).astype(self.id_dtype, copy=False)
                found = []
            else:
                found.append([self.user_defined[layouts[0][len(found) // 2]]])

    def reserve(self, ids: int) -> None:
        """Accept `ids` ids, as published models often have a few beyond the vocabulary: those have no text."""
        self.byte_lengths = np.pad(self.byte_lengths, (0, max(0, ids - len(self.byte_lengths))))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._size

    def encode(self, text: str, after: After = "start") -> list[int]:
        """The ids of a text. after: what precedes it."""
        raise NotImplementedError

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """The ids of each text, in order. workers: processes, for a tokenizer that shares the work."""
        return (np.array(self.encode(text), self.id_dtype) for text in texts)

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
        if 0 <= id < self.vocab_size:
            return self._vocab[id]
        if self.vocab_size <= id < len(self.byte_lengths):
            return b""
        raise UserError(
            f"token id {id} is not in the vocabulary: expected 0..{self.vocab_size - 1}; "
            "use the tokenizer that the ids were made with"
        )

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
    added = content.get("user_defined", {})
    if not isinstance(added, dict) or not all(t and type(id) is int and 0 <= id < tokens for t, id in added.items()):
        return "user_defined does not map texts to ids of tokens"
    if bos is not None and (type(bos) is not int or bos not in specials.values()):
        return f"bos {bos!r:.40} is not the id of a special token"
    return ""


def any_of(texts: Iterable[str]) -> str:
    """A regular expression that matches the longest of the texts at a place. They share their beginnings in it, so
    that thousands of texts cost what their letters do."""
    tree: dict[str, Any] = {}
    for text in texts:
        at = tree
        for character in text:
            at = at.setdefault(character, {})
        at[""] = {}

    def written(tree: dict[str, Any], depth: int = 0) -> str:
        straight = ""
        while len(tree) == 1 and "" not in tree:
            ((character, tree),) = tree.items()
            straight += re.escape(character)
        if depth == MOST_NESTED:  # as deep as groups may be; below, the longest text first
            return f"{straight}(?:{'|'.join(map(re.escape, sorted(_texts(tree), key=len, reverse=True)))})"
        branches = [re.escape(character) + written(rest, depth + 1) for character, rest in tree.items() if character]
        return straight + (f"(?:{'|'.join(branches)}){'?' * ('' in tree)}" if branches else "")

    return written(tree)


def _texts(tree: dict[str, Any]) -> list[str]:
    """The texts of a tree of `any_of`."""
    found, left = [], [("", tree)]
    while left:
        text, tree = left.pop()
        found += [text] * ("" in tree)
        left += [(text + character, rest) for character, rest in tree.items() if character]
    return found
