"""ViT: images as sequences of patches, a class token, pre-norm blocks that look both ways."""

from tinyforge.models.vit.config import PRESETS, Config
from tinyforge.models.vit.model import ViT
from tinyforge.registry import ModelSpec

SPEC = ModelSpec(
    "vit",
    "ViT",
    ViT,
    Config,
    PRESETS,
    "Patches of an image, a class token, attention in both directions",
    hf=f"{__name__}.hf",
    architectures=("ViTForImageClassification",),
    learns="images",
    source='Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (2020)',
    backward="The loss reads one position of each sequence: the gradient of all others is 0 at the top, and attention "
    "fills it in on the way down. The class token's gradient is the sum over all images.",
)
__all__ = ["PRESETS", "SPEC", "Config", "ViT"]
