"""Time to first token: from an uncached prompt to the id of the next token in host memory.

    python bench/prefill.py                                              small on the CPU, 512 tokens, ours alone
    python bench/prefill.py --peer torch --json                          next to PyTorch, as one JSON object
    python bench/prefill.py --config base --backend cupy --precision bf16 --prompt 512 4096 --peer torch

Ours goes through the public generator: a session with an empty cache is given the prompt and asked for one greedy
token. PyTorch's does the same and no more: one causal pass over the prompt that writes the cache and computes the
logits of the last position alone, argmax, the id copied to the host. On a CPU it is eager, once with one thread and
once with --threads; ours shares the prompt among --workers threads. On a GPU it is eager, compiled for this length,
and that replayed as a CUDA graph where PyTorch can. All have the same random weights, and must agree on the logits
behind the prompt before any is timed.

They take turns, one prompt each, in many short rounds: ours/this is the median of the rounds' ratios, which is robust
against changes of the machine's speed. `cpu ms` is processor time of all threads, which other load affects less.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.peers import (
    GRAPH,
    GRAPHS_NEED_A_GPU,
    LOGITS_TOLERANCE,
    MODES,
    OURS,
    check_parity,
    environment,
    heading,
    left_out_table,
    soft,
)
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.workers import cores
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session
from tinyforge.models.nanoeuler.config import Config
from tinyforge.models.nanoeuler.model import NanoEuler
from tinyforge.params import named
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.train.settings import PretrainSettings, config_of

GREEDY = Sampling(temperature=0, drafts=0, max_tokens=1)


class Ours:
    def __init__(self, model: NanoEuler, prompt: list[int]) -> None:
        self.session, self.prompt = Session(model), prompt

    def logits(self) -> np.ndarray:
        """Behind the prompt, (V,), by the decoder's own step."""
        decoder = self.session.decoder
        decoder.rewind([0])
        decoder.prefill(0, self.prompt[:-1])
        return decoder.step([self.prompt[-1:]])[0, 0, 0].copy()

    def run(self) -> int:
        self.session.set_tokens([])
        self.session.extend(self.prompt)
        return next(self.session.generate(GREEDY)).id


class Torch:
    def __init__(self, model: NanoEuler, prompt: list[int], threads: int, mode: str | None = None) -> None:
        # Here and not at the top: torch is needed only when it is the peer.
        from bench.torch_decode import TorchDecoder

        buffer, backend, config = model.buffer, model.backend, model.config
        assert isinstance(config, Config)
        self.decoder = TorchDecoder(
            config,
            named(buffer, buffer.masters, backend),
            batch=1,
            precision=backend.precision.name,
            device="cuda" if backend.name == "cupy" else "cpu",
            threads=threads,
            compiled=mode is not None,
            mode=mode or "default",
        )
        self.ids = self.decoder.on_device(np.array([prompt]))
        self.position = self.decoder.on_device(np.arange(len(prompt)))

    def logits(self) -> np.ndarray:
        self.decoder.use_threads()
        return self.decoder.first(self.ids, self.position)[0, -1].float().cpu().numpy()

    def run(self) -> int:
        return int(self.decoder.first(self.ids, self.position).argmax())


Contender = Ours | Torch


def peers_of(model: NanoEuler, prompt: list[int], threads: int) -> dict[str, Callable[[], Torch] | str]:
    """What makes each contender of PyTorch, or why it does not apply here."""
    if model.backend.name == "cupy":
        return {name: partial(Torch, model, prompt, threads, mode) for name, mode in MODES.items()}
    numbers = sorted({1, threads})
    eager = {f"torch eager, {n} thread{'s' * (n > 1)}": partial(Torch, model, prompt, n) for n in numbers}
    return {**eager, GRAPH: GRAPHS_NEED_A_GPU}


def take_turns(contenders: dict[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds by the clock and of the processor, of each of `rounds` prompts, by contender."""
    found: dict[str, dict[str, list[float]]] = {name: {"clock": [], "cpu": []} for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            if isinstance(contender, Torch):
                contender.decoder.use_threads()
            contender.run()  # finds its data in no cache, and other threads perhaps still spinning: not counted
            start, cpu = time.perf_counter(), time.process_time()
            contender.run()  # gives a number in host memory: the device is done
            found[name]["clock"].append(time.perf_counter() - start)
            found[name]["cpu"].append(time.process_time() - cpu)
    return found


def of_length(model: NanoEuler, length: int, rounds: int, threads: int, peer: str | None) -> dict[str, Any]:
    """The times of one length of prompt."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab, length).tolist()
    made: dict[str, Any] = {OURS: lambda: Ours(model, prompt)}
    made |= peers_of(model, prompt, threads) if peer else {}
    contenders, logits, left_out = soft(made, lambda contender: contender.logits())
    tolerance = LOGITS_TOLERANCE[model.backend.precision.name]
    parity = check_parity(logits, OURS, tolerance, "logits differ by") if peer else None
    times = take_turns(contenders, rounds)

    def ratio(name: str, kind: str) -> float:
        return median(a / b for a, b in zip(times[OURS][kind], times[name][kind], strict=True))

    results = {
        name: {
            "median_ms": 1e3 * median(t["clock"]),
            "min_ms": 1e3 * min(t["clock"]),
            "cpu_ms": 1e3 * median(t["cpu"]),
            "tokens_per_second": length / median(t["clock"]),
            "ours_over_this": ratio(name, "clock"),
            "ours_over_this_by_cpu": ratio(name, "cpu"),
            "clock_ms": [1e3 * s for s in t["clock"]],
        }
        for name, t in times.items()
    }
    return {"prompt": length, "parity": parity, "left_out": left_out, "results": results}


def measure(config: Config, backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    load_average = os.getloadavg()[0]
    lengths = []
    for length in args.prompt:
        model = NanoEuler(config.override({"context": max(config.context, length + 1)}), backend)
        model.initialise(seed=0)
        lengths.append(of_length(model, length, args.rounds, args.threads, args.peer))
    return environment(backend, args.peer, load_average) | {
        "config": config.to_dict(),
        "rounds": args.rounds,
        "lengths": lengths,
        "threads": {"ours": backend.workers, "torch": args.threads if args.peer else None},
    }


def table(found: dict[str, Any]) -> str:
    lines = [f"{name:<13} {value}" for name, value in heading(found)]
    lines.append(f"{'threads':<13} ours {found['threads']['ours']}")
    for part in found["lengths"]:
        lines += [
            "",
            f"{part['prompt']:>5} tokens, {found['rounds']} rounds     {'median ms':>10} {'min ms':>8} "
            f"{'cpu ms':>8} {'tokens/s':>9} {'ours/this':>9} {'by cpu':>7}",
        ]
        for name, r in part["results"].items():
            lines.append(
                f"{name:<27} {r['median_ms']:>10.2f} {r['min_ms']:>8.2f} {r['cpu_ms']:>8.2f} "
                f"{r['tokens_per_second']:>9,.0f} {r['ours_over_this']:>9.2f} "
                f"{r['ours_over_this_by_cpu']:>7.2f}"
            )
        lines += left_out_table(part["left_out"])
        if part["parity"]:
            lines.append(
                f"logits agree to {part['parity']['worst_difference']:.1e} (wanted {part['parity']['tolerance']:g})"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--config", default="small", help="preset (small, base, large) or a JSON file (default: small)")
    p.add_argument("--prompt", type=int, nargs="+", default=[512], help="tokens of the prompts (default: 512)")
    p.add_argument("--rounds", type=int, default=30, help="counted prompts of each contender (default: 30)")
    p.add_argument("--peer", choices=("torch",), help="time PyTorch too")
    p.add_argument("--backend", default="auto", help="ours: auto, numpy, cupy (default: auto)")
    p.add_argument("--device", type=int, help="number of the GPU (default: 0)")
    p.add_argument("--precision", default="fp32", help="fp32, fp64, and on a GPU tf32 or bf16 (default: fp32)")
    p.add_argument("--workers", type=int, help="threads of ours, on a CPU (default: one a core)")
    p.add_argument("--threads", type=int, help="threads of PyTorch (default: as many as --workers)")
    add_json_flag(p)
    args = p.parse_args(argv)
    args.workers = cores() if args.workers is None else args.workers
    args.threads = args.workers if args.threads is None else args.threads
    if min(args.prompt) < 2 or min(args.rounds, args.workers, args.threads) < 1:
        raise UserError("--prompt wants numbers of 2 or more; --rounds, --workers and --threads of 1 or more")
    check_before(args.json, args.peer)
    config = config_of(PretrainSettings(config=args.config))
    assert isinstance(config, Config), "the default model is not NanoEuler"
    found = measure(config, get_backend(args.backend, args.precision, args.workers, args.device), args)
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
