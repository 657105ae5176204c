"""The block of BERT, forward and backward, with a norm after each residual addition. Read `forward`, then `backward`
from the bottom up."""

from __future__ import annotations

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.bert.config import Config
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import AddLayerNorm, Attention, Dropout, Fork, GELULinear, Linear

STD = 0.02
"""Standard deviation of all initial matrices but those of `residual_std`."""


def residual_std(layers: int) -> float:
    """As in GPT-2: 2 * layers projections add to the stream. While their outputs are small beside it, the norms after
    the additions pass on nearly all of the gradient."""
    return STD / (2 * layers) ** 0.5


def linear(
    name: str, rows: int, columns: int, backend: Backend, bias: bool = True, std: float = STD, matrices: int = 1
) -> Linear:
    """matrices: see `Param`; 0 for a head."""
    weight = Param(f"{name}.weight", (rows, columns), std=std, matrices=matrices)
    return Linear(weight, backend, name, bias=Param(f"{name}.bias", (rows,), decay=False) if bias else None)


def norm(name: str, config: Config, backend: Backend) -> AddLayerNorm:
    gain = Param(f"{name}.weight", (config.dim,), fill=1.0, decay=False)
    bias = Param(f"{name}.bias", (config.dim,), decay=False)
    return AddLayerNorm(gain, bias, backend, config.norm_eps, name)


class Block:
    """The ops of one layer."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        c, at, small = config, f"blocks.{layer}", residual_std(config.layers)
        self.fork1, self.fork2 = Fork(backend, f"{at}.fork1"), Fork(backend, f"{at}.fork2")
        self.qkv = linear(f"{at}.qkv", 3 * c.dim, c.dim, backend, matrices=3)
        self.attention = Attention(
            c.heads, c.heads, backend, f"{at}.attention", causal=False, dropout=c.attention_dropout
        )
        self.out = linear(f"{at}.out", c.dim, c.dim, backend, std=small)
        self.out_dropout = Dropout(c.dropout, backend, f"{at}.out_dropout")
        self.norm1 = norm(f"{at}.norm1", c, backend)
        self.up = linear(f"{at}.up", c.hidden, c.dim, backend, bias=False)
        self.down = GELULinear(
            Param(f"{at}.down.weight", (c.dim, c.hidden), std=small, matrices=1),
            backend,
            f"{at}.down",
            approximate="erf",
            bias=Param(f"{at}.down.bias", (c.dim,), decay=False),
            input_bias=Param(f"{at}.up.bias", (c.hidden,), decay=False),
        )
        self.down_dropout = Dropout(c.dropout, backend, f"{at}.down_dropout")
        self.norm2 = norm(f"{at}.norm2", c, backend)
        self.split = 3 * c.heads, c.head_dim  # of qkv's output

    def forward(self, x: Array, lengths: Array, stash: Stash | None) -> Array:
        """The stream after the block, (B, T, C)."""
        x, h = self.fork1.forward(x, stash)
        qkv = self.qkv.forward(h, stash).reshape(*x.shape[:2], *self.split)  # (B, T, 3 H, D)
        a = self.attention.forward(qkv, stash, lengths=lengths)  # (B, T, H, D)
        a = self.out.forward(a.reshape(x.shape), stash)  # (B, T, C)
        _, x = self.norm1.forward(x, self.out_dropout.forward(a, stash), stash)
        x, h = self.fork2.forward(x, stash)
        f = self.down.forward(self.up.forward(h, stash), stash)  # through (B, T, hidden)
        _, x = self.norm2.forward(x, self.down_dropout.forward(f, stash), stash)
        return x

    def backward(self, dx: Array, stash: Stash) -> Array:
        """The gradient of x."""
        dx, df = self.norm2.backward((None, dx), stash)
        df = self.down.backward(self.down_dropout.backward(df, stash), stash)
        dx = self.fork2.backward((dx, self.up.backward(df, stash)), stash)
        dx, da = self.norm1.backward((None, dx), stash)
        da = self.out.backward(self.out_dropout.backward(da, stash), stash)
        heads, head_dim = self.split
        dqkv = self.attention.backward(da.reshape(*da.shape[:2], heads // 3, head_dim), stash)  # (B, T, 3 H, D)
        dh = self.qkv.backward(dqkv.reshape(*da.shape[:2], -1), stash)
        return self.fork1.backward((dx, dh), stash)

    def ops(self) -> list[Op]:
        return [op for op in vars(self).values() if isinstance(op, Op)]
