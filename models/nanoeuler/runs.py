"""Finding and loading trained models."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.nanoeuler.config import Config
from models.nanoeuler.model import NanoEuler
from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.params import load_named
from tinyforge.text import Tokenizer
from tinyforge.train import checkpoint

BUNDLED = Path(__file__).parent / "small"
"""The small preset, fine-tuned on the built-in instructions; its README.md says how it was made and what it can do."""


@dataclass(frozen=True)
class Loaded:
    """A model from a checkpoint with its tokenizer; meta as saved (`kind` is "pretrain" or "sft")."""

    model: NanoEuler
    tokenizer: Tokenizer
    meta: dict[str, Any]
    path: Path


def load_model(path: Path, backend: Backend) -> Loaded:
    """The model of a checkpoint, or of the newest checkpoint in a run's directory."""
    return build_model(checkpoint.load(path), backend)


def build_model(found: checkpoint.Checkpoint, backend: Backend, recompute: bool = False) -> Loaded:
    """The model of a checkpoint that has been read."""
    tokenizer = Tokenizer.load(found.tokenizer_path)
    config = Config.from_dict(found.meta["config"])
    if tokenizer.hash() != found.meta["tokenizer_hash"]:
        raise UserError(f"checkpoint {found.path}: tokenizer.json is not the one it was trained with; use another")
    if tokenizer.vocab_size != config.vocab:
        raise UserError(
            f"checkpoint {found.path}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab}; "
            "use another checkpoint of the run"
        )
    model = NanoEuler(config, backend, recompute=recompute)
    load_named(model.buffer, model.buffer.masters, found.weights, backend, found.path)
    return Loaded(model, tokenizer, found.meta, found.path)


def add_checkpoint_flag(p: argparse.ArgumentParser) -> None:
    """--checkpoint, for `trained_model`."""
    p.add_argument("--checkpoint", metavar="DIR",
                   help="a run or one of its checkpoints (default: the newest run under runs/, fine-tuned before "
                   "pretrained; else the model that comes with the repository)")  # fmt: skip


def trained_model(asked: str | None) -> Path:
    """Where the model to use lies: what was asked for, else the newest run (fine-tuned before pretrained), else the
    small model that comes with the repository."""
    return Path(asked) if asked else newest_run(("sft", "pretrain")) or BUNDLED


def newest_run(kinds: tuple[str, ...], root: Path = Path("runs")) -> Path | None:
    """The newest checkpoint under `root` of the first of `kinds` that has any ("pretrain", "sft")."""
    found = [p.parent for p in root.glob("**/step-*/hashes.json")]
    for kind in kinds:
        of_kind = [p for p in found if f'"kind": "{kind}"' in (p / "meta.json").read_text(encoding="utf-8")]
        if of_kind:
            return max(of_kind, key=lambda p: (p / "hashes.json").stat().st_mtime_ns)
    return None
