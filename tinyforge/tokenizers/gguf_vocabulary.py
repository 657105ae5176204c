"""Tokenizers in the metadata of GGUF files, llama.cpp's format.

    metadata = to_gguf(tokenizer, ids=model.config.vocab)
    tokenizer = from_gguf(metadata, path)

Supported are three of llama.cpp's kinds: "gpt2", byte-level BPE by merges, "llama", SentencePiece by scores, and
"none", a model that takes ids. A byte-level vocabulary is that of a tokenizer.json under other names, and goes through
`tokenizers.huggingface`. The pattern that splits text is named by `tokenizer.ggml.pre`; llama.cpp has the patterns in
its code.

Text that spells a special token becomes its id in llama.cpp if the caller asks for it (`parse_special`), never here.

Source: llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.files import GET_AGAIN
from tinyforge.tokenizers.bpe import Tokenizer
from tinyforge.tokenizers.huggingface import BYTE_LEVEL, cut_by, read_huggingface, to_huggingface
from tinyforge.tokenizers.ids import Ids
from tinyforge.tokenizers.pieces import PATTERNS
from tinyforge.tokenizers.sentencepiece import SentencePiece, Spaces
from tinyforge.tokenizers.vocabulary import TextTokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

_NAMES = (
    ("gpt2", False, ("gpt-2", "phi-2", "mpt", "olmo")),
    ("llama3", True, ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")),
    ("llama3", False, ("smaug-bpe", "dbrx")),
    ("qwen2", False, ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez")),
    ("digits", False, ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")),
    ("tekken", True, ("tekken",)),
    ("o200k", False, ("gpt-4o", "llama4")),
    ("deepseek", False, ("deepseek-v3",)),
)
PRE = {name: (pattern, whole) for pattern, whole, names in _NAMES for name in names}
"""llama.cpp's name, to our pattern and whether a piece that is a token stays whole."""

NONE = ("none", "no_vocab")  # as the package gguf writes it, and as llama.cpp calls it
_KINDS = {"Foreign": "tokenizer that only the package tokenizers reads"}


# --- writing ----------------------------------------------------------------------------------------------------------


def to_gguf(tokenizer: TextTokenizer, ids: int) -> dict[str, Any]:
    """The metadata of a file for a model with `ids` ids; those beyond the tokenizer's are marked as unused.

    Raises UserError for a tokenizer that llama.cpp cannot represent: of characters, with an unknown pattern or
    treatment of spaces, or with merges that no scores can express.
    """
    if isinstance(tokenizer, Ids):
        return {PREFIX + "model": NONE[0]}
    found = _scored(tokenizer) if isinstance(tokenizer, SentencePiece) else _byte_level(tokenizer)
    missing = range(tokenizer.vocab_size, ids)
    found["tokens"] += [f"[PAD{id}]" for id in missing]
    found["token_type"] += [UNUSED] * len(missing)
    if "scores" in found:
        found["scores"] += [0.0] * len(missing)
    found["add_bos_token"] = tokenizer.bos is not None
    if tokenizer.bos is not None:
        found["bos_token_id"] = tokenizer.bos
    return {PREFIX + key: value for key, value in found.items()}


def lost_in_gguf(tokenizer: TextTokenizer) -> str:
    """What llama.cpp does differently with this tokenizer: a few words, or ""."""
    if isinstance(tokenizer, SentencePiece) and _plain(tokenizer.spaces) != tokenizer.spaces:
        return "every text gets a space before it, even where this tokenizer adds none, and tokens may cross spaces"
    if isinstance(tokenizer, Tokenizer) and tokenizer.merging.nfc:
        return "text is not normalised to Unicode's form C"
    return ""


def _plain(spaces: Spaces) -> Spaces:
    """llama.cpp's treatment of spaces."""
    return Spaces(prefix="never", doubled=spaces.doubled) if spaces.prefix == "never" else Spaces()


def _byte_level(tokenizer: TextTokenizer) -> dict[str, Any]:
    if not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        raise UserError(
            f"a .gguf file cannot hold a {_KINDS.get(kind, kind)}, expected a BPE tokenizer; use --format hf"
        )
    content = to_huggingface(tokenizer, recognise_specials=True)
    merging = tokenizer.merging
    cut = merging.pattern.name, bool(merging.whole)
    pre = next((name for name, known in PRE.items() if known == cut), None)
    merges = [f"{left} {right}" for left, right in content["model"]["merges"]]
    if pre is None or not merges:
        raise UserError(
            f"llama.cpp has no tokenizer with {len(merges)} merges, the pattern {cut[0]} and whole pieces "
            f"{'kept' if cut[1] else 'merged'}; use --format hf"
        )
    texts = {id: text for text, id in content["model"]["vocab"].items()}
    added = {entry["id"]: entry for entry in content["added_tokens"]}
    tokens = [
        added[id]["content"] if id in added else texts.get(id, f"[PAD{id}]") for id in range(tokenizer.vocab_size)
    ]
    kinds = {id: CONTROL if entry["special"] else USER_DEFINED for id, entry in added.items()}
    types = [kinds.get(id, NORMAL if id in texts else UNUSED) for id in range(tokenizer.vocab_size)]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": merges}


def _scored(tokenizer: SentencePiece) -> dict[str, Any]:
    if tokenizer.spaces.collapsed:
        raise UserError("llama.cpp keeps all spaces, this tokenizer removes some; use --format hf")
    scores = _scores_of(tokenizer) if tokenizer.scores is None else list(tokenizer.scores)
    types = [NORMAL] * tokenizer.vocab_size
    for id in tokenizer.byte_ids:
        types[id] = BYTE
    for text, id in tokenizer.specials.items():
        types[id] = UNKNOWN if text == "<unk>" else CONTROL
    for id in tokenizer.user_defined.values():
        types[id] = USER_DEFINED
    found = {
        "model": "llama",
        "tokens": list(tokenizer.pieces),
        "scores": scores,
        "token_type": types,
        "add_space_prefix": tokenizer.spaces.prefix != "never",
    }
    if (unknown := tokenizer.specials.get("<unk>")) is not None:
        found["unknown_token_id"] = unknown
    return found


def _scores_of(tokenizer: SentencePiece) -> list[float]:
    """Scores that join the same pairs in the same order as a list of merges."""
    merges = tokenizer.merges or []
    made = [tokenizer.pieces[left] + tokenizer.pieces[right] for left, right in merges]
    order = [piece for piece, _ in groupby(made)]
    rank = {piece: number for number, piece in enumerate(order)}
    # A token that nothing makes: below all others.
    scores = [-float(rank.get(piece, len(order) + id)) for id, piece in enumerate(tokenizer.pieces)]
    scored = SentencePiece(tokenizer.pieces, tokenizer.specials, tokenizer.bos, scores, spaces=tokenizer.spaces)
    if len(rank) < len(order) or sorted(scored.pairs() or []) != sorted(merges):
        raise UserError("llama.cpp joins by scores, and none give this tokenizer's merges; use --format hf")
    return scores


# --- reading ----------------------------------------------------------------------------------------------------------


def from_gguf(metadata: Mapping[str, Any], path: Path, ids: int = 0) -> TextTokenizer:
    """The tokenizer in a file's metadata. ids: those of the model, for a file without a tokenizer. UserError, naming
    `path`, if it is damaged or not supported."""
    if metadata.get(PREFIX + "model") in NONE:
        return Ids(ids)
    try:
        return _Reader(metadata).read(path)
    except UserError as error:
        raise UserError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


class _Reader:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        tokens = self.texts("tokens")
        types = [int(kind) for kind in self.numbers("token_type", len(tokens), NORMAL)]
        while types and types[-1] == UNUSED:
            types.pop()
        self.tokens, self.types = tokens[: len(types)], types
        wrong = next((id for id, kind in enumerate(types) if not NORMAL <= kind <= BYTE), None)
        if wrong is not None:
            raise UserError(f"token {wrong} {self.tokens[wrong]!r:.80} is of type {types[wrong]}; {GET_AGAIN}")
        self.specials = {text: id for id, text in enumerate(self.tokens) if types[id] in (UNKNOWN, CONTROL)}
        self.user_defined = {text: id for id, text in enumerate(self.tokens) if types[id] == USER_DEFINED}
        # By default a text begins with bos in SentencePiece models, and in the byte-level ones of Llama 3 and tekken,
        # those whose pieces stay whole.
        self.kind = self.one("model", str, "")
        begins = PRE.get(self.one("pre", str, ""), ("", False))[1] and f"{PREFIX}bos_token_id" in metadata
        bos = self.one("bos_token_id", int, 1)
        says = self.one("add_bos_token", bool, self.kind == "llama" or begins)
        if says and bos not in self.specials.values():
            raise UserError(f"its bos_token_id is {bos}, which is not a special token; {GET_AGAIN}")
        self.bos = bos if says else None

    def read(self, path: Path) -> TextTokenizer:
        if self.kind == "llama":
            prefix = self.one("add_space_prefix", bool, True)
            scores = [float(score) for score in self.numbers("scores", len(self.tokens))]
            spaces = Spaces(prefix="always" if prefix else "never")
            return SentencePiece(self.tokens, self.specials, self.bos, scores, None, spaces, self.user_defined)
        if self.kind == "gpt2":
            return read_huggingface(self.content(), path)
        raise UserError(f"its tokenizer is of kind {self.kind!r:.40}; supported: 'gpt2', 'llama', 'none'")

    def content(self) -> dict[str, Any]:
        """The same as the content of a tokenizer.json."""
        pre = self.one("pre", str, "")
        if pre not in PRE:
            raise UserError(f"{PREFIX}pre is {pre!r:.80}; supported: {', '.join(PRE)}")
        pattern, whole = PRE[pre]
        special = {*self.specials.values(), *self.user_defined.values()}
        texts = {text: id for id, text in enumerate(self.tokens) if id not in special and self.types[id] != UNUSED}
        added = [(text, id, True) for text, id in self.specials.items()]
        added += [(text, id, False) for text, id in self.user_defined.items()]
        bos = [{"SpecialToken": {"id": self.tokens[self.bos]}}] if self.bos is not None else []
        return {
            "added_tokens": [{"id": id, "content": text, "special": special} for text, id, special in added],
            "pre_tokenizer": cut_by(PATTERNS[pattern]),
            "post_processor": {"type": "TemplateProcessing", "single": [*bos, {"Sequence": {"id": "A"}}]},
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "ignore_merges": whole, "merges": self.texts("merges"), "vocab": texts},
        }

    def one(self, key: str, kind: type, default: Any) -> Any:
        """The value of that name, or the default."""
        found = self.metadata.get(PREFIX + key, default)
        if type(found) is not kind:
            raise UserError(f"its {PREFIX}{key} is {found!r:.40}, expected {kind.__name__}; {GET_AGAIN}")
        return found

    def texts(self, key: str) -> list[str]:
        found = self.metadata.get(PREFIX + key)
        if not isinstance(found, list):
            raise UserError(f"its {PREFIX}{key} is not a list of texts; {GET_AGAIN}")
        return found

    def numbers(self, key: str, count: int, default: int | None = None) -> list[float]:
        """The first `count` numbers of an array; `count` times the default if there is none."""
        found = self.metadata.get(PREFIX + key)
        if found is None and default is not None:
            return [default] * count
        if not isinstance(found, np.ndarray) or len(found) < count:
            raise UserError(f"its {PREFIX}{key} is not an array of {count} numbers; {GET_AGAIN}")
        return found.tolist()[:count]
