"""Images from a trained U-Net.

python examples/diffusion/sample.py runs/diffusion --labels 0 1 2 3 --count 8 --out samples.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

if not __package__:
    import checkout  # noqa: F401  finds tinyforge where this file is run by its path

import numpy as np

import examples.diffusion.unet  # noqa: F401  registers the model
from examples.diffusion.digits import STEPS, draw, sampled
from tinyforge.backends import get_backend
from tinyforge.errors import Parser, UserError, run_command
from tinyforge.formats import load


def main(argv: Sequence[str] | None = None) -> int:
    p = Parser(description=__doc__)
    p.add_argument("run", metavar="RUN", help="a run of train.py, or one of its checkpoints")
    p.add_argument("--labels", type=int, nargs="+", help="a column for each (default: every class)")
    p.add_argument("--count", type=int, default=8, help="images of each label (default: %(default)s)")
    p.add_argument("--euler-steps", type=int, default=STEPS, help="(default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    p.add_argument("--backend", default="auto", help="numpy, cupy, webgpu or auto (default: %(default)s)")
    p.add_argument("--out", default="samples.png", metavar="FILE", help="the picture (default: %(default)s)")
    args = p.parse_args(argv)
    model = load(Path(args.run), get_backend(args.backend), frozen=True).model
    labels = args.labels or list(range(model.config.classes))
    if min(args.count, args.euler_steps) < 1 or not all(0 <= label < model.config.classes for label in labels):
        raise UserError(f"--count, --euler-steps and --labels: expected 1 or more, and 0 to {model.config.classes - 1}")
    draw(sampled(model, np.tile(labels, args.count), args.seed, args.euler_steps), len(labels), Path(args.out))
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
