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
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

# A recipe runs from a plain checkout too: the repository root is where data/, models/ and tinyforge/ are.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data.alpaca import end_of_reply, evenly, read_split, render_prompt
from data.evaluation import TASKS, TEXT_TASKS, Set, check_tasks, find_sets, first_of_each, read_set, text_set
from data.local import read_documents
from data.published import MODELS, PUBLISHED
from data.training import WORLD, built_in_held_out, built_in_training, documents_of
from data.world import instructions
from models.kneser_ney.model import KneserNey
from tinyforge import checkpoint
from tinyforge.backends import PRECISIONS, Backend, get_backend, gpu_is_there
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.files import read_json, sha256_of
from tinyforge.hub import Loaded, Opened, add_checkpoint_flag, add_weights_flag, load, open_model, trained_model
from tinyforge.hub.foreign import is_foreign
from tinyforge.infer import Sampling, make_decoder
from tinyforge.infer.conversation import ROOM_FOR_REPLY
from tinyforge.infer.evaluate import (
    Reply,
    cloze_credits,
    cloze_items,
    reply_decoder,
    reply_shares,
    reply_to,
    speculate,
    standard_error,
)
from tinyforge.infer.likelihood import TOKENS, Scorer, bytes_needed
from tinyforge.infer.tasks import run_task, texts_of
from tinyforge.report import add_json_flag, check_before, publish, write_json
from tinyforge.terminal import one_line
from tinyforge.text.shards import separator_of
from tinyforge.text.vocabulary import start_ids
from tinyforge.train.batches import PackedTokens, fingerprint
from tinyforge.train.card import write_card
from tinyforge.train.corpus import (
    HeldOut,
    document_mask,
    find_shards,
    held_out_text,
    measure,
    mix_weights,
    over_all,
    pack,
    predicted_bytes,
)
from tinyforge.train.data_parallel import Sharded
from tinyforge.train.metrics import NOISE, save_scores
from tinyforge.train.objectives import LN2
from tinyforge.train.plan import OUTSIDE, free_host_memory, gib
from tinyforge.train.settings import PretrainSettings, SftSettings, sequence_length

ROWS = 16  # windows of text in a batch
SPECULATED = 32  # texts, at most, that speculative decoding is measured on
OUT_OF_FORM = 10  # replies that are kept as examples, at most
OPENING, CONTINUATION = 32, 100  # tokens of held-out text in a base model's prompt, and of its continuation


@dataclass(frozen=True)
class Text:
    """Held-out text by source. own: the run itself holds this text out. training: ids, for the n-gram model."""

    parts: tuple[HeldOut, ...]
    own: bool
    training: np.ndarray | None


def pretraining_of(loaded: Loaded) -> PretrainSettings:
    """The settings of pretraining, of the model or of the base it was fine-tuned from; the defaults for a model of
    another program."""
    return PretrainSettings.from_dict(loaded.meta.get("base", loaded.meta).get("settings", {}))


def tuning_of(loaded: Loaded) -> SftSettings:
    """The settings of fine-tuning; the defaults for a model of another program."""
    return SftSettings.from_dict(loaded.meta.get("settings", {}))


def open_text(
    loaded: Loaded, data: Sequence[str], encoding: str, with_training: bool, window: int | None = None
) -> Text:
    """The held-out text of --data in windows of `window` tokens; by default of the length used in pretraining, whose
    figure is then reproduced."""
    tokenizer, config, run = loaded.tokenizer, loaded.model.config, pretraining_of(loaded)
    learned = loaded.meta.get("base", loaded.meta).get("data_hash")
    seq_len = sequence_length(config, window or run.seq_len)
    settings = replace(run, data=tuple(data), encoding=encoding, mix=())
    shards = find_shards(settings)
    if shards:
        if shards.tokenizer.hash() != tokenizer.hash():
            raise UserError(
                f"--data: {data[0]} was made with the tokenizer {shards.tokenizer.hash()[:12]}..., the model has "
                f"{tokenizer.hash()[:12]}...; make shards with python -m data.shards --tokenizer "
                f"{loaded.path / 'tokenizer.json'}"
            )
        shards.verify(progress=sys.stderr.isatty())
        own = shards.hash == learned
        training = None
        if with_training:
            read = mix_weights(run.mix if own else (), shards)
            training = np.concatenate([shards.sequence(name, "train")[:] for name in read])
        return Text(held_out_text(shards, settings, seq_len, config.prediction_heads), own, training)
    texts: Sequence[str] = []
    if data:
        texts, held_out = documents_of(data, encoding, run.seed)
    else:
        held_out = built_in_held_out(run.seed)
        if with_training:
            texts = built_in_training(run.seed)
        if run.data:
            print(one_line(f"the model learned from {', '.join(run.data)}; give --data to evaluate on it rather than "
                           f"on the {WORLD}"))  # fmt: skip
    ids = pack(held_out, tokenizer)
    if len(ids) < 2:
        raise UserError(f"--data: {', '.join(data)}: {len(ids)} held-out tokens, wanted at least 2; give more text")
    mask = document_mask(run, tokenizer)
    windows = PackedTokens(ids, min(seq_len, len(ids) - 1), config.prediction_heads, run.seed, mask)
    part = HeldOut("text" if data else WORLD, windows, predicted_bytes(ids, tokenizer))
    own, training = tuple(data) == run.data, None
    if with_training or (own and data):
        training = pack(texts, tokenizer)
        if own and data and fingerprint(training) != learned:
            own = False
            print(f"{', '.join(data)}: changed since the model learned from it, so its training data may contain some "
                  "of the held-out text")  # fmt: skip
    return Text((part,), own, training)


def bits_per_byte(loaded: Loaded, backend: Backend, text: Text) -> dict[str, np.ndarray]:
    """Of every head, (K,), for each source."""
    return measure(text.parts, Sharded(loaded.model, backend), ROWS, loaded.tokenizer.byte_lengths)


def compare_weights(found: dict[str, Any], plain: Loaded, backend: Backend, text: Text) -> None:
    """Add the bits per byte of the same model without weights rounded to one byte."""
    bits = bits_per_byte(plain, backend, text)
    for source, figures in found["text"]["sources"].items():
        figures["bits_per_byte_plain"] = bits[source].tolist()
    overall = over_all(text.parts, {name: float(heads[0]) for name, heads in bits.items()})
    found["text"]["bits_per_byte_plain"] = overall
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
    tokenizer, decoder = loaded.tokenizer, make_decoder(loaded.model)
    bits = bits_per_byte(loaded, backend, text)
    sources: dict[str, Any] = {}
    for part in text.parts:
        ids = np.asarray(part.windows.tokens[:])
        texts = tokenizer.decode(ids.tolist()).split(separator_of(tokenizer))
        items = cloze_items(texts, sentences, seed)
        scored = cloze_credits(decoder, tokenizer, items)
        sources[part.source] = {"bytes": part.bytes, "bits_per_byte": bits[part.source].tolist(), "cloze": None}
        if scored:
            right = mean(credit for _, credit in scored)
            sources[part.source]["cloze"] = {
                "right": right, "standard_error": standard_error(right, len(scored)), "sentences": len(scored),
                "by_frequency": mean(item.commonest == 0 for item, _ in scored),
            }  # fmt: skip
    overall = over_all(text.parts, {name: float(heads[0]) for name, heads in bits.items()})
    return {"own": text.own, "bits_per_byte": overall, "sources": sources}


def held_out_prompts(
    loaded: Loaded, files: Sequence[str], encoding: str, count: int
) -> tuple[list[list[int]], int]:
    """Up to `count` prompts, evenly spaced in the held-out instructions; and how many of these are too long."""
    if files:
        by_file = read_split(files, encoding)[1]
        asked = [render_prompt(r.instruction, r.input) for records in by_file for r in records]
    else:
        asked = [render_prompt(e.instruction, e.input) for e in instructions("val", count, tuning_of(loaded).seed)]
    begins = start_ids(loaded.tokenizer)
    prompts = [begins + loaded.tokenizer.encode(text) for text in asked]
    context = loaded.model.config.context
    room = context - context // ROOM_FOR_REPLY
    fit = [ids for ids in prompts if len(ids) <= room]
    if not fit:
        raise UserError(
            f"--instructions: none of the {len(prompts)} held-out prompts has at most {room} tokens, so that a reply "
            f"has room in the context of {context}; give shorter ones"
        )
    return evenly(fit, count), len(prompts) - len(fit)


def measure_replies(loaded: Loaded, prompts: Sequence[Sequence[int]], max_tokens: int, seeds: int) -> dict[str, Any]:
    """Shares of replies that are in form, greedy and sampled with several seeds; and some greedy ones that are not."""
    tokenizer, decoder = loaded.tokenizer, reply_decoder(loaded.model, len(prompts))

    def drawn(sampling: Sampling) -> list[Reply]:
        replies = reply_to(loaded.model, prompts, sampling, tokenizer.specials[end_of_reply(tokenizer)], decoder)
        return [Reply(tokenizer.decode(ids), len(ids), ended) for ids, ended in replies]

    replies = drawn(Sampling(temperature=0.0, max_tokens=max_tokens))
    greedy = reply_shares(replies)
    errors = {key: standard_error(share, len(prompts)) for key, share in greedy.items() if key != "tokens"}
    found: dict[str, Any] = {"prompts": len(prompts), "greedy": greedy, "standard_error": errors}
    wrong = [reply for reply in replies if reply_shares([reply])["all_three"] == 0]
    found["out_of_form"] = [asdict(reply) for reply in wrong[:OUT_OF_FORM]]
    # Prompt i uses seed + i, so the seeds of a round start where those of the previous one end.
    rounds = [reply_shares(drawn(Sampling(max_tokens=max_tokens, seed=len(prompts) * number)))
              for number in range(seeds)]  # fmt: skip
    if rounds:
        figures = {key: [shares[key] for shares in rounds] for key in greedy}
        found["seeds"], found["sampled"] = seeds, {key: mean(values) for key, values in figures.items()}
        found["spread"] = {key: stdev(values) for key, values in figures.items()} if seeds > 1 else {}
    return found


def measure_speculation(loaded: Loaded, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    stats = speculate(loaded.model, prompts, max_tokens, frozenset(loaded.tokenizer.specials.values()))
    return {"texts": len(prompts), "tokens": stats.tokens, "passes": stats.passes,
            "tokens_per_pass": stats.tokens_per_pass, "drafted": stats.drafted, "accepted": stats.accepted,
            "acceptance": stats.acceptance}  # fmt: skip


def openings(text: Text, count: int, length: int) -> list[list[int]]:
    """Prompts of `length` tokens from `count` places, evenly spaced in the held-out text of each source."""
    found = []
    for part in text.parts:
        room, each = max(1, len(part.windows.tokens) - length), -(-count // len(text.parts))
        starts = [i * room // each for i in range(each)]
        found += [np.asarray(part.windows.tokens[start : start + length]).tolist() for start in starts]
    return found


# --- what is shown and kept -------------------------------------------------------------------------------------------

SHARES = {
    "ended": "end by themselves", "not_empty": "are not empty", "no_line_repeated": "repeat no line three times",
    "all_three": "do all three", "four_words_repeated": "have four words three times",
}  # fmt: skip


def table_of(found: dict[str, Any]) -> str:
    """All figures as text."""
    text, sources = found["text"], found["text"]["sources"]
    heads = len(next(iter(sources.values()))["bits_per_byte"])
    n_grams = "kneser_ney" in text
    width = max(len("over all"), *map(len, sources))
    lines = [
        f"{found['checkpoint']}: {found['kind']}, step {found['step']:,}, {found['parameters']:,} parameters; "
        f"{found['backend']}, {found['precision']}" + f", weights in {found['weights']}" * bool(found["weights"]),
        "", "bits per byte of held-out text; head k predicts the token k + 1 places ahead",
        " " * (2 + width) + "".join(f"   head {k}" for k in range(heads)) + "   5-gram" * n_grams + "   bytes",
    ]  # fmt: skip
    for name, figures in sources.items():
        row = [f"{bits:>9.3f}" for bits in figures["bits_per_byte"]]
        row += [f"{figures['kneser_ney']:>9.3f}"] if n_grams else []
        lines.append(f"  {name:<{width}}{''.join(row)}   {figures['bytes']:,}")
    if found["weights"]:
        lines += table_of_weights(found)
    if len(sources) > 1 or n_grams:
        row = [f"{text['bits_per_byte']:>9.3f}", " " * 9 * (heads - 1)]
        row += [f"{text['kneser_ney']:>9.3f}"] if n_grams else []
        lines.append(f"  {'over all':<{width}}{''.join(row)}")
    if n_grams:
        ratio = text["bits_per_byte"] / text["kneser_ney"]
        lines.append(f"  the model is {'below' if ratio < 1 else 'NOT below'} a 5-gram Kneser-Ney model of the same "
                     f"training text: {ratio:.3f} of its bits per byte")  # fmt: skip
    lines += ["", "the last word of a sentence among ten (chance: 10 %)"]
    for name, figures in sources.items():
        cloze = figures["cloze"]
        shown = "skipped: too few different last words of sentences"
        if cloze:
            shown = (f"{cloze['right']:>8.1%} +- {cloze['standard_error']:.1%} of {cloze['sentences']} sentences; "
                     f"always the commonest of the ten: {cloze['by_frequency']:.1%}")  # fmt: skip
        lines.append(f"  {name:<{width}}{shown}")
    return "\n".join([*lines, "", *_replies(found["replies"]), "", *_speculation(found["speculation"]), ""])


def _replies(found: dict[str, Any]) -> list[str]:
    if "skipped" in found:
        return [f"replies: skipped; {found['skipped']}"]
    sampled = f"sampled, {found['seeds']} seed{'s' * (found['seeds'] > 1)}" if "sampled" in found else ""
    lines = [
        f"replies to {found['prompts']} held-out instructions, up to {found['max_tokens']} tokens"
        + (f"; {found['left_out']} leave too little of the context to a reply" if found["left_out"] else ""),
        f"  {'':<30}{'greedy':<17}{sampled}",
    ]  # fmt: skip
    for key, what in SHARES.items():
        greedy = f"{found['greedy'][key]:>6.1%} +- {found['standard_error'][key]:.1%}"
        sampled = f"{found['sampled'][key]:>6.1%}" if "sampled" in found else ""
        spread = f" +- {found['spread'][key]:.1%}" if found.get("spread") else ""
        lines.append(f"  {what:<30}{greedy:<17}{sampled}{spread}")
    sampled = f"{found['sampled']['tokens']:>6.1f}" if "sampled" in found else ""
    return [*lines, f"  {'tokens':<30}{found['greedy']['tokens']:>6.1f}{'':<11}{sampled}"]


def _speculation(found: dict[str, Any]) -> list[str]:
    if "skipped" in found:
        return [f"speculation: skipped; {found['skipped']}"]
    heads = ", ".join(f"head {k} {share:.1%}" for k, share in enumerate(found["acceptance"], 1))
    return [
        f"speculation, greedy, on {found['texts']} {found['on']}: {found['tokens_per_pass']:.2f} tokens a pass",
        f"  accepted of what was looked at: {heads}",
    ]


def table_of_weights(found: dict[str, Any]) -> list[str]:
    """Head 0's bits per byte with weights of one byte, and without."""
    text, width = found["text"], max(map(len, (*found["text"]["sources"], "over all")))
    plain, own = found["weight_bytes_plain"], found["weight_bytes"]
    kinds = found["weights"], found["precision"]
    lines = ["", f"head 0 with weights in {kinds[0]}, {own / 1e6:,.1f} MB, and in {kinds[1]}, {plain / 1e6:,.1f} MB",
             " " * (2 + width) + f"{kinds[0]:>9}{kinds[1]:>9}{'more':>19}"]  # fmt: skip
    rows = [(name, figures["bits_per_byte"][0], figures["bits_per_byte_plain"][0])
            for name, figures in text["sources"].items()]  # fmt: skip
    rows += [("over all", text["bits_per_byte"], text["bits_per_byte_plain"])] * (len(rows) > 1)
    for name, bits, before in rows:
        lines.append(f"  {name:<{width}}{bits:>9.4f}{before:>9.4f}{bits - before:>+10.4f}{bits / before - 1:>+9.2%}")
    return lines


def scores_of(found: dict[str, Any]) -> dict[str, float]:
    """The figures by the names that the model card uses; a name with NOISE is the figure's standard error or spread."""
    text, replies, speculation = found["text"], found["replies"], found["speculation"]
    scores: dict[str, float] = {"held-out text, bits per byte": text["bits_per_byte"]} if text["own"] else {}
    for name, figures in text["sources"].items():
        for k, bits in enumerate(figures["bits_per_byte"]):
            scores[f"held-out text of {name}{f', head {k}' if k else ''}, bits per byte"] = bits
        if "kneser_ney" in figures:
            scores[f"held-out text of {name}, a 5-gram model, bits per byte"] = figures["kneser_ney"]
        if figures["cloze"]:
            scores[f"last word of a sentence among ten, {name}"] = figures["cloze"]["right"]
            scores[f"last word of a sentence among ten, {name}{NOISE}"] = figures["cloze"]["standard_error"]
    for how, errors in (("greedy", "standard_error"), ("sampled", "spread")):
        for key, value in replies.get(how, {}).items():
            name = "tokens a reply" if key == "tokens" else f"replies that {SHARES[key]}"
            scores[f"{name}, {how}"] = value
            if key in replies[errors]:
                scores[f"{name}, {how}{NOISE}"] = replies[errors][key]
    for k, share in enumerate(speculation.get("acceptance", ()), 1):
        scores[f"guesses of head {k} accepted, greedy"] = share
    if "tokens_per_pass" in speculation:
        scores["tokens a pass, greedy"] = speculation["tokens_per_pass"]
    return scores


# --- benchmarks -------------------------------------------------------------------------------------------------------


def read_sets(names: Sequence[str], args: argparse.Namespace) -> list[Set]:
    """The sets of the tasks, all read before anything is measured."""
    made = [name for name in names if name in TEXT_TASKS]
    if made and not args.data:
        raise UserError(f"--tasks {made[0]} wants text: --data FILE")
    if len(made) < len(names) and not args.task_data:
        missing = next(name for name in names if name not in TEXT_TASKS)
        raise UserError(f"--tasks {missing} reads files: give their folder with --task-data; docs/evaluation.md says "
                        "where they are published")  # fmt: skip
    texts = read_documents(args.data, args.encoding) if made else []
    files = find_sets([Path(path) for path in args.task_data])
    return [text_set(name, texts, args.seed) if name in TEXT_TASKS else read_set(name, files, args.any_version)
            for name in names]  # fmt: skip


def tokens_that_fit(opened: Opened, backend: Backend, weights: str = "") -> int:
    """Tokens in a batch of the scorer, as many as are worthwhile and fit into free memory; UserError if none fit."""
    free = backend.memory().get("free")
    place = "on the GPU" if free is not None else "of memory"
    free = free_host_memory() if free is None else free - OUTSIDE
    tokens = wanted = max(TOKENS[backend.name], opened.config.context)
    while free is not None:
        needed = bytes_needed(opened.spec, opened.config, backend.precision.name, tokens, weights)
        if needed <= free:
            break
        if tokens == opened.config.context:
            raise UserError(f"scoring {tokens} tokens needs {gib(needed)} {place}, {gib(max(0, free))} are free; use a "
                            "smaller model, or --precision bf16 on a GPU")  # fmt: skip
        tokens = max(tokens // 2, opened.config.context)
    if tokens < wanted:
        print(f"batches of {tokens:,} tokens rather than {wanted:,}: {gib(free or 0)} are free {place}")
    return tokens


def measure_tasks(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Every task's scores. Finished tasks are written to --json, from which --resume reads them."""
    from tqdm import tqdm

    sets = read_sets(names, args)
    path, backend = trained_model(args.checkpoint), backend_of(args)
    opened = open_model(path)
    if opened.spec.learns != "text":
        raise UserError(f"--tasks score causal language models; {opened.path} is a {opened.spec.name}, which learns "
                        f"{opened.spec.learns}; recipes/classify.py measures it")  # fmt: skip
    for name, read in zip(names, sets, strict=True):
        refuse_if_learned(name, read, opened.meta)
    found: dict[str, Any] = {
        "checkpoint": str(opened.path), "model": opened.spec.name, "model_sha256": opened.fingerprint(),
        "tokenizer_sha256": opened.tokenizer.hash(), "step": opened.meta.get("step"),
        "backend": backend.name, "precision": backend.precision.name, "weights": args.weights or None,
        "machine": backend.describe(),
        "command": f"python recipes/evaluate.py {shlex.join(args.given)}", "limit": args.limit, "tasks": {},
    }  # fmt: skip
    same = ("model_sha256", "tokenizer_sha256", "precision", "weights", "limit")
    before = read_before(args.json, {key: found[key] for key in same}) if args.resume else {}
    tokens = tokens_that_fit(opened, backend, args.weights)
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
            "title": read.title, "set_sha256": read.sha256, "variant": read.variant, **result.to_dict(),
            "seconds": round(time.perf_counter() - started, 1),
        }  # fmt: skip
        if args.json != "-":
            write_json(found, args.json)
    return found


def read_before(target: str | None, wanted: dict[str, Any]) -> dict[str, Any]:
    """The tasks in the file of --json, if it has figures of the same model under the same settings."""
    if target in (None, "-"):
        raise UserError("--resume reads the file of --json; name one")
    if not Path(str(target)).exists():
        return {}
    found = read_json(str(target), "figures", fix="remove it, or leave out --resume")
    other = next((key for key, value in wanted.items() if found.get(key) != value), None)
    if other or not isinstance(found.get("tasks"), dict):
        raise UserError(f"--resume: {target} has figures of another {other or 'kind'}; name another file, or leave out "
                        "--resume")  # fmt: skip
    return dict(found["tasks"])


def refuse_if_learned(name: str, found: Set, meta: dict[str, Any]) -> None:
    """UserError where the model, or its base, learned from a file of the evaluation set: by the hashes that a corpus
    keeps of its sources' files, and a run of its --data."""
    learned = {*meta.get("inputs", ()), *meta.get("base", {}).get("inputs", ())}
    if file := next((file for file in found.files if learned and sha256_of(file) in learned), None):
        raise UserError(f"--tasks {name}: the model was trained on {file}, so its score would say nothing; leave the "
                        "task out, or train without that file")  # fmt: skip


SHOWN = {
    "acc": "acc", "acc_norm": "acc_norm", "perplexity": "perplexity", "bits_per_byte": "bits per byte",
    "word_perplexity": "word perplexity", "exact_match_strict": "exact, strict", "exact_match_flexible": "exact, last",
}  # fmt: skip


def table_of_tasks(found: dict[str, Any]) -> str:
    """Every task's scores beside chance level and the published scores of other models."""
    lines = [
        f"{found['checkpoint']}: {found['model']}, {found['parameters']:,} parameters; {found['backend']}, "
        f"{found['precision']}" + f", weights in {found['weights']}" * bool(found["weights"]), "",
        f"{'task':<14}{'metric':<17}{'score':>8}{'+-':>8}{'chance':>9}"
        + "".join(f"{model:>13}" for model in MODELS) + "   items",
    ]  # fmt: skip
    notes = []
    for name, task in found["tasks"].items():
        for metric, value in task["figures"].items():
            if metric not in SHOWN:
                continue
            form = ".1%" if metric.startswith(("acc", "exact")) else ".3f" if "bits" in metric else ".4g"
            error, chance = task["errors"].get(metric), task["chance"] if form == ".1%" else None
            cells = [f"{value:>8{form}}", *(f"{number:>{width}{form}}" if number is not None else " " * width
                                            for number, width in ((error, 8), (chance, 9)))]  # fmt: skip
            for model in MODELS:
                published = PUBLISHED[model].get(name, {}).get(metric)
                cells.append(" " * 13 if published is None else f"{published:>13{form}}")
            lines.append(f"{name:<14}{SHOWN[metric]:<17}{''.join(cells)}   {task['items']:,}")
        notes += [f"{name}: {note}" for note in (task["variant"], task["note"]) if note]
        notes += [f"{name}: {task['cut']:,} of {task['items']:,} did not fit the context; their beginnings were cut off"
                  ] * bool(task["cut"])  # fmt: skip
    if found["limit"]:
        notes.append(f"only the first {found['limit']:,} items of each set: not comparable with scores of whole sets")
    return "\n".join([*lines, *([""] * bool(notes)), *notes, ""])


# --- the command ------------------------------------------------------------------------------------------------------


def backend_of(args: argparse.Namespace) -> Backend:
    """The backend of --backend, in the precision of --precision, or else that of training."""
    path = trained_model(args.checkpoint)
    name = args.backend if args.backend != "auto" else "cupy" if gpu_is_there() else "numpy"
    stored = {} if is_foreign(path) else checkpoint.read_meta(checkpoint.latest(path)).get("settings", {})
    own = stored.get("precision", "fp32")
    precision = args.precision or (own if name in PRECISIONS[own].backends else "fp32")
    return get_backend(name, precision, device=args.device)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Every figure but those of --tasks."""
    backend = backend_of(args)
    path = trained_model(args.checkpoint)
    loaded = load(path, backend, frozen=True, weights=args.weights)
    config, tuned = loaded.model.config, loaded.meta["kind"] != "pretrain"
    started = time.perf_counter()

    def said(what: str) -> None:
        print(f"{time.perf_counter() - started:6.0f} s  {what}", file=sys.stderr)

    found: dict[str, Any] = {
        "checkpoint": str(loaded.path), "kind": loaded.meta["kind"], "step": loaded.meta["step"],
        "parameters": loaded.model.buffer.count, "backend": backend.name, "precision": backend.precision.name,
        "weights": args.weights or None, "weight_bytes": loaded.model.buffer.nbytes,
        "machine": backend.describe(), "data": args.data or WORLD, "instructions": args.instructions,
    }  # fmt: skip
    # Instructions are read first, so that an error in them is reported at once.
    if tuned:
        prompts, left_out = held_out_prompts(loaded, args.instructions, args.encoding, args.prompts)
        taught = tuning_of(loaded).data
        if taught and not args.instructions:
            print(one_line(f"the model was fine-tuned on {', '.join(taught)}; give --instructions to use the records "
                           f"held out there rather than those of the {WORLD}"))  # fmt: skip
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
        found["text"]["kneser_ney"] = over_all(text.parts, by_source)
    if tuned:
        said("replies")
        found["replies"] = measure_replies(loaded, prompts, args.max_tokens, args.seeds)
        found["replies"] |= {"left_out": left_out, "max_tokens": args.max_tokens}
    else:
        found["replies"] = {"skipped": "a base model continues a text; recipes/sft.py teaches it to answer"}
    said("speculation")
    if config.prediction_heads == 1:
        found["speculation"] = {"skipped": "the model has one output head, so it drafts no tokens"}
    elif tuned:
        found["speculation"] = measure_speculation(loaded, prompts[:: -(-len(prompts) // SPECULATED)], args.max_tokens)
        found["speculation"]["on"] = "of these instructions"
    else:
        starts = openings(text, SPECULATED, min(OPENING, config.context // 2))
        found["speculation"] = measure_speculation(loaded, starts, CONTINUATION)
        found["speculation"]["on"] = "places of the held-out text"
    found["seconds"] = round(time.perf_counter() - started, 1)
    return found


def keep_scores(found: dict[str, Any], with_card: bool) -> None:
    """Write the run's scores.json, and its card, if the checkpoint is the run's newest."""
    path = Path(found["checkpoint"])
    if found["weights"]:
        print(f"figures of {found['weights']} weights are not the run's: no scores.json{' and no card' * with_card} "
              "written")  # fmt: skip
        return
    if path not in checkpoint.steps(path.parent)[-1:]:
        print(f"{path} is not the newest checkpoint of a run: no scores.json{' and no card' * with_card} written")
        return
    save_scores(path.parent, found["step"], scores_of(found))
    if with_card:
        print(f"wrote {write_card(path.parent)}")


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_checkpoint_flag(p)
    p.add_argument("--data", nargs="+", default=[], metavar="PATH",
                   help="token shards, or text as given to pretrain.py (default: the built-in world)")  # fmt: skip
    p.add_argument("--instructions", nargs="+", default=[], metavar="FILE",
                   help="records as given to sft.py; the last 20th of each file is used (default: the built-in "
                   "ones)")  # fmt: skip
    p.add_argument("--encoding", default="utf-8", help="encoding of text files (default: %(default)s)")
    p.add_argument("--kneser-ney", action="store_true",
                   help="also a 5-gram model of the training text: some 2 s and 140 MB per million tokens")  # fmt: skip
    p.add_argument("--seq-len", type=int, metavar="TOKENS", help="tokens in a window of held-out text; windows are "
                   "independent (default: as in pretraining; with another, no scores are kept)")  # fmt: skip
    p.add_argument("--sentences", type=int, default=500, help="sentences per source (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=200, help="instructions (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=200, help="longest reply (default: %(default)s)")
    p.add_argument("--seeds", type=int, default=3, help="rounds of sampled replies (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of sentences and candidates (default: %(default)s)")
    p.add_argument("--backend", default="auto", help="numpy, cupy, or auto, which takes a GPU if there is one")
    p.add_argument("--precision", help="fp32, fp64, and on a GPU tf32 or bf16 (default: as in training)")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    add_weights_flag(p)
    p.add_argument("--card", action="store_true", help="write the run's model card, README.md, with these figures")
    p.add_argument("--tasks", nargs="+", metavar="NAME", help="benchmarks instead: " + ", ".join((*TASKS, *TEXT_TASKS)))
    p.add_argument("--task-data", nargs="+", default=[], metavar="PATH", help="folders or zips with the tasks' files")
    p.add_argument("--any-version", action="store_true", help="accept sets that are not the published version")
    p.add_argument("--limit", type=int, help="with --tasks: the first items of each set or phenomenon (default: all)")
    p.add_argument("--resume", action="store_true", help="with --tasks: keep the tasks that the file of --json has")
    add_json_flag(p)
    args = p.parse_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit is {args.limit}, wants 1 or more")
    if args.seq_len is not None and args.seq_len < 1:
        raise UserError(f"--seq-len is {args.seq_len}, wants 1 or more")
    for name, least in (("sentences", 1), ("prompts", 1), ("max_tokens", 1), ("seeds", 0)):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, wants {least} or more")
    check_before(args.json)
    if args.tasks is not None:
        names = check_tasks(args.tasks)
        with redirect_stdout(sys.stderr):
            found = measure_tasks(names, args)
        publish(found, table_of_tasks(found), args.json)
        return 0
    with redirect_stdout(sys.stderr):  # progress messages are not results
        found = evaluate(args)
        if args.seq_len is None:
            keep_scores(found, args.card)
    publish(found, table_of(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
