"""SentencePiece BPE with byte fallback: the tokenizer of Llama, Llama 2, TinyLlama, Mistral and llama2.c.

    tokenizer = read_llama2c("tok512.bin")              llama2.c's tokenizer.bin
    tokenizer = read_model("tokenizer.model")           SentencePiece's own file
    tokenizer.encode("Once upon a time")
    tokenizer.decode([403, 407, 261, 378])              "Once upon a time"

A text starts as its characters, with spaces written as U+2581 and one more space before the text. Then the neighbours
whose joint piece has the highest score are joined, the leftmost of equals, until none make a token. A character that is
not in the vocabulary becomes its UTF-8 bytes, the tokens <0x00> to <0xFF>.

If no token has a space after another character, no join crosses the beginning of a run of spaces. Then each distinct
word is encoded once and cached.

Sources: Kudo, Richardson, "SentencePiece" (2018), and bpe_model.cc of that package; llama2.c's tokenizer.py and run.c.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError, errors_in
from tinyforge.files import GET_AGAIN, read_bytes, writing, written_whole
from tinyforge.tokenizers.bpe import NO_MERGE, Pair, PairRanks, SpeltMerges, apply_merges
from tinyforge.tokenizers.parallel import ordered_map
from tinyforge.tokenizers.pieces import batches, replace_surrogates, to_utf8
from tinyforge.tokenizers.vocabulary import After, Vocabulary, are_texts, check_tokenizer, fault_in_specials, is_pair

FORMAT = "tinyforge-sentencepiece"
VERSION = 1

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MOST_CHARACTERS = 256  # of one token; SentencePiece's own default is at most 16
CACHED_CHARACTERS = 1 << 22  # of all cached words


@dataclass(frozen=True)
class Spaces:
    """How spaces are treated before anything is joined.

    prefix: which texts get a space before them: "always" every text, "first" only a text at the very beginning (not one
    after a special token), "never". doubled: even a text that begins with a space gets one. collapsed: runs of spaces
    become one space, and those at both ends are removed. split: text is split before every space, so that no two join.
    """

    prefix: Literal["always", "first", "never"] = "always"
    doubled: bool = True
    collapsed: bool = False
    split: bool = False

    def has_prefix(self, after: After) -> bool:
        return (self.prefix == "always" and after != "text") or (self.prefix == "first" and after == "start")

    def apply(self, text: str, after: After) -> str:
        """`text` with its prefix, and spaces as U+2581."""
        if self.collapsed:
            text = re.sub(" +", " ", text.strip(" "))
        if text and self.has_prefix(after) and (self.doubled or text[0] not in (" ", SPACE)):
            text = " " + text
        text = text.replace(" ", SPACE)
        return text.rstrip(SPACE) if self.collapsed else text


class Words(dict[str, tuple[int, ...]]):
    """Word -> its ids, computed on first use."""

    def __init__(self, tokenizer: SentencePiece) -> None:
        self.tokenizer = tokenizer
        self.room = CACHED_CHARACTERS

    def __missing__(self, word: str) -> tuple[int, ...]:
        if self.room < 0:
            self.clear()
            self.room = CACHED_CHARACTERS
        self.room -= len(word) + 16  # even a short word costs something
        ids = self[word] = self.tokenizer.encode_word(word)
        return ids


class Joins(NamedTuple):
    """What `apply_merges` takes, the ids of characters and other texts, and how a character without one is spelt in
    bytes, by an id that stands for it during the joins."""

    ranks: PairRanks
    made: Sequence[int] | None
    ids: Mapping[str, int]
    fallback: Mapping[int, list[int]] = {}


class SentencePiece(Vocabulary):
    """A SentencePiece vocabulary of type BPE with byte fallback.

    `pieces[id]` is the text of a token, with U+2581 for a space, or <0x00> .. <0xFF> for a byte. The order of joins
    comes from `scores`, one per token, the highest first, of equal ones the leftmost in the text (as in SentencePiece),
    or from `merges`, pairs of ids, the first in the list first (as in Hugging Face). Text never becomes one of
    `specials`. user_defined: see `Vocabulary`; with `prefix_once` a text has its space before it is split at them.

    Raises UserError if a byte is missing, a token is empty, too long or repeated, a score is not finite, or a merge
    does not make a token.
    """

    def __init__(
        self,
        pieces: Sequence[str],
        specials: dict[str, int],
        bos: int | None,
        scores: Sequence[float] | None = None,
        merges: Sequence[Pair] | SpeltMerges | None = None,
        spaces: Spaces = Spaces(),  # noqa: B008 (frozen)
        user_defined: dict[str, int] | None = None,
        prefix_once: bool = False,
    ) -> None:
        self.pieces, self.scores, self._merges, self.spaces = list(pieces), scores, merges, spaces
        self.prefix_once = prefix_once
        if scores is not None and len(scores) != len(pieces):
            raise UserError(f"got {len(scores)} scores for {len(pieces)} tokens, expected one for each; {GET_AGAIN}")
        self._ids = ids_of_pieces(self.pieces, set(specials.values()))
        missing = next((byte for byte in BYTES if byte not in self._ids), None)
        if missing:
            raise UserError(
                f"there is no token {missing}, expected one for each byte: only vocabularies with byte "
                "fallback can be read"
            )
        self.byte_ids = [self._ids.pop(byte) for byte in BYTES]
        super().__init__(self._bytes_of_tokens, specials, bos, user_defined, len(self.pieces))
        self._words = Words(self)
        if scores is not None and not np.isfinite(np.array(scores, np.float64)).all():
            odd = next(
                (id for piece, id in self._ids.items() if len(piece) > 1 and not math.isfinite(scores[id])), None
            )
            if odd is not None:
                got = f"token {odd} {pieces[odd]!r}: got the score {scores[odd]}"
                raise UserError(f"{got}, expected a number; {GET_AGAIN}")
        elif merges is not None and not isinstance(merges, SpeltMerges):
            self._joins = self._joins_by_merges(merges)  # which checks them

    def _bytes_of_tokens(self) -> list[bytes]:
        found = bytes_of_pieces(self.pieces)
        for byte, id in enumerate(self.byte_ids):
            found[id] = bytes([byte])
        return found

    @cached_property
    def _joins(self) -> Joins:
        """How texts are joined, made for the first text."""
        if isinstance(self._merges, SpeltMerges):
            return Joins(self._merges.ranks(), self._merges.made, self._ids)
        return self._joins_by_scores() if self._merges is None else self._joins_by_merges(self._merges)

    def _joins_by_scores(self) -> Joins:
        """Any two neighbours whose joint text is a token make it, ranked by the token's score."""
        long = [id for piece, id in self._ids.items() if len(piece) > 1]
        # A character that occurs only inside tokens takes part in joins, and is spelt in bytes if it is left over.
        hidden = sorted(set("".join(self.pieces[id] for id in long)) - self._ids.keys())
        pieces = [*self.pieces, *hidden]
        ids = self._ids | {character: len(self.pieces) + number for number, character in enumerate(hidden)}
        order, rank_of = np.unique(-np.array(self.scores, np.float64)[long], return_inverse=True)
        found = dict(zip(long, rank_of.tolist(), strict=True))
        by_rank = dict(zip(rank_of.tolist(), long, strict=True))
        tied = len(order) < len(long)

        def find(left: int, right: int) -> int:
            id = ids.get(pieces[left] + pieces[right])
            if id is None:
                return NO_MERGE
            if tied:
                ranks.joined[left, right] = id
            return found[id]

        ranks = PairRanks(find=find)
        fallback = {ids[text]: [self.byte_ids[byte] for byte in to_utf8(text)] for text in hidden}
        return Joins(ranks, None if tied else [by_rank[rank] for rank in range(len(order))], ids, fallback)

    def _joins_by_merges(self, merges: Sequence[Pair]) -> Joins:
        ranks: dict[Pair, int] = {}
        made: list[int] = []
        for rank, (left, right) in enumerate(merges):
            if not (0 <= left < len(self.pieces) and 0 <= right < len(self.pieces)):
                raise UserError(
                    f"merge {rank}: got the ids {left} and {right}, expected 0..{len(self.pieces) - 1}; {GET_AGAIN}"
                )
            joint = self.pieces[left] + self.pieces[right]
            if joint not in self._ids or (left, right) in ranks:
                what = "twice" if joint in self._ids else "which is not a token"
                raise UserError(
                    f"merge {rank}: got {joint!r} {what}, expected a new pair that makes a token; {GET_AGAIN}"
                )
            made.append(self._ids[joint])
            ranks[left, right] = rank
        return Joins(PairRanks(ranks), made, self._ids)

    @cached_property
    def _find_words(self) -> Callable[[str], list[str]] | None:
        """The words of a text. If a token has a space after another character, a text cannot be split before the
        joins."""
        edge = absent("".join(self._ids))
        if not self.spaces.split and re.search(f"[^{SPACE}{edge}]{SPACE}", edge.join(self._ids)):
            return None
        return re.compile(
            f"{SPACE}?[^{SPACE}]+|{SPACE}" if self.spaces.split else f"{SPACE}*[^{SPACE}]+|{SPACE}+"
        ).findall

    @property
    def merges(self) -> Sequence[Pair] | None:
        if isinstance(self._merges, SpeltMerges):
            self._merges = self._merges.by_id()
        return self._merges

    # --- text to ids and back

    def encode(self, text: str, after: After = "start") -> list[int]:
        """Token ids of `text`; text that spells a special token or a byte token never becomes its id.

        `after` decides whether the text gets a space before it, see `Spaces`. U+DC80..U+DCFF stand for raw bytes; any
        other lone surrogate becomes U+FFFD. U+2581 in the text is a space.
        """
        text = replace_surrogates(text)
        if not self.user_defined:
            return self._encode(self.spaces.apply(text, after))
        if self.prefix_once:
            text = self.spaces.apply(text, after)
        ids: list[int] = []
        for number, part in enumerate(self._split_user_defined(text)):
            if number % 2:
                ids.append(self.user_defined[part])
            else:
                after = "special" if number else after
                ids += self._encode(part if self.prefix_once else self.spaces.apply(part, after))
        return ids

    def _encode(self, text: str) -> list[int]:
        if self._find_words is None:
            return list(self.encode_word(text))
        return list(chain.from_iterable(map(self._words.__getitem__, self._find_words(text))))

    def encode_word(self, word: str) -> tuple[int, ...]:
        """The ids of a text without further splitting."""
        ids: list[int] = []
        ranks, made, of_text, fallback = self._joins
        for character in word:
            if (id := of_text.get(character)) is not None:
                ids.append(id)
            else:
                ids += [self.byte_ids[byte] for byte in to_utf8(character)]
        ids = apply_merges(ids, ranks, made)
        if fallback:
            ids = list(chain.from_iterable(fallback.get(id, (id,)) for id in ids))
        return tuple(ids)

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """`encode` each text on all cores; yields the ids in order, as arrays of `id_dtype`.

        Each text is encoded by one of the `workers` processes (default: one per core); their number changes no id.
        Raises UserError if a worker dies.
        """
        for arrays in ordered_map(self._encode_batch, batches(texts, pattern=None), workers):
            yield from arrays

    def _encode_batch(self, batch: Sequence[tuple[str, bool]]) -> list[npt.NDArray[Any]]:
        return [np.array(self.encode(text), self.id_dtype) for text, _ in batch]

    def decode_bytes(self, ids: Iterable[int], after: After = "start") -> bytes:
        """Bytes of `ids`, special tokens as the bytes of their text. Raises UserError for an unknown id.

        The space that `encode` adds is removed again, at the beginning or after `bos`, unless `after` says that the ids
        continue a text. With `spaces.collapsed` all spaces there are removed.
        """
        ids = list(ids)
        begins = self.bos is not None and ids[:1] == [self.bos]
        tokens = list(map(self.token_bytes, ids))
        rest = b"".join(tokens[begins:])
        if self.spaces.collapsed and after != "text":
            rest = rest.lstrip(b" ")
        elif self.spaces.has_prefix(after):
            rest = rest.removeprefix(b" ")
        return tokens[0] + rest if begins else rest

    def pairs(self) -> list[Pair] | None:
        """All pairs of tokens that make a token, in the order of joins; None if some character is not a token."""
        if self.merges is not None:
            return list(self.merges)
        if self._joins.fallback:
            return None
        cuts = ((piece[:at], piece[at:]) for piece in self._ids for at in range(1, len(piece)))
        found = [(self._ids[a], self._ids[b]) for a, b in cuts if a in self._ids and b in self._ids]
        return sorted(found, key=self._joins.ranks.__getitem__)

    # --- on disk

    def _content(self) -> dict[str, Any]:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "specials": self.specials,
            "bos": self.bos,
            "spaces": asdict(self.spaces),
            **({"user_defined": self.user_defined} if self.user_defined else {}),
            **({"prefix_once": True} if self.prefix_once else {}),
        }
        if self.merges is not None:
            return content | {"pieces": self.pieces, "merges": [list(pair) for pair in self.merges]}
        assert self.scores is not None
        return content | {"pieces": [list(item) for item in zip(self.pieces, self.scores, strict=True)]}

    @classmethod
    def from_content(cls, content: dict[str, Any], path: str | Path) -> SentencePiece:
        """The tokenizer in a file that `save` wrote, as JSON read it. Raises UserError, naming `path`."""

        check = partial(check_tokenizer, path)
        check(content.get("version") == VERSION, f"got version {content.get('version')!r}, expected {VERSION}")
        parts: list[Any] = [content.get(key) for key in ("pieces", "merges", "specials", "bos", "spaces")]
        pieces, merges, specials, bos, spaces = parts
        check(isinstance(pieces, list), "pieces is not a list")
        scores = None
        if merges is None:
            check(
                all(isinstance(item, list) and len(item) == 2 and type(item[1]) is float for item in pieces),
                "pieces is not a list of texts with their scores",
            )
            pieces, scores = [item[0] for item in pieces], [item[1] for item in pieces]
        else:
            check(isinstance(merges, list) and all(map(is_pair, merges)), "merges is not a list of pairs of ids")
            merges = [(left, right) for left, right in merges]
        check(are_texts(pieces), "pieces is not a list of texts")
        check(not (fault := fault_in_specials(content, len(pieces))), fault)
        check(
            isinstance(spaces, dict)
            and spaces.keys() == asdict(Spaces()).keys()
            and spaces["prefix"] in ("always", "first", "never")
            and all(isinstance(value, bool) for key, value in spaces.items() if key != "prefix"),
            f"got {spaces!r:.80} as spaces",
        )
        with errors_in(path):
            given = content.get("user_defined"), content.get("prefix_once") is True
            return cls(pieces, specials, bos, scores, merges, Spaces(**spaces), *given)


def ids_of_pieces(pieces: Sequence[str], special_ids: set[int]) -> dict[str, int]:
    """The id of each token but the special ones."""
    ids = dict(zip(pieces, range(len(pieces)), strict=True))
    if len(ids) == len(pieces) and not set(map(len, pieces)) - set(range(1, MOST_CHARACTERS + 1)):
        for id in special_ids:
            del ids[pieces[id]]
        return ids
    ids = {piece: id for id, piece in enumerate(pieces) if id not in special_ids}
    seen: dict[str, int] = {}
    for id, piece in enumerate(pieces):
        if not 0 < len(piece) <= MOST_CHARACTERS:
            raise UserError(f"token {id}: got {len(piece)} characters, expected 1 to {MOST_CHARACTERS}; {GET_AGAIN}")
        if id not in special_ids and seen.setdefault(piece, id) != id:
            raise UserError(f"token {id}: got {piece!r}, which is token {seen[piece]} too; {GET_AGAIN}")
    return ids


def bytes_of_pieces(pieces: Sequence[str]) -> list[bytes]:
    """The bytes of each token, with a space for U+2581."""
    edge = absent("".join(pieces))
    joined = edge.join(pieces)
    try:
        data = joined.encode()
    except UnicodeEncodeError:  # a lone surrogate
        data = to_utf8(joined)
    return data.replace(SPACE.encode(), b" ").split(edge.encode()) if pieces else []


def absent(text: str) -> str:
    """A character that is not in the text."""
    return next(character for character in map(chr, range(0xE000, 0x110000)) if character not in text)


# --- llama2.c -----------------------------------------------------------------------------------------------

LLAMA2C_SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2}


def read_llama2c(path: str | Path) -> SentencePiece:
    """The tokenizer.bin of llama2.c: int32 length of the longest token; for each token float32 score, int32 length,
    bytes. The number of tokens and the special ones are not in it: ids 0, 1, 2 are `<unk>`, `<s>`, `</s>`.

    Raises UserError if the file cannot be read, is truncated, or is not such a vocabulary.
    """
    data = read_bytes(path, "the tokenizer")
    pieces: list[str] = []
    scores: list[float] = []
    at = 4
    try:
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            at += 8 + length
            if not 0 <= length <= len(data) - at + length:
                raise ValueError(f"got the length {length}")
            pieces.append(data[at - length : at].decode().replace(" ", SPACE))
            scores.append(score)
        if len(pieces) < len(LLAMA2C_SPECIALS):
            raise ValueError("fewer than 3 tokens")
    except (struct.error, ValueError) as error:
        raise UserError(f"{path} is not a tokenizer of llama2.c: {error} at token {len(pieces)}; {GET_AGAIN}") from None
    for text, id in LLAMA2C_SPECIALS.items():
        pieces[id] = text  # in the file <s> and </s> have line ends around them
    with errors_in(path):
        return SentencePiece(pieces, LLAMA2C_SPECIALS, LLAMA2C_SPECIALS["<s>"], scores)


def write_llama2c(tokenizer: SentencePiece, path: str | Path) -> None:
    """Write a tokenizer.bin that llama2.c reads. UserError if the format cannot hold the tokenizer."""
    ids = [*LLAMA2C_SPECIALS.values(), *range(3, 259)]
    if (
        tokenizer.scores is None
        or tokenizer.spaces != Spaces()
        or tokenizer.specials != LLAMA2C_SPECIALS
        or tokenizer.byte_ids != ids[3:]
    ):
        raise UserError(
            f"cannot write {path}: llama2.c's format has scores, <unk>, <s>, </s> and the bytes as ids 0..258, and a "
            "space before every text; this tokenizer differs"
        )
    texts = [piece.replace(SPACE, " ") for piece in tokenizer.pieces]
    texts[1], texts[2] = "\n<s>\n", "\n</s>\n"
    tokens = [text.encode() for text in texts]
    parts = [struct.pack("<i", max(map(len, tokens)))]
    for token, score in zip(tokens, tokenizer.scores, strict=True):
        parts += [struct.pack("<fi", score, len(token)), token]
    with writing(path), written_whole(Path(path)) as partial:
        partial.write_bytes(b"".join(parts))


# --- SentencePiece's own file -------------------------------------------------------------------------------

# Numbers of fields in sentencepiece_model.proto, and of the types of pieces.
MODEL_PIECES, MODEL_TRAINER, MODEL_NORMALIZER = 1, 2, 3
PIECE_TEXT, PIECE_SCORE, PIECE_TYPE = 1, 2, 3
TRAINER_TYPE, TRAINER_SUFFIX, TRAINER_BOS = 3, 24, 41
NORMALIZER_CHARSMAP, NORMALIZER_PREFIX, NORMALIZER_COLLAPSE, NORMALIZER_ESCAPE = 2, 3, 4, 5
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE)
BPE = 2


def read_model(path: str | Path) -> SentencePiece:
    """SentencePiece's own tokenizer.model, of type BPE with byte fallback and no normalisation of characters.

    Raises UserError if the file cannot be read or is damaged, and for what is not supported: another type of model, and
    a normalisation (such as nmt_nfkc, the trainer's default).
    """

    def check(supported: bool, got: str, expected: str) -> None:
        if not supported:
            raise UserError(f"{path}: got {got}, expected {expected}; other SentencePiece models cannot be read")

    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        data = read_bytes(path, "the tokenizer")
        pieces, scores, kinds, end = usual_pieces(data)
        for number, value in protobuf(data[end:]):
            if number == MODEL_PIECES:
                piece = dict(protobuf(value))
                pieces.append(piece[PIECE_TEXT].decode())
                scores.append(struct.unpack("<f", piece.get(PIECE_SCORE, bytes(4)))[0])
                kinds.append(piece.get(PIECE_TYPE, NORMAL))
            elif number in (MODEL_TRAINER, MODEL_NORMALIZER):
                (trainer if number == MODEL_TRAINER else normalizer).update(protobuf(value))
    except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a SentencePiece model ({error}); {GET_AGAIN}") from None
    types = np.array(kinds)
    if (odd := np.flatnonzero(~np.isin(types, KINDS))).size:
        check(False, f"the token {pieces[odd[0]]!r} of type {kinds[odd[0]]}", "no unused tokens")
    specials = {pieces[id]: id for id in np.flatnonzero(np.isin(types, (UNKNOWN, CONTROL))).tolist()}
    user_defined = {pieces[id]: id for id in np.flatnonzero(types == USER_DEFINED).tolist()}
    check(trainer.get(TRAINER_TYPE, 1) == BPE, f"model type {trainer.get(TRAINER_TYPE, 1)}", "2 (BPE)")
    check(not normalizer.get(NORMALIZER_CHARSMAP), "a normalisation of characters", "the one named identity")
    check(normalizer.get(NORMALIZER_ESCAPE, 1) == 1, "spaces that stay as they are", "spaces as U+2581")
    check(not trainer.get(TRAINER_SUFFIX), "spaces after words", "spaces before words")
    spaces = Spaces(
        prefix="always" if normalizer.get(NORMALIZER_PREFIX, 1) else "never",
        collapsed=bool(normalizer.get(NORMALIZER_COLLAPSE, 1)),
    )
    bos = trainer.get(TRAINER_BOS, 1)
    with errors_in(path):
        first = bos if bos in specials.values() else None
        return SentencePiece(pieces, specials, first, scores, None, spaces, user_defined, bool(user_defined))


def usual_pieces(data: bytes) -> tuple[list[str], list[float], list[int], int]:
    """The pieces that a message begins with: their texts, scores and types, and where they end.

    Of a piece with a text of at most 115 bytes, a score and at most a type, every field has its place, so that all are
    read at once.
    """
    octets = np.frombuffer(data + bytes(300), np.uint8)
    at = np.flatnonzero((octets[: max(0, len(data) - 11)] == 10) & (octets[2 : max(2, len(data) - 9)] == 10))
    size, length = octets[at + 1].astype(np.int64), octets[at + 3].astype(np.int64)
    after = at + 4 + length  # the text
    typed = size == length + 9
    usual = (size < 128) & (octets[after] == 21) & (typed & (octets[after + 5] == 24) | (size == length + 7))
    begins = np.append(at[usual], -1)
    # Each begins where the last one ends; what only looks like a piece, inside a text or after the pieces, does not.
    ends = at[usual] + 2 + size[usual]
    follows = np.concatenate([begins[:1] == 0, ends == begins[1:]])
    count = int(np.argmin(follows))
    if not count:
        return [], [], [], 0
    begin, after, length = begins[:count], after[usual][:count], length[usual][:count]
    kinds = np.where(typed[usual][:count], octets[after + 6], NORMAL).tolist()
    with np.errstate(invalid="ignore"):  # a score that is not a number is refused later
        scores = np.stack([octets[after + n] for n in range(1, 5)], 1).view("<f4")[:, 0].astype(float).tolist()
    # The texts, each with a zero after it, in one array: split at these, they need no loop.
    joined = octets.copy()
    joined[after] = 0
    before = np.cumsum(length + 1) - (length + 1)
    places = np.repeat(begin + 4 - before, length + 1)
    places += np.arange(len(places))
    texts = joined[places].tobytes().decode().split("\0")[:-1]
    if len(texts) != count:  # a text with a zero in it
        edges = zip((begin + 4).tolist(), after.tolist(), strict=True)
        texts = [data[a:b].decode() for a, b in edges]
    return texts, scores, kinds, int(ends[count - 1])


def protobuf(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in protobuf's wire format: number and value, an int or bytes. Raises ValueError."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 70, 7):
            if at >= len(data):
                break
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError(f"no number at byte {at}")

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError(f"a field of type {key & 7} at byte {at}")
        length = {1: 8, 5: 4}.get(key & 7) or varint()
        if length > len(data) - at:
            raise ValueError(f"a field of {length} bytes at byte {at}, which is near the end")
        yield key >> 3, data[at : at + length]
        at += length
