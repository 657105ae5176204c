"""Preference pairs from a model's own replies: those that loop or do not end are the rejected ones.

    python recipes/own_pairs.py --base runs/sft --data alpaca.json --out circles.json
    python recipes/dpo.py --base runs/sft --data circles.json --out runs/orderly

Fine-tuning shows a model good replies, but never where its own replies lead: a greedy reply that has repeated a
sentence tends to repeat it for ever. Here the model answers instructions that it was fine-tuned on, greedily and
sampled. Wherever its reply is not in form, as recipes/evaluate.py counts it, the record's own reply is preferred. The
last 20th of each file is left out, because the model is evaluated on it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A recipe runs from a plain checkout too: the repository root is where data/, models/ and tinyforge/ are.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.alpaca import Record, evenly, read_split
from data.files import write_json
from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.hub import Loaded, load, trained_model
from tinyforge.hub.tuning import prompt_ids
from tinyforge.infer import Sampling
from tinyforge.infer.evaluate import Reply, reply_decoder, reply_shares, reply_to
from tinyforge.text.chat_templates import end_of_reply


def records_to_ask(loaded: Loaded, records: Sequence[Record], count: int, max_tokens: int) -> list[Record]:
    """Up to `count` records, evenly spaced, whose own reply is in form and has at most `max_tokens` tokens, and whose
    prompt leaves room for as many."""
    context, tokenizer = loaded.model.config.context, loaded.tokenizer
    fit = [r for r in evenly(records, 4 * count) if reply_shares([Reply(r.output, 0, True)])["all_three"]
           and len(tokenizer.encode(r.output)) <= max_tokens
           and len(prompt_ids(loaded, r.instruction, r.input)) + max_tokens <= context]  # fmt: skip
    if not fit:
        raise UserError(f"--data: no record has a reply in form of up to {max_tokens} tokens, --max-tokens, and a "
                        f"prompt that leaves them room in the context of {context}; give shorter ones")  # fmt: skip
    return evenly(fit, count)


def own_pairs(loaded: Loaded, records: Sequence[Record], samplings: Sequence[Sampling]) -> list[dict[str, Any]]:
    """A pair wherever a reply to a record is not in form. cut: the reply did not end, so its end gets no loss."""
    tokenizer, found = loaded.tokenizer, []
    prompts = [prompt_ids(loaded, r.instruction, r.input) for r in records]
    decoder = reply_decoder(loaded.model, len(prompts))
    for sampling in samplings:
        replies = reply_to(loaded.model, prompts, sampling, tokenizer.specials[end_of_reply(tokenizer)], decoder)
        for record, (ids, ended) in zip(records, replies, strict=True):
            text = tokenizer.decode(ids)
            if text.strip() and not reply_shares([Reply(text, len(ids), ended)])["all_three"]:
                found.append({"instruction": record.instruction, "input": record.input, "chosen": record.output,
                              "rejected": text, "cut": not ended})  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base", required=True, metavar="DIR", help="a fine-tuned run, or a checkpoint of it")
    p.add_argument("--data", nargs="+", required=True, metavar="FILE", help="records as given to sft.py")
    p.add_argument("--out", type=Path, required=True, metavar="FILE", help="the pairs, as JSON for dpo.py --data")
    p.add_argument("--encoding", default="utf-8", help="encoding of text files (default: %(default)s)")
    p.add_argument("--records", type=int, default=1000, help="how many are asked (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=200, help="longest reply (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="draws the sampled replies (default: %(default)s)")
    p.add_argument("--backend", default="auto", help="numpy, cupy, or auto, which takes a GPU if there is one")
    p.add_argument("--precision", default="fp32", help="fp32, and on a GPU tf32 or bf16 (default: %(default)s)")
    args = p.parse_args(argv)
    for name in ("records", "max_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, wants 1 or more")
    loaded = load(trained_model(args.base), get_backend(args.backend, args.precision), frozen=True)
    records = records_to_ask(loaded, read_split(args.data, args.encoding)[0], args.records, args.max_tokens)
    greedy, sampled = Sampling(temperature=0, max_tokens=args.max_tokens), Sampling(max_tokens=args.max_tokens)
    pairs = own_pairs(loaded, records, (greedy, sampled))
    if len(pairs) < 2:
        print(f"{2 * len(records):,} replies, {len(pairs)} not in form: nothing to learn from")
        return 0
    write_json(args.out, pairs)
    print(f"{2 * len(records):,} replies, {len(pairs):,} not in form: {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
