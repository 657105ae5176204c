"""ViT's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.models.checks import DividedHeads, check_rates


@dataclass(frozen=True)
class Config(DividedHeads, ModelConfig):
    """The shape of a vision transformer.

    image: height and width in pixels. patch: height and width of a patch. channels: 1 for grey, 3 for colour. classes:
    number of classes. dim: width C of the stream. heads: each of size dim / heads. layers: blocks. hidden: width of the
    MLP. dropout: rate in training, as in GPT-2. context and vocab follow: the tokens of an image, and the classes.
    """

    image: int = 28
    patch: int = 7
    channels: int = 1
    classes: int = 10
    dim: int = 64
    heads: int = 4
    layers: int = 4
    hidden: int = 256
    dropout: float = 0.0
    norm_eps: float = 1e-12

    def __post_init__(self) -> None:
        self.require_positive("image", "patch", "channels", "classes", "dim", "heads", "layers", "hidden")
        if self.image % self.patch:
            raise UserError(
                f"config: image {self.image} is not a whole number of patches of {self.patch}; use a patch that "
                f"divides {self.image}"
            )
        self.check_heads()
        check_rates(self, "dropout")
        object.__setattr__(self, "context", self.patches + 1)
        object.__setattr__(self, "vocab", self.classes)

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    def input_shapes(self, batch: int, length: int) -> tuple[tuple[int, ...], ...]:
        return (batch, self.channels, self.image, self.image), (batch, 1, 1)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name not in ("context", "vocab")}


PRESETS = {
    "digits": Config(),
    # Those of the paper, as google/vit-base-patch16-224 and vit-large-patch16-224 have them.
    "base": Config(image=224, patch=16, channels=3, classes=1000, dim=768, heads=12, layers=12, hidden=3072),
    "large": Config(image=224, patch=16, channels=3, classes=1000, dim=1024, heads=16, layers=24, hidden=4096),
}
