"""Time decoding: microseconds a token, and the share of the memory's bandwidth that it uses.

    python bench/decode.py                                                      small on the CPU, ours alone
    python bench/decode.py --config small --peer torch --json                   next to PyTorch, as one JSON object
    python bench/decode.py --config base --backend cupy --precision bf16 --position 256 --tokens 64 --peer torch
    python bench/decode.py --config base --backend cupy --precision bf16 --batch-size 64 --position 256
    python bench/decode.py --checkpoint runs/sft                                a trained model: plain and speculative

Without a checkpoint the weights are random, without drafts: plain greedy decoding of `--tokens` tokens around
`--position`, with the cache filled before. Ours goes through the public generator (for a batch, `draw_blocks`, which is
what `generate_batch` runs). PyTorch's loop does the same and no more: a pass, argmax, the next pass, with nothing
copied to the host in between. On a CPU PyTorch is eager, once with one thread and once with --threads; ours has one. On
a GPU it is eager, and compiled under a CUDA graph (mode reduce-overhead). A peer that PyTorch cannot run here is left
out, and the reason printed. All have the same weights and must agree on the logits at `--position` before any is timed;
they then take turns in one process.

Bandwidth used (MBU): the bytes that a step must read, which are all weights but the embedding and heads 1 and up, and
the keys and values of every row, over the time and the rate of a large copy on the same device. What a CPU's caches
hold does not come from memory: for a small model the share can exceed 1 there. On a GPU, `of the floor` is the time in
which an H200, at the 4.28 TB/s of its copies, reads those bytes, over the time taken: a yardstick that is the same in
every run.

With a checkpoint: greedy and sampled decoding with 0 drafts and up, on the same prompts in turns; each prompt counts
with the fastest of its rounds, without its prefill.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.peers import (
    EAGER,
    GRAPH,
    GRAPHS_NEED_A_GPU,
    LOGITS_TOLERANCE,
    OURS,
    LeftOut,
    Parity,
    check_parity,
    environment,
    heading,
    left_out_table,
    soft,
)
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.workers import cores
from tinyforge.data.alpaca import Record, read_split, render_prompt
from tinyforge.data.world import Instruction, documents, instructions
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats import load
from tinyforge.frozen_model import quantised_copy
from tinyforge.infer.choose import make_decoder
from tinyforge.infer.generation import draw_blocks
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session, Stats
from tinyforge.models.nanoeuler.config import Config
from tinyforge.models.nanoeuler.model import NanoEuler
from tinyforge.params import named
from tinyforge.quantised import FORMATS
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.train.settings import PretrainSettings, config_of

COPY_BYTES = {"numpy": 256 << 20, "cupy": 2 << 30}
COPY_ROUNDS = 7
FLOOR_BANDWIDTH = 4.28e12  # bytes per second, read and written, of a large copy on an H200
OPENING = 20  # tokens of a held-out text that a base model is asked to continue
SPECULATION_TOKENS = 80


@dataclass(frozen=True)
class Options:
    """What is timed: `tokens` new ones in each of `batch_size` rows, around `position`, `rounds` times."""

    config: Config
    batch_size: int
    position: int
    tokens: int
    rounds: int
    threads: int

    @property
    def start(self) -> int:
        """Tokens that each row has before the first new one."""
        return self.position + 1 - self.tokens // 2

    def text(self) -> np.ndarray:
        """Random tokens, (batch_size, position + 1)."""
        return np.random.default_rng(0).integers(0, self.config.vocab, (self.batch_size, self.position + 1))


class Ours:
    def __init__(self, options: Options, model: NanoEuler) -> None:
        self.options = options
        self.text = options.text()
        self.decoder = make_decoder(model, options.batch_size)
        self.session = Session(model, self.decoder) if options.batch_size == 1 else None
        self.sampling = Sampling(temperature=0, drafts=0, max_tokens=options.tokens)

    def logits(self) -> np.ndarray:
        """Of head 0 at `position`, (batch_size, V); leaves the cache filled up to it."""
        for row, tokens in enumerate(self.text.tolist()):
            self.decoder.prefill(row, tokens[:-1])
        logits = self.decoder.step(self.text[:, -1:])[:, 0, 0].copy()
        if self.session is not None:
            self.session.set_tokens(self.text[0].tolist())
        return logits

    def run(self) -> None:
        """`tokens` new tokens for each row, from the cache's first `start` - 1 positions on."""
        start = self.options.start
        if self.session is not None:
            self.session.truncate(start)
            for _ in self.session.generate(self.sampling):
                pass
            return
        texts = self.text[:, :start].tolist()
        self.decoder.rewind([start - 1] * len(texts))
        for drawn in draw_blocks(self.decoder, texts, self.sampling, self.options.tokens):
            for text, new in zip(texts, drawn.ids.tolist(), strict=True):
                text += new


class Torch:
    def __init__(self, options: Options, model: NanoEuler, threads: int, compiled: bool) -> None:
        # Here and not at the top: torch is needed only when it is the peer.
        from bench.torch_decode import TorchDecoder

        buffer, backend = model.buffer, model.backend
        weights = named(buffer, buffer.masters, backend)
        self.options = options
        self.decoder = TorchDecoder(
            options.config,
            weights,
            batch=options.batch_size,
            precision=backend.precision.name,
            device="cuda" if backend.name == "cupy" else "cpu",
            threads=threads,
            compiled=compiled,
        )
        self.text = options.text()
        places = range(options.start - 1, options.start - 1 + options.tokens)
        self.places = [(self.decoder.on_device(np.array([t])), t + 1) for t in places]
        self.first = self.decoder.on_device(self.text[:, options.start - 1 : options.start])

    def logits(self) -> np.ndarray:
        return self.decoder.fill(self.text)[:, -1].float().cpu().numpy()

    def run(self) -> None:
        self.decoder.greedy(self.first, self.places)


Contender = Ours | Torch


def peers_of(options: Options, model: NanoEuler) -> dict[str, Callable[[], Torch] | str]:
    """What makes each contender of PyTorch, or why it does not apply here."""
    if model.backend.name == "cupy":
        return {
            EAGER: lambda: Torch(options, model, options.threads, compiled=False),
            GRAPH: lambda: Torch(options, model, options.threads, compiled=True),
        }
    numbers = sorted({1, options.threads})
    eager = {f"torch eager, {n} thread{'s' * (n > 1)}": partial(Torch, options, model, n, False) for n in numbers}
    return {**eager, GRAPH: GRAPHS_NEED_A_GPU}


def contenders_of(
    options: Options, model: NanoEuler, peer: str | None, quantised: Mapping[str, NanoEuler] = MappingProxyType({})
) -> tuple[dict[str, Contender], Parity, LeftOut]:
    """All whose logits agree, their caches filled up to the position; the agreement; and who was left out, with why.

    quantised: by name, models of ours with the same weights in one byte each, whose logits differ.
    """
    makers: dict[str, Any] = {OURS: lambda: Ours(options, model)}
    makers |= {name: partial(Ours, options, other) for name, other in quantised.items()}
    makers |= peers_of(options, model) if peer else {}
    contenders, logits, left_out = soft(makers, lambda contender: contender.logits())
    exact = {name: found for name, found in logits.items() if name not in quantised}
    tolerance = LOGITS_TOLERANCE[model.backend.precision.name]
    return contenders, check_parity(exact, OURS, tolerance, "logits differ by") if peer else None, left_out


def take_turns(contenders: dict[str, Contender], options: Options, backend: Backend) -> dict[str, list[float]]:
    """Seconds per step of each of `rounds` runs, by contender."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            if isinstance(contender, Torch):
                contender.decoder.use_threads()
            contender.run()  # finds its data in no cache, and other threads perhaps still spinning: not counted
            backend.synchronize()
            start = time.perf_counter()
            contender.run()
            backend.synchronize()
            seconds[name].append((time.perf_counter() - start) / options.tokens)
    return seconds


def copy_bandwidth(backend: Backend) -> float:
    """Bytes per second, read and written, of a large copy: the fastest of some."""
    half = COPY_BYTES[backend.name] // 2
    source, target = (backend.zeros((half,), np.dtype(np.uint8)) for _ in range(2))
    seconds = []
    for _ in range(COPY_ROUNDS):
        backend.synchronize()
        start = time.perf_counter()
        target[...] = source
        backend.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * half / min(seconds)


def bytes_per_step(options: Options, model: NanoEuler) -> int:
    """What a step must read: the weights it multiplies by, once, and each row's keys and values."""
    c, heads = options.config, model.heads.weight
    size = model.backend.dtype.itemsize
    # One row on a GPU reads weights as they are stored, all else their numbers.
    by_code = model.backend.name == "cupy" and options.batch_size == 1
    of = {p: p.stored.nbytes if by_code else p.size * size for p in (*model.buffer.params, *model.buffer.frozen)}
    weights = sum(of.values()) - of[model.embedding.weight] - of[heads] // c.mtp_heads * (c.mtp_heads - 1)
    cache = 2 * c.layers * c.kv_heads * c.head_dim * (options.position + 1) * options.batch_size
    return weights + cache * size


def measure(options: Options, backend: Backend, peer: str | None, weights: Sequence[str] = ()) -> dict[str, Any]:
    """Microseconds of a step (one token in each row), by contender."""
    load_average = os.getloadavg()[0]
    model = NanoEuler(options.config, backend)
    model.initialise(seed=0)
    quantised = {f"{OURS}, {kind} weights": quantised_copy(model, kind) for kind in weights}
    contenders, parity, left_out = contenders_of(options, model, peer, quantised)
    bandwidth = copy_bandwidth(backend)
    seconds = take_turns(contenders, options, backend)
    sizes = {name: bytes_per_step(options, quantised.get(name, model)) for name in seconds}
    base = median(seconds[OURS])
    results = {
        name: {
            "median_us": 1e6 * median(times),
            "min_us": 1e6 * min(times),
            "tokens_per_second": options.batch_size / median(times),
            "gb_per_second": sizes[name] / median(times) / 1e9,
            "mbu": sizes[name] / median(times) / bandwidth,
            "of_the_floor": sizes[name] / FLOOR_BANDWIDTH / median(times) if backend.name == "cupy" else None,
            "ours_over_this": base / median(times),
            "ours_over_this_by_min": min(seconds[OURS]) / min(times),
            "bytes_per_step": sizes[name],
            "step_us": [1e6 * t for t in times],
        }
        for name, times in seconds.items()
    }
    return environment(backend, peer, load_average) | {
        "config": options.config.to_dict(),
        "batch_size": options.batch_size,
        "position": options.position,
        "tokens_per_round": options.tokens,
        "rounds": options.rounds,
        "bytes_per_step": sizes[OURS],
        "copy_gb_per_second": bandwidth / 1e9,
        "floor_us": 1e6 * sizes[OURS] / FLOOR_BANDWIDTH if backend.name == "cupy" else None,
        "parity": parity,
        "left_out": left_out,
        "results": results,
    }


def table(found: dict[str, Any]) -> str:
    """The figures of `measure` for people."""
    rows = heading(found) + [
        (
            "decoding",
            f"{found['batch_size']} rows, {found['tokens_per_round']} tokens around position "
            f"{found['position']}, {found['rounds']} rounds",
        ),
        ("reads", f"{found['bytes_per_step'] / 1e6:.2f} MB a step; a copy does {found['copy_gb_per_second']:.1f} GB/s"),
    ]
    if found["floor_us"]:
        rows.append(("floor", f"{found['floor_us']:.0f} us a step, those bytes at {FLOOR_BANDWIDTH / 1e12} TB/s"))
    if found["parity"]:
        parity = found["parity"]
        rows.append(("parity", f"logits agree to {parity['worst_difference']:.1e} (wanted {parity['tolerance']:g})"))
    lines = [f"{name:<13} {value}" for name, value in rows]
    of_the_floor = f" {'of the floor':>12}" if found["floor_us"] else ""
    lines += [
        "",
        f"{'':<27} {'median us':>9} {'min us':>8} {'tokens/s':>9} {'GB/s':>7} {'MBU':>6} {'ours/this':>9}"
        f"{of_the_floor}",
    ]
    for name, r in found["results"].items():
        share = f" {r['of_the_floor']:>12.0%}" if found["floor_us"] else ""
        lines.append(
            f"{name:<27} {r['median_us']:>9.0f} {r['min_us']:>8.0f} {r['tokens_per_second']:>9,.0f} "
            f"{r['gb_per_second']:>7.1f} {r['mbu']:>6.0%} {r['ours_over_this']:>9.2f}{share}"
        )
    lines += left_out_table(found["left_out"])
    return "\n".join(lines)


def measure_speculation(
    path: Path, backend: Backend, prompts: int, rounds: int, files: Sequence[str] = ()
) -> dict[str, Any]:
    """Tokens per second of a trained model by number of drafts, greedy and by the default sampling. files: records
    whose held-out instructions are the prompts, rather than those of the built-in world."""
    load_average = os.getloadavg()[0]
    loaded = load(path, backend)
    tokenizer, config = loaded.tokenizer, loaded.model.config
    if loaded.meta["kind"] != "pretrain":
        asked: Sequence[Instruction | Record] = [*instructions("val", prompts, seed=0)]
        if files:
            held_out = [record for records in read_split(files)[1] for record in records]
            asked = held_out[:: -(-len(held_out) // prompts)]
        texts = [tokenizer.encode(render_prompt(e.instruction, e.input)) for e in asked]
    else:
        texts = [tokenizer.encode(d)[:OPENING] for d in documents("val", prompts, seed=0)]
    texts = [t for t in texts if len(t) < config.context]
    stop = frozenset(tokenizer.specials.values())
    session = Session(loaded.model)
    results: dict[str, Any] = {}
    kinds = {
        "greedy": Sampling(temperature=0, max_tokens=SPECULATION_TOKENS),
        "sampled": Sampling(max_tokens=SPECULATION_TOKENS),
    }
    for kind, sampling in kinds.items():
        drafts = range(loaded.model.prediction_heads)
        best = np.full((len(drafts), len(texts)), np.inf)
        totals = [Stats() for _ in drafts]
        replies: list[list[list[int]]] = [[] for _ in drafts]
        for turn in range(rounds):
            for i, text in enumerate(texts):
                session.set_tokens(text)
                for _ in session.generate(replace(sampling, drafts=0, max_tokens=1)):  # the prefill
                    pass
                for d in drafts:
                    session.set_tokens(text)
                    backend.synchronize()  # what was queued for the reply before goes on behind its end
                    session.stats = stats = Stats()
                    for _ in session.generate(replace(sampling, drafts=d, seed=i), stop):
                        pass
                    best[d, i] = min(best[d, i], stats.first_seconds + stats.decode_seconds)
                    if turn == 0:
                        totals[d] = added(totals[d], stats)
                        replies[d].append(session.tokens[len(text) :])
        speeds = [t.tokens / seconds for t, seconds in zip(totals, best.sum(axis=1), strict=True)]
        results[kind] = [
            {
                "drafts": d,
                "tokens": totals[d].tokens,
                "tokens_per_second": speeds[d],
                "over_plain": speeds[d] / speeds[0],
                "tokens_per_pass": totals[d].tokens_per_pass,
                "us_per_pass": 1e6 * best[d].sum() / totals[d].passes,
                "acceptance": totals[d].acceptance,
                "same_text_as_plain": replies[d] == replies[0],
            }
            for d in drafts
        ]
    return environment(backend, None, load_average) | {
        "kind": loaded.meta["kind"],
        "step": loaded.meta.get("step"),
        "config": config.to_dict(),
        "prompts": len(texts),
        "max_tokens": SPECULATION_TOKENS,
        "rounds": rounds,
        "results": results,
    }


def added(a: Stats, b: Stats) -> Stats:
    """The counts of both."""
    most = max(len(a.drafted), len(b.drafted))

    def sums(x: list[int], y: list[int]) -> list[int]:
        return [sum(pair) for pair in zip(*(v + [0] * (most - len(v)) for v in (x, y)), strict=True)]

    return Stats(
        passes=a.passes + b.passes,
        tokens=a.tokens + b.tokens,
        drafted=sums(a.drafted, b.drafted),
        accepted=sums(a.accepted, b.accepted),
    )


def speculation_table(found: dict[str, Any]) -> str:
    rows = heading(found) + [
        (
            "model",
            f"{found['kind']}, {found['prompts']} held-out prompts, up to {found['max_tokens']} tokens each, the "
            f"fastest of {found['rounds']} rounds",
        )
    ]
    lines = [f"{name:<13} {value}" for name, value in rows]
    lines += [
        "",
        f"{'':<8} {'drafts':>6} {'tokens':>7} {'tokens/s':>9} {'of plain':>8} {'a pass':>7} {'us a pass':>9}"
        "  acceptance by head   same text",
    ]
    for kind, cases in found["results"].items():
        for r in cases:
            shares = " ".join(f"{share:.2f}" for share in r["acceptance"])
            lines.append(
                f"{kind:<8} {r['drafts']:>6} {r['tokens']:>7,} {r['tokens_per_second']:>9,.0f} "
                f"{r['over_plain']:>8.2f} {r['tokens_per_pass']:>7.2f} {r['us_per_pass']:>9.0f}  {shares:<20} "
                f"{'yes' if r['same_text_as_plain'] else 'no'}"
            )
    return "\n".join(lines)


def options_of(args: argparse.Namespace) -> Options:
    config = config_of(PretrainSettings(config=args.config))
    assert isinstance(config, Config), "the default model is not NanoEuler"
    position = args.position
    if position < args.tokens // 2 or position - args.tokens // 2 + 1 + args.tokens > config.context:
        raise UserError(
            f"--position {position}: {args.tokens} tokens around it are not within the context of {config.context}; "
            "use another position, or fewer --tokens"
        )
    return Options(config, args.batch_size, position, args.tokens, args.rounds, args.threads or cores())


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--config", default="small", help="preset (small, base, large) or a JSON file (default: small)")
    p.add_argument("--batch-size", type=int, default=1, help="rows that are decoded side by side (default: 1)")
    p.add_argument("--position", type=int, default=64, help="tokens before the one in the middle (default: 64)")
    p.add_argument("--tokens", type=int, default=16, help="tokens a round, around the position (default: 16)")
    p.add_argument("--rounds", type=int, default=30, help="counted runs of each contender (default: 30)")
    p.add_argument("--peer", choices=("torch",), help="time PyTorch too")
    p.add_argument("--weights", nargs="+", choices=tuple(FORMATS), default=[], help="ours with such weights too")
    p.add_argument("--backend", default="auto", help="ours: auto, numpy, cupy (default: auto)")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    p.add_argument("--precision", default="fp32", help="fp32, fp64, and on a GPU tf32 or bf16 (default: fp32)")
    p.add_argument("--threads", type=int, help="threads of PyTorch (default: as many as there are cores)")
    p.add_argument("--checkpoint", metavar="DIR", help="time plain and speculative decoding of this model instead")
    p.add_argument("--prompts", type=int, default=60, help="held-out prompts, with --checkpoint (default: 60)")
    p.add_argument(
        "--instructions",
        nargs="+",
        default=[],
        metavar="FILE",
        help="records as given to sft.py, the "
        "last 20th of each file being the prompts, with --checkpoint (default: built-in ones)",
    )
    add_json_flag(p)
    args = p.parse_args(argv)
    for name in ("batch_size", "tokens", "rounds", "threads", "prompts"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {value}, wants a number above 0")
    check_before(args.json, args.peer)
    options = options_of(args)
    backend = get_backend(args.backend, args.precision, 1, args.device)
    if args.checkpoint:
        found = measure_speculation(Path(args.checkpoint), backend, args.prompts, args.rounds, args.instructions)
        publish(found, speculation_table(found), args.json)
    else:
        found = measure(options, backend, args.peer, args.weights)
        publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
