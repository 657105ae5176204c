"""The block of GPT-2, forward and backward: the two lines of the paper, then the same two lines read upwards.

Which kernels are fused is decided in tinyforge/residual.py: the addition is part of the product before it or of the
norm after it.
"""

from __future__ import annotations

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.gpt2.config import Config
from tinyforge.models.gpt2.parts import gelu_mlp, norm, self_attention
from tinyforge.op import Op, Stash
from tinyforge.residual import NO_CONTEXT, AttentionContext, PreNorm, ResidualStream


class Block:
    """x = x + attention(norm1(x));   x = x + mlp(norm2(x)), with x the residual stream, (B, T, C)."""

    def __init__(
        self,
        config: Config,
        layer: int,
        backend: Backend,
        hidden: int | None = None,
        causal: bool = True,
        gelu: str = "tanh",
        recompute: bool = False,
    ) -> None:
        """hidden: width of the MLP, 4 C unless given. gelu: its formula, "tanh" or "erf". recompute: the norms' values
        in backward, instead of keeping them."""
        c, at, bias = config, f"blocks.{layer}", config.bias
        self.norm1 = PreNorm(norm(f"{at}.norm1", c, backend, bias=bias), recompute=recompute)
        self.attention = self_attention(at, c, backend, bias=bias, causal=causal, dropout=c.dropout)
        self.norm2 = PreNorm(norm(f"{at}.norm2", c, backend, bias=bias), recompute=recompute)
        self.mlp = gelu_mlp(at, c, backend, hidden or 4 * c.dim, gelu, bias=bias)

    def forward(
        self, stream: ResidualStream, stash: Stash | None = None, context: AttentionContext = NO_CONTEXT
    ) -> None:
        stream.add(self.attention.forward(self.norm1.forward(stream, stash), stash, context))
        stream.add(self.mlp.forward(self.norm2.forward(stream, stash), stash))

    def backward(self, dx: Array, stash: Stash) -> Array:
        """The gradient of the stream before the block, from that after it."""
        dx = self.norm2.backward(self.mlp.backward(dx, stash), stash, residual=dx)
        return self.norm1.backward(self.attention.backward(dx, stash), stash, residual=dx)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        return [self.norm1.op, *self.attention.ops(), self.norm2.op, *self.mlp.ops()]
