"""Time a training step of the U-Net next to the same U-Net in PyTorch: forward, backward, clipping, AdamW.

    python examples/diffusion/benchmark.py --peer torch                                      on a CPU
    python examples/diffusion/benchmark.py --width 64 --precision bf16 --peer torch          on a GPU

All contenders have the same weights and inputs, and must agree on the loss of the first steps. On a GPU ours runs as a
CUDA graph, as with --cuda-graph, and plainly; PyTorch eager, compiled, and compiled with CUDA graphs. A turn is timed
from beginning to end. PyTorch's batches lie on the device from the start, ours are uploaded in the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from bench import harness, training
from bench.harness import COMPILED, EAGER, GRAPH, OURS, Flags
from examples.diffusion.digits import noised
from examples.diffusion.unet import Config, UNet
from tinyforge.backends import Backend
from tinyforge.backends.workers import cores
from tinyforge.errors import UserError, run_command
from tinyforge.params import named
from tinyforge.train.objectives import Arrays, MeanOfRows

PLAIN = "tinyforge, no graph"
BATCHES, PARITY_STEPS, WARM_UP_STEPS, TURN = 4, 3, 3, 10
TOLERANCE = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 3e-2}  # of the loss, which begins at about 1.3


def batches_of(config: Config, rows: int) -> list[Arrays]:
    rng = np.random.default_rng(0)
    shape = (rows, config.channels, config.image, config.image)
    found = []
    for _ in range(BATCHES):
        images, labels = rng.integers(0, 256, shape).astype(np.uint8), rng.integers(0, config.classes, rows)
        noise = rng.normal(size=(rows, config.image, config.image, config.channels))
        found.append(noised(images, labels, rng.random(rows), noise, config.features))
    return found


def ours(config: Config, backend: Backend, batches: Sequence[Arrays], captured: bool) -> training.Ours:
    model = UNet(config, backend)
    model.initialise(seed=0)
    return training.Ours(model, backend, training.repeated(batches), captured=captured, objective=MeanOfRows())


def measure(config: Config, backend: Backend, rows: int, steps: int, peer: bool, precision: str) -> dict[str, Any]:
    before, gpu = harness.machine(), backend.name == "cupy"
    batches = batches_of(config, rows)
    first = ours(config, backend, batches, captured=gpu)
    buffer = first.model.buffer
    weights = {name: value.copy() for name, value in named(buffer, buffer.masters, backend).items()}

    def torch_peer(mode: str | None) -> Any:
        from examples.diffusion.torch_unet import Training

        made = Training(config, precision, "cuda" if gpu else "cpu", mode, batches)
        made.load(weights)
        return made

    makers: dict[str, Any] = {OURS: lambda: first}
    if gpu:
        makers[PLAIN] = lambda: ours(config, backend, batches, captured=False)
    if peer:
        makers |= harness.by_mode(backend, torch_peer, (EAGER, COMPILED, GRAPH))
    contenders, losses, left_out = harness.soft(makers, lambda c: [float(c.step(i)) for i in range(PARITY_STEPS)])
    parity = harness.check_parity(losses, TOLERANCE[precision], "losses differ by") if len(losses) > 1 else None
    for contender in contenders.values():
        for i in range(WARM_UP_STEPS):
            contender.step(i)
    seconds = harness.take_turns(
        {name: made.step for name, made in contenders.items()}, steps, backend.synchronize, turn=TURN, together=gpu
    )
    results = harness.figures(seconds, "ms", "step", rows)
    for found in results.values():
        found["images_per_second"] = found.pop("tokens_per_second")
    return harness.environment(backend, "torch" if peer else None, before) | {
        "config": config.to_dict(),
        "batch_size": rows,
        "counted_steps": steps,
        "parameters": buffer.count,
        "gflop_per_step": first.model.flop_per_token(1) * rows / 1e9,
        "parity": parity,
        "left_out": left_out,
        "results": results,
    }


def table(found: dict[str, Any]) -> list[str]:
    lines = harness.heading(
        found,
        ("model", f"{found['parameters']:,} parameters, {found['config']}"),
        ("batch", f"{found['batch_size']} images, {found['gflop_per_step']:.1f} GFLOP a step"),
        ("steps", f"{found['counted_steps']} counted each, in turns of {TURN}"),
    )
    columns = "median_ms:.3f | min_ms:.3f | images_per_second:,.0f | ours_over_this:.2f"
    return lines + harness.rows(columns, found["results"], left_out=found["left_out"])


def main(argv: Sequence[str] | None = None) -> int:
    p = Flags(__doc__)
    p.number("--width", 16, "channels at full size")
    p.number("--batch-size", 64, "images a step")
    p.number("--steps", 100, "counted steps for each contender")
    p.shared("peer", "backend", "device", "workers", precision={"help": "fp32, and on a GPU tf32 or bf16"})
    args = p.parse(argv)
    if args.precision not in TOLERANCE:
        raise UserError(f"--precision is {args.precision}, expected one of: {', '.join(TOLERANCE)}")
    backend = harness.backend_of(args, args.workers or cores())
    found = measure(Config(width=args.width), backend, args.batch_size, args.steps, bool(args.peer), args.precision)
    return harness.publish(found, table(found), args)


if __name__ == "__main__":
    run_command(main)
