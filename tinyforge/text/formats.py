"""Tokenizers in the files of other libraries: Hugging Face's tokenizer.json and tiktoken's ranks.

    json.dump(to_huggingface(tokenizer), file)              tokenizers.Tokenizer.from_file(...)
    tokenizer = from_huggingface("tokenizer.json")
    file.writelines(to_tiktoken(tokenizer))                 tiktoken.load.load_tiktoken_bpe(...)
    tokenizer = from_tiktoken("gpt2.tiktoken", ["<|endoftext|>"])

The ids are the same on both sides, on any text. A vocabulary or an option that the other side cannot express is
refused with a UserError, never dropped or changed.

Sources: the serialisation of the `tokenizers` package (version "1.0" of its JSON), and `tiktoken.load`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError
from tinyforge.files import read_json, read_text
from tinyforge.text.bpe import (
    BYTE_ORDERS,
    GPT2_PRINTABLE,
    Pair,
    Tokenizer,
    apply_merges,
)
from tinyforge.text.pieces import split

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Hugging Face spells bytes as GPT-2's files do: a printable byte as itself, the n-th other one as U+0100 + n.
HIDDEN = 256 - len(GPT2_PRINTABLE)
SPELLING = dict(
    zip(BYTE_ORDERS["gpt2"], map(chr, [*GPT2_PRINTABLE, *range(256, 256 + HIDDEN)]), strict=True),
)
SPELT = {character: byte for byte, character in SPELLING.items()}


def spell(token: bytes) -> str:
    """`token` with each byte as one visible character."""
    return "".join(map(SPELLING.__getitem__, token))


def unspell(spelt: str) -> bytes | None:
    """The bytes that `spelt` stands for; None when a character of it stands for no byte."""
    return bytes(SPELT[c] for c in spelt) if SPELT.keys() >= set(spelt) else None


def byte_order_of(byte_ids: list[int | None], path: str | Path) -> str:
    """Name of the byte order in which byte b has the id `byte_ids[b]`. Raises UserError when it has no name."""
    for name, order in BYTE_ORDERS.items():
        if all(byte_ids[byte] == id for id, byte in enumerate(order)):
            return name
    byte, id = next((b, id) for b, id in enumerate(byte_ids) if id is None or id > 255 or id != b)
    raise UserError(
        f"{path}: got id {id} for the byte {byte:#04x}, wanted ids 0..255 for the 256 bytes, in their own or GPT-2's "
        "order; only a vocabulary that starts with them can be read"
    )


# --- Hugging Face -------------------------------------------------------------------------------------------


def to_huggingface(tokenizer: Tokenizer, recognise_specials: bool = False) -> dict[str, Any]:
    """Content of a tokenizer.json that gives the same ids: write it with `json.dump`.

    The special tokens are entries of the vocabulary that no merge makes, so that text which spells one does not
    become its id: as here. With `recognise_specials` they are listed as "added_tokens", which is what most programs
    on that side look for; then text that spells one does become its id, unless the caller sets the
    `encode_special_tokens` of their Tokenizer.

    Raises UserError when two tokens have the same bytes (the file has one id for each), or when a special token
    could not be told from another token or would be decoded to another text.
    """
    vocab: dict[str, int] = {}
    for id in range(256 + len(tokenizer.merges)):
        spelt = spell(tokenizer.token_bytes(id))
        if spelt in vocab:
            raise UserError(
                f"tokenizer.json cannot hold this vocabulary: got the bytes {tokenizer.token_bytes(id)!r} as ids "
                f"{vocab[spelt]} and {id}, wanted one id for them; train the tokenizer again"
            )
        vocab[spelt] = id

    merges = [[spell(tokenizer.token_bytes(left)), spell(tokenizer.token_bytes(right))]
              for left, right in tokenizer.merges]  # fmt: skip
    added = []
    taken = dict(vocab)
    for text, id in tokenizer.specials.items():
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise UserError(f"tokenizer.json cannot hold the special token {text!r}: got a lone surrogate, wanted "
                            "text that UTF-8 can hold; give it another name") from None  # fmt: skip
        key = text if recognise_specials else spell(data)
        if key in taken:
            raise UserError(f"tokenizer.json cannot hold the special token {text!r}: got it spelt as token "
                            f"{taken[key]} is, wanted a spelling of its own; give it another name")  # fmt: skip
        if unspell(key) not in (None, data):
            raise UserError(f"tokenizer.json cannot hold the special token {text!r}: got characters that spell other "
                            "bytes there; give it a name in ASCII")  # fmt: skip
        taken[key] = id
        if recognise_specials:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            added.append({"id": id, "content": text, **flags})
        else:
            vocab[key] = id

    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def from_huggingface(path: str | Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json of byte-level BPE with GPT-2's pattern, with the same ids.

    Entries of the vocabulary that are neither a byte nor made by a merge are special tokens, as are the special
    "added_tokens". Text that spells one never becomes its id here; on the other side it does for an added token,
    unless `encode_special_tokens` is set.

    Raises UserError for a file that is damaged, that asks for what this tokenizer does not do (a normalizer, another
    pattern, a prefix space, a template, added tokens that are not special, ...), or whose ids are not the bytes, the
    merges in order, and then the special tokens.
    """
    content = read_json(path, "the tokenizer")
    _check_huggingface_options(content, path)
    model = content["model"]
    vocab, merge_list, added = model.get("vocab"), model.get("merges"), content.get("added_tokens") or []
    if not isinstance(vocab, dict) or not all(type(id) is int for id in vocab.values()):
        raise UserError(f"{path}: got no map of tokens to ids as model.vocab; get or make the file again")
    for key, value in (("model.merges", merge_list), ("added_tokens", added)):
        if not isinstance(value, list):
            raise UserError(f"{path}: got no list as {key}; get or make the file again")

    byte_order = byte_order_of([vocab.get(SPELLING[byte]) for byte in range(256)], path)
    ids = {SPELLING[byte]: id for id, byte in enumerate(BYTE_ORDERS[byte_order])}
    merges: list[Pair] = []
    for number, merge in enumerate(merge_list):
        # Files of before 2024 hold "left right", newer ones ["left", "right"].
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) and t in ids for t in pair)):
            raise UserError(f"{path} merge {number}: got {merge!r}, wanted two earlier tokens; "
                            "get or make the file again")  # fmt: skip
        left, right = pair
        new = 256 + number
        if left + right in ids or vocab.get(left + right) != new:
            raise UserError(
                f"{path} merge {number}: got id {vocab.get(left + right)} for {left + right!r}, wanted {new}, a new id "
                "for each merge, in order after the bytes; only such a vocabulary can be read"
            )
        ids[left + right] = new
        merges.append((ids[left], ids[right]))

    specials: dict[int, str] = {}
    for entry in added:
        if not (isinstance(entry, dict) and type(entry.get("id")) is int and isinstance(entry.get("content"), str)):
            raise UserError(f"{path}: got the added token {entry!r}, wanted an id and a content; "
                            "get or make the file again")  # fmt: skip
        text, id = entry["content"], entry["id"]
        if entry.get("special") is not True:
            raise UserError(
                f"{path}: got the added token {text!r} that is not special, wanted special ones only: it would be cut "
                "out of text before all else, which this tokenizer does not do"
            )
        if text in specials.values() or vocab.get(text, id) != id:
            raise UserError(f"{path}: got the added token {text!r} with two ids, wanted one; "
                            "get or make the file again")  # fmt: skip
        _add_special(specials, id, text, path)
    for spelt in vocab.keys() - ids.keys() - set(specials.values()):
        data = unspell(spelt)
        try:
            text = spelt if data is None else data.decode()
        except UnicodeDecodeError:
            raise UserError(f"{path}: got the token {spelt!r}, which no merge makes and which is no text, wanted only "
                            "bytes, merges and special tokens; get or make the file again") from None  # fmt: skip
        _add_special(specials, vocab[spelt], text, path)
    first = 256 + len(merges)
    if sorted(specials) != list(range(first, first + len(specials))):
        raise UserError(
            f"{path}: got the ids {sorted(specials)[:8]} for special tokens, wanted {first} onwards, after the merges "
            "and without a gap; only such a vocabulary can be read"
        )
    try:
        return Tokenizer(merges, [specials[id] for id in sorted(specials)], byte_order)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _add_special(specials: dict[int, str], id: int, text: str, path: str | Path) -> None:
    if specials.setdefault(id, text) != text:
        raise UserError(f"{path}: got id {id} for both {specials[id]!r} and {text!r}, wanted one token for an id; "
                        "get or make the file again")  # fmt: skip


def _check_huggingface_options(content: dict[str, Any], path: str | Path) -> None:
    """Raise UserError for the first option of a tokenizer.json that this tokenizer does not have."""

    def refuse(key: str, got: object, wanted: str) -> UserError:
        shown = repr(got)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        return UserError(f"{path}: got {key} {shown}, wanted {wanted}; only byte-level BPE with GPT-2's pattern can "
                         "be read")  # fmt: skip

    model = content.get("model")
    # Files of before 2021 do not name the type; theirs is told by the merges.
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise refuse("model", model.get("type") if isinstance(model, dict) else model, "'BPE' with its merges")
    for key in ("truncation", "padding", "normalizer"):
        if content.get(key) is not None:
            raise refuse(key, content[key], "none")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges"):
        if model.get(key):
            raise refuse(f"model.{key}", model[key], "none")

    def byte_level(key: str) -> dict[str, Any] | None:
        part = content.get(key)
        return part if isinstance(part, dict) and part.get("type") == "ByteLevel" else None

    cut = byte_level("pre_tokenizer")
    if cut is None or cut.get("add_prefix_space", True) is not False or cut.get("use_regex", True) is not True:
        raise refuse("pre_tokenizer", content.get("pre_tokenizer"),
                     "ByteLevel with its own pattern and no prefix space")  # fmt: skip
    if content.get("post_processor") is not None and byte_level("post_processor") is None:
        raise refuse("post_processor", content["post_processor"], "none, or ByteLevel")
    if byte_level("decoder") is None:
        raise refuse("decoder", content.get("decoder"), "ByteLevel")


# --- tiktoken -----------------------------------------------------------------------------------------------


def to_tiktoken(tokenizer: Tokenizer) -> list[str]:
    r"""Lines of a rank file, each "base64(token) id\n": all tokens but the special ones, in the order of ids.

    The file holds neither pattern nor special tokens, so the other side is told both:

        tiktoken.Encoding(name, pat_str=GPT2_PATTERN, mergeable_ranks=load_tiktoken_bpe(path),
                          special_tokens=tokenizer.specials)

    `encode_ordinary` is then our `encode`. Raises UserError when the ids would differ: tiktoken joins any two
    neighbours whose bytes together are a token, where here the pair itself must be a merge. The two are the same
    exactly when each token is what its own bytes encode to, as after training.
    """
    # Why that is enough: at the first step that differs, tiktoken would join x and y to t, where the merge of t is
    # (l, r). No merge has crossed the edges of t so far, so what happened inside is what happens to the bytes of t
    # alone; and these are l and r just before they become t. So x is l, and y is r.
    order = BYTE_ORDERS[tokenizer.byte_order]
    byte_ids = {byte: id for id, byte in enumerate(order)}
    merged = {pair: 256 + index for index, pair in enumerate(tokenizer.merges)}
    lines = []
    for id in range(256 + len(tokenizer.merges)):
        token = tokenizer.token_bytes(id)
        parts = apply_merges([byte_ids[byte] for byte in token], merged, range(256 + len(tokenizer.merges)))
        if parts != [id]:
            raise UserError(
                f"tiktoken's ranks cannot express this vocabulary: got token {id} {token!r}, whose bytes encode to "
                f"{parts}, wanted [{id}]; train the tokenizer again"
            )
        lines.append(f"{base64.b64encode(token).decode()} {id}\n")
    return lines


def from_tiktoken(path: str | Path, specials: Iterable[str] = ()) -> Tokenizer:
    """The tokenizer of a rank file, with the same ids; `specials` get the ids after the last rank.

    The file holds no merges: the merge of a token is the pair that its bytes have become when all tokens of lower
    rank are made. Nor does it hold its pattern. GPT-2's is meant here, and a file made with another is refused if
    that shows in an ASCII token that GPT-2's pattern would cut in two.

    Raises UserError, naming the line, for a file that is damaged, whose ranks are not 0, 1, 2, ..., whose first 256
    are not the bytes, or with a token that is no pair of earlier ones.
    """
    tokens: dict[int, bytes] = {}
    lines: dict[bytes, int] = {}
    for number, line in enumerate(read_text(path, "the ranks").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except (ValueError, binascii.Error):
            raise UserError(f"{path} line {number}: got {line[:80]!r}, wanted a token in base64 and its rank; get or "
                            "make the file again") from None  # fmt: skip
        if not token or rank < 0 or rank in tokens or token in lines:
            raise UserError(f"{path} line {number}: got {token!r} with rank {rank}, wanted a token and a rank not "
                            "given before; get or make the file again")  # fmt: skip
        tokens[rank], lines[token] = token, number
    gap = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if gap is not None or len(tokens) < 256:
        raise UserError(
            f"{path}: got {len(tokens)} ranks of which {len(tokens) if gap is None else gap} is none, wanted all from "
            "0 on, at least the 256 bytes; only such a vocabulary can be read"
        )

    ranks = {token: rank for rank, token in tokens.items()}
    byte_order = byte_order_of([ranks.get(bytes([byte])) for byte in range(256)], path)
    merged: dict[Pair, int] = {}
    for rank in range(256, len(tokens)):
        token = tokens[rank]
        parts = apply_merges([ranks[bytes([byte])] for byte in token], merged, range(rank))
        if len(parts) != 2:
            raise UserError(
                f"{path} line {lines[token]}: got {token!r}, which tokens of lower rank make in {len(parts)} parts, "
                "wanted 2; get or make the file again"
            )
        # Only ASCII: which other characters are letters depends on the version of Unicode.
        if token.isascii() and _is_cut(token.decode()):
            raise UserError(
                f"{path} line {lines[token]}: got {token!r}, which GPT-2's pattern cuts in two, wanted the ranks of "
                "a vocabulary with that pattern; one with another pattern cannot be read"
            )
        merged[parts[0], parts[1]] = rank
    try:
        return Tokenizer(merged, specials, byte_order)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _is_cut(token: str) -> bool:
    """Whether GPT-2's pattern cuts an ASCII token of more than one piece, so that no text could give it."""
    pieces = [piece for chunk in split(token) for piece in chunk]
    # The beginning of a contraction is a sign and a letter by itself, but one piece with the rest.
    return len(pieces) > 1 and token not in ("'r", "'v", "'l")
