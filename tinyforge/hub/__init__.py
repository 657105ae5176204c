"""Trained models in and out: our checkpoints, and which of them to use."""

from tinyforge.hub.runs import Loaded, add_checkpoint_flag, build, load, model_of, newest_run, trained_model

__all__ = ["Loaded", "add_checkpoint_flag", "build", "load", "model_of", "newest_run", "trained_model"]
