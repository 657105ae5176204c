"""Make a trained model small enough to give away: weights in bfloat16, no optimizer, and a card that says what it is.

    python -m models.nanoeuler.export --checkpoint runs/sft --out my-model
    python -m models.nanoeuler.chat --checkpoint my-model

The card, README.md, is written from what the run itself has stored: its commands, its time, its scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tinyforge import checkpoint
from tinyforge.errors import Parser, run_command
from tinyforge.train.card import card


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m models.nanoeuler.export", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run or one of its checkpoints")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    args = parser.parse_args(argv)
    found = checkpoint.load(Path(args.checkpoint))
    checkpoint.export(found, Path(args.out), card(found, "bfloat16"))
    size = sum(file.stat().st_size for file in Path(args.out).iterdir())
    print(f"wrote {args.out}, {size / 1e6:.1f} MB; python -m models.nanoeuler.chat --checkpoint {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
