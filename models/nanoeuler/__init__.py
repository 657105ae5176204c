"""NanoEuler: a decoder-only language model whose every gradient is written by hand."""

from pathlib import Path

from models.nanoeuler.config import PRESETS, Config
from models.nanoeuler.model import NanoEuler
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "nanoeuler", "NanoEuler", NanoEuler, Config, PRESETS, "Llama-like blocks with multi-token prediction heads",
    hf="models.nanoeuler.hf", bundled=Path(__file__).parent / "small",
)  # fmt: skip
__all__ = ["PRESETS", "SPEC", "Config", "NanoEuler"]
