"""Optimisers and learning-rate schedules, over a model's flat parameter buffer."""

from tinyforge.optim.adamw import AdamW, AdamWConfig, clip_scale
from tinyforge.optim.muon import COEFFICIENTS, Muon, MuonConfig
from tinyforge.optim.schedules import SCHEDULES, Pace, Rate, learning_rate

__all__ = [
    "COEFFICIENTS",
    "SCHEDULES",
    "AdamW",
    "AdamWConfig",
    "Muon",
    "MuonConfig",
    "Pace",
    "Rate",
    "clip_scale",
    "learning_rate",
]
