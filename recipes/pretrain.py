"""Pretrain a model of the zoo on text: next-token prediction, or for BERT masked words.

    python recipes/pretrain.py                                  the built-in corpus, small preset, minutes on a CPU
    python recipes/pretrain.py --model gpt2 --config char --data shakespeare.txt --tokenizer chars
    python recipes/pretrain.py --model bert --data reviews.txt --out runs/bert
    python recipes/pretrain.py --model bert --data reviews.txt --base runs/bert --seq-len 512 --out runs/long
    python recipes/pretrain.py --data books/ --minutes 30       your own text
    python recipes/pretrain.py --data shards --mix books=0.7 web=0.3        token shards (python -m data.shards)
    python recipes/pretrain.py --data shards --teacher runs/large           distillation from a larger model
    python recipes/pretrain.py --resume                         continue runs/pretrain

Documents are packed into one stream, each followed by <|endoftext|>. `val bits per byte` is measured on held-out text,
which is never trained on: the val split of the built-in corpus or of token shards, the last tenth of your own data.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A recipe runs from a plain checkout too: the repository root is where data/, models/ and tinyforge/ are.
if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.data.training import documents_of, input_hashes
from tinyforge.errors import UserError, run_command
from tinyforge.formats import Opened, open_model, trained_model
from tinyforge.formats.teaching import beside, check_teachers, described, open_teachers, taught_by
from tinyforge.infer import Sampling, generate, make_decoder
from tinyforge.parallel.launch import Ranks
from tinyforge.params import take_weights
from tinyforge.registry import find_model
from tinyforge.report import timed
from tinyforge.shards import Shards, separator_of
from tinyforge.terminal import one_line
from tinyforge.tokenizers import CharTokenizer
from tinyforge.train.batches import micro_batches
from tinyforge.train.card import write_card
from tinyforge.train.corpus import Corpus, config_for, corpus_of_text, find_shards, open_corpus, tokenizer_for
from tinyforge.train.data_parallel import Sharded, Trainable
from tinyforge.train.masked import FRAME, MaskedWords, evaluate_masked, guesses
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import MaskedTokens, NextTokens
from tinyforge.train.plan import Plan, check_fits, print_plan
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import (
    PretrainSettings,
    config_of,
    open_backend,
    parse,
    print_schedule,
    sequence_length,
    start_ranks,
    with_fields,
)

EVAL_TOKENS = 16_384  # of each evaluation while training; the last one reads all held-out text


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(PretrainSettings, __doc__ or "", argv)
    spec, base = find_model(settings.model), open_base(settings, resume)
    config = with_fields(base.config, settings.set) if base else config_of(settings)
    if spec.learns == "images":
        raise UserError(
            f"{spec.title} learns images and cannot continue text; use recipes/classify.py, or another model"
        )
    shards = find_shards(settings)
    if shards:
        if base and base.tokenizer.hash() != shards.tokenizer.hash():
            raise UserError(
                f"--base: {base.path} has another tokenizer than {settings.data[0]}; make the shards with "
                f"python -m data.shards --tokenizer {base.path}/tokenizer.json"
            )
        config = config_for(shards, config, settings)
    teachers = open_teachers(settings)
    if teachers:
        if not base and not shards:
            if settings.tokenizer:
                raise UserError("--tokenizer: the model gets its teacher's; leave out --tokenizer or --teacher")
            config = config.override({"vocab": teachers[0].config.vocab})
        known = base.tokenizer if base else shards.tokenizer if shards else teachers[0].tokenizer
        check_teachers(teachers, settings, spec, config, known, base.path if base else "the shards")
    if plan_only:
        print_plan(spec, config, settings, teachers=described(teachers, settings))
        return 0
    if (status := start_ranks(settings, __file__, argv)) is not None:
        return status
    with running(settings, resume) as ranks:
        opening, tunable = pretrain(settings, config, shards, base, teachers, resume, ranks)
    out = shlex.quote(settings.out)
    if with_card:
        print(f"wrote {write_card(Path(settings.out))}")
    if spec.learns == "masked text":
        print(f"next: python recipes/classify.py --base {out}")
        return 0
    chat = f"python -m tinyforge.chat --checkpoint {out} --prompt {shlex.quote(one_line(opening))}"
    print(f"next: python recipes/sft.py --base {out}\n  or: {chat}" if tunable else f"next: {chat}")
    return 0


def open_base(settings: PretrainSettings, resume: bool) -> Opened | None:
    """The checkpoint of --base. A resumed run opens itself: it has its own weights and no longer needs the base."""
    if not settings.base:
        return None
    base = open_model(Path(settings.out) if resume else trained_model(settings.base))
    if base.spec.name != settings.model:
        raise UserError(f"--base: {base.path} is a {base.spec.name}, wanted a {settings.model}; give --model too")
    return base


def pretrain(
    settings: PretrainSettings,
    config: ModelConfig,
    shards: Shards | None,
    base: Opened | None,
    teachers: Sequence[Opened],
    resume: bool,
    ranks: Ranks,
) -> tuple[str, bool]:
    """Train, and measure the model; returns the beginning of a held-out document, and whether its tokenizer can write
    what fine-tuning lays around a question."""
    spec, seq_len = find_model(settings.model), sequence_length(config, settings.seq_len)
    masked = spec.learns == "masked text"
    text_len = seq_len - FRAME if masked else seq_len
    with timed("opening the backend"):
        backend, settings = open_backend(settings, ranks)
    shape = ", ".join(f"{name} {value}" for name, value in config.to_dict().items())
    print(f"model {spec.name}, config {settings.config}: {shape}")
    print(f"backend {backend.name}, {settings.precision}, {backend.describe()}")
    with timed("planning the memory"):
        plan = check_fits(spec, config, backend, settings, ranks.size, teachers=described(teachers, settings))

    if shards:
        with timed("opening the shards"):
            corpus = open_corpus(shards, settings, text_len, config.prediction_heads)
    else:
        with timed("reading the text"):
            texts = documents_of(settings.data, settings.encoding, settings.seed)
        if given := base or next(iter(teachers), None):
            tokenizer = given.tokenizer
        else:
            with timed("training the tokenizer"):
                tokenizer, config = tokenizer_for(settings, config, *texts)
        with timed("encoding the text"):
            corpus = corpus_of_text(settings, config, text_len, *texts, tokenizer)
    tokenizer = corpus.tokenizer
    with timed("making the model"):
        model = spec.build(config, backend, recompute=settings.recompute)
        model.initialise(settings.seed)
        if base:
            take_weights(model.buffer, base.build(backend).model.buffer, backend)
    learner = beside(model, teachers, backend, settings)
    per_step = settings.batch_size * settings.grad_accum * seq_len
    print(f"model: {model.buffer.count:,} parameters, seed {settings.seed}")
    print_schedule(settings, f"{per_step:,} tokens", corpus.tokens / per_step, "text")

    own = corpus.inputs if shards else input_hashes(settings.data)
    about = {
        "kind": "pretrain",
        "model": spec.name,
        "config": config.to_dict(),
        "tokenizer_hash": tokenizer.hash(),
        "data_hash": corpus.hash,
        "corpus": corpus.summary,
        "machine": backend.describe(),
        "inputs": list(dict.fromkeys([*own, *(base.inputs() if base else ())])),
    }
    about = taught_by(teachers, about)
    if masked:
        hide_words(settings, model, corpus, backend, seq_len, about, plan, resume)
        return "", False

    def evaluate(sharded: Sharded) -> dict[str, float]:
        overall, by_source = corpus.evaluate(sharded, settings.batch_size, EVAL_TOKENS)
        return {"val_bits_per_byte": overall, **{f"val_bits_per_byte_{name}": bpb for name, bpb in by_source.items()}}

    # A character can take four tokens. Half of the context is left for the continuation.
    opening = tokenizer.decode(tokenizer.encode(corpus.opening)[: max(1, config.context // 2)])
    end = frozenset({tokenizer.specials[separator_of(tokenizer)]})

    def sample() -> str:
        decoder = make_decoder(model, spare_memory=True)
        ids = generate(model, tokenizer.encode(opening), Sampling(max_tokens=60), end, decoder)
        return f"  {opening}|{tokenizer.decode(ids)}".replace("\n", "\n  ")

    # With a teacher the loss is not the text's likelihood: it has no bits per byte.
    objective = NextTokens(config.head_weights, None if teachers else tokenizer.byte_lengths)
    task = Task(
        learner,
        tokenizer,
        objective,
        micro_batches(corpus.batches, settings.batch_size, settings.grad_accum),
        evaluate,
        sample,
        about,
        learner.flop_per_token(seq_len),
        settings.batch_size if settings.carry else 0,
        plan=plan,
    )
    last = Run(task, settings, backend, resume).train()
    final, by_source = corpus.evaluate(Sharded(model, backend), settings.batch_size)
    for name, figure in by_source.items():
        print(f"held-out text of {name}: {figure:.3f} bits per byte")
    print(f"all held-out text: {final:.3f} bits per byte")
    of_sources = {f"held-out text of {name}, bits per byte": figure for name, figure in by_source.items()}
    scores = {"held-out text, bits per byte": final, **of_sources}
    save_scores(Path(settings.out), checkpoint.step_of(last), scores)
    return opening, not isinstance(tokenizer, CharTokenizer)


def hide_words(
    settings: PretrainSettings,
    model: Trainable,
    corpus: Corpus,
    backend: Backend,
    seq_len: int,
    about: dict[str, Any],
    plan: Plan,
    resume: bool,
) -> None:
    """Pretrain with masked words (BERT)."""
    rows = settings.batch_size
    words = MaskedWords(corpus.batches, corpus.tokenizer, model.config, seq_len, settings.seed)
    print(
        f"to beat: loss {words.frequency_loss():.2f}, that of guessing by word frequency; if a run stays "
        "there, start with a smaller --seq-len, or lower --lr"
    )

    def evaluate(sharded: Sharded) -> dict[str, float]:
        return evaluate_masked(sharded, words.held_out(corpus, rows, EVAL_TOKENS))

    def sample() -> str:
        shown = next(words.held_out(corpus, rows, EVAL_TOKENS), None)
        return "  " + guesses(model, shown, corpus.tokenizer, backend)[:400] if shown else ""

    task = Task(
        model,
        corpus.tokenizer,
        MaskedTokens(),
        micro_batches(words, rows, settings.grad_accum),
        evaluate,
        sample,
        about,
        model.flop_per_token(seq_len),
        plan=plan,
    )
    last = Run(task, settings, backend, resume).train()
    from tqdm import tqdm

    everything = tqdm(words.held_out(corpus, rows), "held-out text", unit=" batches", leave=False, disable=None)
    final = evaluate_masked(Sharded(model, backend), everything)
    print(f"all held-out text: loss {final['val_loss']:.3f}, perplexity {final['val_perplexity']:.1f} of a hidden word")
    save_scores(Path(settings.out), checkpoint.step_of(last), {"hidden words, perplexity": final["val_perplexity"]})


if __name__ == "__main__":
    run_command(main)
