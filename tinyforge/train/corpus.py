"""The corpus of a pretraining run: batches of training text, held-out text by source, and the mix of token shards."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.registry import find_model
from tinyforge.report import count_of
from tinyforge.shards import Part, Shards, is_shard_folder, separator_of
from tinyforge.terminal import one_line
from tinyforge.tokenizers import CharTokenizer, TextTokenizer, Tokenizer, WordPiece, load_tokenizer
from tinyforge.tokenizers.bpe import TooLittleText
from tinyforge.train.batches import ContinuedTokens, DocumentMask, MixedTokens, PackedTokens, check_ids, fingerprint
from tinyforge.train.data_parallel import DataParallel, evaluate_heads
from tinyforge.train.settings import PretrainSettings, restarts

NOT_STATED = "not stated"  # a licence
CHARS = "chars"  # in place of a tokenizer's file
FEW_DOCUMENTS, FEW_BYTES = 50, 100_000  # of held-out text: below these, its figures are mostly chance


@dataclass(frozen=True)
class HeldOut:
    """Held-out text of one source. bytes: of the predicted tokens, all but the first; they weigh the source in the
    overall figure."""

    source: str
    windows: PackedTokens
    bytes: int


@dataclass(frozen=True)
class Corpus:
    """tokens: of training text. opening: of a held-out document. hash: must be the same in a resumed run. summary: a
    row for each source that is read, from `summarise`, for the model's card."""

    tokenizer: TextTokenizer
    batches: PackedTokens | MixedTokens | ContinuedTokens
    tokens: int
    held_out: tuple[HeldOut, ...]
    opening: str
    hash: str
    summary: tuple[dict[str, Any], ...]
    inputs: tuple[str, ...] = ()  # SHA-256 of the files that the text came from, where shards know them

    def evaluate(self, parallel: DataParallel, rows: int, limit: int | None = None) -> tuple[float, dict[str, float]]:
        """Bits per byte of the held-out text: over all of it, and by source if there are several.

        limit: tokens to read, the same number from each source; the overall figure weighs a source by its true size.
        """
        heads = measure(self.held_out, parallel, rows, self.tokenizer.byte_lengths, limit)
        figures = {source: float(bits[0]) for source, bits in heads.items()}
        return over_all(self.held_out, figures), figures if len(figures) > 1 else {}


def measure(
    parts: Sequence[HeldOut], parallel: DataParallel, rows: int, byte_lengths: np.ndarray, limit: int | None = None
) -> dict[str, np.ndarray]:
    """Bits per byte of every head, (K,), on the held-out text of each source.

    limit: tokens to read, the same number from each source.
    """
    figures = {}
    for part in parts:
        tokens = len(part.windows.tokens) if limit is None else limit // len(parts)
        windows = part.windows.in_order(rows, tokens)
        if limit is None:  # all of it: minutes on a CPU
            from tqdm import tqdm

            what = one_line(f"held-out text of {part.source}")
            windows = tqdm(windows, what, unit=" batches", leave=False, disable=None)
        figures[part.source] = evaluate_heads(parallel, windows, byte_lengths)
    return figures


def over_all(parts: Sequence[HeldOut], figures: Mapping[str, float]) -> float:
    """The mean of the sources' figures, each weighed by the bytes of its held-out text."""
    return sum(figures[part.source] * part.bytes for part in parts) / sum(part.bytes for part in parts)


def summarise(name: str, licence: str, share: float, train: Part, val: Part) -> dict[str, Any]:
    """A source's row on a model card. share: of the tokens read in training."""
    row = {"source": name, "licence": licence, "share": share}
    row |= {"documents": train.documents, "bytes": train.bytes, "tokens": train.tokens}
    return row | {"held-out_documents": val.documents, "held-out_bytes": val.bytes}


QUOTES = '"“”«»„`'


def opening_of(text: str, cut: bool = False) -> str:
    """The first words of a document for the model to continue, up to a quotation mark, which a shell would read. cut:
    the text may begin within a word; its next sentence is taken, or its next word."""
    if cut and (begun := re.search(r"[.!?][^\w\s]*\s+(?=\S)", text[:200]) or re.search(r"\s+(?=\S)", text[:200])):
        text = text[begun.end() :]
    text = text.lstrip(QUOTES)
    words = text[:40].rsplit(" ", 1)[0] or text[:40]
    plain = re.split(f"[{QUOTES}]", words)[0].rstrip(" ,")
    return plain if len(plain) >= 8 else words


def find_shards(settings: PretrainSettings) -> Shards | None:
    """The token shards that --data names, not yet verified; None where it names text, or nothing."""
    shards = [path for path in settings.data if is_shard_folder(Path(path))]
    text = [path for path in settings.data if path not in shards]
    if shards and text:
        raise UserError(f"--data: {shards[0]} holds token shards, {text[0]} does not; give the one or the other")
    if settings.stateful and shards:
        raise UserError(f"--stateful reads one text from end to end, {shards[0]} holds token shards; give text files")
    if settings.mix and not shards:
        raise UserError("--mix weighs the sources of token shards, --data names none; make some: python -m data.shards")
    return Shards([Path(path) for path in shards]) if shards else None


def shards_for(tokenizer: TextTokenizer, model: Path, settings: PretrainSettings) -> Shards | None:
    """As `find_shards`, verified. Raises UserError if they were made with another tokenizer than that of the model at
    this path."""
    shards = find_shards(settings)
    if shards is None:
        return None
    if shards.tokenizer.hash() != tokenizer.hash():
        raise UserError(
            f"--data: {settings.data[0]} was made with the tokenizer {shards.tokenizer.hash()[:12]}..., the model has "
            f"{tokenizer.hash()[:12]}...; make shards with python -m data.shards --tokenizer {model / 'tokenizer.json'}"
        )
    shards.verify(progress=sys.stderr.isatty())
    return shards


def mix_weights(mix: Sequence[str], shards: Shards) -> dict[str, Fraction]:
    """The weight of each source that is read: from NAME=WEIGHT items, or its number of tokens if there are none.

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
            raise UserError(f"--mix: {item!r} expects NAME=WEIGHT with a number, e.g. --mix {example}=0.7")
        if name not in shards.sources:
            raise UserError(f"--mix: the shards have no source {name!r}; they have {', '.join(shards.sources)}")
        if name in weights:
            raise UserError(f"--mix: {name!r} is given twice; give it one weight")
        if not 0 <= weight < math.inf:
            raise UserError(f"--mix: the weight of {name} is {value}, expected a number of 0 or more")
        weights[name] = Fraction(str(weight))  # 0.7 is seven tenths, not the float next to it
    if not any(weights.values()):
        raise UserError("--mix: all weights are 0; give a source to be read a weight above 0")
    return {name: weight for name, weight in weights.items() if weight}


def open_corpus(shards: Shards, settings: PretrainSettings, seq_len: int, heads: int) -> Corpus:
    """Verify the shards, and print which sources are read and how often."""
    weights = mix_weights(settings.mix, shards)
    train = {name: shards.sequence(name, "train") for name in weights}
    mask, full = document_mask(settings, shards.tokenizer), settings.windows == "full"
    batches = MixedTokens(train, weights, seq_len, heads, settings.seed, mask, full)
    held_out = held_out_text(shards, settings, seq_len, heads)
    shards.verify(progress=sys.stderr.isatty())
    print(f"corpus: token shards in {', '.join(settings.data)}, every file checked")
    per_step = settings.batch_size * settings.grad_accum
    for name, weight in weights.items():
        part, share = shards.sources[name].train, float(weight / sum(weights.values()))
        each = batches.epochs(per_step)[name]
        epochs = f"{each * settings.steps:.2f} epochs" if settings.steps else f"an epoch in {1 / each:,.0f} steps"
        print(
            f"  {name}: {share:.1%} of what is read, {epochs}; {count_of(part.documents, 'document')}, "
            f"{part.tokens:,} tokens of {part.bytes / part.tokens:.2f} bytes"
        )
    vals = [shards.sources[part.source].val for part in held_out]
    documents, size = sum(val.documents for val in vals), sum(val.bytes for val in vals)
    few = "; that is few, and figures on it owe much to chance" if documents < FEW_DOCUMENTS or size < FEW_BYTES else ""
    print(
        f"held out: {count_of(documents, 'document')}, {size:,} bytes of {', '.join(p.source for p in held_out)}{few}"
    )
    begin = shards.tokenizer.decode(held_out[0].windows.tokens[:256].tolist()).split(separator_of(shards.tokenizer))
    opening = opening_of(next((text for text in begin if text.strip()), " "))
    sources = [(shards.sources[name], float(weight / sum(weights.values()))) for name, weight in weights.items()]
    summary = tuple(summarise(s.name, s.licence or NOT_STATED, share, s.train, s.val) for s, share in sources)
    tokens, inputs = sum(map(len, train.values())), tuple(d for source, _ in sources for d in source.inputs)
    return Corpus(shards.tokenizer, batches, tokens, held_out, opening, shards.hash, summary, inputs)


def held_out_text(shards: Shards, settings: PretrainSettings, seq_len: int, heads: int) -> tuple[HeldOut, ...]:
    """The val split of all sources, in the mix or not, so that runs with different mixes can be compared."""
    parts = []
    for source in shards.sources.values():
        ids = shards.sequence(source.name, "val")
        if size := predicted_bytes(ids[:], shards.tokenizer):
            mask = document_mask(settings, shards.tokenizer)
            windows = PackedTokens(ids, min(seq_len, len(ids) - 1), heads, settings.seed, mask)
            parts.append(HeldOut(source.name, windows, size))
    if not parts:
        raise UserError(
            f"--data: {', '.join(settings.data)}: no held-out text, the split val, to measure on; make the corpus from "
            "more documents"
        )
    return tuple(parts)


def document_mask(settings: PretrainSettings, tokenizer: TextTokenizer) -> DocumentMask | None:
    """The mask that --document-mask asks for, in training and evaluation."""
    restart = restarts(settings, find_model(settings.model))
    return None if restart is None else DocumentMask(tokenizer.specials[separator_of(tokenizer)], restart)


def pack(texts: Sequence[str], tokenizer: TextTokenizer) -> np.ndarray:
    """One stream of ids, each document followed by the separator."""
    end = np.array([tokenizer.specials[separator_of(tokenizer)]], np.int32)
    parts = [part for ids in tokenizer.encode_many(texts) for part in (ids, end)]
    return np.concatenate([end[:0], *parts], dtype=np.int32, casting="same_kind")


def predicted_bytes(ids: np.ndarray, tokenizer: TextTokenizer) -> int:
    """The bytes that a model is measured on: all but those of the first token, which is not predicted."""
    return int(tokenizer.byte_lengths[ids[1:]].sum())


def byte_count(texts: Sequence[str]) -> int:
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def tokenizer_for(
    settings: PretrainSettings, config: ModelConfig, training: Sequence[str], held_out: Sequence[str]
) -> tuple[TextTokenizer, ModelConfig]:
    """The tokenizer of --tokenizer, or one trained on the text, and the config with its vocabulary.

    A vocabulary size that the user asked for is kept or refused. That of a preset, and any with the built-in corpus,
    becomes the number of characters, or what can be learned from the text.
    """
    asked = _vocab_is_asked_for(settings)
    # A preset whose vocabulary has no room for the bytes is meant for characters.
    chars = settings.tokenizer == CHARS or not (settings.tokenizer or asked) and config.vocab < 256
    tokenizer: TextTokenizer
    if chars:
        tokenizer = CharTokenizer.of([*training, *held_out])
    elif settings.tokenizer:
        tokenizer = load_tokenizer(settings.tokenizer)
        separator_of(tokenizer)  # raises if it has none
    elif find_model(settings.model).learns == "masked text":
        tokenizer = WordPiece.train(training, config.vocab, progress=sys.stderr.isatty())
    else:
        progress = sys.stderr.isatty()
        try:
            tokenizer = Tokenizer.train(training, config.vocab, progress=progress, exact=bool(asked and settings.data))
        except TooLittleText as error:
            raise UserError(f"{error.fault}; use --set vocab={error.size}, or give more text") from None
    if tokenizer.vocab_size == config.vocab:
        return tokenizer, config
    if settings.tokenizer and (asked or settings.tokenizer != CHARS):
        raise UserError(
            f"--tokenizer: {settings.tokenizer} has {tokenizer.vocab_size} ids, the config's vocab is {config.vocab}; "
            f"use --set vocab={tokenizer.vocab_size}, or another tokenizer"
        )
    why = "the characters of the text" if chars else "what can be learned from the text"
    print(f"vocab {config.vocab} -> {tokenizer.vocab_size}: {why}")
    return tokenizer, config.override({"vocab": tokenizer.vocab_size})


def corpus_of_text(
    settings: PretrainSettings,
    config: ModelConfig,
    seq_len: int,
    training: Sequence[str],
    held_out: Sequence[str],
    tokenizer: TextTokenizer,
    documents: int,
) -> Corpus:
    """The corpus of plain text, or the built-in one: the ids are held in memory. documents: their number; one that is
    cut into a part of both texts counts as read in training."""
    streams = [pack(texts, tokenizer) for texts in (training, held_out)]
    for stream in streams:
        check_ids(stream, config.vocab)
    train, val = (
        Part(number, len(stream), byte_count(texts))
        for number, texts, stream in zip(
            (len(training), documents - len(training)), (training, held_out), streams, strict=True
        )
    )
    print(
        f"tokenizer: {tokenizer.vocab_size} ids, {train.bytes / max(1, train.tokens - train.documents):.2f} bytes a "
        "token"
    )
    print(f"training text: {train.bytes:,} bytes, {train.tokens:,} tokens; held out: {val.tokens:,} tokens")
    mask, made = document_mask(settings, tokenizer), (streams[0], seq_len, config.prediction_heads, settings.seed)
    full = settings.windows == "full"
    data = ContinuedTokens(*made, settings.batch_size, full) if settings.stateful else PackedTokens(*made, mask, full)
    length = min(seq_len, max(1, len(streams[1]) - 1))
    parts = (HeldOut("text", PackedTokens(streams[1], length, config.prediction_heads, settings.seed, mask), 1),)
    name, licence = ("text", NOT_STATED) if settings.data else ("the built-in world", "MIT")
    summary = (summarise(name, licence, 1.0, train, val),)
    opening = opening_of(held_out[0], cut=len(training) + len(held_out) > documents)
    return Corpus(tokenizer, data, train.tokens, parts, opening, fingerprint(streams[0]), summary)


def _vocab_is_asked_for(settings: PretrainSettings) -> bool:
    """Whether the user has chosen the vocabulary's size, by --set or in a config file."""
    preset = settings.config in find_model(settings.model).presets
    return not preset or any(item.startswith("vocab=") for item in settings.set)


def config_for(shards: Shards, config: ModelConfig, settings: PretrainSettings) -> ModelConfig:
    """The config with the vocabulary of the shards' tokenizer, unless the user asked for another."""
    tokenizer = shards.tokenizer
    if settings.tokenizer and (
        settings.tokenizer == CHARS or load_tokenizer(settings.tokenizer).hash() != tokenizer.hash()
    ):
        raise UserError(
            f"--tokenizer: {settings.tokenizer} is not the one that {settings.data[0]} was made with; drop the flag, "
            f"or make the shards with python -m data.shards --tokenizer {settings.tokenizer}"
        )
    if config.vocab == tokenizer.vocab_size:
        return config
    if _vocab_is_asked_for(settings):
        raise UserError(
            f"config: vocab is {config.vocab}, the tokenizer of {settings.data[0]} has {tokenizer.vocab_size} ids; use "
            f"--set vocab={tokenizer.vocab_size}, or shards made with a tokenizer of {config.vocab}"
        )
    print(f"vocab {config.vocab} -> {tokenizer.vocab_size}: what the tokenizer of the shards has")
    return config.override({"vocab": tokenizer.vocab_size})
