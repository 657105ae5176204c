"""Memory and time of a training step with LoRA adapters, next to one that trains all weights.

    python bench/lora.py                                                     SmolLM2-135M's shape, on the CPU
    python bench/lora.py --backend cupy --precision bf16 --batch-size 4 --seq-len 512

Each of the two runs in its own child process, which builds the model with random weights and takes the same steps:
forward, backward, clipping, AdamW. Time is the median of the steps after the first two; with one worker on a CPU it is
processor time, which is independent of other load. Memory is the peak of the process (on a GPU: of arrays). Beside it
is the planned memory of the step on a GPU, without the interpreter and its libraries, and with one set of gradients,
where a CPU has one per worker.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from tinyforge.adapters import Adapted, Adapters
from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.optim import AdamW
from tinyforge.registry import find_model
from tinyforge.report import add_json_flag, check_before, publish
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.data_parallel import Sharded
from tinyforge.train.metrics import peak_memory_mib
from tinyforge.train.objectives import NextTokens
from tinyforge.train.plan import plan_step

WARM_UP = 2
KINDS = ("all weights", "adapters")


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Take the steps in a child process; seconds a step, MiB."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        return child.submit(_steps, kind, args).result()


def _steps(kind: str, args: argparse.Namespace) -> dict[str, float]:
    backend = get_backend(args.backend, args.precision, args.workers)
    spec = find_model(args.model)
    config = spec.presets[args.config]
    hook: Any = nullcontext()
    if backend.name == "cupy":
        from tinyforge.backends.cupy_backend import PeakMemory

        hook = PeakMemory()
    with hook as peak:
        make = partial(spec.build, config, backend)
        model = make() if kind == KINDS[0] else Adapted(make, adapters_of(args))
        buffer, rng = model.buffer, np.random.default_rng(0)
        buffer.initialise(Stream(0, "init"))
        for p in buffer.frozen:
            rows = p.value.reshape(-1, p.shape[-1])
            for row in range(0, len(rows), 1024):  # a part at a time: what is drawn is not to count
                part = rows[row : row + 1024]
                part[...] = backend.asarray(rng.standard_normal(part.shape, np.float32) * p.std + p.fill)
        sharded, optimizer = Sharded(model, backend, NextTokens(config.head_weights)), AdamW(buffer, backend)
        tokens = rng.integers(0, config.vocab, (args.batch_size + 2) * args.seq_len)
        batch = PackedTokens(tokens, args.seq_len, config.prediction_heads, seed=0).batch(0, args.batch_size)
        clock = time.process_time if backend.name == "numpy" and backend.workers == 1 else time.perf_counter
        seconds = []
        for step in range(WARM_UP + args.steps):
            start = clock()
            sharded.gradients([batch], Stream(step, "dropout"))
            _, factor = optimizer.clip(1.0)
            optimizer.step(1e-3, factor)
            backend.synchronize()
            seconds.append(clock() - start)
        memory = peak.bytes / 2**20 if peak else peak_memory_mib()
    return {"seconds": median(seconds[WARM_UP:]), "peak_mib": memory}


def adapters_of(args: argparse.Namespace) -> Adapters:
    return Adapters(args.rank, 2.0 * args.rank, args.dropout)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", default="llama", help="model of the zoo (default: %(default)s)")
    parser.add_argument("--config", default="SmolLM2-135M", help="one of its presets (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.05, help="on the adapters' input (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences a step (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="counted steps (default: %(default)s)")
    parser.add_argument("--backend", default="numpy", choices=("numpy", "cupy"), help="(default: %(default)s)")
    parser.add_argument("--precision", default="fp32", help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes, on a CPU (default: %(default)s)")
    add_json_flag(parser)
    args = parser.parse_args(argv)
    if min(args.rank, args.batch_size, args.seq_len, args.steps, args.workers) < 1:
        raise UserError("--rank, --batch-size, --seq-len, --steps and --workers want numbers of 1 or more")
    spec = find_model(args.model)
    if args.config not in spec.presets:
        raise UserError(f"--config: {args.config!r} is not a preset ({', '.join(spec.presets)})")
    config, asked = spec.presets[args.config], vars(args).copy()
    check_before(asked.pop("json"))
    found: dict[str, Any] = {**asked, "machine": get_backend(args.backend, args.precision, args.workers).describe()}
    table = [f"{'':<12} {'s a step':>9} {'peak MiB':>9} {'planned':>9}"]
    for kind in KINDS:
        adapters = adapters_of(args) if kind == KINDS[1] else None
        plan = plan_step(spec, config, args.precision, args.batch_size, args.seq_len, adapters=adapters)
        row = {**measure(kind, args), "planned_mib": plan.peak / 2**20}
        table.append(f"{kind:<12} {row['seconds']:>9.3f} {row['peak_mib']:>9.0f} {row['planned_mib']:>9.0f}")
        found[kind] = row
    shares = [found["adapters"][name] / found["all weights"][name] for name in ("seconds", "peak_mib", "planned_mib")]
    table.append(f"{'share':<12} {shares[0]:>9.2f} {shares[1]:>9.2f} {shares[2]:>9.2f}")
    publish(found, "\n".join(table), args.json)
    return 0


if __name__ == "__main__":
    run_command(main)
