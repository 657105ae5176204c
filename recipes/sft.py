"""Fine-tune a pretrained model to follow instructions.

    python recipes/sft.py                                   the newest pretrained run, the built-in instructions
    python recipes/sft.py --data alpaca.json --base runs/pretrain
    python recipes/sft.py --base HuggingFaceTB/SmolLM2-135M --lora 8    LoRA adapters on a frozen model of the hub
    python recipes/sft.py --teacher runs/large-sft          distillation from a larger fine-tuned model
    python recipes/sft.py --replay shards                   half of the rows are text, which is so not forgotten
    python recipes/sft.py --resume                          continue runs/sft

Each record is formatted with the chat template of the base; a base without one learns Alpaca's, or that of --template.
Only the reply and its end get a loss; all other targets are -1. With the built-in instructions the run ends with exact
match on held-out ones, per kind of question.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge import checkpoint
from tinyforge.data.alpaca import Record, encode_example, names_of, read_split, summary_of
from tinyforge.data.answers import answered, exact_match, talk_match
from tinyforge.data.talk import talk
from tinyforge.data.training import input_hashes
from tinyforge.data.world import KINDS, instructions
from tinyforge.errors import UserError, run_command
from tinyforge.formats import Opened, lora, newest_run, open_model, resolve_checkpoint
from tinyforge.formats.tokenizers import published_files
from tinyforge.parallel.launch import ProcessGroupInfo
from tinyforge.registry import next_token_model
from tinyforge.report import count_of, timed
from tinyforge.shards import Shards, open_shards, separator_of
from tinyforge.tokenizers import TextTokenizer
from tinyforge.tokenizers.chat_templates import AnyTemplate
from tinyforge.train.batches import Batches, DocumentMask, Examples, MixedTokens, Replayed, fingerprint, micro_batches
from tinyforge.train.corpus import mix_weights
from tinyforge.train.data_parallel import DataParallel, evaluate_nll
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import NextTokens
from tinyforge.train.plan import print_plan
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import (
    EVERY_ACTION,
    SftSettings,
    parse,
    print_schedule,
    restarts,
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
from tinyforge.train.tuning import build, print_next_steps, run_metadata, stages_before, training_template

BUILT_IN_RECORDS = 30_000
HELD_OUT_RECORDS = 300
LINES_OF_TALK = 1 / 3  # of small talk, for each of these


def built_in(split: str, count: int, seed: int) -> list[Record]:
    """The built-in records: questions about the world, and small talk."""
    made = (*instructions(split, count, seed), *talk(split, round(count * LINES_OF_TALK), seed))
    return [Record(e.instruction, e.input, e.output) for e in made]


def encode(
    records: Sequence[Record],
    tokenizer: TextTokenizer,
    template: AnyTemplate,
    seq_len: int,
    what: str,
    max_reply: int | None = None,
) -> list[tuple[list[int], int]]:
    """Records as ids, each with the length of its prompt. Prints how many were refused and how many were truncated."""
    encoded = (encode_example(tokenizer, r, 10**9, template) for r in records)
    whole = [example for example in encoded if example and example[1] <= seq_len]
    kept = [(ids[: seq_len + 1], prompt) for ids, prompt in whole]
    end = template.end_id(tokenizer)
    cut = sum(ids[-1] != end for ids, _ in kept)
    empty = sum(not r.output.strip() for r in records)
    print(
        f"{what}: {count_of(len(kept), 'example')} of up to {seq_len} tokens; refused {empty} with an empty reply "
        f"and {len(records) - len(kept) - empty} whose reply is cut away entirely; {cut} end early"
    )
    if max_reply is None:
        return kept
    brief = [e for e, (ids, prompt) in zip(kept, whole, strict=True) if len(ids) - prompt <= max_reply]
    print(f"{what}: {len(kept) - len(brief):,} left out whose reply takes more than {max_reply} tokens (--max-reply)")
    return brief


def open_base(settings: SftSettings, resume: bool) -> Opened:
    """The model that training starts from. A run with adapters resumes from its base, any other run from itself."""
    out = Path(settings.out)
    if resume and settings.lora is None:
        stopped = open_model(out)
        checkpoint.require(stopped.path, stopped.meta, "base")  # only fine-tuned checkpoints have it
        return stopped
    if resume:
        found = checkpoint.latest(out)
        meta = checkpoint.read_meta(found)
        checkpoint.require(found, meta, "lora")
        base = open_model(lora.base_of(found, meta))
        lora.check_base(found, base, lora.noted(found, meta)["base_sha256"])
        return base
    path = resolve_checkpoint(settings.base) if settings.base else newest_run(("pretrain",))
    if path is None:
        raise UserError("no pretrained run under runs/; run python recipes/pretrain.py first, or give --base DIR")
    return open_model(path)


def open_replay(settings: SftSettings, base: Opened) -> Shards | None:
    """The shards of --replay, verified. Raises UserError if they have another tokenizer than the base."""
    if not settings.replay:
        return None
    shards = open_shards([Path(folder) for folder in settings.replay])
    if shards.tokenizer.hash() != base.tokenizer.hash():
        raise UserError(
            f"--replay: {settings.replay[0]} has another tokenizer than {base.path}; make the shards with "
            f"python -m data.shards --tokenizer {base.path}/tokenizer.json"
        )
    return shards


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(SftSettings, __doc__ or "", argv, actions=EVERY_ACTION)
    base = open_base(settings, resume)
    next_token_model(base.spec.name)
    restarts(settings, base.spec)  # refused before ranks start
    teachers = open_teachers(settings)
    check_teachers(teachers, settings, base.spec, base.config, base.tokenizer, base.path)
    if plan_only:
        print_plan(base.spec, base.config, settings, teachers=teacher_specs(teachers, settings))
        return 0
    if (status := start_ranks(settings, __file__, argv)) is not None:
        return status
    with running(settings, resume) as ranks:
        fine_tune(settings, base, teachers, resume, ranks)
    print_next_steps(settings, with_card)
    return 0


def fine_tune(
    settings: SftSettings, base: Opened, teachers: Sequence[Opened], resume: bool, ranks: ProcessGroupInfo
) -> None:
    config, adapters = base.config, settings.adapters
    seq_len, restart = sequence_length(config, settings), restarts(settings, base.spec)
    template = training_template(settings, base, teachers)
    specs = teacher_specs(teachers, settings)
    loaded, backend, settings, plan = build(settings, base, template, ranks, teachers=specs)
    model, tokenizer = loaded.model, loaded.tokenizer

    if settings.data:
        training, by_file = read_split(settings.data, settings.encoding)
        held_out = [record for records in by_file for record in records]
        of_each = " of each file" if len(settings.data) > 1 else ""
        print(
            f"data: {count_of(len(training), 'record')} to train on; held out: {len(held_out):,}, the last "
            f"20th{of_each}"
        )
    else:
        training = built_in("train", BUILT_IN_RECORDS, settings.seed)
        held_out = built_in("val", HELD_OUT_RECORDS, settings.seed)
        print(
            f"data: built in (no --data given), {BUILT_IN_RECORDS:,} instructions of {len(KINDS)} kinds and "
            f"{len(training) - BUILT_IN_RECORDS:,} lines of small talk"
        )
        by_file = [held_out]
    with timed("encoding the records"):
        encoded = encode(training, tokenizer, template, seq_len, "training", settings.max_reply)
        data = Examples(encoded, seq_len, config.prediction_heads, settings.seed, restart)
        names = names_of(settings.data) if len(by_file) > 1 else [""]
        held = {
            name: encode(records, tokenizer, template, seq_len, f"held out{' of ' * bool(name)}{name}")
            for name, records in zip(names, by_file, strict=True)
        }
    if not any(held.values()):
        raise UserError(f"data: no held-out record fits {seq_len} tokens; give more records")

    counts = len(encoded), sum(map(len, held.values()))
    summary = summary_of(settings.data, "the built-in instructions", "records", *counts)
    accum, rows, replayed = settings.grad_accum, settings.batch_size, settings.replayed_rows
    source: Batches = data
    if shards := open_replay(settings, base):
        weights, heads = mix_weights(settings.mix, shards), config.prediction_heads
        mask = None if restart is None else DocumentMask(tokenizer.specials[separator_of(tokenizer)], restart)
        read = {name: shards.sequence(name, "train") for name in weights}
        source = Replayed(
            data, MixedTokens(read, weights, seq_len, heads, settings.seed, mask), replayed, bool(teachers)
        )
        print(f"replay: {replayed} of {rows} rows, of {', '.join(weights)}")
    sizes = {
        name: sum(int(tokenizer.byte_lengths[ids[prompt:]].sum()) for ids, prompt in examples)
        for name, examples in held.items()
        if examples
    }

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        of_file = {}
        for name in sizes:
            batches = (data.pad([[e] for e in held[name][i : i + rows]]) for i in range(0, len(held[name]), rows))
            of_file[name] = evaluate_nll(parallel, batches, tokenizer.byte_lengths)
        figures = {"val_bits_per_byte": sum(sizes[name] * of_file[name] for name in sizes) / sum(sizes.values())}
        if len(held) > 1:
            figures |= {f"val_bits_per_byte_{name}": bits for name, bits in of_file.items()}
        if not settings.data:
            figures["exact_match"] = exact_match(loaded, 5 * len(KINDS), settings.seed + 1)["all"]
        return figures

    def sample() -> str:
        return answered(loaded, held_out[0])

    step = f"{count_of((rows - replayed) * accum, 'row')} of several records"
    print_schedule(settings, step, data.batches_in(0, rows - replayed) / accum, "records")

    stream = np.concatenate([np.asarray([*ids, prompt], np.int64) for ids, prompt in encoded])
    learner = wrap_with_teachers(model, teachers, backend, settings)
    meta = {
        "kind": "sft",
        "data_hash": fingerprint(stream) + (shards.hash if shards else ""),
        "corpus": [summary],
        "inputs": input_hashes(settings.data),
        **stages_before(base, resumed=resume and not adapters),
        **run_metadata(loaded, base, backend, settings),
    }
    # With a teacher the loss is not the replies' likelihood: it has no bits per byte.
    objective = NextTokens(config.head_weights, None if teachers else tokenizer.byte_lengths)
    task = Task(
        model=learner,
        tokenizer=tokenizer,
        objective=objective,
        batches=micro_batches(source, rows, accum),
        evaluate=evaluate,
        sample=sample,
        meta=add_teacher_metadata(teachers, meta),
        flop_per_token=learner.flop_per_token(seq_len),
        plan=plan,
        published=published_files(base.published),
    )
    last = Run(task, settings, backend, resume).train()
    if not settings.data:
        scores = exact_match(loaded, 20 * len(KINDS), settings.seed)
        talked = talk_match(loaded, 10 * len(KINDS), settings.seed)
        for what, found in ((", 20 of each kind", scores), (", small talk", talked)):
            print(f"exact match on held-out instructions (greedy{what}):")
            for kind, score in found.items():
                print(f"  {kind:<14} {score:6.1%}")
        named = {f"exact match, {kind}": score for kind, score in (*scores.items(), *talked.items())}
        save_scores(Path(settings.out), checkpoint.step_of(last), named)


if __name__ == "__main__":
    run_command(main)
