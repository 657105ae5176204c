"""Tokenizers in tiktoken's rank files, read and written.

    file.writelines(to_tiktoken(tokenizer))                 tiktoken.load.load_tiktoken_bpe(...)
    tokenizer = from_tiktoken("gpt2.tiktoken", ["<|endoftext|>"])

Both sides give the same ids for any text. A vocabulary that the other side cannot express is refused with a UserError,
never changed.

Source: `tiktoken.load` of the package of that name.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tinyforge.errors import UserError, errors_in
from tinyforge.files import GET_AGAIN, read_text, shown
from tinyforge.tokenizers import bpe
from tinyforge.tokenizers.pieces import GPT2, PATTERNS, Pattern, split


def to_tiktoken(tokenizer: bpe.Tokenizer) -> list[str]:
    r"""Lines of a rank file, each "base64(token) id\n": all tokens but the special ones, in the order of ids.

    The file holds neither the pattern nor the special tokens; give both to tiktoken:

        tiktoken.Encoding(name, pat_str=tokenizer.merging.pattern.published, mergeable_ranks=load_tiktoken_bpe(path),
                          special_tokens=tokenizer.specials)

    `encode_ordinary` is then our `encode`. Raises UserError if the ids would differ: tiktoken joins any two neighbours
    whose joint bytes are a token, while here the pair itself must be a merge. The two agree exactly if the bytes of
    each token encode to that token, as after training.
    """
    # Why that is enough: at the first step that differs, tiktoken would join x and y to t, while the merge of t is
    # (l, r). No merge has crossed the edges of t so far, so inside t the same has happened as to the bytes of t alone,
    # and these are l and r just before they become t. So x is l, and y is r.
    lines = []
    for id in range(256 + len(tokenizer.merges)):
        token = tokenizer.token_bytes(id)
        parts = tokenizer.merging.merge(token)
        if parts != [id]:
            raise UserError(
                f"tiktoken's ranks cannot express this vocabulary: got token {id} {token!r}, whose bytes encode to "
                f"{parts}, expected [{id}]; train the tokenizer again"
            )
        lines.append(f"{base64.b64encode(token).decode()} {id}\n")
    return lines


class Growing(bpe.PairRanks):
    """Ranks that are still being read: a pair without one may get one."""

    def __missing__(self, pair: bpe.Pair) -> int:
        return bpe.NO_MERGE


def from_tiktoken(path: str | Path, specials: Iterable[str] = (), pattern: Pattern = GPT2) -> bpe.Tokenizer:
    """The tokenizer of a rank file, with the same ids; `specials` get the ids after the last rank.

    The file holds no merges: the merge of a token is the pair that its bytes encode to with all tokens of lower rank.
    Nor does it hold its pattern, GPT2 or DIGITS. A file made with another is refused if that shows, in an ASCII token
    that this pattern would split.

    Raises UserError, naming the line, for a file that is damaged, whose ranks are not 0, 1, 2, ..., whose first 256 are
    not the bytes, or with a token that is not a pair of earlier ones.
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
            raise UserError(
                f"{path} line {number}: got {line[:80]!r}, expected a token in base64 and its rank; get or "
                "make the file again"
            ) from None
        if not token or rank < 0 or rank in tokens or token in lines:
            raise UserError(
                f"{path} line {number}: got {token!r} with rank {rank}, expected a token and a rank not "
                "given before; get or make the file again"
            )
        tokens[rank], lines[token] = token, number
    gap = next((rank for rank in range(len(tokens)) if rank not in tokens), None)
    if gap is not None or len(tokens) < 256:
        raise UserError(
            f"{path}: got {len(tokens)} ranks without rank {len(tokens) if gap is None else gap}, expected all from 0 "
            "on, at least the 256 bytes; only such a vocabulary can be read"
        )

    ranks = {token: rank for rank, token in tokens.items()}
    byte_ids = [ranks.get(bytes([byte])) for byte in range(256)]
    if (byte_order := bpe.byte_order_of(byte_ids)) is None:
        byte, id = next((b, id) for b, id in enumerate(byte_ids) if id is None or id > 255 or id != b)
        raise UserError(
            f"{path}: got id {id} for the byte {byte:#04x}, expected ids 0..255 for the 256 bytes, in their own or "
            "GPT-2's order; only a vocabulary that starts with them can be read"
        )
    merged = Growing()
    for rank in range(256, len(tokens)):
        token = tokens[rank]
        parts = bpe.apply_merges([ranks[bytes([byte])] for byte in token], merged, range(rank))
        if len(parts) != 2:
            raise UserError(
                f"{path} line {lines[token]}: got {token!r}, which is {len(parts)} tokens of lower rank, expected 2; "
                "get or make the file again"
            )
        # Only ASCII: which other characters are letters depends on the version of Unicode.
        if token.isascii() and _is_cut(token.decode(), pattern):
            raise UserError(
                f"{path} line {lines[token]}: got {token!r}, which the pattern {pattern.name} splits, expected the "
                "ranks of a vocabulary with that pattern; give the pattern that it was made with"
            )
        merged[parts[0], parts[1]] = rank
    with errors_in(path):
        return bpe.Tokenizer(merged, specials, byte_order, pattern)


TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The first special tokens of Mistral's tekken.json before it listed them."""


def read_tekken(content: dict[str, Any], path: str | Path) -> bpe.Tokenizer:
    """The tokenizer of a tekken.json, Mistral's format: ranks as tiktoken's, after ids for special tokens.

    Raises UserError, naming `path`, if it is damaged or has another pattern.
    """

    def check(sound: bool, cause: str) -> None:
        if not sound:
            raise UserError(f"{path} is not a tekken.json that can be read: {cause}; {GET_AGAIN}")

    config, vocab = content.get("config"), content.get("vocab")
    check(isinstance(config, dict) and isinstance(vocab, list), "it lacks config or vocab")
    assert isinstance(config, dict) and isinstance(vocab, list)
    size: Any = config.get("default_vocab_size")
    count: Any = config.get("default_num_special_tokens")
    check(type(size) is int and type(count) is int and 0 < count < size <= count + len(vocab), f"got {size} ids")
    pattern = next((known for known in PATTERNS.values() if known.published == config.get("pattern")), None)
    if pattern is None:
        raise UserError(f"{path}: got the pattern {shown(config.get('pattern'))}; known: {', '.join(PATTERNS)}")
    listed = content.get("special_tokens")
    try:
        given = {item["rank"]: item["token_str"] for item in listed} if listed else dict(enumerate(TEKKEN_SPECIALS))
        ranks = [item["rank"] for item in vocab[: size - count]]
        tokens = [binascii.a2b_base64(item["token_bytes"]) for item in vocab[: size - count]]
    except (KeyError, TypeError, binascii.Error) as error:
        raise UserError(f"{path} is damaged ({error!r}); {GET_AGAIN}") from None
    check(ranks == list(range(size - count)) and b"" not in tokens, "its ranks do not follow each other")
    specials = {str(given.get(id, f"<SPECIAL_{id}>")): id for id in range(count)}
    check(len(specials) == count, "two special tokens have one name")
    every = [*([b""] * count), *tokens]
    with errors_in(path):
        merges = bpe.JointMerges(every, bpe.ids_by_bytes(every, set()))
        return bpe.Tokenizer(
            merges, specials, pattern=pattern, tokens=every, bos=specials.get("<s>"), ignore_merges=True
        )


def _is_cut(token: str, pattern: Pattern) -> bool:
    """Whether the pattern splits an ASCII token, so that no text could give it."""
    pieces = [piece for chunk in split(token, pattern) for piece in chunk]
    # The first two characters of a longer contraction are two pieces alone, but one piece with the rest.
    return len(pieces) > 1 and token not in ("'r", "'v", "'l")
