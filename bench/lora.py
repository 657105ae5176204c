"""Memory and time of a training step with LoRA adapters, next to one that trains all weights.

    python bench/lora.py                                                     SmolLM2-135M's shape, on the CPU
    python bench/lora.py --backend cupy --precision bf16 --batch-size 4 --seq-len 512

Each of the two runs in its own child process, which builds the model with random weights and takes the same steps:
forward, backward, clipping, AdamW. Time is the median of the steps after the first two; with one worker on a CPU it is
processor time, which is independent of other load. Memory is the peak of the process (on a GPU: of arrays). Planned is
the memory of the step on a GPU, without the interpreter and its libraries, and with one set of gradients, where a CPU
has one per worker.
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
from bench.training import Ours
from tinyforge.adapters import Adapted, Adapters
from tinyforge.errors import UserError, run_command
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.plan import plan_step

WARM_UP = 2
KINDS = ("all weights", "adapters")


def steps(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds a step, MiB; runs in a child process."""
    backend, spec = harness.backend_of(args, args.workers), find_model(args.model)
    config = spec.presets[args.config]
    make = partial(spec.build, config, backend)
    with harness.peak_mib(backend) as peak:
        model = make() if kind == KINDS[0] else Adapted(make, adapters_of(args))
        rng = np.random.default_rng(0)
        model.buffer.initialise(Stream(0, "init"))
        for p in model.buffer.frozen:
            rows = p.value.reshape(-1, p.shape[-1])
            for row in range(0, len(rows), 1024):  # a part at a time: the memory of random numbers is not to count
                part = rows[row : row + 1024]
                part[...] = backend.asarray(rng.standard_normal(part.shape, np.float32) * p.std + p.fill)
        tokens = rng.integers(0, config.vocab, (args.batch_size + 2) * args.seq_len)
        batch = PackedTokens(tokens, args.seq_len, config.prediction_heads, seed=0).batch(0, args.batch_size)
        step, alone = Ours(model, backend, lambda _: batch).step, backend.name == "numpy" and backend.workers == 1
        clock = time.process_time if alone else time.perf_counter
        turn = {"turn": args.steps, "warm_up": WARM_UP, "clock": clock}
        [seconds] = harness.take_turns({kind: step}, args.steps, backend.synchronize, **turn).values()
        return {"seconds": median(seconds), "peak_mib": peak()}


def adapters_of(args: argparse.Namespace) -> Adapters:
    return Adapters(args.rank, 2.0 * args.rank, args.dropout)


def main(argv: Sequence[str] | None = None) -> int:
    p = harness.Flags(__doc__, "")
    p.text("--model", "llama", "model of the zoo")
    p.text("--config", "SmolLM2-135M", "one of its presets")
    p.number("--rank", 8, "of the adapters")
    p.number("--dropout", 0.05, "on the adapters' input", 0)
    p.number("--batch-size", 1, "sequences a step")
    p.number("--seq-len", 128, "tokens a sequence")
    p.number("--steps", 5, "counted steps")
    p.shared("precision", backend={"default": "numpy", "choices": ("numpy", "cupy")})
    p.number("--workers", 1, "processes, on a CPU")
    args = p.parse(argv)
    spec, given = find_model(args.model), {name: value for name, value in vars(args).items() if name != "json"}
    if args.config not in spec.presets:
        raise UserError(f"--config: {args.config!r} is not a preset ({', '.join(spec.presets)})")
    found: dict[str, Any] = {**given, "machine": harness.backend_of(args, args.workers).describe()}
    for kind, adapters in zip(KINDS, (None, adapters_of(args)), strict=True):
        shape = args.precision, args.batch_size, args.seq_len
        plan = plan_step(spec, spec.presets[args.config], *shape, adapters=adapters)
        found[kind] = {**harness.in_child(steps, kind, args), "planned_mib": plan.peak / 2**20}
    dense, adapted = (found[kind] for kind in KINDS)
    rows = {kind: found[kind] for kind in KINDS} | {"share": {key: adapted[key] / dense[key] for key in dense}}
    columns = "seconds=s a step:.3f | peak_mib:,.2f | planned_mib=planned:,.2f"
    return harness.publish(found, harness.rows(columns, rows), args)


if __name__ == "__main__":
    run_command(main)
