"""NanoEuler: a decoder-only language model whose every gradient is written by hand."""

from models.nanoeuler.config import PRESETS, Config
from models.nanoeuler.model import NanoEuler

__all__ = ["PRESETS", "Config", "NanoEuler"]
