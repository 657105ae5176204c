"""Time to first token: from an uncached prompt to the id of the next token in host memory.

    python bench/prefill.py                                              small on the CPU, 512 tokens, ours alone
    python bench/prefill.py --peer torch --json                          next to PyTorch, as one JSON object
    python bench/prefill.py --config base --backend cupy --precision bf16 --prompt 512 4096 --peer torch

Ours goes through the public generator: a session with an empty cache is given the prompt and asked for one greedy
token. PyTorch's does the same and no more: one causal pass over the prompt that writes the cache and computes the
logits of the last position alone, argmax, the id copied to the host. On a CPU it is eager, once with one thread and
once with --threads; ours shares the prompt among --workers threads. On a GPU it is eager, compiled for this length,
and that replayed as a CUDA graph where PyTorch can. All must agree on the logits after the prompt.

A turn is one prompt, in many short rounds: ours/this is the median of the rounds' ratios, which is robust against
changes of the machine's speed. `cpu ms` is processor time of all threads, which other load affects less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness
from bench.harness import MODES, OURS, Flags
from tinyforge.backends import Backend
from tinyforge.backends.workers import cores
from tinyforge.errors import run_command
from tinyforge.infer.sampling import Sampling
from tinyforge.infer.session import Session
from tinyforge.models.nanoeuler.config import Config
from tinyforge.models.nanoeuler.model import NanoEuler

GREEDY = Sampling(temperature=0, drafts=0, max_tokens=1)


class Ours:
    def __init__(self, model: NanoEuler, prompt: list[int]) -> None:
        self.session, self.prompt = Session(model), prompt

    def logits(self) -> np.ndarray:
        """After the prompt, (V,), by the decoder's own step."""
        decoder = self.session.decoder
        decoder.rewind([0])
        decoder.prefill(0, self.prompt[:-1])
        return decoder.step([self.prompt[-1:]])[0, 0, 0].copy()

    def run(self, _: int = 0) -> int:
        """The next token, a number in host memory: the device is idle then."""
        self.session.set_tokens([])
        self.session.extend(self.prompt)
        return next(self.session.generate(GREEDY)).id


class Torch:
    def __init__(self, model: NanoEuler, prompt: list[int], threads: int, mode: str | None = None) -> None:
        # Here and not at the top: torch is needed only when it is the peer.
        from bench.torch_decode import TorchDecoder

        self.decoder = TorchDecoder(model, 1, threads, mode)
        self.ids = self.decoder.on_device(np.array([prompt]))
        self.position = self.decoder.on_device(np.arange(len(prompt)))

    def logits(self) -> np.ndarray:
        self.decoder.use_threads()
        return self.decoder.first(self.ids, self.position)[0, -1].float().cpu().numpy()

    def run(self, _: int = 0) -> int:
        return int(self.decoder.first(self.ids, self.position).argmax())


def of_length(model: NanoEuler, length: int, rounds: int, threads: int, peer: str | None) -> dict[str, Any]:
    """The times of one length of prompt."""
    prompt = np.random.default_rng(0).integers(0, model.config.vocab, length).tolist()
    makers: dict[str, Any] = {OURS: partial(Ours, model, prompt)}
    if peer:
        makers |= harness.by_threads(model.backend, partial(Torch, model, prompt), threads, MODES)
    contenders, logits, left_out = harness.soft(makers, lambda contender: contender.logits())
    tolerance = harness.LOGITS_TOLERANCE[model.backend.precision.name]
    parity = harness.check_parity(logits, tolerance, "logits differ by") if peer else None
    runs = {name: made.run for name, made in contenders.items()}
    between = harness.threads_of(contenders)
    both = harness.take_turns(runs, rounds, between=between, clock=clock_and_cpu)  # seconds by clock, of CPU
    clock, cpu = ({name: [t[i] for t in times] for name, times in both.items()} for i in range(2))
    results = harness.figures(clock, "ms", "clock", length)
    for name, found in results.items():
        found["cpu_ms"] = 1e3 * median(cpu[name])
        for key, times in (("ours_over_this", clock), ("ours_over_this_by_cpu", cpu)):
            found[key] = median(a / b for a, b in zip(times[OURS], times[name], strict=True))
    return {"prompt": length, "parity": parity, "left_out": left_out, "results": results}


def clock_and_cpu() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def measure(config: Config, backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    before, lengths = harness.machine(), []
    for length in args.prompt:
        model = harness.nanoeuler(config.override({"context": max(config.context, length + 1)}), backend)
        lengths.append(of_length(model, length, args.rounds, args.threads, args.peer))
    threads = {"ours": backend.workers, "torch": args.threads if args.peer else None}
    found = {"config": config.to_dict(), "rounds": args.rounds, "lengths": lengths, "threads": threads}
    return harness.environment(backend, args.peer, before) | found


COLUMNS = "median_ms:.2f | min_ms:.2f | cpu_ms:.2f | tokens_per_second:,.0f | ours_over_this:.2f"
COLUMNS += " | ours_over_this_by_cpu=by cpu:.2f"


def table(found: dict[str, Any]) -> list[str]:
    lines = harness.heading(found, ("threads", f"ours {found['threads']['ours']}"))
    for part in found["lengths"]:
        title = f"{part['prompt']:,} tokens, {found['rounds']} rounds"
        lines += [*harness.rows(COLUMNS, part["results"], title, part["left_out"]), *harness.agreement(part), ""]
    return lines[:-1]


def main(argv: Sequence[str] | None = None) -> int:
    p = Flags(__doc__)
    p.shared("config")
    p.number("--prompt", [512], "tokens of the prompts", 2, nargs="+")
    p.number("--rounds", 30, "counted prompts of each contender")
    p.shared("peer", "backend", "device", "precision", "workers", "threads")
    args = p.parse(argv)
    args.workers = args.workers or cores()
    args.threads = args.threads or args.workers
    found = measure(harness.nanoeuler_config(args.config), harness.backend_of(args, args.workers), args)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
