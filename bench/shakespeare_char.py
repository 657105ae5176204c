"""nanoGPT's first lesson, a model of Shakespeare's characters, trained by us and by PyTorch, one after the other.

    python bench/shakespeare_char.py --data input.txt                                      ours alone
    python bench/shakespeare_char.py --data input.txt --backend cupy --precision bf16 --peer torch --json result.json
    python bench/shakespeare_char.py --data input.txt --steps 200 --peer torch-eager       less of it

The data is tiny Shakespeare as one text file, 1.1 MB; its last tenth is held out. The model is the preset `char` of
GPT-2: 6 layers of width 384, dropout 0.2. The run is nanoGPT's train_shakespeare_char: 5,000 steps of 64 x 256
characters, AdamW with rates from 1e-3 down to 1e-4, a warm-up of 100 steps, beta2 0.99, weight decay 0.1, clipping at
1. Its published validation loss is 1.4697 nats.

Both start from the same weights and see the same batches. The peer is nanoGPT's model in PyTorch, with dropout in
the same places. Every 250 steps both are measured on all of the held-out text, in order, without dropout; the best of
these losses is reported, as nanoGPT does. Seconds are those of the steps: neither evaluation nor compilation is in them
(a few steps are taken first, and undone).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench.peers import (
    COMPILED,
    EAGER,
    GRAPH,
    GRAPHS_NEED_A_GPU,
    MODES,
    OURS,
    LeftOut,
    environment,
    heading,
    left_out_table,
    soft,
)
from tinyforge.backends import Backend, get_backend
from tinyforge.backends.workers import cores
from tinyforge.config import ModelConfig
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.optim import AdamW, AdamWConfig, learning_rate
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import Sharded
from tinyforge.train.objectives import Batch, NextTokens

MODEL, PRESET = "gpt2", "char"
PEERS = {"torch": (COMPILED, GRAPH), "torch-eager": (EAGER,)}
PUBLISHED = 1.4697  # nats, nanoGPT's README
ADAMW = AdamWConfig(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
LR, FLOOR, WARM_UP, CLIP = 1e-3, 0.1, 100, 1.0  # FLOOR: the last rate as a share of the peak
FIRST_STEPS = 5  # before the clock, to compile


@dataclass(frozen=True)
class Options:
    """The run. rows: windows of the context's length in a batch. threads: of PyTorch on a CPU."""

    config: ModelConfig
    train: np.ndarray
    held_out: np.ndarray
    steps: int
    rows: int
    eval_every: int
    seed: int
    precision: str
    threads: int

    def batch(self, step: int) -> Batch:
        """Windows at random places of the training text, as nanoGPT draws them: a pure function of the step."""
        length = self.config.context
        places = Stream(self.seed, f"shakespeare/{step}").uniform((self.rows,)) * (len(self.train) - length)
        rows = self.train[places.astype(np.int64)[:, None] + np.arange(length + 1)]
        return Batch(np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:, None]))

    def held_out_batches(self) -> list[Batch]:
        """All of the held-out text, each character predicted once."""
        windows = PackedTokens(self.held_out, self.config.context, 1, self.seed)
        return list(windows.in_order(self.rows, len(self.held_out)))

    def lr(self, step: int) -> float:
        warm_up = min(1.0, WARM_UP / max(self.steps, 1))
        return learning_rate("cosine", step / self.steps, LR, decay=1.0, warmup=warm_up, floor=FLOOR)


class Contender(Protocol):
    def step(self, batch: Batch, number: int, lr: float) -> None:
        """One step of training; may return before the device has done it."""

    def nll(self, batch: Batch) -> float:
        """The summed nll of a batch, without dropout."""


class Ours:
    def __init__(self, options: Options, backend: Backend) -> None:
        self.model = find_model(MODEL).build(options.config, backend)
        self.model.initialise(options.seed)
        self.sharded = Sharded(self.model, backend, NextTokens())
        self.optimizer = AdamW(self.model.buffer, backend, ADAMW)
        self.noise = Stream(options.seed, "dropout")

    def step(self, batch: Batch, number: int, lr: float) -> None:
        self.sharded.gradients([batch], self.noise.fork(str(number)))
        _, factor = self.optimizer.clip(CLIP)
        self.optimizer.step(lr, factor)

    def nll(self, batch: Batch) -> float:
        return float(self.sharded.nll(batch)[0])


class Peer:
    def __init__(self, options: Options, backend: Backend, weights: dict[str, np.ndarray], mode: str | None) -> None:
        """mode: of torch.compile; None for eager."""
        # Here and not at the top: torch is only needed when it is the peer.
        import torch

        from bench.torch_peer import TorchTraining

        self.torch = torch
        self.training = TorchTraining(
            MODEL,
            options.config,
            precision=options.precision,
            device="cuda" if backend.name == "cupy" else "cpu",
            threads=options.threads,
            clip=CLIP,
            compiled=mode,
            adamw=ADAMW,
        )
        self.weights, self.seed = weights, options.seed
        self.restart()

    def restart(self) -> None:
        """The first weights, and an optimizer that knows nothing."""
        self.training.load(self.weights)
        self.training.optimizer.state.clear()
        self.torch.manual_seed(self.seed)

    def step(self, batch: Batch, number: int, lr: float) -> None:
        self.training.step(*self.training.batch(batch), lr)

    def nll(self, batch: Batch) -> float:
        training = self.training
        training.model.eval()
        with self.torch.no_grad(), training.autocast:
            mean = training.model(*training.batch(batch))
        training.model.train()
        return float(mean) * int((batch.targets >= 0).sum())


def train(contender: Contender, options: Options, backend: Backend, say: Callable[[str], None]) -> dict[str, Any]:
    """The whole run of one contender. losses: (steps, held-out nats) at each evaluation."""
    held_out = options.held_out_batches()
    count = sum(int((batch.targets >= 0).sum()) for batch in held_out)
    seconds, losses = 0.0, []
    for first in range(0, options.steps, options.eval_every):
        last = min(first + options.eval_every, options.steps)
        backend.synchronize()
        start = time.perf_counter()
        for step in range(first, last):
            contender.step(options.batch(step), step, options.lr(step))
        backend.synchronize()
        seconds += time.perf_counter() - start
        loss = sum(map(contender.nll, held_out)) / count
        losses.append((last, loss))
        say(f"step {last}: held-out loss {loss:.4f} nats, {seconds:.1f} s")
    best_step, best = min(losses, key=lambda found: found[1])
    return {
        "seconds": seconds,
        "step_ms": 1e3 * seconds / options.steps,
        "best_val_nats": best,
        "best_step": best_step,
        "last_val_nats": losses[-1][1],
        "losses": losses,
    }


def measure(options: Options, backend: Backend, peer: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Train ours, then the peer; everything that is printed, as a JSON object."""
    load_average = os.getloadavg()[0]
    ours = Ours(options, backend)
    buffer = ours.model.buffer
    weights = named(buffer, buffer.masters, backend)
    for step in range(FIRST_STEPS):
        ours.step(options.batch(step), step, LR)
    parameters, ours = buffer.count, Ours(options, backend)
    say(OURS)
    results = {OURS: train(ours, options, backend, say)}

    def warm(other: Peer) -> None:
        for step in range(FIRST_STEPS):
            other.step(options.batch(step), step, LR)
        other.restart()

    left_out: LeftOut = {}
    for name in PEERS[peer] if peer else ():
        graph_on_cpu = name == GRAPH and backend.name != "cupy"
        make = GRAPHS_NEED_A_GPU if graph_on_cpu else partial(Peer, options, backend, weights, MODES[name])
        made, _, why = soft({name: make}, warm)
        left_out |= why
        if made:
            say(name)
            results[name] = train(made[name], options, backend, say)
    for found in results.values():
        found["ours_over_this"] = results[OURS]["seconds"] / found["seconds"]
    return environment(backend, peer, load_average) | {
        "model": MODEL,
        "config": options.config.to_dict(),
        "parameters": parameters,
        "steps": options.steps,
        "batch": [options.rows, options.config.context],
        "characters": {"train": len(options.train), "held_out": len(options.held_out)},
        "published_val_nats": PUBLISHED,
        "left_out": left_out,
        "results": results,
    }


def table(found: dict[str, Any]) -> str:
    """The figures of `measure` for people."""
    rows, length = found["batch"]
    lines = [
        *(f"{name:<13} {value}" for name, value in heading(found)),
        f"{'run':<13} {found['steps']:,} steps of {rows} x {length} characters, {found['precision']}, "
        f"{found['parameters']:,} parameters",
        f"{'nanoGPT':<13} {found['published_val_nats']} nats, as published",
        "",
        f"{'':<27} {'seconds':>8} {'ms/step':>8} {'ours/this':>9} {'best val':>9} {'at step':>8} {'last val':>9}",
    ]
    lines += [
        f"{name:<27} {r['seconds']:>8.1f} {r['step_ms']:>8.2f} {r['ours_over_this']:>9.2f} {r['best_val_nats']:>9.4f} "
        f"{r['best_step']:>8,} {r['last_val_nats']:>9.4f}"
        for name, r in found["results"].items()
    ]
    lines += left_out_table(found["left_out"])
    return "\n".join(lines)


def read_characters(path: Path, context: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The training text and its last tenth as ids in the order of the characters, and how many of those there are."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--data: cannot read {path}: {error}; give tiny Shakespeare as one text file") from error
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    alphabet, ids = np.unique(codes, return_inverse=True)
    ids = ids.astype(np.int32)
    cut = int(0.9 * len(ids))
    if len(ids) - cut <= context:
        raise UserError(f"--data: {path} has {len(ids):,} characters, its last tenth wants more than {context}")
    return ids[:cut], ids[cut:], len(alphabet)


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("--data", required=True, metavar="FILE", help="tiny Shakespeare, one text file")
    p.add_argument("--steps", type=int, default=5000, help="steps of each (default: 5000)")
    p.add_argument("--batch-size", type=int, default=64, help="windows a step (default: 64)")
    p.add_argument("--eval-every", type=int, default=250, help="steps between evaluations (default: 250)")
    p.add_argument("--peer", choices=tuple(PEERS), help="train PyTorch's after ours, compiled (twice), or eager")
    p.add_argument("--backend", default="auto", help="ours: auto, numpy, cupy (default: auto)")
    p.add_argument("--precision", default="fp32", help="fp32, and on a GPU tf32 or bf16 (default: fp32)")
    p.add_argument("--workers", type=int, help="processes of ours, threads of PyTorch on a CPU (default: one a core)")
    p.add_argument("--seed", type=int, default=0, help="of weights, batches and dropout (default: 0)")
    add_json_flag(p)
    args = p.parse_args(argv)
    for name in ("steps", "batch_size", "eval_every"):
        if getattr(args, name) <= 0:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(args, name)}, wants a number above 0")
    check_before(args.json, args.peer)
    config = find_model(MODEL).presets[PRESET]
    train_ids, held_out, vocab = read_characters(Path(args.data), config.context)
    options = Options(
        config.override({"vocab": vocab}),
        train_ids,
        held_out,
        args.steps,
        args.batch_size,
        args.eval_every,
        args.seed,
        args.precision,
        args.workers or cores(),
    )
    backend = get_backend(args.backend, args.precision, args.workers)
    found = measure(options, backend, args.peer, lambda line: print(line, file=sys.stderr, flush=True))
    publish(found, table(found), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
