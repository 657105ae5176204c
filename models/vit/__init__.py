"""ViT: images as sequences of patches, a class token, pre-norm blocks that look both ways."""

from models.vit.config import PRESETS, Config
from models.vit.model import ViT
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "vit", "ViT", ViT, Config, PRESETS, "Patches of an image, a class token, attention in both directions",
    hf="models.vit.hf", architectures=("ViTForImageClassification",), learns="images",
)  # fmt: skip
__all__ = ["PRESETS", "SPEC", "Config", "ViT"]
