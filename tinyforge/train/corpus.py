"""What a pretraining run reads: batches of training text, held-out text by source, and for token shards their mix."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.errors import UserError
from tinyforge.text import Tokenizer
from tinyforge.text.shards import SEPARATOR, Part, Shards, is_shard_folder
from tinyforge.train.batches import MixedTokens, PackedTokens
from tinyforge.train.loop import evaluate_heads
from tinyforge.train.settings import Settings
from tinyforge.train.sharded import Sharded

NOT_STATED = "not stated"  # a licence
FEW_DOCUMENTS, FEW_BYTES = 50, 100_000  # of held-out text: below these, its figures are mostly chance


@dataclass(frozen=True)
class HeldOut:
    """Held-out text of one source. bytes: of all of it, the source's weight in the overall figure."""

    source: str
    windows: PackedTokens
    bytes: int


@dataclass(frozen=True)
class Corpus:
    """tokens: of training text. opening: of a held-out document. hash: a resumed run must find the same. summary: a
    row for each source that is read, from `summarise`, for the model's card."""

    tokenizer: Tokenizer
    batches: PackedTokens | MixedTokens
    tokens: int
    held_out: tuple[HeldOut, ...]
    opening: str
    hash: str
    summary: tuple[dict[str, Any], ...]

    def evaluate(self, sharded: Sharded, rows: int, limit: int | None = None) -> tuple[float, dict[str, float]]:
        """Bits per byte of the held-out text: of all, and of each source if there are several.

        With a limit, so many tokens are read, of each source the same number; its figure counts by its true size.
        """
        heads = measure(self.held_out, sharded, rows, self.tokenizer.byte_lengths, limit)
        figures = {source: float(bits[0]) for source, bits in heads.items()}
        return over_all(self.held_out, figures), figures if len(figures) > 1 else {}


def measure(
    parts: Sequence[HeldOut], sharded: Sharded, rows: int, byte_lengths: np.ndarray, limit: int | None = None
) -> dict[str, np.ndarray]:
    """Bits per byte of every head, (K,), on the held-out text of each source.

    With a limit, so many tokens are read, of each source the same number.
    """
    figures = {}
    for part in parts:
        tokens = len(part.windows.tokens) if limit is None else limit // len(parts)
        figures[part.source] = evaluate_heads(sharded, part.windows.in_order(rows, tokens), byte_lengths)
    return figures


def over_all(parts: Sequence[HeldOut], figures: Mapping[str, float]) -> float:
    """The mean of the sources' figures, each weighed by the bytes of its held-out text."""
    return sum(figures[part.source] * part.bytes for part in parts) / sum(part.bytes for part in parts)


def summarise(name: str, licence: str, share: float, train: Part, val: Part) -> dict[str, Any]:
    """What a card says of a source. share: of what is read in training."""
    return {
        "source": name, "licence": licence, "share": share, "documents": train.documents, "bytes": train.bytes,
        "tokens": train.tokens, "held-out_documents": val.documents, "held-out_bytes": val.bytes,
    }  # fmt: skip


def opening_of(text: str) -> str:
    """The first words of a document, to be gone on with by the model."""
    return text[:40].rsplit(" ", 1)[0] or text[:40]


def find_shards(settings: Settings) -> Shards | None:
    """The token shards that --data names, not yet verified; None where it names text, or nothing."""
    shards = [path for path in settings.data if is_shard_folder(Path(path))]
    text = [path for path in settings.data if path not in shards]
    if shards and text:
        raise UserError(f"--data: {shards[0]} holds token shards, {text[0]} does not; give the one or the other")
    if settings.mix and not shards:
        raise UserError("--mix weighs the sources of token shards, --data names none; make some: python -m data.shards")
    return Shards([Path(path) for path in shards]) if shards else None


def mix_weights(mix: Sequence[str], shards: Shards) -> dict[str, Fraction]:
    """The weight of each source to be read: as NAME=WEIGHT items say, or without any its number of tokens.

    Raises UserError for an item of another form, an unknown or repeated source, and a weight below 0 or not finite.
    """
    if not mix:
        return {s.name: Fraction(s.train.tokens) for s in shards.sources.values() if s.train.tokens}
    weights: dict[str, Fraction] = {}
    for item in mix:
        name, _, value = item.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            name = ""
        if not name:
            example = next(iter(shards.sources))
            raise UserError(f"--mix: {item!r} wants NAME=WEIGHT with a number, e.g. --mix {example}=0.7")
        if name not in shards.sources:
            raise UserError(f"--mix: the shards have no source {name!r}; they have {', '.join(shards.sources)}")
        if name in weights:
            raise UserError(f"--mix: {name!r} is given twice; give it one weight")
        if not 0 <= weight < math.inf:
            raise UserError(f"--mix: the weight of {name} is {value}, wants a number of 0 or more")
        weights[name] = Fraction(str(weight))  # 0.7 is seven tenths, not the float next to it
    if not any(weights.values()):
        raise UserError("--mix: all weights are 0; give a source to be read a weight above 0")
    return {name: weight for name, weight in weights.items() if weight}


def open_corpus(shards: Shards, settings: Settings, seq_len: int, heads: int) -> Corpus:
    """Verify the shards, and say what is read of them how often."""
    weights = mix_weights(settings.mix, shards)
    train = {name: shards.sequence(name, "train") for name in weights}
    batches = MixedTokens(train, weights, seq_len, heads, settings.seed)
    held_out = held_out_text(shards, settings, seq_len, heads)
    shards.verify(progress=sys.stderr.isatty())
    print(f"corpus: token shards in {', '.join(settings.data)}, every file checked")
    per_step = settings.batch_size * settings.grad_accum
    for name, weight in weights.items():
        part, share = shards.sources[name].train, float(weight / sum(weights.values()))
        each = batches.epochs(per_step)[name]
        epochs = f"{each * settings.steps:.2f} epochs" if settings.steps else f"an epoch in {1 / each:,.0f} steps"
        print(f"  {name}: {share:.1%} of what is read, {epochs}; {part.documents:,} documents, {part.tokens:,} tokens "
              f"of {part.bytes / part.tokens:.2f} bytes")  # fmt: skip
    vals = [shards.sources[part.source].val for part in held_out]
    documents, size = sum(val.documents for val in vals), sum(val.bytes for val in vals)
    few = "; that is few, and figures on it owe much to chance" if documents < FEW_DOCUMENTS or size < FEW_BYTES else ""
    print(f"held out: {documents:,} documents, {size:,} bytes of {', '.join(p.source for p in held_out)}{few}")
    begin = shards.tokenizer.decode(held_out[0].windows.tokens[:256].tolist()).split(SEPARATOR)
    opening = opening_of(next((text for text in begin if text.strip()), " "))
    sources = [(shards.sources[name], float(weight / sum(weights.values()))) for name, weight in weights.items()]
    summary = tuple(summarise(s.name, s.licence or NOT_STATED, share, s.train, s.val) for s, share in sources)
    return Corpus(shards.tokenizer, batches, sum(map(len, train.values())), held_out, opening, shards.hash, summary)


def held_out_text(shards: Shards, settings: Settings, seq_len: int, heads: int) -> tuple[HeldOut, ...]:
    """The val split of all sources, in the mix or not: so that runs with other mixes can be compared."""
    parts = []
    for source in shards.sources.values():
        ids = shards.sequence(source.name, "val")
        if source.val.bytes and len(ids) > 1:
            windows = PackedTokens(ids, min(seq_len, len(ids) - 1), heads, settings.seed)
            parts.append(HeldOut(source.name, windows, source.val.bytes))
    if not parts:
        raise UserError(
            f"--data: {', '.join(settings.data)}: no held-out text, the split val, to measure on; make the corpus from "
            "more documents"
        )
    return tuple(parts)
