"""The flags that all recipes share, and the frozen settings they become."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from tinyforge.backends import Backend, get_backend
from tinyforge.errors import Parser, UserError
from tinyforge.optim.schedules import SCHEDULES


@dataclass(frozen=True)
class Settings:
    """One training run. They are stored in its checkpoints; `--resume` takes them from there.

    steps: optimizer steps, or None to stop after `minutes`. seq_len: tokens a sequence. max_reply: most tokens of a
    reply to learn from, None for any. lr: peak learning rate. lr_decay: the last share of the run, in which the
    schedule wsd lowers it. eval_every, save_every: steps. keep: newest checkpoints kept (0: all). workers: shards of a
    batch; part of the settings because the sum of gradients depends, in its last bits, on how the batch was cut.
    """

    config: str = "small"
    set: tuple[str, ...] = ()
    backend: str = "auto"
    device: int | None = None
    recompute: bool = False
    precision: str = "fp32"
    data: tuple[str, ...] = ()
    mix: tuple[str, ...] = ()
    encoding: str = "utf-8"
    tokenizer: str | None = None
    base: str | None = None
    max_reply: int | None = None
    out: str = ""
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 16
    grad_accum: int = 1
    seq_len: int | None = None
    lr: float = 4e-3
    schedule: str = "wsd"
    lr_decay: float = 0.4
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    eval_every: int = 250
    save_every: int = 500
    keep: int = 2
    workers: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Settings:
        """As a checkpoint has them: lists are tuples again, and what this version does not know is left out."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items() if k in known}
        return cls(**values)


# What may differ between a run and its continuation: none of it changes a step that was already planned.
_FREE = {"out", "eval_every", "save_every", "keep", "backend", "device", "recompute"}


def parser(description: str, defaults: Settings, with_base: bool) -> argparse.ArgumentParser:
    """The recipes' command line. Defaults are applied later, to know which flags were given."""
    p = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def flag(name: str, help: str, **options: Any) -> None:
        default = getattr(defaults, name.replace("-", "_"))
        shown = f" (default: {default})" if default not in (None, ()) else ""
        p.add_argument(f"--{name}", default=None, help=help + shown, **options)

    if with_base:
        flag("base", "pretrained run or checkpoint to start from", metavar="DIR")
        flag("max-reply", "leave out training records whose reply takes more tokens: a model answers as briefly as "
             "what it learned from", type=int, metavar="TOKENS")  # fmt: skip
    else:
        flag("config", "preset (small, base, large) or a JSON file with the config's fields")
        flag("set", "override fields of the config, e.g. --set dim=192 layers=6; given again, it adds to them",
             nargs="+", action="extend", metavar="KEY=VALUE")  # fmt: skip
        flag("tokenizer", "tokenizer.json to use (default: train one on the data)", metavar="FILE")
    flag("backend", "where to compute: numpy, cupy (an NVIDIA GPU), or auto, which takes a GPU if there is one")
    flag("device", "number of the GPU, as CUDA counts the visible ones (default: 0)", type=int)
    flag("precision", "fp32, fp64, and on a GPU tf32 or bf16")
    flag("data", "files or folders: text, parquet, token shards (pretrain), Alpaca JSON (sft) (default: the built-in "
         "corpus)", nargs="+", metavar="PATH")  # fmt: skip
    if not with_base:
        flag("mix", "shares of the shards' sources, e.g. --mix books=0.7 web=0.3 (default: by their tokens)", nargs="+",
             metavar="NAME=WEIGHT")  # fmt: skip
    flag("encoding", "encoding of text files")
    flag("out", "directory of the run", metavar="DIR")
    flag("steps", "optimizer steps", type=int)
    flag("minutes", "stop after so many minutes instead; the schedule follows the clock", type=float)
    flag("batch-size", "sequences a step and micro-batch", type=int)
    flag("grad-accum", "micro-batches a step", type=int)
    flag("seq-len", "tokens a sequence (default: the config's context)", type=int)
    flag("lr", "peak learning rate", type=float)
    flag("schedule", "learning-rate schedule", choices=SCHEDULES)
    flag("lr-decay", "the last share of the run, 0 to 1, in which the schedule wsd lowers the rate", type=float)
    flag("weight-decay", "AdamW's decay of matrices, per unit of learning rate", type=float)
    flag("clip", "limit on the gradient's norm, 0 for none", type=float)
    flag("seed", "seed of weights, order and samples", type=int)
    flag("eval-every", "steps between evaluations on held-out text", type=int)
    flag("save-every", "steps between checkpoints", type=int)
    flag("keep", "newest checkpoints kept, 0 for all", type=int)
    flag("workers", "shards of a batch, each in a process (default: one a core)", type=int)
    p.add_argument("--recompute", action="store_true", default=None,
                   help="make norms again in backward: a tenth less memory, 2 %% slower, the same bits")  # fmt: skip
    p.add_argument("--resume", action="store_true", help="continue the run in --out from its newest checkpoint")
    p.add_argument("--plan", action="store_true", help="print what a step needs in a GPU's memory, and leave")
    p.add_argument("--card", action="store_true", help="write a model card, README.md, into --out at the end")
    return p


class Command(NamedTuple):
    """What was asked for. plan: only the memory's plan is wanted. card: so is a model card."""

    settings: Settings
    resume: bool
    plan: bool
    card: bool


def parse(p: argparse.ArgumentParser, argv: Sequence[str] | None, defaults: Settings) -> Command:
    """The command line; the settings' fields are checked here, once."""
    given = {name: value for name, value in vars(p.parse_args(argv)).items() if value is not None}
    resume, plan, card = (given.pop(name) for name in ("resume", "plan", "card"))
    for name in ("data", "mix", "set"):
        if name in given:
            given[name] = tuple(given[name])
    out = given.get("out", defaults.out)
    if resume:
        settings = _resumed(given, Path(out))
    else:
        if "minutes" in given and "steps" in given:
            raise UserError("--steps and --minutes are both given, and a run ends by one of them; drop the other")
        if "minutes" in given:
            given["steps"] = None
        settings = Settings(**{**defaults.to_dict(), **given})
    for name in ("batch_size", "grad_accum", "eval_every", "save_every", "lr"):
        _check(name, getattr(settings, name), above_zero=True)
    for name in ("weight_decay", "clip", "keep"):
        _check(name, getattr(settings, name), above_zero=False)
    for name in ("steps", "minutes", "seq_len", "max_reply", "workers"):
        if getattr(settings, name) is not None:
            _check(name, getattr(settings, name), above_zero=True)
    if not 0 < settings.lr_decay <= 1:
        raise UserError(f"--lr-decay is {settings.lr_decay}, wants a share of the run above 0 and up to 1")
    if settings.steps is None and settings.minutes is None:
        raise UserError("neither --steps nor --minutes is given; one of them must end the run")
    return Command(settings, resume, plan, card)


def print_schedule(settings: Settings, step: str, steps_a_pass: float, data: str) -> None:
    """How long a run is, and how often it reads its data. step: what one takes; steps_a_pass: for all of the data."""
    length = f"{settings.steps:,} steps" if settings.steps else f"{settings.minutes:g} minutes"
    passes = f", {settings.steps / steps_a_pass:.1f} times through the {data}" if settings.steps else ""
    print(f"plan: {length} of {step}{passes}; {settings.schedule} schedule, peak rate {settings.lr:g}")


def open_backend(settings: Settings) -> tuple[Backend, Settings]:
    """The backend that is asked for, and the settings with its number of workers, on which a run's last bits depend."""
    backend = get_backend(settings.backend, settings.precision, settings.workers, settings.device)
    return backend, Settings(**{**settings.to_dict(), "workers": backend.workers})


def _check(name: str, value: float, above_zero: bool) -> None:
    if not (0 <= value < math.inf) or (above_zero and value == 0):
        wanted = "above 0" if above_zero else "of 0 or more"
        raise UserError(f"--{name.replace('_', '-')} is {value}, wants a number {wanted}")


def _resumed(given: dict[str, Any], out: Path) -> Settings:
    from tinyforge import checkpoint

    if not checkpoint.steps(out):
        raise UserError(f"--resume: nothing to resume in {out}; start the run without --resume")
    stored = Settings.from_dict(checkpoint.load(out).meta["settings"]).to_dict()
    for name, value in given.items():
        if name not in _FREE and stored.get(name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"--resume: {flag} is {value!r}, the run in {out} has {stored.get(name)!r}; "
                f"drop {flag}, or start a new run with another --out"
            )
    return Settings(**{**stored, **given, "out": str(out)})
