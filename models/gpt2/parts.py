"""The parts of a block of GPT-2, ViT and BERT, built from a config: its norms, its self-attention, its MLP."""

from __future__ import annotations

from typing import Any

from tinyforge.backends import Backend
from tinyforge.op import Param
from tinyforge.ops import AddLayerNorm, Attention, Dropout, GELULinear, Linear
from tinyforge.residual import MLP, SelfAttention

STD = 0.02
"""Standard deviation of all initial matrices but those of `residual_std`."""


def residual_std(layers: int) -> float:
    """2 * layers projections add to the stream; this keeps its variance from growing with depth. In BERT, while their
    outputs are small next to the stream, the norms after the additions pass on nearly all of the gradient."""
    return STD / (2 * layers) ** 0.5


def bias_of(name: str, rows: int) -> Param:
    return Param(f"{name}.bias", (rows,), fill=0.0, decay=False)


def linear(
    name: str, rows: int, columns: int, backend: Backend, *, bias: bool = True, std: float = STD, matrices: int = 1
) -> Linear:
    """matrices: see `Param`; 0 for a head."""
    weight = Param(f"{name}.weight", (rows, columns), std=std, matrices=matrices)
    return Linear(weight, backend, name, bias=bias_of(name, rows) if bias else None)


def norm(name: str, c: Any, backend: Backend, *, bias: bool = True) -> AddLayerNorm:
    """c: a config with dim and norm_eps."""
    gain = Param(f"{name}.weight", (c.dim,), fill=1.0, decay=False)
    return AddLayerNorm(gain, bias_of(name, c.dim) if bias else None, backend, c.norm_eps, name)


def self_attention(
    at: str, c: Any, backend: Backend, *, bias: bool = True, causal: bool = True, dropout: float
) -> SelfAttention:
    """at: the block's path. c: a config with dim, heads, layers and dropout. dropout: of attention probabilities."""
    return SelfAttention(
        linear(f"{at}.qkv", 3 * c.dim, c.dim, backend, bias=bias, matrices=3),
        Attention(c.heads, c.heads, backend, f"{at}.attention", causal=causal, dropout=dropout),
        linear(f"{at}.out", c.dim, c.dim, backend, bias=bias, std=residual_std(c.layers)),
        Dropout(c.dropout, backend, f"{at}.out_dropout"),
        head_dim=c.head_dim,
    )


def gelu_mlp(at: str, c: Any, backend: Backend, hidden: int, gelu: str, *, bias: bool = True) -> MLP:
    """The bias before the GELU belongs to the map after it. gelu: its formula, "tanh" or "erf"."""
    down = GELULinear(
        Param(f"{at}.down.weight", (c.dim, hidden), std=residual_std(c.layers), matrices=1),
        backend,
        f"{at}.down",
        bias=bias_of(f"{at}.down", c.dim) if bias else None,
        input_bias=bias_of(f"{at}.up", hidden) if bias else None,
        approximate=gelu,
    )
    up = linear(f"{at}.up", hidden, c.dim, backend, bias=False)
    return MLP(up, down, Dropout(c.dropout, backend, f"{at}.down_dropout"))
