"""Trained models in and out: our checkpoints and which of them to use, and the formats of other programs."""

from tinyforge.hub.pretrained import load_pretrained, save_pretrained
from tinyforge.hub.runs import Loaded, add_checkpoint_flag, build, load, model_of, newest_run, trained_model

__all__ = [
    "Loaded", "add_checkpoint_flag", "build", "load", "load_pretrained", "model_of", "newest_run", "save_pretrained",
    "trained_model",
]  # fmt: skip
