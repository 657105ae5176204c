"""Trained models in and out: our checkpoints and which of them to use, and the formats of other programs."""

from tinyforge.formats.opened import Loaded, Opened
from tinyforge.formats.pretrained import load_pretrained, save_pretrained
from tinyforge.formats.runs import add_checkpoint_flag, add_weights_flag, load, newest_run, open_model, trained_model

__all__ = [
    "Loaded",
    "Opened",
    "add_checkpoint_flag",
    "add_weights_flag",
    "load",
    "load_pretrained",
    "newest_run",
    "open_model",
    "save_pretrained",
    "trained_model",
]
