"""NanoEuler's sizes: a frozen dataclass, three presets, and a loader that refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tinyforge.errors import UserError


@dataclass(frozen=True)
class Config:
    """The shape of a NanoEuler; it travels with every checkpoint.

    dim: width C of the residual stream. heads, kv_heads: query and key/value heads, each of size dim / heads.
    layers: blocks. context: longest sequence, tokens. vocab: token ids. mtp_heads: output heads, head k predicting
    token t + 1 + k. hidden: width of SwiGLU. mtp_weights: the heads' weights in the loss, made to sum to 1.
    """

    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    layers: int = 4
    context: int = 128
    vocab: int = 512
    mtp_heads: int = 4
    hidden: int = 344
    mtp_weights: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "kv_heads", "layers", "context", "vocab", "mtp_heads", "hidden"):
            if getattr(self, name) < 1:
                raise UserError(f"config: {name} is {getattr(self, name)}, wants at least 1")
        if self.dim % self.heads:
            raise UserError(
                f"config: dim {self.dim} is not divisible by heads {self.heads}; use dim "
                f"{self.dim // self.heads * self.heads or self.heads} or another number of heads"
            )
        if self.head_dim % 2:
            raise UserError(f"config: head size {self.head_dim} (dim / heads) is odd; RoPE turns pairs, make it even")
        if self.heads % self.kv_heads:
            raise UserError(f"config: heads {self.heads} is not divisible by kv_heads {self.kv_heads}")
        if len(self.mtp_weights) != self.mtp_heads:
            raise UserError(
                f"config: mtp_weights has {len(self.mtp_weights)} numbers for {self.mtp_heads} heads; give one a head"
            )
        if min(self.mtp_weights) < 0 or self.mtp_weights[0] <= 0:
            raise UserError(f"config: mtp_weights {self.mtp_weights} wants no negative number and a positive first")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        return cls().override(values)

    def override(self, values: Mapping[str, Any]) -> Config:
        """This config with some fields replaced; unknown names raise."""
        known = [f.name for f in fields(self)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UserError(f"config: unknown key {unknown[0]!r}; known: {', '.join(known)}")
        for name, value in values.items():
            if not _fits(value, getattr(self, name)):
                wanted = {int: "a whole number", float: "a number", tuple: "a list of numbers"}
                raise UserError(f"config: {name} is {value!r}, wants {wanted[type(getattr(self, name))]}")
        values = dict(values)
        if "mtp_weights" in values:
            values["mtp_weights"] = tuple(float(w) for w in values["mtp_weights"])
        elif "mtp_heads" in values:
            values["mtp_weights"] = tuple(0.5**k for k in range(int(values["mtp_heads"])))
        return replace(self, **values)


def _fits(value: Any, default: Any) -> bool:
    """Whether a value from outside has the type of the field's default; an integer will do for a float."""
    if isinstance(default, tuple):
        return isinstance(value, list | tuple) and all(_fits(v, 0.0) for v in value)
    return isinstance(value, int | float if isinstance(default, float) else int) and not isinstance(value, bool)


PRESETS = {
    "small": Config(),
    "base": Config(dim=768, heads=12, kv_heads=4, layers=16, context=512, vocab=4096, hidden=2048),
    "large": Config(dim=1024, heads=16, kv_heads=4, layers=20, context=1024, vocab=8192, hidden=2816),
}
