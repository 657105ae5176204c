"""Tokenizers in the metadata of GGUF files, llama.cpp's format.

    metadata = to_gguf(tokenizer, ids=model.config.vocab)
    tokenizer = from_gguf(metadata, path)

Supported are two of llama.cpp's kinds: "gpt2", byte-level BPE by merges, and "llama", SentencePiece by scores. A
byte-level vocabulary is that of a tokenizer.json under other names, and goes through `tinyforge.tokenizers.huggingface`. The
pattern that splits text is named by `tokenizer.ggml.pre`; llama.cpp has the patterns in its code.

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
from tinyforge.tokenizers.bpe import ByteLevelBPE
from tinyforge.tokenizers.huggingface import BYTE_LEVEL, MARK, cut_by, read_huggingface, to_huggingface
from tinyforge.tokenizers.pieces import PATTERNS
from tinyforge.tokenizers.sentencepiece import SentencePiece, Spaces
from tinyforge.tokenizers.vocabulary import TextTokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of tokens

PRE = {
    "gpt-2": ("gpt2", False),
    "llama-bpe": ("llama3", True),
    "smaug-bpe": ("llama3", False),
    "qwen2": ("qwen2", False),
    "smollm": ("digits", False),
}
"""llama.cpp's name, to our pattern and whether a piece that is a token stays whole."""


# --- writing ----------------------------------------------------------------------------------------------------------


def to_gguf(tokenizer: TextTokenizer, ids: int) -> dict[str, Any]:
    """The metadata of a file for a model with `ids` ids; those beyond the tokenizer's are marked as unused.

    Raises UserError for a tokenizer that llama.cpp cannot represent: of characters, with an unknown pattern or
    treatment of spaces, or with merges that no scores can express.
    """
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
    if isinstance(tokenizer, ByteLevelBPE) and tokenizer.merging.nfc:
        return "text is not normalised to Unicode's form C"
    return ""


def _plain(spaces: Spaces) -> Spaces:
    """llama.cpp's treatment of spaces."""
    return Spaces(prefix="never", doubled=spaces.doubled) if spaces.prefix == "never" else Spaces()


def _byte_level(tokenizer: TextTokenizer) -> dict[str, Any]:
    content = to_huggingface(tokenizer, recognise_specials=True)  # refuses what is not BPE
    assert isinstance(tokenizer, ByteLevelBPE)
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
    specials = {entry["id"]: entry["content"] for entry in content["added_tokens"]}
    tokens = [specials.get(id) or texts[id] for id in range(tokenizer.vocab_size)]
    types = [CONTROL if id in specials else NORMAL for id in range(tokenizer.vocab_size)]
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


def from_gguf(metadata: Mapping[str, Any], path: Path) -> TextTokenizer:
    """The tokenizer in a file's metadata. UserError, naming `path`, if it is damaged or not supported."""
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
        for id, (text, kind) in enumerate(zip(self.tokens, types, strict=True)):
            known = kind in (NORMAL, UNKNOWN, CONTROL, BYTE) or (kind == USER_DEFINED and MARK.fullmatch(text))
            if not known:
                raise UserError(
                    f"token {id} {text!r:.80} is of type {kind}; supported are normal, unknown, control, "
                    "byte tokens, and marks such as <tool>"
                )
        special = (UNKNOWN, CONTROL, USER_DEFINED)
        self.specials = {text: id for id, text in enumerate(self.tokens) if types[id] in special}
        # By default a text begins with bos in SentencePiece models, and not in byte-level ones.
        self.kind = self.one("model", str, "")
        bos = self.one("bos_token_id", int, 1)
        says = self.one("add_bos_token", bool, self.kind == "llama")
        if says and bos not in self.specials.values():
            raise UserError(f"its bos_token_id is {bos}, which is not a special token; {GET_AGAIN}")
        self.bos = bos if says else None

    def read(self, path: Path) -> TextTokenizer:
        if self.kind == "llama":
            prefix = self.one("add_space_prefix", bool, True)
            scores = [float(score) for score in self.numbers("scores", len(self.tokens))]
            return SentencePiece(
                self.tokens, self.specials, self.bos, scores, spaces=Spaces(prefix="always" if prefix else "never")
            )
        if self.kind == "gpt2":
            return read_huggingface(self.content(), path)
        raise UserError(f"its tokenizer is of kind {self.kind!r:.40}; supported: 'gpt2', 'llama'")

    def content(self) -> dict[str, Any]:
        """The same as the content of a tokenizer.json."""
        pre = self.one("pre", str, "")
        if pre not in PRE:
            raise UserError(f"{PREFIX}pre is {pre!r:.80}; supported: {', '.join(PRE)}")
        pattern, whole = PRE[pre]
        special = set(self.specials.values())
        bos = [{"SpecialToken": {"id": self.tokens[self.bos]}}] if self.bos is not None else []
        return {
            "added_tokens": [{"id": id, "content": text, "special": True} for text, id in self.specials.items()],
            "pre_tokenizer": cut_by(PATTERNS[pattern]),
            "post_processor": {"type": "TemplateProcessing", "single": [*bos, {"Sequence": {"id": "A"}}]},
            "decoder": BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "ignore_merges": whole,
                "merges": self.texts("merges"),
                "vocab": {text: id for id, text in enumerate(self.tokens) if id not in special},
            },
        }

    def one(self, key: str, kind: type, default: Any) -> Any:
        """The value of that name, or the default."""
        found = self.metadata.get(PREFIX + key, default)
        if type(found) is not kind:
            raise UserError(f"its {PREFIX}{key} is {found!r:.40}, wanted {kind.__name__}; {GET_AGAIN}")
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
