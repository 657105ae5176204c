"""What the configs of several models check."""

from __future__ import annotations

from typing import Any

from tinyforge.errors import UserError


class DividedHeads:
    """Part of the configs whose heads divide the width among them."""

    dim: int
    heads: int

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def check_heads(self) -> None:
        """The width is a whole number of heads."""
        dim, heads = self.dim, self.heads
        if dim % heads:
            multiple = dim // heads * heads or heads
            raise UserError(
                f"config: dim {dim} is not divisible by heads {heads}; use dim {multiple} or another number of heads"
            )


def check_rates(config: Any, *names: str) -> None:
    """Dropout's rates are at least 0, and below 1."""
    for name in names:
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"config: {name} is {getattr(config, name)}, expected 0 to below 1")
