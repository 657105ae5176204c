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

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness, training
from bench.harness import COMPILED, EAGER, GRAPH, OURS, LeftOut
from tinyforge.backends import Backend
from tinyforge.backends.workers import cores
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError, run_command
from tinyforge.optim import AdamWConfig, learning_rate
from tinyforge.params import named
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.objectives import Batch

MODEL, PRESET = "gpt2", "char"
PEERS = {"torch": (COMPILED, GRAPH), "torch-eager": (EAGER,)}
PUBLISHED = 1.4697  # nats, nanoGPT's README
ADAMW = AdamWConfig(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
LR, FLOOR, WARM_UP = 1e-3, 0.1, 100  # FLOOR: the last rate as a share of the peak
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
        """Windows at random places of the training text, as nanoGPT samples them: a pure function of the step."""
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


class Ours(training.Ours):
    def __init__(self, options: Options, backend: Backend) -> None:
        model = find_model(MODEL).build(options.config, backend)
        model.initialise(options.seed)
        super().__init__(model, backend, options.batch, optimizer=ADAMW, seed=options.seed)

    def nll(self, batch: Batch) -> float:
        """The summed nll of a batch, without dropout."""
        return float(self.parallel.nll(batch)[0])


class Peer:
    def __init__(self, options: Options, backend: Backend, weights: dict[str, np.ndarray], mode: str | None) -> None:
        """mode: of torch.compile; None for eager."""
        # Here and not at the top: torch is only needed when it is the peer.
        import torch

        from bench.torch_peer import TorchTraining

        self.torch, self.options, self.weights = torch, options, weights
        device, precision, threads = "cuda" if backend.name == "cupy" else "cpu", options.precision, options.threads
        self.training = TorchTraining(MODEL, options.config, precision, device, threads, mode, ADAMW)
        self.restart()

    def restart(self) -> None:
        """The first weights, and an optimizer without state."""
        self.training.load(self.weights)
        self.training.optimizer.state.clear()
        self.torch.manual_seed(self.options.seed)

    def step(self, index: int, lr: float) -> None:
        self.training.step(*self.training.batch(self.options.batch(index)), lr)

    def nll(self, batch: Batch) -> float:
        training = self.training
        training.model.eval()
        with self.torch.no_grad(), training.autocast:
            mean = training.model(*training.batch(batch))
        training.model.train()
        return float(mean) * int((batch.targets >= 0).sum())


def first_steps(contender: Any) -> None:
    """Before the clock, to compile."""
    for index in range(FIRST_STEPS):
        contender.step(index, LR)


def train(contender: Any, options: Options, backend: Backend, say: Callable[[str], None]) -> dict[str, Any]:
    """The complete run of one contender. losses: (steps, held-out nats) at each evaluation."""
    held_out = options.held_out_batches()
    count = sum(int((batch.targets >= 0).sum()) for batch in held_out)
    seconds, losses = 0.0, []
    for first in range(0, options.steps, options.eval_every):
        last = min(first + options.eval_every, options.steps)
        backend.synchronize()
        start = time.perf_counter()
        for step in range(first, last):
            contender.step(step, options.lr(step))
        backend.synchronize()
        seconds += time.perf_counter() - start
        losses.append((last, sum(map(contender.nll, held_out)) / count))
        say(f"step {last}: held-out loss {losses[-1][1]:.4f} nats, {seconds:.1f} s")
    best_step, best = min(losses, key=lambda found: found[1])
    found = {"seconds": seconds, "step_ms": 1e3 * seconds / options.steps, "best_val_nats": best}
    return found | {"best_step": best_step, "last_val_nats": losses[-1][1], "losses": losses}


def measure(options: Options, backend: Backend, peer: str | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Train ours, then the peer; everything that is printed, as a JSON object."""
    before, ours = harness.machine(), Ours(options, backend)
    buffer = ours.model.buffer
    weights, parameters = named(buffer, buffer.masters, backend), buffer.count
    first_steps(ours)
    ours, left_out = Ours(options, backend), LeftOut()
    say(OURS)
    results = {OURS: train(ours, options, backend, say)}

    def compiled(other: Peer) -> None:
        first_steps(other)
        other.restart()

    makers = harness.by_mode(backend, partial(Peer, options, backend, weights), PEERS.get(peer or "", ()))
    for name, make in makers.items():
        made, _, why = harness.soft({name: make}, compiled)
        left_out |= why
        if made:
            say(name)
            results[name] = train(made[name], options, backend, say)
    for found in results.values():
        found["ours_over_this"] = results[OURS]["seconds"] / found["seconds"]
    found = {"model": MODEL, "config": options.config.to_dict(), "parameters": parameters, "steps": options.steps}
    found["batch"] = [options.rows, options.config.context]
    found["characters"] = {"train": len(options.train), "held_out": len(options.held_out)}
    found |= {"published_val_nats": PUBLISHED, "left_out": left_out, "results": results}
    return harness.environment(backend, peer, before) | found


COLUMNS = "seconds:.1f | step_ms=ms/step:.2f | ours_over_this:.2f | best_val_nats=best val:.4f | best_step=at step:,"
COLUMNS += " | last_val_nats=last val:.4f"


def table(found: dict[str, Any]) -> list[str]:
    """The figures of `measure` for people."""
    run = "{:,} steps of {} x {} characters".format(found["steps"], *found["batch"])
    run = f"{run}, {found['precision']}, {found['parameters']:,} parameters"
    lines = harness.heading(found, ("run", run), ("nanoGPT", f"{found['published_val_nats']} nats, as published"))
    return lines + harness.rows(COLUMNS, found["results"], left_out=found["left_out"])


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
        raise UserError(f"--data: {path} has {len(ids):,} characters, its last tenth needs more than {context}")
    return ids[:cut], ids[cut:], len(alphabet)


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, "")
    p.text("--data", required=True, metavar="FILE", help="tiny Shakespeare, one text file")
    p.number("--steps", 5000, "steps of each")
    p.number("--batch-size", 64, "windows a step")
    p.number("--eval-every", 250, "steps between evaluations")
    p.shared(peer={"choices": tuple(PEERS), "help": "train PyTorch's after ours, compiled (twice), or eager"})
    p.shared("backend", "precision")
    p.shared(workers={"help": "processes of ours, threads of PyTorch on a CPU (default: one a core)"})
    p.number("--seed", 0, "of weights, batches and dropout", 0)
    args = p.parse(argv)
    config, threads = find_model(MODEL).presets[PRESET], args.workers or cores()
    train_ids, held_out, vocab = read_characters(Path(args.data), config.context)
    run = args.steps, args.batch_size, args.eval_every, args.seed, args.precision, threads
    options = Options(config.override({"vocab": vocab}), train_ids, held_out, *run)
    backend = harness.backend_of(args, args.workers)
    found = measure(options, backend, args.peer, lambda line: print(line, file=sys.stderr, flush=True))
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
