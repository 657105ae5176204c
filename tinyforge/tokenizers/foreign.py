"""Tokenizers that the package tokenizers reads for us: what `huggingface` does not cover.

    tokenizer = read_foreign(content, "tokenizer.json", "got pre_tokenizer ..., expected ...")

The ids are the package's, with `encode_special_tokens`: as everywhere here, text that spells a special token never
becomes its id. The bytes of single tokens, which streaming needs, come from the decoder: byte-level, byte fallback or
Metaspace. Another one is refused.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError
from tinyforge.files import GET_AGAIN, write_whole, writing
from tinyforge.requirements import needs
from tinyforge.tokenizers.bpe import unspell
from tinyforge.tokenizers.pieces import replace_surrogates, to_utf8
from tinyforge.tokenizers.sentencepiece import BYTES
from tinyforge.tokenizers.vocabulary import After, Vocabulary, start_ids

TEXTS = 256  # that the package encodes at once
SPACE = "\u2581"


class Foreign(Vocabulary):
    """The tokenizer of a tokenizer.json, by the package tokenizers.

    content: of the file. Raises UserError where the package is missing or refuses it, and for a decoder whose tokens
    have no bytes of their own.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        # Truncation and padding are of a call, not of the tokenizer.
        self.content = content | {"truncation": None, "padding": None}
        package = _package()
        try:
            self._reader = package.Tokenizer.from_str(json.dumps(self.content))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the package raises Exception itself, and a panic that is not even one
            raise UserError(f"the package tokenizers {package.__version__} cannot read it: {error}") from None
        self._reader.encode_special_tokens = True
        self._encoder = self._without_specials(package)
        self._decoder = json.dumps(content.get("decoder"))
        added = self._reader.get_added_tokens_decoder()
        specials = {token.content: id for id, token in added.items() if token.special}
        user_defined = {token.content: id for id, token in added.items() if not token.special}
        ids = self._reader.get_vocab(with_added_tokens=True).values()
        texts = {id: self._reader.id_to_token(id) for id in ids}
        tokens = [self._bytes(texts.get(id) or "", added) for id in range(max(ids, default=-1) + 1)]
        for text, id in [*specials.items(), *user_defined.items()]:
            tokens[id] = to_utf8(text)
        super().__init__(tokens, specials, None, user_defined)
        ordinary = self._reader.get_vocab(with_added_tokens=False)
        listed = {**specials, **user_defined}  # which may be pieces too, whose bytes are not those of their text
        for text in listed.keys() & ordinary:
            self._vocab[listed[text]] = self._bytes(text, added)
        first = self._reader.encode("").ids
        self.bos = first[0] if first and first[0] in specials.values() else None

    def _without_specials(self, package: Any) -> Any:
        """The package's tokenizer for texts. A piece of the model that is spelled like a special token would still be
        found in a text: here it is spelled in a way that no text is. Its id stays that of its place."""
        model, added = self.content["model"], self.content.get("added_tokens") or []
        names = {token["content"] for token in added if token.get("special")} - {model.get("unk_token")}
        names -= set(BYTES) if model.get("byte_fallback") else set()
        pieces = model.get("vocab") or []
        held = names & ({piece for piece, _ in pieces} if isinstance(pieces, list) else set(pieces))
        if model.get("type") == "BPE":  # pieces are reached by merges, or as whole words
            merges = [m if isinstance(m, list) else m.split(" ") for m in model.get("merges") or []]
            used = {part for merge in merges for part in (*merge, "".join(merge))}
            held = held - used if model.get("ignore_merges") else set()
        if not held:
            return self._reader

        def hidden(piece: str) -> str:
            return f"\0{piece}\0" if piece in held else piece

        vocabulary: Any = (
            [[hidden(piece), score] for piece, score in pieces]
            if isinstance(pieces, list)
            else {hidden(piece): id for piece, id in pieces.items()}
        )
        kept = [token for token in added if token["content"] not in held]
        content = self.content | {"model": model | {"vocab": vocabulary}, "added_tokens": kept}
        found = package.Tokenizer.from_str(json.dumps(content))
        found.encode_special_tokens = True
        return found

    def _bytes(self, text: str, added: dict[int, Any]) -> bytes:
        if '"ByteLevel"' in self._decoder:
            found = unspell(text)
            return to_utf8(text) if found is None else found
        if '"ByteFallback"' in self._decoder and (byte := re.fullmatch("<0x([0-9A-F]{2})>", text)):
            return bytes.fromhex(byte[1])
        if '"ByteFallback"' in self._decoder or '"Metaspace"' in self._decoder:
            return to_utf8(text.replace(SPACE, " "))
        raise UserError(
            f"got the decoder {self._decoder:.80}, expected ByteLevel, ByteFallback or Metaspace; "
            "use a model with another tokenizer"
        )

    def encode(self, text: str, after: After = "start") -> list[int]:
        """Token ids of `text`; see `Tokenizer.encode`. Lone surrogates become U+FFFD."""
        return next(self.encode_many([text])).tolist()

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """`encode` each text; the package uses all cores."""
        texts = iter(texts)
        while batch := [to_utf8(replace_surrogates(text)).decode(errors="replace") for text in islice(texts, TEXTS)]:
            for found in self._encoder.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(found.ids, self.id_dtype)

    def decode_bytes(self, ids: Iterable[int], after: After = "start") -> bytes:
        """Bytes of `ids`, special tokens as the bytes of their text. Raises UserError for an unknown id."""
        ids = list(ids)
        begins = int(bool(ids) and ids[:1] == start_ids(self))
        lead, rest = (b"".join(map(self.token_bytes, part)) for part in (ids[:begins], ids[begins:]))
        if after == "text" or '"ByteLevel"' in self._decoder or not (strips := self._strips()) or not rest:
            return lead + rest
        if strips == "Strip":
            return lead + rest.removeprefix(b" ")
        first = self._reader.id_to_token(ids[begins])  # which loses all its marks of spaces, and no space itself
        whole = len(self.token_bytes(ids[begins]))
        return lead + (to_utf8(first.replace(SPACE, "")) if SPACE in first else rest[:whole]) + rest[whole:]

    def _strips(self) -> str:
        """The step of the decoder that removes the space before a text; "" if none does."""
        decoder: Any = self.content["decoder"]
        for step in decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]:
            if step["type"] == "Strip" and step["content"] == " " and step["start"]:
                return "Strip"
            if step["type"] == "Metaspace" and step.get("add_prefix_space", True):
                return "" if step.get("prepend_scheme", "always") == "never" else "Metaspace"
        return ""

    def _content(self) -> dict[str, Any]:
        return self.content

    def save(self, path: str | Path) -> None:
        """Write the tokenizer.json. Raises UserError if it cannot be written."""
        with writing(f"the tokenizer {path}"):
            write_whole(Path(path), json.dumps(self.content, ensure_ascii=False) + "\n")


def read_foreign(content: dict[str, Any], path: str | Path, why: str) -> Foreign:
    """The tokenizer in a tokenizer.json, with a line on stderr that says why the package reads it. UserError, naming
    the file, as `Foreign`."""
    try:
        found = Foreign(content)
    except UserError as error:
        raise UserError(f"{path}: {error} (our own reader: {why})") from None
    _say(f"note: {path} is read by the package tokenizers: {why}")
    return found


@cache
def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{needs('it', 'tokenizers', 'hub')}, or {GET_AGAIN}") from None
    return tokenizers
