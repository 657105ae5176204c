"""Train a U-Net that turns noise into images of digits.

    python examples/diffusion/train.py --data mnist                   4 minutes on two idle CPU cores
    python examples/diffusion/train.py --data mnist --width 64 --precision bf16 --cuda-graph --steps 8000
    python examples/diffusion/train.py --resume                       continue runs/diffusion

--data: a folder of idx files, a folder of PNGs per class, or a parquet file, as of recipes/classify.py. The run ends
with the held-out error and samples.png. README.md derives the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

from examples.diffusion.digits import batch_of, draw, noised, sampled
from examples.diffusion.unet import SPEC, Config
from tinyforge import checkpoint
from tinyforge.data.labelled import Labelled, has_test_images, hold_out, read_images
from tinyforge.errors import UserError, run_command
from tinyforge.parallel.launch import ProcessGroupInfo
from tinyforge.rng import Stream
from tinyforge.train.batches import Shuffled, fingerprint, micro_batches
from tinyforge.train.data_parallel import DataParallel
from tinyforge.train.metrics import save_scores
from tinyforge.train.objectives import MeanOfRows
from tinyforge.train.plan import print_plan
from tinyforge.train.run import Run, Task, running
from tinyforge.train.settings import (
    MODEL,
    OF_TEXT,
    Settings,
    above_zero,
    described,
    open_backend,
    parse,
    setting,
    with_default,
)

HELD_OUT = 2000  # images, each at one time and with one noise, the same at every evaluation


@dataclass(frozen=True)
class DiffusionSettings(Settings):
    """examples/diffusion/train.py: images and the U-Net's width."""

    unused = OF_TEXT
    out: str = with_default("out", "runs/diffusion")
    data: tuple[str, ...] = with_default("data", (), "a folder of images, or a parquet file")
    steps: int | None = with_default("steps", 2000)
    batch_size: int = with_default("batch_size", 64, "images per micro-batch")
    lr: float = with_default("lr", 2e-3)
    weight_decay: float = with_default("weight_decay", 0.01)
    eval_every: int = with_default("eval_every", 500)
    width: int = setting(16, "channels at full size", check=above_zero, group=MODEL)


def main(argv: Sequence[str] | None = None) -> int:
    settings, resume, plan_only, _ = parse(DiffusionSettings, __doc__ or "", argv, actions=("resume", "plan"))
    if plan_only:
        print_plan(SPEC, Config(width=settings.width), settings)
        return 0
    with running(settings, resume) as ranks:
        train(settings, resume, ranks)
    return 0


def read(settings: DiffusionSettings) -> tuple[Labelled, Labelled]:
    """Images to learn from, and held-out ones."""
    if len(settings.data) != 1:
        raise UserError("--data: expected one folder of images or one parquet file, e.g. --data mnist")
    path = Path(settings.data[0])
    data = read_images(path)
    height, width = data.inputs.shape[2:]
    if height != width or height % 4:
        raise UserError(f"--data: images of {height} x {width} pixels, expected squares whose side is a multiple of 4")
    return (data, read_images(path, data.names, "test")) if has_test_images(path) else hold_out(data, settings.seed)


def train(settings: DiffusionSettings, resume: bool, ranks: ProcessGroupInfo) -> None:
    backend, settings = open_backend(settings, ranks)
    print(described(backend, settings))
    data, test = read(settings)
    config = Config(data.inputs.shape[2], data.inputs.shape[1], len(data.names), settings.width)
    model = SPEC.build(config, backend)
    model.initialise(settings.seed)
    print(f"model: {model.buffer.count:,} parameters; data: {len(data):,} images, {len(test):,} held out")
    count, picture = min(HELD_OUT, len(test)), Path(settings.out) / "samples.png"
    shuffled = Shuffled(len(data), settings.seed, lambda rows, stream: batch_of(data, rows, stream, config.features))

    def evaluate(parallel: DataParallel) -> dict[str, float]:
        times = (np.arange(count) + 0.5) / count  # every part of the path
        noise = Stream(1, "held out").normal((count, config.image, config.image, config.channels))
        held_out = noised(test.inputs[:count], test.labels[:count], times, noise, config.features)
        return {"val_mse": float(parallel.losses(held_out).mean())}

    def sample() -> str:
        labels = np.arange(4 * config.classes) % config.classes
        draw(sampled(model, labels, settings.seed), config.classes, picture)
        return f"  wrote {picture}"

    task = Task(
        model=model,
        tokenizer=None,
        objective=MeanOfRows("mse"),
        batches=micro_batches(shuffled, settings.batch_size, settings.grad_accum),
        evaluate=evaluate,
        sample=sample,
        meta={
            "kind": "diffusion",
            "model": SPEC.name,
            "config": config.to_dict(),
            "data_hash": fingerprint(data.labels),
            "machine": backend.describe(),
        },
        flop_per_token=model.flop_per_token(1),
        unit="images",
        curve="mse",
    )
    last = Run(task, settings, backend, resume).train()
    found = evaluate(DataParallel(model, backend))
    save_scores(Path(settings.out), checkpoint.step_of(last), {"held-out MSE": found["val_mse"]})
    print(f"held-out MSE {found['val_mse']:.4f}")


if __name__ == "__main__":
    run_command(main)
