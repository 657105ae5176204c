"""Trained models in and out: our checkpoints and which of them to use, and the formats of other programs."""

from tinyforge.hub.opened import Loaded, Opened
from tinyforge.hub.pretrained import load_pretrained, save_pretrained
from tinyforge.hub.runs import add_checkpoint_flag, add_weights_flag, load, newest_run, open_model, trained_model

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
