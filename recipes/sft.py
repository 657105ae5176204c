"""Fine-tune a pretrained model to follow instructions.

    python recipes/sft.py                                   the newest pretrained run, the built-in instructions
    python recipes/sft.py --data alpaca.json --base runs/pretrain
    python recipes/sft.py --base SmolLM2-135M --lora 8      adapters beside a frozen model, here another program's
    python recipes/sft.py --resume                          continue runs/sft

Each record is laid out in Alpaca's form and ends with </s>; only the reply and its </s> are learned (all other targets
are -1). With the built-in instructions it ends with exact match on held-out ones, per kind of question.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A recipe runs from a plain checkout too: the repository root is where data/, models/ and tinyforge/ are.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from data.alpaca import Record, encode_example, end_of_reply, hold_out, origin_of, read_records, render_prompt
from data.world import KINDS, instructions, is_correct
from tinyforge import checkpoint
from tinyforge.errors import UserError, run_command
from tinyforge.hub import Loaded, Opened, lora, newest_run, open_model
from tinyforge.infer import Sampling, generate, make_decoder
from tinyforge.infer.decoder import Decoder
from tinyforge.registry import next_token_model
from tinyforge.report import timed
from tinyforge.rng import Stream
from tinyforge.text import TextTokenizer
from tinyforge.text.vocabulary import start_ids
from tinyforge.train.batches import Examples, fingerprint, micro_batches
from tinyforge.train.card import write_card
from tinyforge.train.data_parallel import Sharded, evaluate_nll
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import NextTokens
from tinyforge.train.plan import check_fits, print_plan
from tinyforge.train.run import Run, Task, claimed
from tinyforge.train.settings import SftSettings, open_backend, parse, print_schedule, restarts, sequence_length

BUILT_IN_RECORDS = 30_000
HELD_OUT_RECORDS = 300
# What is kept of a base's meta.
OF_BASE = ("settings", "step", "elapsed", "data_hash", "corpus", "machine", "tokens", "tokens_per_second", "joules")


def encode(
    records: Sequence[Record], tokenizer: TextTokenizer, seq_len: int, what: str, max_reply: int | None = None
) -> list[tuple[list[int], int]]:
    """Records as ids with the prompt's length; says how many could not be used, and how many lost the end."""
    encoded = [encode_example(tokenizer, r, seq_len) for r in records]
    kept = [e for e in encoded if e is not None]
    end = tokenizer.specials[end_of_reply(tokenizer)]
    cut = sum(ids[-1] != end for ids, _ in kept)
    empty = sum(not r.output.strip() for r in records)
    print(f"{what}: {len(kept):,} examples of up to {seq_len} tokens; refused {empty} with an empty reply and "
          f"{len(records) - len(kept) - empty} whose reply is cut away entirely; {cut} end early")  # fmt: skip
    if max_reply is None:
        return kept
    brief = [(ids, prompt) for ids, prompt in kept if len(ids) - prompt <= max_reply]
    print(f"{what}: {len(kept) - len(brief):,} left out whose reply takes more than {max_reply} tokens (--max-reply)")
    return brief


def answer(loaded: Loaded, instruction: str, input: str, max_tokens: int = 40, decoder: Decoder | None = None) -> str:
    """The greedy reply; empty if the prompt leaves no room for one."""
    tokenizer = loaded.tokenizer
    prompt = start_ids(tokenizer) + tokenizer.encode(render_prompt(instruction, input))
    if len(prompt) >= loaded.model.config.context:
        return ""
    stop = frozenset(tokenizer.specials.values())
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
    decoder = decoder or make_decoder(loaded.model, spare_memory=True)
    return tokenizer.decode(generate(loaded.model, prompt, sampling, stop, decoder))


def exact_match(loaded: Loaded, count: int, seed: int) -> dict[str, float]:
    """Share of right greedy replies to `count` held-out built-in instructions, for each kind and overall."""
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    decoder = make_decoder(loaded.model, spare_memory=True)
    for example in instructions("val", count, seed):
        reply = answer(loaded, example.instruction, example.input, decoder=decoder)
        right[example.kind].append(is_correct(example, reply))
    scores = {kind: float(np.mean(results)) for kind, results in right.items()}
    return {**scores, "all": float(np.mean([r for results in right.values() for r in results]))}


def open_base(settings: SftSettings, resume: bool) -> Opened:
    """What training starts from. A run of adapters resumes on its base, any other on itself."""
    out = Path(settings.out)
    if resume and settings.lora is None:
        stopped = open_model(out)
        checkpoint.require(stopped.path, stopped.meta, "base")  # only fine-tuning has it: nothing else goes on here
        return stopped
    if resume:
        found = checkpoint.latest(out)
        meta = checkpoint.read_meta(found)
        checkpoint.require(found, meta, "lora")
        base = open_model(lora.base_of(found, meta))
        lora.check_base(found, base, meta["lora"]["base_sha256"])
        return base
    path = Path(settings.base) if settings.base else newest_run(("pretrain",))
    if path is None:
        raise UserError("no pretrained run under runs/; run python recipes/pretrain.py first, or give --base DIR")
    return open_model(path)


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, with_card = parse(SftSettings, __doc__ or "", argv)
    base = open_base(settings, resume)
    next_token_model(base.spec.name)
    restart = restarts(settings, base.spec)
    if plan_only:
        seq_len = sequence_length(base.config, settings.seq_len)
        print_plan(base.spec, base.config, settings.precision, settings.batch_size, seq_len, settings.recompute,
                   settings.adapters, restart)  # fmt: skip
        return 0
    with claimed(settings, resume):
        fine_tune(settings, base, resume)
    if with_card:
        print(f"wrote {write_card(Path(settings.out))}")
    print(f"next: python -m tinyforge.chat --checkpoint {shlex.quote(settings.out)}")
    return 0


def fine_tune(settings: SftSettings, base: Opened, resume: bool) -> None:
    spec, config, adapters = base.spec, base.config, settings.adapters
    seq_len = sequence_length(config, settings.seq_len)
    with timed("opening the backend"):
        backend, settings = open_backend(settings)
    restart = restarts(settings, spec)
    check_fits(spec, config, backend, settings.batch_size, seq_len, settings.recompute, adapters, restart)
    with timed("making the model"):
        loaded = base.build(backend, settings.recompute, adapters)
        if adapters:
            loaded.model.buffer.initialise(Stream(settings.seed, "adapters"))
    model, tokenizer = loaded.model, loaded.tokenizer
    learned = sum(p.size for p in model.buffer.params)
    print(f"base: {loaded.path}, {spec.name}, {model.buffer.count - learned if adapters else learned:,} parameters")
    if adapters:
        names = dict.fromkeys(name.rpartition(".")[2] for name in model.adapters)
        print(f"adapters: rank {adapters.rank}, alpha {adapters.alpha:g}, on {', '.join(names)}: {learned:,} "
              "parameters are learned, the base is frozen")  # fmt: skip
    print(f"backend {backend.name}, {settings.precision}, {backend.describe()}")

    if settings.data:
        records = read_records(settings.data, settings.encoding)
        training, held_out = hold_out(records)
        print(f"data: {len(records):,} records; the last {len(held_out):,} are held out")
    else:
        print(f"data: built in (no --data given), {BUILT_IN_RECORDS:,} instructions of {len(KINDS)} kinds")
        training, held_out = ([Record(e.instruction, e.input, e.output) for e in instructions(split, n, settings.seed)]
                              for split, n in (("train", BUILT_IN_RECORDS), ("val", HELD_OUT_RECORDS)))  # fmt: skip
    with timed("encoding the records"):
        encoded = encode(training, tokenizer, seq_len, "training", settings.max_reply)
        data = Examples(encoded, seq_len, config.prediction_heads, settings.seed, restart)
        held = encode(held_out, tokenizer, seq_len, "held out")
    if not held:
        raise UserError(f"data: none of the {len(held_out)} held-out records fits {seq_len} tokens; give more records")

    origins = [origin_of(Path(path)) for path in settings.data] or [("the built-in instructions", "MIT")]
    sources, licences = ("; ".join(sorted(set(part))) for part in zip(*origins, strict=True))
    summary = [
        {"source": sources, "licence": licences, "records": len(encoded), "held-out_records": len(held)},
    ]
    accum, rows = settings.grad_accum, settings.batch_size

    def evaluate(sharded: Sharded) -> dict[str, float]:
        batches = (data.pad([[e] for e in held[i : i + rows]]) for i in range(0, len(held), rows))
        figures = {"val_bits_per_byte": evaluate_nll(sharded, batches, tokenizer.byte_lengths)}
        if not settings.data:
            figures["exact_match"] = exact_match(loaded, 5 * len(KINDS), settings.seed + 1)["all"]
        return figures

    def sample() -> str:
        record = held_out[0]
        asked = f"{record.instruction} {record.input}".strip().replace("\n", " ")
        return f"  {asked} -> {answer(loaded, record.instruction, record.input)}".replace("\n", "\n  ")

    print_schedule(settings, f"{rows * accum} rows of several records", data.batches_in(0, rows) / accum, "records")

    origin: dict[str, Any] = {
        "base": base.meta["base"] if resume and not adapters else
        {key: base.meta[key] for key in OF_BASE if key in base.meta},
    }  # fmt: skip
    if adapters:
        origin["lora"] = lora.describe(adapters, base, model.buffer.count - learned, Path(settings.out))
    stream = np.concatenate([np.asarray([*ids, prompt], np.int64) for ids, prompt in encoded])
    task = Task(
        model, tokenizer, NextTokens(config.head_weights, tokenizer.byte_lengths),
        micro_batches(data, rows, accum), evaluate, sample,
        {"kind": "sft", "model": spec.name, "config": config.to_dict(), "tokenizer_hash": tokenizer.hash(),
         "data_hash": fingerprint(stream), "corpus": summary, "machine": backend.describe(), **origin},
        model.flop_per_token(seq_len),
    )  # fmt: skip
    last = Run(task, settings, backend, resume).train()
    if not settings.data:
        scores = exact_match(loaded, 20 * len(KINDS), settings.seed)
        print("exact match on held-out instructions (greedy, 20 of each kind):")
        for kind, score in scores.items():
            print(f"  {kind:<14} {score:6.1%}")
        named = {f"exact match, {kind}": score for kind, score in scores.items()}
        save_scores(Path(settings.out), checkpoint.step_of(last), named)


if __name__ == "__main__":
    run_command(main)
