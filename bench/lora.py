"""Memory and time of a training step with LoRA adapters, next to one that trains all weights; or, with --weights, of
adapters on frozen matrices of four bits, next to those on matrices in the precision.

    python bench/lora.py                                                     SmolLM2-135M's shape, on the CPU
    python bench/lora.py --backend cupy --precision bf16 --batch-size 4 --seq-len 512
    python bench/lora.py --backend cupy --precision bf16 --seq-len 2048 --rank 16 --dropout 0 --weights nf4 --peer torch
        --set dim=4096 heads=32 kv_heads=8 layers=32 hidden=14336 vocab=128256 context=2048 tied=false

Each of them runs in its own child process, which builds the model with random weights and takes the same steps:
forward, backward, clipping, AdamW. Time is the median of the steps after the first two; with one worker on a CPU it is
processor time, which is independent of other load. Memory is the peak of the process (on a GPU: of arrays). Planned is
the memory of the step on a GPU, without the interpreter and its libraries, and with one set of gradients, where a CPU
has one per worker. --peer torch: adapters in PyTorch, compiled, on frozen matrices in bf16.
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
from tinyforge.quantised import DOUBLE, FOR_TUNING
from tinyforge.registry import find_model
from tinyforge.rng import Stream
from tinyforge.train.batches import PackedTokens
from tinyforge.train.plan import plan_step
from tinyforge.train.settings import with_fields

WARM_UP = 2
KINDS = ("all weights", "adapters")
BLOCK = 1024
"""Rows of random numbers that are repeated: enough for a product's time, and quickly made."""


def config_of(args: argparse.Namespace) -> Any:
    return with_fields(find_model(args.model).presets[args.config], args.set)


def fill(p: Any, backend: Any, rng: np.random.Generator) -> None:
    """Set a frozen parameter to random numbers."""
    if p.weights:
        codes, scales = (x.reshape(-1, x.shape[-1]) for x in (p.stored.codes, p.stored.scales))
        made = rng.integers(0, 256, (BLOCK, codes.shape[1]), np.uint8).view(codes.dtype)
        size = 3 * p.std / (1 if p.weights.startswith("nf4") else 127)
        if p.weights == DOUBLE:
            tops, offset, _ = p.stored.second
            scales[...], tops[...], offset[...] = 0, 0, size
        else:
            scales[...] = size
        rows = codes
    else:
        rows = p.value.reshape(-1, p.shape[-1])
        made = rng.standard_normal((BLOCK, rows.shape[1]), np.float32) * p.std + p.fill
    block = backend.asarray(made, rows.dtype)
    for row in range(0, len(rows), BLOCK):
        rows[row : row + BLOCK] = block[: len(rows) - row]


def steps(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds a step, MiB; runs in a child process."""
    backend, spec = harness.backend_of(args, args.workers), find_model(args.model)
    config = config_of(args)
    make = partial(spec.build, config, backend, recompute=args.recompute)
    with harness.peak_mib(backend) as peak:
        adapters = adapters_of(args, kind)
        model = make() if adapters is None else Adapted(make, adapters)
        rng = np.random.default_rng(0)
        model.buffer.initialise(Stream(0, "init"))
        for p in model.buffer.frozen:
            fill(p, backend, rng)
        tokens = rng.integers(0, config.vocab, (args.batch_size + 2) * args.seq_len)
        batch = PackedTokens(tokens, args.seq_len, config.prediction_heads, seed=0).batch(0, args.batch_size)
        step, alone = Ours(model, backend, lambda _: batch).step, backend.name == "numpy" and backend.workers == 1
        clock = time.process_time if alone else time.perf_counter
        turn = {"turn": args.steps, "warm_up": WARM_UP, "clock": clock}
        [seconds] = harness.take_turns({kind: step}, args.steps, backend.synchronize, **turn).values()
        return {"seconds": median(seconds), "peak_mib": peak()}


def adapters_of(args: argparse.Namespace, kind: str) -> Adapters | None:
    if kind == KINDS[0]:
        return None
    return Adapters(args.rank, 2.0 * args.rank, args.dropout, weights="" if kind == KINDS[1] else args.weights)


def torch_steps(args: argparse.Namespace) -> dict[str, float]:
    """As `steps`, of PyTorch compiled: matrices in bf16, adapters in float32 under autocast."""
    import torch

    from bench.torch_peer import MODELS, TorchTraining

    class WithAdapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a = torch.nn.Parameter(torch.randn(args.rank, base.in_features) * (3 * base.in_features) ** -0.5)
            self.b = torch.nn.Parameter(torch.zeros(base.out_features, args.rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dropped = torch.nn.functional.dropout(x, args.dropout) if args.dropout else x
            low = torch.nn.functional.linear(torch.nn.functional.linear(dropped, self.a), 2.0 * self.b)
            return self.base(x) + low

    def build(config: Any) -> torch.nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            model = MODELS[args.model](config).requires_grad_(False)
            torch.set_default_dtype(torch.float32)
            for block in model.blocks:
                for name in ("qkv", "out", "gate_up", "down"):
                    setattr(block, name, WithAdapter(getattr(block, name)))
        return model.cuda()  # the tables of RoPE are made on the CPU

    class Training(TorchTraining):
        def __init__(self) -> None:
            torch.backends.cuda.matmul.allow_tf32 = True
            self.device, self.model = torch.device("cuda"), build(config_of(args))
            self.autocast = torch.autocast("cuda", torch.bfloat16)
            self.forward, self.graphs = torch.compile(self.model), False
            learned = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(learned, fused=True)

    training, config = Training(), config_of(args)
    tokens = np.random.default_rng(0).integers(0, config.vocab, (args.batch_size + 2) * args.seq_len)
    batch = training.batch(PackedTokens(tokens, args.seq_len, 1, seed=0).batch(0, args.batch_size))
    turn: dict[str, Any] = {"turn": args.steps, "warm_up": WARM_UP}
    step = {"torch": lambda _: training.step(*batch, 1e-3)}
    [seconds] = harness.take_turns(step, args.steps, torch.cuda.synchronize, **turn).values()
    return {"seconds": median(seconds), "peak_mib": torch.cuda.max_memory_allocated() / 2**20}


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
    p.text(
        "--weights",
        None,
        "format of the frozen matrices, to be compared with those in the precision",
        choices=FOR_TUNING,
    )
    p.text("--recompute", "", "in backward", choices=("", "blocks"))
    p.text("--set", (), "fields of the config, as dim=512", nargs="*", metavar="FIELD=VALUE")
    p.text("--peer", None, "compare with compiled PyTorch, on a GPU", choices=("torch",))
    args = p.parse(argv)
    spec, given = find_model(args.model), {name: value for name, value in vars(args).items() if name != "json"}
    if args.config not in spec.presets:
        raise UserError(f"--config: {args.config!r} is not a preset ({', '.join(spec.presets)})")
    found: dict[str, Any] = {**given, "machine": harness.backend_of(args, args.workers).describe()}
    kinds = (KINDS[1], f"on {args.weights}") if args.weights else KINDS
    for kind in kinds:
        shape = args.precision, args.batch_size, args.seq_len, args.recompute
        plan = plan_step(spec, config_of(args), *shape, adapters=adapters_of(args, kind))
        found[kind] = {**harness.in_child(steps, kind, args), "planned_mib": plan.peak / 2**20}
    dense, adapted = (found[kind] for kind in kinds)
    rows = {kind: found[kind] for kind in kinds} | {"share": {key: adapted[key] / dense[key] for key in dense}}
    if args.peer:
        found["torch compiled"] = {**harness.in_child(torch_steps, args), "planned_mib": float("nan")}
        rows["torch compiled"] = found["torch compiled"]
    columns = "seconds=s a step:.3f | peak_mib:,.2f | planned_mib=planned:,.2f"
    return harness.publish(found, harness.rows(columns, rows), args)


if __name__ == "__main__":
    run_command(main)
