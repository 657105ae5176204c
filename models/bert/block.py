"""The block of BERT, forward and backward, with a norm after each residual addition. Read `forward`, then `backward`
from the bottom up."""

from __future__ import annotations

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.bert.config import Config
from tinyforge.models.gpt2.parts import gelu_mlp, norm, self_attention
from tinyforge.op import Op, Stash
from tinyforge.ops import Fork
from tinyforge.residual import AttentionContext


class Block:
    """x = norm1(x + attention(x));   x = norm2(x + mlp(x)), with x the stream, (B, T, C)."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        c, at = config, f"blocks.{layer}"
        self.fork1, self.fork2 = Fork(backend, f"{at}.fork1"), Fork(backend, f"{at}.fork2")
        self.attention = self_attention(at, c, backend, causal=False, dropout=c.attention_dropout)
        self.norm1 = norm(f"{at}.norm1", c, backend)
        self.mlp = gelu_mlp(at, c, backend, c.hidden, "erf")
        self.norm2 = norm(f"{at}.norm2", c, backend)

    def forward(self, x: Array, stash: Stash | None, context: AttentionContext) -> Array:
        x, h = self.fork1.forward(x, stash)
        _, x = self.norm1.forward(x, self.attention.forward(h, stash, context).value(), stash)
        x, h = self.fork2.forward(x, stash)
        _, x = self.norm2.forward(x, self.mlp.forward(h, stash).value(), stash)
        return x

    def backward(self, dx: Array, stash: Stash) -> Array:
        """The gradient of the stream before the block, from that after it."""
        dx, df = self.norm2.backward((None, dx), stash)
        dx = self.fork2.backward((dx, self.mlp.backward(df, stash)), stash)
        dx, da = self.norm1.backward((None, dx), stash)
        return self.fork1.backward((dx, self.attention.backward(da, stash)), stash)

    def ops(self) -> list[Op]:
        return [self.fork1, self.fork2, *self.attention.ops(), self.norm1, *self.mlp.ops(), self.norm2]
