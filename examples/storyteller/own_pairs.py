"""Preference pairs from a model's own replies: those that loop or do not end are the rejected ones.

    python examples/storyteller/own_pairs.py --base runs/sft --data alpaca.json --out circles.json
    python recipes/dpo.py --base runs/sft --data circles.json --out runs/orderly
    python examples/storyteller/own_pairs.py --base runs/sft --data stories/alpaca.json --stories 8 --out told.json
    python examples/storyteller/own_pairs.py --base storyteller --data chats/alpaca.json --stories 1 --out own.json

Fine-tuning shows a model good replies, but never where its own replies lead: a greedy reply that has repeated a
sentence tends to repeat it for ever. Here the model answers instructions that it was fine-tuned on, greedily and
sampled. Wherever its reply is not well-formed (docs/evaluation.md), the record's own reply is preferred. The last 20th
of each file is left out, because the model is evaluated on it.

With --stories N, the records are those that ask for a story. Of N stories sampled for each, the best is preferred to
the worst: a story ought to end, to be about whom it was asked for, under that name, and to share few runs of eight
words with the records' own replies. With --stories 1, the requests are the first lines of all chats, and the stories
without a fault are written as records: what chats.py makes of them costs the model little of what it knew, as they are
its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from examples.storyteller.grams import gram_shares, grams_of
from examples.storyteller.stories import asks_for_a_story, misses
from tinyforge.backends import get_backend
from tinyforge.data.alpaca import Record, evenly, read_split
from tinyforge.data.files import check_writable, write_json
from tinyforge.data.preferences import Pair
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats import Loaded, load, resolve_checkpoint
from tinyforge.infer import Sampling
from tinyforge.infer.evaluate import Reply, repeats_four_words, reply_decoder, reply_shares, text_replies
from tinyforge.parallel.launch import refuse_ranks
from tinyforge.report import count_of
from tinyforge.train.tuning import prompt_ids

GRAM = 8  # words of a run
DIFFERENCE = 0.04  # of the costs of a pair of stories, at least
WIDE = Sampling(1.0, top_k=0, top_p=1.0, min_p=0.05)  # how stories are sampled: they ought to differ


def records_to_ask(loaded: Loaded, records: Sequence[Record], count: int, max_tokens: int) -> list[Record]:
    """Up to `count` records, evenly spaced, whose own reply is well-formed and has at most `max_tokens` tokens, and
    whose prompt leaves room for as many."""
    context, tokenizer = loaded.model.config.context, loaded.tokenizer
    fit = [
        r
        for r in evenly(records, 4 * count)
        if reply_shares([Reply(r.output, 0, True)])["all_three"]
        and len(tokenizer.encode(r.output)) <= max_tokens
        and len(prompt_ids(loaded, r.instruction, r.input, r.history, r.system)) + max_tokens <= context
    ]
    if not fit:
        raise UserError(
            f"--data: no record has a well-formed reply of up to {max_tokens} tokens, --max-tokens, and a "
            f"prompt that leaves them room in the context of {context}; give shorter ones, or a smaller "
            "--max-tokens"
        )
    return evenly(fit, count)


def own_pairs(loaded: Loaded, records: Sequence[Record], samplings: Sequence[Sampling]) -> list[Pair]:
    """A pair wherever a reply to a record is not well-formed."""
    prompts, found = [prompt_ids(loaded, r.instruction, r.input, r.history, r.system) for r in records], []
    stop = loaded.template.stop_ids(loaded.tokenizer)
    decoder = reply_decoder(loaded.model, len(prompts))
    for sampling in samplings:
        replies = text_replies(loaded.model, loaded.tokenizer, prompts, sampling, decoder, stop)
        for record, reply in zip(records, replies, strict=True):
            if reply.text.strip() and not reply_shares([reply])["all_three"]:
                sides = record.output, reply.text, not reply.ended
                found.append(Pair(record.instruction, record.input, *sides, record.history, record.system))
    return found


def pairs_of_stories(
    loaded: Loaded, records: Sequence[Record], count: int, sampling: Sampling, known: np.ndarray
) -> list[Pair]:
    """A pair of the best and the worst of `count` stories for each record, unless the best has a fault or they are
    about as good. The cost of a story: 1 for each thing asked for that it misses, 1 if it does not end, and the share
    of its runs of GRAM words that are `known`, which are hashes."""
    prompts, found = (
        [prompt_ids(loaded, r.instruction, r.input, r.history, r.system) for r in records for _ in range(count)],
        [],
    )
    decoder = reply_decoder(loaded.model, len(prompts))
    stop = loaded.template.stop_ids(loaded.tokenizer)
    replies = text_replies(loaded.model, loaded.tokenizer, prompts, sampling, decoder, stop)
    shares = gram_shares([reply.text for reply in replies], GRAM, known)
    for number, record in enumerate(records):
        own = slice(number * count, (number + 1) * count)
        told = [
            (misses(record.instruction, reply.text) + (not reply.ended), share, reply)
            for share, reply in zip(shares[own], replies[own], strict=True)
            if reply.text.strip()
        ]
        if told:
            best, worst = min(told, key=_cost), max(told, key=_cost)
            if not best[0] and _cost(worst) - _cost(best) >= DIFFERENCE:
                sides = best[2].text, worst[2].text, not worst[2].ended
                found.append(Pair(record.instruction, record.input, *sides, record.history, record.system))
    print(
        f"{len(replies):,} stories: {np.mean([reply.ended for reply in replies]):.1%} end, "
        f"{shares.mean():.1%} of their runs of {GRAM} words are in the records"
    )
    return found


def own_stories(loaded: Loaded, requests: Sequence[str], sampling: Sampling) -> list[Record]:
    """A story for each request, without those that miss what was asked for, do not end, or repeat themselves."""
    prompts = [prompt_ids(loaded, request, "") for request in requests]
    stop = loaded.template.stop_ids(loaded.tokenizer)
    decoder = reply_decoder(loaded.model, len(prompts))
    replies = text_replies(loaded.model, loaded.tokenizer, prompts, sampling, decoder, stop)
    return [
        Record(request, "", reply.text.strip())
        for request, reply in zip(requests, replies, strict=True)
        if reply_shares([reply])["all_three"] and not repeats_four_words(reply.text) and not misses(request, reply.text)
    ]


def _cost(told: tuple[int, float, Reply]) -> float:
    faults, share, _ = told
    return faults + share


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--base", required=True, metavar="DIR", help="a fine-tuned run, or a checkpoint of it")
    p.add_argument("--data", nargs="+", required=True, metavar="FILE", help="records as given to sft.py")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="the pairs, as JSON for dpo.py --data")
    p.add_argument("--encoding", default="utf-8", help="encoding of text files (default: %(default)s)")
    p.add_argument("--records", type=int, default=1000, help="how many are asked, at most (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=200, help="longest reply (default: %(default)s)")
    p.add_argument(
        "--stories",
        type=int,
        default=0,
        metavar="N",
        help="pairs of stories, the best and the worst of N; 1: records of stories",
    )
    p.add_argument("--seed", type=int, default=0, help="draws the sampled replies (default: %(default)s)")
    p.add_argument("--backend", default="auto", help="numpy, cupy, webgpu, or auto: cupy if CUDA is there")
    p.add_argument("--precision", default="fp32", help="fp32, and on a GPU tf32 or bf16 (default: %(default)s)")
    args = p.parse_args(argv)
    for name in ("records", "max_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, expected 1 or more")
    if args.stories < 0:
        raise UserError(
            f"--stories is {args.stories}, expected 1 for records of stories, or more: the best and the worst of so "
            "many make a pair"
        )
    refuse_ranks()
    check_writable(args.out)
    loaded = load(resolve_checkpoint(args.base), get_backend(args.backend, args.precision), frozen=True)
    training = read_split(args.data, args.encoding)[0]
    if args.stories == 1:
        training = [Record(r.history[0][0], "", r.history[0][1]) if r.history else r for r in training]
    asked = [record for record in training if asks_for_a_story(record)] if args.stories else training
    if args.stories and not asked:
        raise UserError(
            "--data: no record asks for a story; give what python examples/storyteller/stories.py instruct has written"
        )
    records = records_to_ask(loaded, asked, args.records, args.max_tokens)
    given = {"max_tokens": args.max_tokens, "seed": args.seed}
    pairs: Sequence[Pair | Record]
    if args.stories == 1:
        pairs = own_stories(loaded, [record.instruction for record in records], replace(WIDE, **given))
        summary = f"{len(pairs):,} stories without a fault, of {len(records):,}"
    elif args.stories:
        known = np.unique(np.concatenate(list(grams_of((record.output for record in training), GRAM))))
        pairs = pairs_of_stories(loaded, records, args.stories, replace(WIDE, **given), known)
        summary = f"{count_of(len(pairs), 'pair')} of {len(records) * args.stories:,} stories"
    else:
        pairs = own_pairs(loaded, records, (Sampling(**given, temperature=0), Sampling(**given)))
        asked_of = count_of(len(records), "record")  # fewer than --records where few fit
        summary = f"{2 * len(records):,} replies to {asked_of}, {len(pairs):,} not well-formed"
    if len(pairs) < 2:
        print(f"{summary}: nothing to learn from, {args.out} is not written")
        return 0
    write_json(args.out, [asdict(pair) for pair in pairs])
    print(f"{summary}: {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
