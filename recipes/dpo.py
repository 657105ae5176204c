"""Learn from preferences: of two replies to a prompt, make the chosen one likelier than the rejected one (DPO).

    python recipes/dpo.py                                   the newest fine-tuned run, pairs of the built-in world
    python recipes/dpo.py --data pairs.json --base runs/sft
    python recipes/dpo.py --objective simpo                 length-normalised, no reference; also ipo, orpo
    python recipes/dpo.py --resume                          continue runs/dpo

A pair is an instruction, an input (which may be empty), a chosen and a rejected reply. The last fifth of each file is
held out. The reference is the model that the run starts from. Its log-probabilities are computed once and cached under
--cache, by a hash of the model and of the tokenised pairs. The run ends with the accuracy on the held-out pairs (the
share whose chosen reply gained more than the rejected one), and for the built-in pairs with exact match on held-out
questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge import checkpoint
from tinyforge.backends import Backend
from tinyforge.data.alpaca import names_of, summary_of
from tinyforge.data.answers import answered, exact_match
from tinyforge.data.preferences import Pair, encode_pairs, read_split, world_pairs
from tinyforge.data.training import input_hashes
from tinyforge.data.world import KINDS
from tinyforge.errors import UserError, run_command
from tinyforge.formats import Loaded, Opened
from tinyforge.formats.tokenizers import published_files
from tinyforge.parallel.launch import ProcessGroupInfo
from tinyforge.registry import next_token_model
from tinyforge.report import count_of, timed
from tinyforge.train import tuning
from tinyforge.train.batches import fingerprint, micro_batches
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.metrics import save_scores
from tinyforge.train.plan import print_plan
from tinyforge.train.preferences import DPO, OBJECTIVES, Pairs, SimPO, cached_reference, measure
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import EVERY_ACTION, DpoSettings, parse, print_schedule, sequence_length, start_ranks

BUILT_IN_PAIRS, HELD_OUT_PAIRS = 2_000, 300


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(DpoSettings, __doc__ or "", argv, actions=EVERY_ACTION)
    base = tuning.open_start(settings, resume)
    next_token_model(base.spec.name)
    if plan_only:
        print_plan(base.spec, base.config, settings, each=2)
        return 0
    if (status := start_ranks(settings, __file__, argv)) is not None:
        return status
    with running(settings, resume) as ranks:
        learn(settings, base, resume, ranks)
    tuning.print_next_steps(settings, with_card)
    return 0


def objective_of(settings: DpoSettings) -> DPO:
    made = OBJECTIVES[settings.objective](label_smoothing=settings.label_smoothing)
    made = replace(made, gamma=settings.gamma) if isinstance(made, SimPO) else made
    return made if settings.beta is None else replace(made, beta=settings.beta)


def read(settings: DpoSettings) -> tuple[Sequence[Pair], dict[str, Sequence[Pair]]]:
    """The pairs to learn from, and the held-out ones of each file."""
    if settings.data:
        training, by_file = read_split(settings.data, settings.encoding)
        of_each = " of each file" if len(by_file) > 1 else ""
        print(
            f"data: {count_of(len(training), 'pair')} to learn from; held out: {sum(map(len, by_file)):,}, the last "
            f"fifth{of_each}"
        )
        return training, dict(zip(names_of(settings.data), by_file, strict=True))
    print(f"data: built in (no --data given), {BUILT_IN_PAIRS:,} pairs of {len(KINDS)} kinds")
    held_out = world_pairs("val", HELD_OUT_PAIRS, settings.seed)
    return world_pairs("train", BUILT_IN_PAIRS, settings.seed), {"built in": held_out}


def learn(settings: DpoSettings, base: Opened, resume: bool, ranks: ProcessGroupInfo) -> None:
    training, by_file = read(settings)
    seq_len = sequence_length(base.config, settings)
    template = tuning.training_template(settings, base)
    with timed("encoding the pairs"):
        heads, tokenizer = base.config.prediction_heads, base.tokenizer
        data = Pairs(encode_pairs(training, tokenizer, seq_len, "training", template=template), heads, settings.seed)
        parts = {
            name: encode_pairs(pairs, tokenizer, seq_len, f"held out, {name}", len(by_file) > 1, template)
            for name, pairs in by_file.items()
        }
        held = {name: Pairs(part, heads, settings.seed) for name, part in parts.items() if part}
    if not held:
        raise UserError(f"data: none of the held-out pairs fits {seq_len} tokens; give more pairs, or shorter ones")
    loaded, backend, settings, plan = tuning.build(settings, base, template, ranks, each=2)
    model, objective, rows, accum = loaded.model, objective_of(settings), settings.batch_size, settings.grad_accum
    if objective.referenced:
        held_out = {f"held-out pairs, {name}": part for name, part in held.items()}
        add_reference(settings, base, backend, loaded, resume, {"training pairs": data, **held_out})

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        return {f"val_{name}": value for name, value in measure(parallel, objective, held, rows).items()}

    def sample() -> str:
        return answered(loaded, next(iter(by_file.values()))[0])

    print_schedule(settings, count_of(rows * accum, "pair"), len(data.pairs) / rows / accum, "pairs")
    counts = len(data.pairs), sum(len(part.pairs) for part in held.values())
    summary = summary_of(settings.data, "the built-in pairs", "pairs", *counts)
    task = Task(
        model=model,
        tokenizer=tokenizer,
        objective=objective,
        batches=micro_batches(data, rows, accum),
        evaluate=evaluate,
        sample=sample,
        meta={
            "kind": "dpo",
            "data_hash": data.fingerprint(),
            "corpus": [summary],
            **tuning.run_metadata(loaded, base, backend, settings),
            **tuning.provenance(base, Path(settings.out), input_hashes(settings.data)),
        },
        flop_per_token=model.flop_per_token(seq_len),
        curve="rewards/accuracies",
        plan=plan,
        published=published_files(base.published),
    )
    if not settings.data and not resume and not ranks.rank:
        print(f"before: {exact_match(loaded, 20 * len(KINDS), settings.seed)['all']:.1%} exact match")
    last = Run(task, settings, backend, resume).train()
    found = measure(DataParallel(model, backend), objective, held, rows)
    of_each = ", ".join(f"{name} {found[key]:.1%}" for name in held if (key := f"rewards/accuracies_{name}") in found)
    print(
        f"held-out pairs: accuracy {found['rewards/accuracies']:.1%}{f' ({of_each})' if of_each else ''}, margin "
        f"{found['rewards/margins']:.3f}"
    )
    scores = {"preference accuracy": found["rewards/accuracies"]}
    if not settings.data:
        scores["exact match, all"] = exact_match(loaded, 20 * len(KINDS), settings.seed)["all"]
        print(f"after: {scores['exact match, all']:.1%} exact match")
    save_scores(Path(settings.out), checkpoint.step_of(last), scores)


def add_reference(
    settings: DpoSettings, base: Opened, backend: Backend, loaded: Loaded, resume: bool, parts: Mapping[str, Pairs]
) -> None:
    """The reference's log-probabilities of all pairs, from the cache or by one pass over them. parts: by what they
    are called."""
    weights = base.fingerprint()
    # Before its first step the policy equals the reference, also with adapters, which add nothing yet.
    model = base.build(backend, adapters=settings.adapters).model if resume else loaded.model
    reference, computed = DataParallel(model, backend), f"{settings.precision} {settings.weights}"
    for name, pairs in parts.items():
        key = fingerprint(np.frombuffer(f"{weights} {pairs.fingerprint()} {computed}".encode(), np.uint8))
        with timed(f"the reference's log-probabilities of the {name}"):
            pairs.reference = reference.led(
                partial(
                    cached_reference,
                    Path(settings.cache),
                    key,
                    len(pairs.pairs),
                    partial(pairs.reference_logps, reference.token_nll, settings.batch_size),
                )
            )


if __name__ == "__main__":
    run_command(main)
