"""Optimisers and learning-rate schedules, over a model's flat parameter buffer."""

from tinyforge.optim.adamw import AdamW, AdamWConfig, clip_scale
from tinyforge.optim.muon import Muon, MuonConfig
from tinyforge.optim.schedules import SCHEDULES, learning_rate

__all__ = ["SCHEDULES", "AdamW", "AdamWConfig", "Muon", "MuonConfig", "clip_scale", "learning_rate"]
