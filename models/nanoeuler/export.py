"""Make a trained model small enough to give away: weights in bfloat16, no optimizer, and a card that says what it is.

    python -m models.nanoeuler.export --checkpoint runs/sft --out my-model
    python -m models.nanoeuler.chat --checkpoint my-model

The card, README.md, is written from what the run itself has stored: its commands, its time, its scores.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from models.nanoeuler.config import Config
from tinyforge.errors import UserError, run_command
from tinyforge.train import checkpoint
from tinyforge.train.settings import Settings

# What does not change what is learned, or is not known to another machine.
_UNTOLD = {"out", "base", "workers", "device", "eval_every", "save_every", "keep", "recompute"}

CARD = """---
license: mit
language: en
library_name: tinyforge
pipeline_tag: text-generation
tags: [nanoeuler, multi-token-prediction, grouped-query-attention]
---

# NanoEuler, {size} parameters, {kind}

A decoder-only language model whose every gradient was written by hand, trained and run by tinyforge without automatic
differentiation. Weights are bfloat16.

    python -m models.nanoeuler.chat --checkpoint DIR

## The model

| dim | layers | query / key heads | SwiGLU hidden | output heads | vocabulary | context |
|---|---|---|---|---|---|---|
| {dim} | {layers} | {heads} / {kv_heads} | {hidden} | {mtp_heads} | {vocab} | {context} |

RMSNorm before each half of a block, rotary positions, no biases. Output head k predicts the token k + 1 places ahead;
text is drawn from head 0, the others guess ahead.

## How it was trained

{runs}

## Scores

{scores}

## What it cannot do

{limits}
"""
WORLD = """It knows the small world of `data/world.py`: a few dozen patterns of English sentences about people, things,
places and small numbers. Asked about anything else it answers in the same patterns, wrongly. Its training text is made
by that file and holds nothing of the real world and no personal data."""
OWN = """It has learned from the text named above alone, and repeats that text's errors and opinions. At this size it
states falsehoods fluently. Do not rely on anything it says."""


def card(found: checkpoint.Checkpoint) -> str:
    """The model card of a checkpoint, from its meta.json and what its run has written beside it."""
    config, meta = Config.from_dict(found.meta["config"]), found.meta
    runs = [("recipes/pretrain.py", meta["base"])] if "base" in meta else []
    runs.append((f"recipes/{meta['kind']}.py", meta))
    built_in = not any(run["settings"]["data"] for _, run in runs)
    return CARD.format(
        **config.to_dict(), size=f"{sum(weight.size for weight in found.weights.values()):,}",
        kind="fine-tuned to answer" if meta["kind"] == "sft" else "a base model: it continues text",
        runs="\n".join(_told(recipe, run) for recipe, run in runs),
        scores=_scores(found.path.parent),
        limits=WORLD if built_in else OWN,
    )  # fmt: skip


def _told(recipe: str, run: dict[str, Any]) -> str:
    settings, usual = run["settings"], json.loads(json.dumps(Settings().to_dict()))
    flags = [_flag(name, value) for name, value in settings.items() if name not in _UNTOLD and value != usual[name]]
    return (
        f"    python {' '.join([recipe, *flags])}\n\n"
        f"{run['step']:,} steps in {run['elapsed']:,.0f} s on {run['machine']}; seed {settings['seed']}, data SHA-256 "
        f"`{run['data_hash'][:16]}`.\n"
    )


def _flag(name: str, value: Any) -> str:
    values = value if isinstance(value, list) else [value]
    return " ".join([f"--{name.replace('_', '-')}", *(shlex.quote(str(v)) for v in values)])


def _scores(run: Path) -> str:
    try:
        scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "None were taken: the run was stopped before its end."
    rows = [f"| {name} | {value:.1%} |" if "exact match" in name else f"| {name} | {value:.3f} |"
            for name, value in scores.items()]  # fmt: skip
    return "\n".join(["| on held-out data, greedy | |", "|---|---|", *rows])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m models.nanoeuler.export", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run or one of its checkpoints")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make")
    args = parser.parse_args(argv)
    found = checkpoint.load(Path(args.checkpoint))
    if "machine" not in found.meta:
        raise UserError(f"{found.path} was made before runs noted what a card needs; train it again")
    checkpoint.export(found, Path(args.out), card(found))
    size = sum(file.stat().st_size for file in Path(args.out).iterdir())
    print(f"wrote {args.out}, {size / 1e6:.1f} MB; python -m models.nanoeuler.chat --checkpoint {args.out}")
    return 0


if __name__ == "__main__":
    run_command(main)
