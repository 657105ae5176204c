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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.data.training import documents_of, input_hashes
from tinyforge.errors import UserError, run_command
from tinyforge.formats import Opened, open_model, resolve_checkpoint
from tinyforge.infer import Sampling, generate, make_decoder
from tinyforge.invocation import as_typed
from tinyforge.parallel.launch import ProcessGroupInfo
from tinyforge.params import load_named, take_weights
from tinyforge.registry import find_model, next_token_model
from tinyforge.report import timed
from tinyforge.shards import Shards, separator_of
from tinyforge.terminal import readable_argument
from tinyforge.tokenizers import CharTokenizer
from tinyforge.train.batches import Batches, micro_batches
from tinyforge.train.card import write_card
from tinyforge.train.corpus import Corpus, config_for, corpus_of_text, find_shards, open_corpus, tokenizer_for
from tinyforge.train.data_parallel import DataParallel, Trainable
from tinyforge.train.masked import MaskedWords, evaluate_masked, guesses, room_in
from tinyforge.train.metrics import best_step, save_scores
from tinyforge.train.objectives import MaskedTokens, NextTokens, Objective
from tinyforge.train.plan import Plan, check_fits, print_plan
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import (
    EVERY_ACTION,
    PretrainSettings,
    config_of,
    described,
    on_base,
    open_backend,
    parse,
    print_schedule,
    sequence_length,
    start_ranks,
)
from tinyforge.train.teachers import (
    add_teacher_metadata,
    check_teachers,
    open_teachers,
    teacher_specs,
    wrap_with_teachers,
)

EVAL_TOKENS = 16_384  # of each evaluation while training; the last one reads all held-out text


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(PretrainSettings, __doc__ or "", argv, actions=EVERY_ACTION)
    spec, base = find_model(settings.model), open_base(settings, resume)
    config = on_base(base.config, settings, resume) if base else config_of(settings)
    if spec.learns != "masked text":
        next_token_model(spec.name)
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
            vocab = teachers[0].config.vocab
            if config.vocab != vocab and not resume and any(item.startswith("vocab=") for item in settings.set):
                raise UserError(
                    f"--set vocab={config.vocab}: the model gets its teacher's tokenizer, vocab {vocab}; drop it"
                )
            config = config.override({"vocab": vocab})
        known = base.tokenizer if base else shards.tokenizer if shards else teachers[0].tokenizer
        check_teachers(
            teachers, settings, spec, config, known, base.path if base else "the shards" if shards else teachers[0].path
        )
    if plan_only:
        print_plan(spec, config, settings, teachers=teacher_specs(teachers, settings))
        return 0
    if (status := start_ranks(settings, __file__, argv)) is not None:
        return status
    with running(settings, resume) as ranks:
        opening, tunable = pretrain(settings, config, shards, base, teachers, resume, ranks)
    out = shlex.quote(settings.out)
    if with_card:
        print(f"wrote {write_card(Path(settings.out))}")
    if spec.learns == "masked text":
        print(as_typed(f"next: python recipes/classify.py --base {out}"))
        return 0
    best = shlex.quote(str(best_checkpoint(settings) or settings.out))
    chat = f"python -m tinyforge.chat --checkpoint {best} --prompt {readable_argument(opening)}"
    print(as_typed(f"next: python recipes/sft.py --base {out}\n  or: {chat}" if tunable else f"next: {chat}"))
    return 0


def open_base(settings: PretrainSettings, resume: bool) -> Opened | None:
    """The checkpoint of --base. A resumed run opens itself: it has its own weights and no longer needs the base."""
    if not settings.base:
        return None
    base = open_model(Path(settings.out) if resume else resolve_checkpoint(settings.base))
    if base.spec.name != settings.model:
        raise UserError(f"--base: {base.path} is a {base.spec.name}, expected a {settings.model}; give --model too")
    return base


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to train.

    model: what is saved. learner: what is trained: the model, or the model with its teachers. plan: of the memory.
    """

    settings: PretrainSettings
    backend: Backend
    plan: Plan
    corpus: Corpus
    model: Any  # a CausalLM, or BERT
    learner: Trainable
    seq_len: int
    run_metadata: dict[str, Any]
    resume: bool

    def train(
        self,
        objective: Objective,
        source: Batches,
        evaluate: Callable[[DataParallel], Mapping[str, float]],
        sample: Callable[[], str],
    ) -> int:
        """Train on the batches of `source`; returns the last step."""
        rows = self.settings.batch_size
        task = Task(
            model=self.learner,
            tokenizer=self.corpus.tokenizer,
            objective=objective,
            batches=micro_batches(source, rows, self.settings.grad_accum),
            evaluate=evaluate,
            sample=sample,
            meta=self.run_metadata,
            flop_per_token=self.learner.flop_per_token(self.seq_len),
            carried=rows if self.settings.stateful else 0,
            plan=self.plan,
        )
        return checkpoint.step_of(Run(task, self.settings, self.backend, self.resume).train())


def pretrain(
    settings: PretrainSettings,
    config: ModelConfig,
    shards: Shards | None,
    base: Opened | None,
    teachers: Sequence[Opened],
    resume: bool,
    ranks: ProcessGroupInfo,
) -> tuple[str, bool]:
    """Train, and measure the model; returns the beginning of a held-out document, and whether its tokenizer can write
    what fine-tuning lays around a question."""
    spec, seq_len = find_model(settings.model), sequence_length(config, settings)
    with timed("opening the backend"):
        backend, settings = open_backend(settings, ranks, settings.model)
    shape = ", ".join(f"{name} {value}" for name, value in config.to_dict().items())
    print(f"model {spec.name}, config {settings.config}: {shape}")
    print(described(backend, settings, settings.model))
    with timed("planning the memory"):
        plan = check_fits(spec, config, backend, settings, ranks.size, teachers=teacher_specs(teachers, settings))
    text_len = room_in(seq_len) if spec.learns == "masked text" else seq_len
    corpus, config = read_corpus(settings, config, text_len, shards, base or next(iter(teachers), None))
    with timed("making the model"):
        model = spec.build(config, backend, recompute=settings.recompute)
        model.initialise(settings.seed)
        if base:
            take_weights(model.buffer, base.build(backend).model.buffer, backend)
    learner = wrap_with_teachers(model, teachers, backend, settings)
    of_step = settings.micro_batches / settings.steps if settings.steps else settings.micro_batches_at(0.0)
    per_step = round(settings.batch_size * of_step * seq_len)
    print(f"model: {model.buffer.count:,} parameters, seed {settings.seed}")
    print_schedule(settings, f"{per_step:,} tokens", corpus.tokens / per_step, "text")

    own = corpus.inputs if shards else input_hashes(settings.data)
    run_metadata = {
        "kind": "pretrain",
        "model": spec.name,
        "config": config.to_dict(),
        "tokenizer_hash": corpus.tokenizer.hash(),
        "data_hash": corpus.hash,
        "corpus": corpus.summary,
        "machine": backend.describe(),
        "inputs": list(dict.fromkeys([*own, *(base.inputs() if base else ())])),
    }
    run_metadata = add_teacher_metadata(teachers, run_metadata)
    run = Prepared(settings, backend, plan, corpus, model, learner, seq_len, run_metadata, resume)
    if spec.learns == "masked text":
        learn_masked_words(run)
        return "", False
    return learn_next_tokens(run, bool(teachers)), not isinstance(corpus.tokenizer, CharTokenizer)


def read_corpus(
    settings: PretrainSettings, config: ModelConfig, text_len: int, shards: Shards | None, given: Opened | None
) -> tuple[Corpus, ModelConfig]:
    """The corpus in rows of `text_len` tokens, and the config, whose vocabulary is the tokenizer's. given: the model
    whose tokenizer is used; without one the tokenizer is trained on the text."""
    if shards:
        with timed("opening the shards"):
            return open_corpus(shards, settings, text_len, config.prediction_heads), config
    with timed("reading the text"):
        training, held_out, documents = documents_of(settings.data, settings.encoding, settings.seed)
    if given:
        tokenizer = given.tokenizer
    else:
        with timed("training the tokenizer"):
            tokenizer, config = tokenizer_for(settings, config, training, held_out)
    with timed("encoding the text"):
        return corpus_of_text(settings, config, text_len, training, held_out, tokenizer, documents), config


def learn_next_tokens(run: Prepared, distilled: bool) -> str:
    """Pretrain on the next token; returns the beginning of a held-out document."""
    corpus, model, tokenizer, rows = run.corpus, run.model, run.corpus.tokenizer, run.settings.batch_size

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        overall, by_source = corpus.evaluate(parallel, rows, EVAL_TOKENS)
        return {"val_bits_per_byte": overall, **{f"val_bits_per_byte_{name}": bpb for name, bpb in by_source.items()}}

    # A character can take four tokens. Half of the context is left for the continuation.
    opening = tokenizer.decode(tokenizer.encode(corpus.opening)[: max(1, model.config.context // 2)])
    end = frozenset({tokenizer.specials[separator_of(tokenizer)]})

    def sample() -> str:
        decoder = make_decoder(model, spare_memory=True)
        ids = generate(model, tokenizer.encode(opening), Sampling(max_tokens=60), end, decoder)
        return f"  {opening}|{tokenizer.decode(ids)}".replace("\n", "\n  ")

    # With a teacher the loss is not the text's likelihood: it has no bits per byte.
    objective = NextTokens(model.config.head_weights, None if distilled else tokenizer.byte_lengths)
    last = run.train(objective, corpus.batches, evaluate, sample)
    final, by_source = corpus.evaluate(DataParallel(model, run.backend), rows)
    for name, figure in by_source.items():
        print(f"held-out text of {name}: {figure:.3f} bits per byte")
    print(f"all held-out text: {final:.3f} bits per byte")
    of_sources = {f"held-out text of {name}, bits per byte": figure for name, figure in by_source.items()}
    save_scores(Path(run.settings.out), last, {"held-out text, bits per byte": final, **of_sources})
    if best := best_checkpoint(run.settings):
        load_named(model.buffer, model.buffer.masters, checkpoint.load(best).weights, run.backend, best)
        figure, _ = corpus.evaluate(DataParallel(model, run.backend), rows)
        print(f"all held-out text, by the best checkpoint, {best}: {figure:.3f} bits per byte")
    return opening


def best_checkpoint(settings: PretrainSettings) -> Path | None:
    """The checkpoint that --keep-best has kept, unless it is the last one."""
    out = Path(settings.out)
    step = best_step(out / "metrics.jsonl") if settings.keep_best else None
    kept = checkpoint.steps(out)
    return next((path for path in kept[:-1] if checkpoint.step_of(path) == step), None)


def learn_masked_words(run: Prepared) -> None:
    """Pretrain with masked words (BERT)."""
    from tqdm import tqdm

    corpus, settings, rows = run.corpus, run.settings, run.settings.batch_size
    words = MaskedWords(corpus.batches, corpus.tokenizer, run.model.config, run.seq_len, settings.seed)
    print(
        f"to beat: loss {words.frequency_loss():.2f}, that of guessing by word frequency; if a run stays "
        "there, start with a smaller --seq-len, or lower --lr"
    )

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        return evaluate_masked(parallel, words.held_out(corpus, rows, EVAL_TOKENS))

    def sample() -> str:
        shown = next(words.held_out(corpus, rows, EVAL_TOKENS), None)
        return "  " + guesses(run.model, shown, corpus.tokenizer, run.backend)[:400] if shown else ""

    last = run.train(MaskedTokens(), words, evaluate, sample)
    everything = tqdm(words.held_out(corpus, rows), "held-out text", unit=" batches", leave=False, disable=None)
    final = evaluate_masked(DataParallel(run.model, run.backend), everything)
    print(f"all held-out text: loss {final['val_loss']:.3f}, perplexity {final['val_perplexity']:.1f} of a hidden word")
    save_scores(Path(settings.out), last, {"hidden words, perplexity": final["val_perplexity"]})


if __name__ == "__main__":
    run_command(main)
