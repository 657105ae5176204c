"""The block of GPT-2, forward and backward. Read `forward`, then `backward` from the bottom up.

As in Llama's (models/llama/block.py), a norm is fused with the residual addition before it, so a block takes the stream
and its norm, and returns both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.gpt2.config import Config
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import AddLayerNorm, Attention, Dropout, GELULinear, Linear
from tinyforge.ops.attention import LayerCache
from tinyforge.ops.dropout import adding


class Block:
    """The ops of one layer, without the norms: they are fused with the residual additions and belong to the model."""

    def __init__(
        self,
        config: Config,
        layer: int,
        backend: Backend,
        hidden: int | None = None,
        causal: bool = True,
        gelu: str = "tanh",
    ) -> None:
        """hidden: width of the MLP, 4 C unless given. gelu: its formula, "tanh" or "erf"."""
        dim, at = config.dim, f"blocks.{layer}"
        hidden = hidden or 4 * dim
        # 2 * layers projections add to the residual stream; this keeps its variance from growing with depth.
        std, residual_std = 0.02, 0.02 / (2 * config.layers) ** 0.5

        def bias(name: str, rows: int) -> Param | None:
            return Param(f"{at}.{name}.bias", (rows,), decay=False) if config.bias else None

        def linear(
            name: str, rows: int, columns: int, std: float, bias: Param | None = None, matrices: int = 1
        ) -> Linear:
            weight = Param(f"{at}.{name}.weight", (rows, columns), std=std, matrices=matrices)
            return Linear(weight, backend, f"{at}.{name}", bias=bias)

        def dropout(name: str) -> Dropout:
            return Dropout(config.dropout, backend, f"{at}.{name}")

        self.qkv = linear("qkv", 3 * dim, dim, std, bias("qkv", 3 * dim), matrices=3)
        self.attention = Attention(
            config.heads, config.heads, backend, f"{at}.attention", causal=causal, dropout=config.dropout
        )
        self.out = linear("out", dim, dim, residual_std, bias("out", dim))
        self.out_dropout = dropout("out_dropout")
        self.up = linear("up", hidden, dim, std)
        down = Param(f"{at}.down.weight", (dim, hidden), std=residual_std, matrices=1)
        self.down = GELULinear(
            down, backend, f"{at}.down", bias=bias("down", dim), input_bias=bias("up", hidden), approximate=gelu
        )
        self.down_dropout = dropout("down_dropout")
        self.split = 3 * config.heads, config.head_dim  # of qkv's output

    def forward(
        self,
        x: Array,
        h: Array,
        stash: Stash | None,
        *,
        joints: Sequence[AddLayerNorm],
        normed: Callable[[Array], Array] | None = None,
        cache: LayerCache | None = None,
        starts: Array | None = None,
    ) -> tuple[Array, Array]:
        """The stream and its norm after the block, (B, T, C) each. normed: computes h from x, to recompute norms
        instead of storing them; None to store them. starts: first position of each token's document, (B, T)."""
        joint, next_joint = joints
        qkv = self.qkv.forward(h, stash, recompute=partial(normed, x) if normed else None)
        qkv = qkv.reshape(*x.shape[:2], *self.split)  # (B, T, 3 H, D)
        a = self.attention.forward(qkv, stash, cache=cache, starts=starts)  # (B, T, H, D)
        add = adding(self.out, self.out_dropout, x)
        a = self.out_dropout.forward(self.out.forward(a.reshape(x.shape), stash, **add), stash)  # (B, T, C)
        x, h = joint.forward(a, None, stash) if add else joint.forward(x, a, stash)
        u = self.up.forward(h, stash, recompute=partial(joint.normed, x) if normed else None)  # (B, T, hidden)
        add = adding(self.down, self.down_dropout, x)
        f = self.down_dropout.forward(self.down.forward(u, stash, **add), stash)
        return next_joint.forward(f, None, stash) if add else next_joint.forward(x, f, stash)

    def backward(
        self, dx: Array | None, dh: Array, stash: Stash, joints: Sequence[AddLayerNorm]
    ) -> tuple[Array, Array]:
        """The gradients of x and h. dx: None if only the norm of x is used."""
        joint, next_joint = joints
        dx, df = next_joint.backward((dx, dh), stash)
        df = self.down_dropout.backward(df, stash)
        du = self.down.backward(df, stash)
        dh = self.up.backward(du, stash)
        dx, da = joint.backward((dx, dh), stash)
        da = self.out_dropout.backward(da, stash)
        da = self.out.backward(da, stash)  # (B, T, C)
        heads, head_dim = self.split
        dqkv = self.attention.backward(da.reshape(*da.shape[:2], heads // 3, head_dim), stash)  # (B, T, 3 H, D)
        return dx, self.qkv.backward(dqkv.reshape(*da.shape[:2], -1), stash)

    def ops(self) -> list[Op]:
        """In the order of forward, without the norms."""
        return [self.qkv, self.attention, self.out, self.out_dropout, self.up, self.down, self.down_dropout]
