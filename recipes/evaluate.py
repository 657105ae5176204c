"""Evaluate a trained model on held-out text and instructions.

    python recipes/evaluate.py                                         the newest run under runs/, on the built-in world
    python recipes/evaluate.py --checkpoint runs/base --data shards --kneser-ney
    python recipes/evaluate.py --checkpoint runs/chat --data shards --instructions alpaca.json --seeds 5
    python recipes/evaluate.py --checkpoint runs/chat --backend numpy --prompts 50 --json figures.json
    python recipes/evaluate.py --checkpoint storyteller --weights int8     and the cost of int8 in bits per byte
    python recipes/evaluate.py --checkpoint runs/base --tasks blimp,arc_easy,piqa --task-data eval

For each source of held-out text: bits per byte of every output head, and accuracy on the last words of sentences. For
a fine-tuned model: how many replies to held-out instructions end, are not empty, and do not loop. For several heads:
how often the drafts of speculative decoding are accepted. The figures also go into the run's scores.json.
docs/evaluation.md explains them.

With --tasks: common benchmarks instead, from files that you have, scored as lm-evaluation-harness does.

Without --checkpoint, the newest fine-tuned run is evaluated, else the newest pretrained one, else the model that comes
with the repository.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge import checkpoint
from tinyforge.backends import PRECISIONS, Backend, get_backend, gpu_is_there
from tinyforge.data.alpaca import evenly, read_split
from tinyforge.data.evaluation import TASKS, TEXT_TASKS, check_tasks, first_of_each, read_sets, refuse_if_learned
from tinyforge.data.published import PUBLISHED
from tinyforge.data.training import WORLD, built_in_held_out, built_in_training, documents_of
from tinyforge.data.world import instructions
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json
from tinyforge.formats import Loaded, add_checkpoint_flag, add_weights_flag, load, open_model, resolve_checkpoint
from tinyforge.formats.foreign import is_foreign
from tinyforge.infer.conversation import ROOM_FOR_REPLY
from tinyforge.infer.evaluate import measure_cloze, measure_replies, measure_speculation
from tinyforge.infer.figures import scores_of, table_of, table_of_tasks
from tinyforge.infer.likelihood import Scorer, tokens_that_fit
from tinyforge.infer.tasks import run_task, texts_of
from tinyforge.models.kneser_ney.model import KneserNey
from tinyforge.parallel.launch import refuse_ranks
from tinyforge.report import add_json_flag, check_before, publish, write_json
from tinyforge.shards import separator_of
from tinyforge.terminal import one_line
from tinyforge.train import corpus
from tinyforge.train.batches import PackedTokens, fingerprint
from tinyforge.train.card import write_card
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import LN2
from tinyforge.train.settings import PretrainSettings, SftSettings, sequence_length
from tinyforge.train.tuning import chat_template_of, prompt_ids

ROWS = 16  # windows of text in a batch
SPECULATED = 32  # texts, at most, that speculative decoding is measured on
OF_TASKS = ("task_data", "any_version", "limit", "resume")
NOT_OF_TASKS = ("instructions", "kneser_ney", "seq_len", "card")
OPENING, CONTINUATION = 32, 100  # tokens of held-out text in a base model's prompt, and of its continuation


@dataclass(frozen=True)
class Text:
    """Held-out text by source. own: the run itself holds this text out. training: ids, for the n-gram model."""

    parts: tuple[corpus.HeldOut, ...]
    own: bool
    training: np.ndarray | None


def open_text(
    loaded: Loaded, data: Sequence[str], encoding: str, with_training: bool, window: int | None = None
) -> Text:
    """The held-out text of --data, by default of the text that the run learned from, in windows of `window` tokens; by
    default of the length used in pretraining, whose figure is then reproduced."""
    tokenizer, config = loaded.tokenizer, loaded.model.config
    pretraining = loaded.meta.get("base", loaded.meta)
    run, learned = PretrainSettings.from_dict(pretraining.get("settings", {})), pretraining.get("data_hash")
    seq_len = sequence_length(config, replace(run, seq_len=window or run.seq_len))
    if not data and run.data and all(Path(path).exists() for path in run.data):
        data, encoding = run.data, run.encoding
    settings = replace(run, data=tuple(data), encoding=encoding, mix=())
    if shards := corpus.shards_for(tokenizer, loaded.path, settings):
        own = shards.hash == learned
        training = None
        if with_training:
            read = corpus.mix_weights(run.mix if own else (), shards)
            training = np.concatenate([shards.sequence(name, "train")[:] for name in read])
        return Text(corpus.held_out_text(shards, settings, seq_len, config.prediction_heads), own, training)
    texts: Sequence[str] = []
    if data:
        texts, held_out, _ = documents_of(data, encoding, run.seed)
    else:
        held_out = built_in_held_out(run.seed)
        if with_training:
            texts = built_in_training(run.seed)
        if run.data:
            print(
                one_line(
                    f"the model learned from {', '.join(run.data)}, which is not here; give --data to evaluate on it "
                    f"rather than on the {WORLD}"
                )
            )
    ids = corpus.pack(held_out, tokenizer)
    if len(ids) < 2:
        raise UserError(f"--data: {', '.join(data)}: held-out tokens: {len(ids)}, expected at least 2; give more text")
    mask = corpus.document_mask(run, tokenizer)
    windows = PackedTokens(ids, min(seq_len, len(ids) - 1), config.prediction_heads, run.seed, mask)
    part = corpus.HeldOut("text" if data else WORLD, windows, corpus.predicted_bytes(ids, tokenizer))
    own, training = tuple(data) == run.data, None
    if with_training or (own and data):
        training = corpus.pack(texts, tokenizer)
        if own and data and fingerprint(training) != learned:
            own = False
            print(
                f"{', '.join(data)}: changed since the model learned from it, so its training data may contain some "
                "of the held-out text"
            )
    return Text((part,), own, training)


def bits_per_byte(loaded: Loaded, backend: Backend, text: Text) -> tuple[dict[str, np.ndarray], float]:
    """Of every head, (K,), for each source; and of head 0 over all sources."""
    bits = corpus.measure(text.parts, DataParallel(loaded.model, backend), ROWS, loaded.tokenizer.byte_lengths)
    return bits, corpus.over_all(text.parts, {name: float(heads[0]) for name, heads in bits.items()})


def compare_weights(found: dict[str, Any], plain: Loaded, backend: Backend, text: Text) -> None:
    """Add the bits per byte of the same model without weights rounded to one byte."""
    bits, found["text"]["bits_per_byte_plain"] = bits_per_byte(plain, backend, text)
    for source, figures in found["text"]["sources"].items():
        figures["bits_per_byte_plain"] = bits[source].tolist()
    found["weight_bytes_plain"] = plain.model.buffer.nbytes


def kneser_ney(loaded: Loaded, text: Text) -> dict[str, float]:
    """Bits per byte of a 5-gram model of the training text, for each source, on the text that head 0 is measured on."""
    assert text.training is not None
    model = KneserNey(text.training, loaded.model.config.vocab)
    found = {}
    for part in text.parts:
        ids = np.asarray(part.windows.tokens[:])
        nll = -model.log_probs(ids)[1:].sum()
        found[part.source] = float(nll / LN2 / loaded.tokenizer.byte_lengths[ids[1:]].sum())
    return found


def measure_text(loaded: Loaded, backend: Backend, text: Text, sentences: int, seed: int) -> dict[str, Any]:
    """Bits per byte and last words, for each source and over all."""
    model, tokenizer = loaded.model, loaded.tokenizer
    bits, overall = bits_per_byte(loaded, backend, text)
    sources: dict[str, Any] = {}
    for part in text.parts:
        ids = np.asarray(part.windows.tokens[:])
        texts = tokenizer.decode(ids.tolist()).split(separator_of(tokenizer))
        sources[part.source] = {
            "bytes": part.bytes,
            "bits_per_byte": bits[part.source].tolist(),
            "cloze": measure_cloze(model, tokenizer, texts, sentences, seed),
        }
    return {"own": text.own, "bits_per_byte": overall, "sources": sources}


def held_out_prompts(
    loaded: Loaded, files: Sequence[str], encoding: str, count: int, seed: int
) -> tuple[list[list[int]], int]:
    """Up to `count` prompts, evenly spaced in the held-out instructions; and how many of these are too long."""
    if files:
        by_file = read_split(files, encoding)[1]
        asked = [(r.instruction, r.input, r.history, r.system) for records in by_file for r in records]
    else:
        asked = [(e.instruction, e.input, (), "") for e in instructions("val", count, seed)]
    prompts = [prompt_ids(loaded, *question) for question in asked]
    context = loaded.model.config.context
    room = context - context // ROOM_FOR_REPLY
    fit = [ids for ids in prompts if len(ids) <= room]
    if not fit:
        raise UserError(
            f"--instructions: no held-out prompt has at most {room} tokens, so that a reply has room in the context of "
            f"{context}; give shorter ones"
        )
    return evenly(fit, count), len(prompts) - len(fit)


def openings(text: Text, count: int, length: int) -> list[list[int]]:
    """Prompts of `length` tokens from `count` places, evenly spaced in the held-out text of each source."""
    found = []
    for part in text.parts:
        room, each = max(1, len(part.windows.tokens) - length), -(-count // len(text.parts))
        starts = [i * room // each for i in range(each)]
        found += [np.asarray(part.windows.tokens[start : start + length]).tolist() for start in starts]
    return found


# --- benchmarks -------------------------------------------------------------------------------------------------------


def measure_tasks(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Every task's scores. Finished tasks are written to --json, from which --resume reads them."""
    from tqdm import tqdm

    sets = read_sets(names, args.task_data, args.data, args.encoding, args.seed, args.any_version)
    path, backend = resolve_checkpoint(args.checkpoint), backend_of(args)
    opened = open_model(path)
    if opened.spec.learns != "text":
        raise UserError(
            f"--tasks score causal language models; {opened.path} is a {opened.spec.name}, which learns "
            f"{opened.spec.learns}; {opened.spec.advice}"
        )
    for read in sets:
        refuse_if_learned(read, opened.inputs())
    found: dict[str, Any] = {
        "checkpoint": str(opened.path),
        "model": opened.spec.name,
        "model_sha256": opened.fingerprint(),
        "tokenizer_sha256": opened.tokenizer.hash(),
        "step": opened.meta.get("step"),
        "backend": backend.name,
        "precision": backend.precision.name,
        "weights": args.weights or None,
        "machine": backend.describe(),
        "command": f"python recipes/evaluate.py {shlex.join(args.given)}",
        "limit": args.limit,
        "tasks": {},
    }
    same = ("model_sha256", "tokenizer_sha256", "precision", "weights", "limit")
    before = read_before(args.json, {key: found[key] for key in same}) if args.resume else {}
    tokens = tokens_that_fit(opened.spec, opened.config, backend, args.weights)
    model = opened.build(backend, frozen=True, weights=args.weights).model
    found["parameters"] = model.buffer.count
    for name, read in zip(names, sets, strict=True):
        kept = before.get(name)
        if kept and kept.get("set_sha256") == read.sha256:
            found["tasks"][name] = kept
            print(f"{name}: taken from {args.json}")
            continue
        items = first_of_each(read.items, args.limit)
        started, scorer = time.perf_counter(), Scorer(model, opened.tokenizer, tokens)
        with tqdm(total=texts_of(items), desc=name, unit="text", disable=not sys.stderr.isatty(), leave=False) as bar:
            result = run_task(scorer, items, bar.update)
        found["tasks"][name] = {
            "title": read.title,
            "set_sha256": read.sha256,
            "variant": read.variant,
            **result.to_dict(),
            "seconds": round(time.perf_counter() - started, 1),
        }
        if args.json != "-":
            write_json(found, args.json)
    return found


def read_before(target: str | None, expected: dict[str, Any]) -> dict[str, Any]:
    """The tasks in the file of --json, if it has figures of the same model under the same settings."""
    if target in (None, "-"):
        raise UserError("--resume reads the file of --json; name one")
    if not Path(str(target)).exists():
        return {}
    found = read_json(str(target), "figures", fix="remove it, or leave out --resume")
    other = next((key for key, value in expected.items() if found.get(key) != value), None)
    if other or not isinstance(found.get("tasks"), dict):
        kind = (other or "kind").removesuffix("_sha256")
        raise UserError(f"--resume: {target} has figures of another {kind}; name another file, or leave out --resume")
    return dict(found["tasks"])


# --- the command ------------------------------------------------------------------------------------------------------


def backend_of(args: argparse.Namespace) -> Backend:
    """The backend of --backend, in the precision of --precision, or else that of training, bf16 for FP8."""
    path = resolve_checkpoint(args.checkpoint)
    name = args.backend if args.backend != "auto" else "cupy" if gpu_is_there() else "numpy"
    stored = {} if is_foreign(path) else checkpoint.read_meta(checkpoint.latest(path)).get("settings", {})
    own = stored.get("precision", "fp32").replace("fp8", "bf16")
    precision = args.precision or (own if name in PRECISIONS[own].backends else "fp32")
    return get_backend(name, precision, device=args.device)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure but those of --tasks."""
    backend = backend_of(args)
    path = resolve_checkpoint(args.checkpoint)
    loaded = load(path, backend, frozen=True, weights=args.weights)
    config, tuned = loaded.model.config, loaded.meta["kind"] != "pretrain"
    started = time.perf_counter()

    def said(what: str) -> None:
        print(f"{time.perf_counter() - started:6.0f} s  {what}", file=sys.stderr)

    found: dict[str, Any] = {
        "checkpoint": str(loaded.path),
        "kind": loaded.meta["kind"],
        "step": loaded.meta["step"],
        "parameters": loaded.model.buffer.count,
        "backend": backend.name,
        "precision": backend.precision.name,
        "weights": args.weights or None,
        "weight_bytes": loaded.model.buffer.nbytes,
        "machine": backend.describe(),
        "data": args.data or WORLD,
        "instructions": args.instructions,
    }
    # Instructions are read first, so that an error in them is reported at once.
    if tuned:
        run = SftSettings.from_dict(loaded.meta.get("settings", {}))  # the defaults for a model of another program
        prompts, left_out = held_out_prompts(loaded, args.instructions, args.encoding, args.prompts, run.seed)
        if run.data and not args.instructions:
            print(
                one_line(
                    f"the model was fine-tuned on {', '.join(run.data)}; give --instructions to use the records "
                    f"held out there rather than those of the {WORLD}"
                )
            )
    text = open_text(loaded, args.data, args.encoding, args.kneser_ney, args.seq_len)
    said("text: bits per byte and last words")
    found["text"] = measure_text(loaded, backend, text, args.sentences, args.seed)
    if args.weights:
        said("text: bits per byte without rounding the weights")
        compare_weights(found, load(path, backend, frozen=True), backend, text)
    if args.kneser_ney:
        said("the 5-gram model")
        by_source = kneser_ney(loaded, text)
        for source, bits in by_source.items():
            found["text"]["sources"][source]["kneser_ney"] = bits
        found["text"]["kneser_ney"] = corpus.over_all(text.parts, by_source)
    if tuned:
        said("replies")
        sampling = loaded.generation.sampling(max_tokens=args.max_tokens)
        stop = chat_template_of(loaded).stop_ids(loaded.tokenizer)
        found["replies"] = measure_replies(loaded.model, loaded.tokenizer, prompts, sampling, args.seeds, stop)
        found["replies"]["left_out"] = left_out
    else:
        found["replies"] = {"skipped": "a base model continues a text; recipes/sft.py teaches it to answer"}
    said("speculation")
    if config.prediction_heads == 1:
        found["speculation"] = {"skipped": "the model has one output head, so it drafts no tokens"}
    elif tuned:
        some = prompts[:: -(-len(prompts) // SPECULATED)]
        found["speculation"] = measure_speculation(loaded.model, loaded.tokenizer, some, args.max_tokens)
        found["speculation"]["on"] = "of these instructions"
    else:
        starts = openings(text, SPECULATED, min(OPENING, config.context // 2))
        found["speculation"] = measure_speculation(loaded.model, loaded.tokenizer, starts, CONTINUATION)
        found["speculation"]["on"] = "places of the held-out text"
    found["seconds"] = round(time.perf_counter() - started, 1)
    return found


def keep_scores(found: dict[str, Any], with_card: bool) -> None:
    """Write the run's scores.json, and its card, if the checkpoint is the run's newest."""
    path = Path(found["checkpoint"])
    if found["weights"]:
        reason = f"figures of {found['weights']} weights are not the run's"
    elif path not in checkpoint.steps(path.parent)[-1:]:
        reason = f"{path} is not the newest checkpoint of a run"
    elif not os.access(path.parent, os.W_OK):
        reason = f"{path.parent} is not writable"
    else:
        save_scores(path.parent, found["step"], scores_of(found))
        if with_card:
            print(f"wrote {write_card(path.parent)}")
        return
    print(f"{reason}: no scores.json{' and no card' * with_card} written")


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    add_checkpoint_flag(p)
    data = "token shards, or text as given to pretrain.py (default: what the run learned from)"
    p.flag("--data", [], data, metavar="PATH")
    records = "records as given to sft.py; the last 20th of each file is used (default: the built-in ones)"
    p.flag("--instructions", [], records, metavar="FILE")
    p.flag("--encoding", "utf-8", "encoding of text files")
    p.flag("--kneser-ney", False, "also a 5-gram model of the training text: some 2 s and 140 MB per million tokens")
    p.flag(
        "--seq-len",
        int,
        "tokens in a window of held-out text; windows are "
        "independent (default: as in pretraining; with another, no scores are kept)",
        1,
        metavar="TOKENS",
    )
    p.flag("--sentences", 500, "sentences per source", 1)
    p.flag("--prompts", 200, "instructions", 1)
    p.flag("--max-tokens", 200, "longest reply", 1)
    p.flag("--seeds", 3, "rounds of sampled replies", 0)
    p.flag("--seed", 0, "of sentences and candidates")
    p.add_argument("--backend", default="auto", help="numpy, cupy, webgpu, or auto: cupy if CUDA is there")
    p.flag("--precision", str, "fp32, fp64, and on a GPU tf32 or bf16 (default: as in training, bf16 after fp8)")
    p.flag("--device", int, "number of the GPU (default: 0)")
    add_weights_flag(p)
    p.flag("--card", False, "write the run's model card, README.md, with these figures")
    p.add_argument("--tasks", nargs="+", metavar="NAME", help="benchmarks instead: " + ", ".join((*TASKS, *TEXT_TASKS)))
    p.flag("--task-data", [], "folders or zips with the tasks' files", metavar="PATH")
    p.flag("--any-version", False, "accept sets that are not the published version")
    p.flag("--limit", int, "with --tasks: the first items of each set or phenomenon (default: all)", 1)
    p.flag("--resume", False, "with --tasks: keep the tasks that the file of --json has")
    add_json_flag(p)
    args = p.parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    for flags, wrong, fix in (
        (OF_TASKS, args.tasks is None, "is for --tasks; name some tasks"),
        (NOT_OF_TASKS, args.tasks is not None, "says nothing of --tasks; run that without it"),
    ):
        if given := next((flag for flag in flags if wrong and getattr(args, flag)), None):
            raise UserError(f"--{given.replace('_', '-')} {fix}, or leave it out")
    check_before(args.json)
    refuse_ranks()
    if args.tasks is not None:
        names = check_tasks(args.tasks)
        with redirect_stdout(sys.stderr):
            found = measure_tasks(names, args)
        publish(found, table_of_tasks(found, PUBLISHED), args.json)
        return 0
    with redirect_stdout(sys.stderr):  # progress messages are not results
        found = evaluate(args)
    publish(found, table_of(found), args.json)
    if args.seq_len is None:
        with redirect_stdout(sys.stderr):
            keep_scores(found, args.card)
    return 0


if __name__ == "__main__":
    run_command(main)
