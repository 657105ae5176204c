"""Trained models in and out: our checkpoints and which of them to use, and the formats of other programs."""

import warnings
from typing import Any

from tinyforge.formats.opened import Loaded, Opened
from tinyforge.formats.pretrained import load_pretrained, save_pretrained
from tinyforge.formats.runs import (
    add_checkpoint_flag,
    add_computing_flags,
    add_weights_flag,
    load,
    newest_run,
    open_model,
    resolve_checkpoint,
    shipped_models,
)

__all__ = [
    "Loaded",
    "Opened",
    "add_checkpoint_flag",
    "add_computing_flags",
    "add_weights_flag",
    "load",
    "load_pretrained",
    "newest_run",
    "open_model",
    "resolve_checkpoint",
    "save_pretrained",
    "shipped_models",
]


def __getattr__(name: str) -> Any:
    if name == "trained_model":
        warnings.warn("trained_model is called resolve_checkpoint now", DeprecationWarning, stacklevel=2)
        return resolve_checkpoint
    raise AttributeError(f"module {__name__} has no attribute {name!r}")
