"""Pretrain NanoEuler.

    python recipes/pretrain.py                                  the built-in corpus, small preset, minutes on a CPU
    python recipes/pretrain.py --data books/ --minutes 30       your own text
    python recipes/pretrain.py --data shards --mix books=0.7 web=0.3        token shards (python -m data.shards)
    python recipes/pretrain.py --resume                         go on with runs/pretrain

Documents are packed into one stream, each followed by <|endoftext|>. Held-out text (built-in corpus: its own val
part; token shards: their val split; your data: the last tenth) is never trained on and is what `val bits per byte` is
measured on.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A recipe runs from a plain checkout too: the repository root is where data/, models/ and tinyforge/ are.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data.local import read_documents
from data.world import documents
from models.nanoeuler.card import write_card
from models.nanoeuler.config import PRESETS, Config
from models.nanoeuler.model import FLOP_CONVENTION, NanoEuler
from models.nanoeuler.plan import check_fits, print_plan, sequence_length
from tinyforge import checkpoint
from tinyforge.errors import UserError, run_command
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.generation import generate
from tinyforge.infer.sampling import Sampling
from tinyforge.text import Tokenizer
from tinyforge.text.shards import SEPARATOR, Part, Shards
from tinyforge.train.batches import PackedTokens, check_ids, fingerprint
from tinyforge.train.corpus import NOT_STATED, Corpus, HeldOut, find_shards, open_corpus, opening_of, summarise
from tinyforge.train.loop import Task, train
from tinyforge.train.metrics import save_scores
from tinyforge.train.settings import Settings, open_backend, parse, parser, print_schedule
from tinyforge.train.sharded import Sharded

DEFAULTS = Settings(out="runs/pretrain", steps=2300)
BUILT_IN_DOCUMENTS = 40_000
BUILT_IN_VOCAB = 2048  # the built-in world has few words: 2,473 ids are all that can be learned from it
HELD_OUT_DOCUMENTS = 1_000
EVAL_TOKENS = 16_384  # while training; at the end, all held-out text is read


def config_of(settings: Settings) -> Config:
    """The preset or JSON file of --config with the fields of --set replaced."""
    config = PRESETS.get(settings.config)
    if config is None:
        path = Path(settings.config)
        if not path.is_file():
            raise UserError(f"--config: {settings.config!r} is no preset ({', '.join(PRESETS)}) and no file")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"--config: cannot read {path} as JSON: {error}; see to the file") from error
        if not isinstance(values, dict):
            raise UserError(f"--config: {path} holds a {type(values).__name__}, wants an object of the config's fields")
        config = Config.from_dict(values)
    changes: dict[str, Any] = {}
    for item in settings.set:
        key, equals, value = item.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError as error:
            raise UserError(f"--set: {item!r} wants KEY=VALUE with a number, e.g. --set dim=192") from error
    return config.override(changes)


def documents_of(settings: Settings) -> tuple[list[str], list[str]]:
    """Training and held-out documents."""
    if not settings.data:
        print(f"corpus: built in (no --data given), {BUILT_IN_DOCUMENTS:,} documents of a small world")
        return (
            list(documents("train", BUILT_IN_DOCUMENTS, settings.seed)),
            list(documents("val", HELD_OUT_DOCUMENTS, settings.seed)),
        )
    found = read_documents(settings.data, settings.encoding)
    # The cut is a position in the text, so that one large file is split as well as many small ones.
    remaining = int(sum(map(len, found)) * 0.9)
    training, held_out = [], []
    for text in found:
        cut = min(max(remaining, 0), len(text))
        remaining -= len(text)
        training += [text[:cut]] if cut else []
        held_out += [text[cut:]] if cut < len(text) else []
    print(f"corpus: {len(found)} documents from {', '.join(settings.data)}; the last tenth of the text is held out")
    return training, held_out


def pack(texts: Sequence[str], tokenizer: Tokenizer) -> np.ndarray:
    """One stream of ids, each document followed by the separator."""
    end = np.array([tokenizer.specials[SEPARATOR]], np.int32)
    parts = [part for ids in tokenizer.encode_many(texts) for part in (ids, end)]
    return np.concatenate([end[:0], *parts], dtype=np.int32, casting="same_kind")


def corpus_of_text(settings: Settings, config: Config, seq_len: int) -> Corpus:
    """Plain text, or the built-in corpus: the tokenizer is trained here, and the ids are held in memory."""
    training, held_out = documents_of(settings)
    if settings.tokenizer:
        tokenizer = Tokenizer.load(settings.tokenizer)
        if tokenizer.vocab_size != config.vocab:
            raise UserError(
                f"--tokenizer: {settings.tokenizer} has {tokenizer.vocab_size} ids, the config's vocab is "
                f"{config.vocab}; use --set vocab={tokenizer.vocab_size}, or another tokenizer"
            )
        if SEPARATOR not in tokenizer.specials:
            raise UserError(f"--tokenizer: {settings.tokenizer} has no special token {SEPARATOR}; use another")
    else:
        tokenizer = Tokenizer.train(training, config.vocab, progress=sys.stderr.isatty())
    streams = [pack(texts, tokenizer) for texts in (training, held_out)]
    for stream in streams:
        check_ids(stream, config.vocab)
    size = sum(len(t.encode("utf-8", "surrogatepass")) for t in training)
    print(f"tokenizer: {tokenizer.vocab_size} ids, {size / max(1, len(streams[0]) - len(training)):.2f} bytes a token")
    print(f"training text: {size:,} bytes, {len(streams[0]):,} tokens; held out: {len(streams[1]):,} tokens")
    data = PackedTokens(streams[0], seq_len, config.mtp_heads, settings.seed)
    held = PackedTokens(streams[1], min(seq_len, max(1, len(streams[1]) - 1)), config.mtp_heads, settings.seed)
    parts = (HeldOut("text", held, 1),)
    name, licence = ("text", NOT_STATED) if settings.data else ("the built-in world", "MIT")
    train, val = (Part(len(texts), len(stream), sum(len(t.encode("utf-8", "surrogatepass")) for t in texts))
                  for texts, stream in zip((training, held_out), streams, strict=True))  # fmt: skip
    summary = (summarise(name, licence, 1.0, train, val),)
    return Corpus(tokenizer, data, train.tokens, parts, opening_of(held_out[0]), fingerprint(streams[0]), summary)


def config_for(shards: Shards, config: Config, settings: Settings) -> Config:
    """The config with the vocabulary of the shards' tokenizer, unless the user asked for another."""
    tokenizer = shards.tokenizer
    if settings.tokenizer and Tokenizer.load(settings.tokenizer).hash() != tokenizer.hash():
        raise UserError(
            f"--tokenizer: {settings.tokenizer} is not the one that {settings.data[0]} was made with; drop the flag, "
            f"or make the shards with python -m data.shards --tokenizer {settings.tokenizer}"
        )
    if config.vocab == tokenizer.vocab_size:
        return config
    if settings.config not in PRESETS or any(item.startswith("vocab=") for item in settings.set):
        raise UserError(
            f"config: vocab is {config.vocab}, the tokenizer of {settings.data[0]} has {tokenizer.vocab_size} ids; use "
            f"--set vocab={tokenizer.vocab_size}, or shards made with a tokenizer of {config.vocab}"
        )
    print(f"vocab {config.vocab} -> {tokenizer.vocab_size}: what the tokenizer of the shards has")
    return config.override({"vocab": tokenizer.vocab_size})


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(parser(__doc__ or "", DEFAULTS, with_base=False), argv, DEFAULTS)
    config = config_of(settings)
    shards = find_shards(settings)
    if shards:
        config = config_for(shards, config, settings)
    chosen = settings.data or settings.tokenizer or any(item.startswith("vocab=") for item in settings.set)
    if config.vocab > BUILT_IN_VOCAB and not chosen:
        print(f"vocab {config.vocab} -> {BUILT_IN_VOCAB}: the built-in corpus has too few words; give --data for more")
        config = config.override({"vocab": BUILT_IN_VOCAB})
    seq_len = sequence_length(config, settings.seq_len)
    if plan_only:
        print_plan(config, settings.precision, settings.batch_size, seq_len, settings.recompute)
        return 0
    out = Path(settings.out)
    backend, settings = open_backend(settings)
    print(f"config {settings.config}: dim {config.dim}, {config.layers} layers, {config.heads}/{config.kv_heads} "
          f"heads, context {config.context}, {config.mtp_heads} output heads")  # fmt: skip
    print(f"backend {backend.name}, {settings.precision}, {backend.describe()}")
    check_fits(config, backend, settings.batch_size, seq_len, settings.recompute)

    if shards:
        corpus = open_corpus(shards, settings, seq_len, config.mtp_heads)
    else:
        corpus = corpus_of_text(settings, config, seq_len)
    tokenizer = corpus.tokenizer
    model = NanoEuler(config, backend, recompute=settings.recompute)
    model.initialise(settings.seed)
    per_step = settings.batch_size * settings.grad_accum * seq_len
    print(f"model: {model.buffer.count:,} parameters, seed {settings.seed}")
    print_schedule(settings, f"{per_step:,} tokens", corpus.tokens / per_step, "text")

    def evaluate(sharded: Sharded) -> dict[str, float]:
        overall, by_source = corpus.evaluate(sharded, settings.batch_size, EVAL_TOKENS)
        return {"val_bits_per_byte": overall, **{f"val_bits_per_byte_{name}": bpb for name, bpb in by_source.items()}}

    # A character can take four tokens: half of the context is left for what follows.
    opening = tokenizer.decode(tokenizer.encode(corpus.opening)[: max(1, config.context // 2)])

    def sample() -> str:
        decoder = make_decoder(model, spare_memory=True)
        ids = generate(model, tokenizer.encode(opening), Sampling(max_tokens=60), frozenset({end}), decoder)
        return f"  {opening}|{tokenizer.decode(ids)}".replace("\n", "\n  ")

    end = tokenizer.specials[SEPARATOR]
    accum, rows = settings.grad_accum, settings.batch_size
    task = Task(
        model, tokenizer, tokenizer.byte_lengths, config.mtp_weights,
        lambda step: [corpus.batches.batch(step * accum + i, rows) for i in range(accum)], evaluate, sample,
        {"kind": "pretrain", "config": config.to_dict(), "tokenizer_hash": tokenizer.hash(),
         "data_hash": corpus.hash, "corpus": corpus.summary, "machine": backend.describe()},
        model.flop_per_token(seq_len), FLOP_CONVENTION,
    )  # fmt: skip
    last = train(task, settings, backend, resume)
    final, by_source = corpus.evaluate(Sharded(model, backend), settings.batch_size)
    for name, figure in by_source.items():
        print(f"held-out text of {name}: {figure:.3f} bits per byte")
    print(f"all held-out text: {final:.3f} bits per byte")
    of_sources = {f"held-out text of {name}, bits per byte": figure for name, figure in by_source.items()}
    save_scores(out, checkpoint.step_of(last), {"held-out text, bits per byte": final, **of_sources})
    if with_card:
        print(f"wrote {write_card(out)}")
    print(f"next: python recipes/sft.py --base {out}")
    print(f"  or: python -m models.nanoeuler.chat --checkpoint {out} --prompt {shlex.quote(opening)}")
    return 0


if __name__ == "__main__":
    run_command(main)
