"""Byte-level byte-pair encoding (BPE): learn a vocabulary from text, turn text into token ids, and back.

Text is split into pieces (words, numbers, punctuation, space) by GPT-2's pattern, or by the same pattern with every
digit as a piece of its own. A piece starts as its UTF-8 bytes, one token each; then each learned merge, in the order
learned, replaces a pair of neighbouring tokens by one new token. Bytes are tokens, so every byte string can be encoded.
No merge crosses the edge of a piece.

    tokenizer = Tokenizer.train(texts, vocab_size=4096)
    ids = tokenizer.encode("Once upon a time")
    assert tokenizer.decode(ids) == "Once upon a time"

The same from the command line (`--help` says more):

    python -m tinyforge.tokenizers train book.txt --vocab-size 4096 --out tokenizer.json
    python -m tinyforge.tokenizers inspect "Once upon a time" --tokenizer tokenizer.json

Token ids: 0..255 are the bytes, then one id per merge in the order learned, then the special tokens.

Sources: Gage, "A New Algorithm for Data Compression" (1994); Sennrich, Haddow, Birch, "Neural Machine
Translation of Rare Words with Subword Units" (2016); Radford et al., "Language Models are Unsupervised
Multitask Learners" (2019) for the bytes and the pattern. `docs/tokenizer.md` is the long version of this
page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from pathlib import Path
from threading import get_ident
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from tinyforge.errors import UserError, errors_in
from tinyforge.files import GET_AGAIN, read_json, read_text
from tinyforge.tokenizers.parallel import ordered_map
from tinyforge.tokenizers.pieces import (
    DIGITS,
    GPT2,
    OWN_PATTERNS,
    PATTERNS,
    Batch,
    Pattern,
    PieceTable,
    batches,
    nfc,
    to_utf8,
)
from tinyforge.tokenizers.vocabulary import (
    MOST_VOCABULARY_BYTES,
    After,
    Vocabulary,
    are_texts,
    check_tokenizer,
    fault_in_specials,
    is_pair,
)

Pair = tuple[int, int]


class TooLittleText(UserError):
    """The text has too few merges for a vocabulary. size: the largest one that it allows; fault: what is wrong, without
    what to do about it."""

    def __init__(self, vocab_size: int, smallest: int, merges: int) -> None:
        self.size = smallest + merges
        self.fault = (
            f"too little text for vocab_size {vocab_size}: got {merges} possible merges, expected "
            f"{vocab_size - smallest}"
        )
        super().__init__(f"{self.fault}; ask for vocab_size {self.size} or give more text")


FORMAT = "tinyforge-bpe"
IMPORTED = "tinyforge-imported-bpe"  # ids in another order
VERSION = 1

# GPT-2's order has the printable bytes first, then the rest: its files spell each byte as a visible character.
GPT2_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTE_ORDERS: dict[str, tuple[int, ...]] = {
    "plain": tuple(range(256)),
    "gpt2": (*GPT2_PRINTABLE, *(b for b in range(256) if b not in GPT2_PRINTABLE)),
}
SPELLING = dict(
    zip(BYTE_ORDERS["gpt2"], map(chr, [*GPT2_PRINTABLE, *range(256, 512 - len(GPT2_PRINTABLE))]), strict=True)
)
"""How GPT-2's files spell a byte: a printable byte as itself, the n-th other one as U+0100 + n."""
SPELT = {character: byte for byte, character in SPELLING.items()}

COUNTED_PIECES = 1 << 20  # distinct pieces that training counts; beyond that the rarest are dropped
NO_MERGE = 1 << 60
MOST_PAIRS = 1 << 20  # pairs of ids whose rank is kept
LONG = 100  # bytes of a piece from which a heap finds the next merge faster than a scan over all pairs


# --- merging ------------------------------------------------------------------------------------------------


class PairRanks(dict[Pair, int]):
    """Pair of ids -> rank of its merge, NO_MERGE if it has none.

    known: the ranks. find(left, right): the rank of a pair not among them, called once for each. joined: where several
    merges have one rank, the id that each pair becomes.
    """

    def __init__(self, known: Mapping[Pair, int] | None = None, find: Callable[[int, int], int] | None = None) -> None:
        super().__init__(known or {})
        self.find = find
        self.joined: dict[Pair, int] = {}

    def __missing__(self, pair: Pair) -> int:
        if self.find is None:
            return NO_MERGE
        rank = self.find(*pair)
        if len(self) < MOST_PAIRS:
            self[pair] = rank
        return rank


def apply_merges(ids: list[int], ranks: PairRanks, made: Sequence[int] | None) -> list[int]:
    """Apply all merges to one piece: always the pair of lowest rank, the leftmost of equals.

    `ranks` maps a pair of ids to its rank, and `made[rank]` is the id that replaces it; without `made`, `ranks.joined`
    has that id by pair.
    """
    if len(ids) >= LONG:
        return apply_merges_by_heap(ids, ranks, made)
    ids = ids.copy()
    known = ranks.find is None  # then `get` is faster: most pairs have no rank
    found = [ranks.get(pair, NO_MERGE) if known else ranks[pair] for pair in pairwise(ids)]
    while found and (rank := min(found)) < NO_MERGE:
        at = found.index(rank)
        new = made[rank] if made is not None else ranks.joined[ids[at], ids[at + 1]]
        ids[at : at + 2] = [new]
        del found[at]
        if at > 0:
            pair = ids[at - 1], new
            found[at - 1] = ranks.get(pair, NO_MERGE) if known else ranks[pair]
        if at < len(found):
            pair = new, ids[at + 1]
            found[at] = ranks.get(pair, NO_MERGE) if known else ranks[pair]
    return ids


def apply_merges_by_heap(ids: list[int], ranks: PairRanks, made: Sequence[int] | None) -> list[int]:
    """`apply_merges` in O(n log n) for n tokens, with a linked list of tokens and a heap of candidates, so that a long
    run without a space stays cheap."""
    ids = ids.copy()
    end = len(ids)
    following = list(range(1, end + 1))
    preceding = list(range(-1, end - 1))
    heap = [(rank, at) for at, pair in enumerate(pairwise(ids)) if (rank := ranks[pair]) < NO_MERGE]
    heapify(heap)
    while heap:
        rank, left = heappop(heap)
        right = following[left]
        if ids[left] < 0 or right == end or ranks[ids[left], ids[right]] != rank:
            continue  # another merge has taken one of the two
        new = made[rank] if made is not None else ranks.joined[ids[left], ids[right]]
        ids[left], ids[right] = new, -1
        following[left] = after = following[right]
        if after < end:
            preceding[after] = left
            if (rank := ranks[new, ids[after]]) < NO_MERGE:
                heappush(heap, (rank, left))
        before = preceding[left]
        if before >= 0 and (rank := ranks[ids[before], new]) < NO_MERGE:
            heappush(heap, (rank, before))
    return [token for token in ids if token >= 0]


@dataclass(frozen=True)
class Merging:
    """How a text becomes ids: the pattern that splits it, the ids of the 256 bytes, and the merges (`apply_merges`).

    nfc: the text is normalised to Unicode's form C first. whole: pieces, by their bytes, that are tokens whatever the
    merges give. A byte whose id is -1 is not in the vocabulary, and is left out of every text.
    """

    byte_ids: list[int]
    ranks: PairRanks
    made: Sequence[int]
    pattern: Pattern = GPT2
    nfc: bool = False
    whole: dict[bytes, int] = field(default_factory=dict)

    def merge(self, piece: bytes) -> list[int]:
        """The ids of one piece."""
        if (id := self.whole.get(piece)) is not None:
            return [id]
        ids = [self.byte_ids[byte] for byte in piece]
        return apply_merges([id for id in ids if id >= 0] if -1 in ids else ids, self.ranks, self.made)


class Encoder:
    """Texts to token ids. Each distinct piece is merged once, and its ids are looked up after that."""

    def __init__(self, merging: Merging, dtype: npt.DTypeLike) -> None:
        self.merging = merging
        self.dtype = dtype
        self.forget()

    def forget(self) -> None:
        self.table = PieceTable(self.merging.pattern)
        # The ids of all pieces end to end, in the order of their numbers; how many each has; where each begins.
        # Piece 0, the edge of a text, has none. One attribute, so that Ctrl-C cannot leave it half changed.
        self.known = (np.zeros(0, self.dtype), np.zeros(1, np.int64), np.zeros(1, np.int64))

    def encode(self, batch: Batch) -> tuple[npt.NDArray[Any], list[int]]:
        """The ids of all parts in `batch`, end to end, and the ends of the texts that end in it."""
        if self.table.is_full:
            self.forget()
        parts = [part for part, _ in batch]
        if self.merging.nfc:
            parts = [nfc(part) for part in parts]
        numbers = self.table.number(parts)
        self._merge_new_pieces()
        known_ids, known_lengths, known_firsts = self.known
        lengths = known_lengths.take(numbers)
        stops = np.cumsum(lengths)
        shifts = known_firsts.take(numbers) - (stops - lengths)  # from a position in the result to one in known_ids
        ids = known_ids.take(np.arange(stops[-1]) + np.repeat(shifts, lengths))
        part_ends = stops[numbers == 0].tolist()
        return ids, [end for end, (_, is_last) in zip(part_ends, batch, strict=True) if is_last]

    def _merge_new_pieces(self) -> None:
        ids, lengths, _ = self.known
        new = self.table.pieces[len(lengths) :]
        if new:
            tokens = list(map(self.merging.merge, new))
            ids = np.concatenate([ids, np.fromiter(chain.from_iterable(tokens), self.dtype)])
            lengths = np.concatenate([lengths, np.fromiter(map(len, tokens), np.int64)])
            self.known = (ids, lengths, np.cumsum(lengths) - lengths)


# --- training -----------------------------------------------------------------------------------------------


class PieceCounter:
    """Counts the pieces of texts."""

    def __init__(self, pattern: Pattern) -> None:
        self.table = PieceTable(pattern)

    def count(self, batch: Batch) -> tuple[int, dict[bytes, int]]:
        """The number of characters in `batch`, and the count of each of its pieces."""
        if self.table.is_full:
            self.table = PieceTable(self.table.pattern)
        counts = np.bincount(self.table.number([part for part, _ in batch]))
        counts[0] = 0  # the edges
        seen = np.flatnonzero(counts)
        pieces = map(self.table.pieces.__getitem__, seen.tolist())
        return sum(len(part) for part, _ in batch), dict(zip(pieces, counts[seen].tolist(), strict=True))


def drop_rarest(counts: dict[bytes, int]) -> dict[bytes, int]:
    """`counts` without the rarest pieces, so that at most half of COUNTED_PIECES are left."""
    floor = 0
    while len(counts) > COUNTED_PIECES // 2:
        floor += 1
        counts = {piece: count for piece, count in counts.items() if count > floor}
    return counts


class Pairs:
    """All pairs of neighbouring tokens in the distinct pieces, and how often each occurs in the text.

    The tokens of all pieces lie in one array and form linked lists: `following[at]` and `preceding[at]` are the
    positions of the neighbours in the piece, `end` where there is none. `weights[at]` is the count of the piece. A
    merge of two tokens leaves the new one at the first position, and -1 at the other.
    """

    def __init__(self, counts: dict[bytes, int]) -> None:
        lengths = np.fromiter(map(len, counts), np.int64)
        stops = np.cumsum(lengths)
        self.end = end = int(stops[-1])
        self.tokens = np.append(np.frombuffer(b"".join(counts), np.uint8).astype(np.int32), np.int32(-1))
        self.weights = np.repeat(np.fromiter(counts.values(), np.int64), lengths)
        self.following = np.arange(1, end + 1)
        self.preceding = np.arange(-1, end - 1)
        self.following[stops - 1] = end
        self.preceding[stops - lengths] = end
        self.places: dict[Pair, npt.NDArray[np.intp]] = {}  # positions of each pair's first token
        self.heap: list[tuple[int, Pair]] = []  # (-count, pair)
        self._add(np.flatnonzero(self.following < end))

    def _add(self, at: npt.NDArray[np.intp]) -> None:
        """Add the pairs that begin at these positions; none of these pairs is known yet."""
        if not len(at):
            return
        keys = self.tokens[at].astype(np.int64) << 32 | self.tokens[self.following[at]]
        order = np.argsort(keys, kind="stable")  # stable: a pair's positions stay in text order
        keys, at = keys[order], at[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        counts = np.add.reduceat(self.weights[at], first)
        for key, count, places in zip(keys[first].tolist(), counts.tolist(), np.split(at, first[1:]), strict=True):
            pair = (key >> 32, key & 0xFFFFFFFF)
            self.places[pair] = places
            heappush(self.heap, (-count, pair))

    def pop_best(self) -> Pair | None:
        """The most frequent pair, the smallest ids among equals; None if every piece is one token."""
        while self.heap:
            negative_count, pair = heappop(self.heap)
            at = self.places[pair]
            at = at[(self.tokens[at] == pair[0]) & (self.tokens[self.following[at]] == pair[1])]
            self.places[pair] = at
            count = int(self.weights[at].sum())
            if count == -negative_count:
                return pair
            if count > 0:
                heappush(self.heap, (-count, pair))
            else:
                del self.places[pair]
        return None

    def merge(self, pair: Pair, new: int) -> None:
        """Replace `pair`, which pop_best has just returned, by the token `new`."""
        tokens, following, preceding, end = self.tokens, self.following, self.preceding, self.end
        at = self.places.pop(pair)
        if pair[0] == pair[1]:
            # In a run such as aaa pairs overlap: take every second one, from the beginning of the run.
            index = np.arange(len(at))
            starts = np.append(True, following[at[:-1]] != at[1:])
            at = at[(index - np.maximum.accumulate(np.where(starts, index, 0))) % 2 == 0]
        taken = following[at]
        after = following[taken]
        tokens[at], tokens[taken] = new, -1
        following[at] = after
        inside = after < end
        preceding[after[inside]] = at[inside]
        # The new pairs: (new, following), and (preceding, new) unless the preceding token is new too.
        before = preceding[at]
        before = before[before < end]
        self._add(np.concatenate([before[tokens[before] != new], at[inside]]))


def learn_merges(counts: dict[bytes, int], limit: int, progress: bool) -> list[Pair]:
    """Learn up to `limit` merges: each time the most frequent pair, the smallest ids among equals. Fewer are returned
    when every piece has become one token.

    `counts` holds the number of occurrences of each distinct piece. A pair is counted when it first appears, and again
    only when it comes up as the best. By then its count can be too high, as later merges took tokens away, but never
    too low, as all positions of a pair appear in one step.
    """
    from tqdm import tqdm

    pairs = Pairs(counts)
    merges: list[Pair] = []
    with tqdm(total=limit, desc="learning merges", unit="merge", disable=not progress) as bar:
        while len(merges) < limit and (best := pairs.pop_best()):
            pairs.merge(best, 256 + len(merges))
            merges.append(best)
            bar.update()
    return merges


# --- the tokenizer ------------------------------------------------------------------------------------------


def tokens_in_order(
    merges: Sequence[Pair], specials: Sequence[str], order: Sequence[int]
) -> tuple[list[bytes], dict[str, int]]:
    """The tokens by id of `Tokenizer`'s own order, and the ids of the special ones."""
    if not all(specials) or len(set(specials)) < len(specials):
        raise UserError(f"special tokens: got {specials}, expected distinct texts, none empty; name each once")
    tokens = [bytes([byte]) for byte in order]
    merged: set[Pair] = set()
    size = len(tokens)
    for pair in merges:
        if not (min(pair) >= 0 and max(pair) < len(tokens)) or pair in merged:
            raise UserError(
                f"tokenizer merge {len(merged)}: got {pair}, expected a pair of ids below {len(tokens)} not "
                "merged before; the file is damaged, train the tokenizer again"
            )
        # Each merge can double a token: some sixty of them could exhaust any memory.
        size += len(tokens[pair[0]]) + len(tokens[pair[1]])
        if size > MOST_VOCABULARY_BYTES:
            raise UserError(
                f"tokenizer merge {len(merged)}: got tokens of {size:,} bytes in all, expected "
                f"{MOST_VOCABULARY_BYTES:,} at most; train the tokenizer again"
            )
        merged.add(pair)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
    ids = {text: id for id, text in enumerate(specials, len(tokens))}
    return [*tokens, *map(to_utf8, specials)], ids


def ids_by_bytes(tokens: Sequence[bytes], special_ids: set[int]) -> dict[bytes, int]:
    """The id of each token but the special ones and those without bytes, which no text has."""
    texts = list(tokens)
    for id in special_ids:
        texts[id] = b""
    ids = dict(zip(texts, range(len(texts)), strict=True))
    ids.pop(b"", None)
    if len(ids) + texts.count(b"") < len(texts):
        for id, token in enumerate(tokens):
            if token and id not in special_ids and ids[token] != id:
                raise UserError(f"token {id}: got {token[:40]!r}, which is token {ids[token]} too; {GET_AGAIN}")
    return ids


def made_by(merges: Sequence[Pair], tokens: Sequence[bytes], ids: dict[bytes, int], special_ids: set[int]) -> list[int]:
    """The id that each merge makes: that of the token with the bytes of both."""
    made: list[int] = []
    seen: set[Pair] = set()
    for rank, pair in enumerate(merges):
        left, right = pair
        joint = tokens[left] + tokens[right] if 0 <= min(pair) <= max(pair) < len(tokens) else b""
        if joint not in ids or not special_ids.isdisjoint(pair) or pair in seen:
            raise UserError(
                f"merge {rank}: got the ids {left} and {right}, expected a new pair of tokens that "
                f"makes one; {GET_AGAIN}"
            )
        seen.add(pair)
        made.append(ids[joint])
    return made


@dataclass(frozen=True)
class SpeltMerges:
    """Merges as a tokenizer.json has them, each two tokens in its spelling: their ids are looked up on use, as a
    published vocabulary has up to half a million.

    order: the rank of each merge, by its two tokens with `gap` between them. made: the id that each makes. spelt: the
    tokens by id. ids: the id of each.
    """

    order: dict[str, int]
    made: Sequence[int]
    spelt: Sequence[str]
    ids: Mapping[str, int]
    gap: str

    def ranks(self) -> PairRanks:
        order, spelt, gap = self.order, self.spelt, self.gap
        return PairRanks(find=lambda left, right: order.get(f"{spelt[left]}{gap}{spelt[right]}", NO_MERGE))

    def by_id(self) -> list[Pair]:
        pairs = (merge.split(self.gap) for merge in self.order)
        return [(self.ids[left], self.ids[right]) for left, right in pairs]


@dataclass(frozen=True)
class JointMerges:
    """The merges of a list of ranks, as tiktoken has it: any two neighbours whose joint bytes are a token make it, the
    token of the lowest id first.

    tokens: by id. ids: the id of each token that text can become.
    """

    tokens: Sequence[bytes]
    ids: Mapping[bytes, int]

    def ranks(self) -> PairRanks:
        ids, tokens = self.ids, self.tokens
        return PairRanks(find=lambda left, right: ids.get(tokens[left] + tokens[right], NO_MERGE))

    @property
    def made(self) -> Sequence[int]:
        return range(len(self.tokens))

    def by_id(self) -> list[Pair]:
        """Every way to split a token into two tokens, in the order of the tokens."""
        found = []
        for token in sorted(self.ids, key=self.ids.__getitem__):
            cuts = [(self.ids.get(token[:at]), self.ids.get(token[at:])) for at in range(1, len(token))]
            found += sorted((left, right) for left, right in cuts if left is not None and right is not None)
        return found


class Tokenizer(Vocabulary):
    """A byte-level BPE vocabulary: the 256 bytes, the merges, the special tokens, with ids in this order.

    `merges[i]` is the pair of ids that becomes id 256 + i. `byte_order` is "plain" (id b is byte b) or "gpt2", and
    `pattern` one of OWN_PATTERNS.

    With `tokens`, as published models have them, the ids are in another order, and byte_order is None: `tokens[id]` are
    the bytes of a token, those of special tokens being ignored; `specials` maps texts to ids; `merges[rank]` becomes
    the token with its bytes, and several merges may make one; `pattern` is one of PATTERNS. nfc: text is normalised to
    Unicode's form C first. ignore_merges: a piece that is a token is that token, whatever the merges give. A byte that
    is not a token is left out of every text. user_defined: see `Vocabulary`.

    Raises UserError if a merge uses a later id or is repeated, or a special token is empty or repeated; with `tokens`,
    if two tokens have the same bytes, or a merge does not make a token or is repeated.
    """

    def __init__(
        self,
        merges: Iterable[Pair] | SpeltMerges | JointMerges,
        specials: Iterable[str] | dict[str, int],
        byte_order: str = "plain",
        pattern: Pattern = GPT2,
        *,
        tokens: Sequence[bytes] | None = None,
        bos: int | None = None,
        nfc: bool = False,
        ignore_merges: bool = False,
        user_defined: dict[str, int] | None = None,
    ) -> None:
        lazy = merges if isinstance(merges, SpeltMerges | JointMerges) else None
        self.joint = isinstance(merges, JointMerges)
        self._merges = lazy or list(cast("Iterable[Pair]", merges))
        self.byte_order = byte_order if tokens is None else None
        whole: dict[bytes, int] = {}
        if tokens is None:
            tokens, ids = tokens_in_order(self.merges, list(specials), BYTE_ORDERS[byte_order])
            byte_ids = [BYTE_ORDERS[byte_order].index(byte) for byte in range(256)]
            made: Sequence[int] = range(256, len(tokens))
        else:
            assert isinstance(specials, dict)
            ids = specials
            by_bytes = ids_by_bytes(tokens, {*ids.values(), *(user_defined or {}).values()})
            for id in (user_defined or {}).values():
                by_bytes.setdefault(tokens[id], id)
            byte_ids = [by_bytes.get(bytes([byte]), -1) for byte in range(256)]
            made = lazy.made if lazy else made_by(self.merges, tokens, by_bytes, set(ids.values()))
            whole = by_bytes if ignore_merges else {}
        super().__init__(tokens, ids, bos, user_defined)
        ranks = lazy.ranks() if lazy else PairRanks({pair: rank for rank, pair in enumerate(self.merges)})
        self.merging = Merging(byte_ids, ranks, made, pattern, nfc, whole)
        self._encoders: dict[int, Encoder] = {}  # one for each thread

    @property
    def merges(self) -> list[Pair]:
        if not isinstance(self._merges, list):
            self._merges = self._merges.by_id()
        return self._merges

    @property
    def _encoder(self) -> Encoder:
        """This thread's encoder: its cache of pieces is not thread-safe."""
        thread = get_ident()
        if thread not in self._encoders:
            self._encoders[thread] = Encoder(self.merging, self.id_dtype)
        return self._encoders[thread]

    def encode(self, text: str, after: After = "start") -> list[int]:
        """Token ids of `text`. Text that spells a special token is encoded as plain bytes, never as its id. `after`
        does not matter.

        U+DC80..U+DCFF stand for raw bytes, as in `encode_bytes`. Other lone surrogates, which UTF-8 cannot hold, become
        U+FFFD.
        """
        return next(self.encode_many([text], workers=1)).tolist()

    def encode_many(self, texts: Iterable[str], workers: int | None = None) -> Iterator[npt.NDArray[Any]]:
        """`encode` each text on all cores; yields the ids in order, as arrays of `id_dtype`.

        `workers` processes (default: one per core) take batches of about BATCH characters, so that many short texts and
        one long text both keep them busy; their number changes no id. Only a batch per worker and the current text are
        in memory. Raises UserError if a worker dies.
        """
        if self.user_defined:
            return self._between_user_defined(partial(self._encode_many, workers=workers), texts)
        return self._encode_many(texts, workers)

    def _encode_many(self, texts: Iterable[str], workers: int | None) -> Iterator[npt.NDArray[Any]]:
        parts: list[npt.NDArray[Any]] = []
        for ids, ends in ordered_map(self._encoder.encode, batches(texts, pattern=self.merging.pattern), workers):
            start = 0
            for end in ends:
                yield np.concatenate([*parts, ids[start:end]])
                parts, start = [], end
            parts.append(ids[start:])

    def encode_bytes(self, data: bytes) -> list[int]:
        """Token ids of any bytes, valid UTF-8 or not; `decode_bytes` returns the same bytes."""
        return self.encode(data.decode("utf-8", "surrogateescape"))

    # --- making one

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        specials: tuple[str, ...] = ("<|endoftext|>", "</s>"),
        progress: bool = True,
        workers: int | None = None,
        size: int | None = None,
        exact: bool = True,
        single_digits: bool = False,
    ) -> Tokenizer:
        """Learn a vocabulary of exactly `vocab_size` ids from `texts`, whose order does not matter.

        If not `exact`, a text with too few merges gives as many ids as it can, in multiples of 64, which suit matrix
        products on a GPU. `single_digits`: no token holds more than one digit, so a model sees the digits of a number
        one by one.

        Pieces are counted on `workers` processes (default: one per core), whose number changes nothing. `size` is the
        number of characters in all texts, if known, for the progress bar. Of more than COUNTED_PIECES distinct pieces
        the rarest are dropped on the way; only then does the order of the texts matter.

        Raises UserError if `vocab_size` cannot hold the bytes, if there is no text, and if the text is too small or too
        uniform for so many merges.
        """
        from tqdm import tqdm

        smallest = 256 + len(specials)
        if vocab_size < smallest:
            raise UserError(
                f"vocabulary too small for the bytes: got vocab_size {vocab_size}, expected at least "
                f"{smallest} (256 bytes and {len(specials)} special tokens); raise vocab_size"
            )
        if size is None and isinstance(texts, Sequence):
            size = sum(map(len, texts))
        pattern = DIGITS if single_digits else GPT2
        counts: dict[bytes, int] = {}
        with tqdm(total=size, desc="counting words", unit="char", unit_scale=True, disable=not progress) as bar:
            for characters, counted in ordered_map(PieceCounter(pattern).count, batches(texts), workers):
                for piece, count in counted.items():
                    counts[piece] = counts.get(piece, 0) + count
                if len(counts) > COUNTED_PIECES:
                    counts = drop_rarest(counts)
                bar.update(characters)
        if not counts:
            raise UserError("no text to train the tokenizer on: got 0 characters; give a file with text")
        merges = learn_merges(counts, vocab_size - smallest, progress)
        if len(merges) < vocab_size - smallest and not exact:
            merges = merges[: max(0, (smallest + len(merges)) // 64 * 64 - smallest)]
        elif len(merges) < vocab_size - smallest:
            raise TooLittleText(vocab_size, smallest, len(merges))
        return cls(merges, specials, pattern=pattern)

    @classmethod
    def from_gpt2(cls, encoder_json: str | Path, vocab_bpe: str | Path) -> Tokenizer:
        """GPT-2's own vocabulary from the two files OpenAI published: the same ids, `<|endoftext|>` = 50256.

        encoder.json maps each token to its id, vocab.bpe lists the merges in order, both with every byte spelt as a
        visible character. Raises UserError if a file cannot be read, or the two do not belong together.
        """
        encoder = read_json(encoder_json, "GPT-2's tokens")
        ids = {SPELLING[byte]: id for id, byte in enumerate(BYTE_ORDERS["gpt2"])}
        merges: list[Pair] = []
        for number, line in enumerate(read_text(vocab_bpe, "GPT-2's merges").splitlines(), start=1):
            if not line or (number == 1 and line.startswith("#version")):
                continue
            left, _, right = line.partition(" ")
            if left not in ids or right not in ids:
                raise UserError(
                    f"{vocab_bpe} line {number}: got {line[:80]!r}, expected two earlier tokens; "
                    "get GPT-2's vocab.bpe again"
                )
            if left + right not in encoder:  # before it is stored, as each merge can double a token
                break
            ids[left + right] = 256 + len(merges)
            merges.append((ids[left], ids[right]))
        ids["<|endoftext|>"] = 256 + len(merges)
        if encoder != ids:
            raise UserError(
                f"{encoder_json} and {vocab_bpe} do not belong together: got ids that do not follow from the "
                "merges; get both of GPT-2's files again, from one place"
            )
        return cls(merges, ["<|endoftext|>"], byte_order="gpt2")

    # --- on disk

    def _content(self) -> dict[str, Any]:
        merging, merges = self.merging, [list(pair) for pair in self.merges] if not self.joint else []
        if self.byte_order is not None:
            return {
                "format": FORMAT,
                "version": VERSION,
                "pattern": merging.pattern.name,
                "byte_order": self.byte_order,
                "specials": list(self.specials),
                "merges": merges,
            }
        special_ids = set(self.specials.values())
        return {
            "format": IMPORTED,
            "version": VERSION,
            "pattern": merging.pattern.name,
            "nfc": merging.nfc,
            "ignore_merges": bool(merging.whole),
            "specials": self.specials,
            "bos": self.bos,
            **({"user_defined": self.user_defined} if self.user_defined else {}),
            **({"joint": True} if self.joint else {}),
            "tokens": ["" if id in special_ids else spell(self.token_bytes(id)) for id in range(self.vocab_size)],
            "merges": merges,
        }

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a file that `save` wrote. Raises UserError, naming the file, if it is missing or damaged."""
        return cls.from_content(read_json(path, "the tokenizer"), path)

    @classmethod
    def from_content(cls, content: dict[str, Any], path: str | Path) -> Tokenizer:
        """The tokenizer in a file that `save` wrote, as JSON read it. Raises UserError, naming `path`."""
        ours = content.get("format") != IMPORTED
        patterns = {pattern.name: pattern for pattern in OWN_PATTERNS} if ours else PATTERNS
        formats = (FORMAT if ours else IMPORTED,)
        for key, known in (("format", formats), ("version", (VERSION,)), ("pattern", tuple(patterns))):
            if content.get(key) not in known:
                raise UserError(
                    f"{path} is not a tokenizer that this version reads: got {key} {content.get(key)!r:.80}, expected "
                    f"{' or '.join(map(repr, known))}; {'train one again' if ours else GET_AGAIN}"
                )
        check = partial(check_tokenizer, path)
        merges: Any = content.get("merges")
        check(isinstance(merges, list) and all(map(is_pair, merges)), "merges is not a list of pairs of ids")
        fields = fields_in_our_order(content, check) if ours else fields_by_bytes(content, check)
        with errors_in(path):
            if content.get("joint") is True and not ours:
                used = {*fields["specials"].values(), *fields["user_defined"].values()}
                made: Any = JointMerges(fields["tokens"], ids_by_bytes(fields["tokens"], used))
            else:
                made = [(left, right) for left, right in merges]
            return cls(made, pattern=patterns[content["pattern"]], **fields)


def fields_in_our_order(content: dict[str, Any], check: Callable[[bool, str], None]) -> dict[str, Any]:
    """Further arguments of a `Tokenizer` in a file; check: raises UserError with a cause."""
    order, specials = content.get("byte_order"), content.get("specials")
    known = isinstance(order, str) and order in BYTE_ORDERS
    check(known, f"byte_order {order!r} is none of {', '.join(BYTE_ORDERS)}")
    check(are_texts(specials), "specials is not a list of texts")
    return {"specials": specials, "byte_order": order}


def fields_by_bytes(content: dict[str, Any], check: Callable[[bool, str], None]) -> dict[str, Any]:
    """The same for ids in another order."""
    spelt: Any = content.get("tokens")
    flags = {key: content.get(key) for key in ("nfc", "ignore_merges")}
    check(all(isinstance(flag, bool) for flag in flags.values()), "nfc or ignore_merges is not true or false")
    check(are_texts(spelt), "tokens is not a list of texts")
    tokens = unspell_all(spelt)
    check(None not in tokens, "tokens holds a character that does not spell a byte")
    check(not (fault := fault_in_specials(content, len(tokens))), fault)
    return {
        "specials": content["specials"],
        "tokens": tokens,
        "bos": content.get("bos"),
        "user_defined": content.get("user_defined", {}),
        **flags,
    }


def spell(token: bytes) -> str:
    """`token` with each byte as one visible character."""
    return "".join(map(SPELLING.__getitem__, token))


def unspell(spelt: str) -> bytes | None:
    """The bytes that `spelt` stands for; None when a character of it stands for no byte."""
    return bytes(SPELT[c] for c in spelt) if SPELT.keys() >= set(spelt) else None


def unspell_all(spelt: Sequence[str]) -> list[bytes | None]:
    """`unspell` of each, all at once in NumPy."""
    table = np.full(
        max(map(ord, SPELT)) + 2, 256, np.uint16
    )  # 256: no byte; so for the last entry, all other characters
    table[[*map(ord, SPELT)]] = [*SPELT.values()]
    codes = np.frombuffer("".join(spelt).encode("utf-32-le", "surrogatepass"), np.uint32)
    found = table[np.minimum(codes, len(table) - 1)]
    stops = np.cumsum(np.fromiter(map(len, spelt), np.int64, len(spelt)))
    damaged = set(np.searchsorted(stops, np.flatnonzero(found == 256), "right").tolist())
    ends = stops.tolist()
    read: list[bytes | None] = list(map(found.astype(np.uint8).tobytes().__getitem__, map(slice, [0, *ends], ends)))
    for id in damaged:
        read[id] = None
    return read


def byte_order_of(byte_ids: Sequence[int | None]) -> str | None:
    """The name in BYTE_ORDERS of the order in which byte b has the id `byte_ids[b]`, or None."""
    orders = BYTE_ORDERS.items()
    return next((name for name, order in orders if all(byte_ids[b] == id for id, b in enumerate(order))), None)
