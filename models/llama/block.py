"""The block of Llama, its kin, and NanoEuler, forward and backward. Read `forward`, then `backward` from the bottom up.

A norm is fused with the residual addition before it, so a block takes the stream and its norm, and returns both:

    h = norm1(x)                                     before the first block
    x, h = block(x, h):   x = x + out(attention(rope(qkv(h))));    h = norm2(x)
                          x = x + down(gate_up(h));                h = norm1 of the next block, or the final norm

In training, dropout is applied to both additions if the config has any; without dropout, the product adds x itself.
In FP8, h is a `Scaled`, and so are the gradients that reach the second half's products.
"""

from __future__ import annotations

from functools import partial

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.kernel import Array
from tinyforge.models.llama.config import Config
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import (
    AddRMSNorm,
    Attention,
    Dropout,
    FP8AddRMSNorm,
    FP8Linear,
    FP8LinearSwiGLU,
    FP8SwiGLULinear,
    Linear,
    LinearSwiGLU,
    RMSNorm,
    RoPE,
    RopeScaling,
    SwiGLULinear,
)
from tinyforge.ops.attention import LayerCache, split
from tinyforge.ops.dropout import adding
from tinyforge.ops.swiglu_linear import swiglu_mlp

STD = 0.02
"""Standard deviation of all initial matrices but those of `residual_std`."""


def residual_std(layers: int) -> float:
    """GPT-2: 2 * layers projections add to the residual stream; this keeps its variance from growing with depth."""
    return STD / (2 * layers) ** 0.5


def gain(name: str, width: int) -> Param:
    return Param(f"{name}.weight", (width,), fill=1.0, decay=False)


class AttentionHalf:
    """The first half of a layer, and the norm that ends it. Dense layers and mixtures of experts share it. x, h: the
    stream and its norm, (B, T, C) each. in_fp8: whether --precision fp8 applies to the layer."""

    in_fp8 = False

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        c, at, fp8, last = config, f"blocks.{layer}", backend.fp8 and self.in_fp8, layer + 1 == config.layers
        self.head_dim = c.head_dim
        queries, heads = c.heads * c.head_dim, c.heads + 2 * c.kv_heads

        def head_norm(name: str) -> RMSNorm:
            return RMSNorm(gain(f"{at}.{name}", c.head_dim), backend, c.norm_eps, f"{at}.{name}")

        def add_norm(name: str, *, scaled: bool = True, scaled_backward: bool = True) -> AddRMSNorm:
            known = (gain(name, c.dim), backend, c.norm_eps, name)
            if not fp8:
                return AddRMSNorm(*known)
            return FP8AddRMSNorm(*known, scaled=scaled, scaled_backward=scaled_backward)

        bias = Param(f"{at}.qkv.bias", (heads * c.head_dim,), decay=False) if c.qkv_bias else None
        keys = c.kv_heads * c.head_dim
        qkv = Param(f"{at}.qkv.weight", (heads * c.head_dim, c.dim), std=STD, matrices=(queries, keys, keys))
        if fp8 and bias:
            raise UserError("--precision fp8: products in FP8 add no bias, and qkv has one (qkv_bias); use bf16")
        self.qkv = FP8Linear(qkv, backend, f"{at}.qkv") if fp8 else Linear(qkv, backend, f"{at}.qkv", bias=bias)
        # Qwen3: one norm for all query heads, one for all key heads.
        of_q, of_k = slice(0, c.heads), slice(c.heads, c.heads + c.kv_heads)
        self.head_norms = [(head_norm("q_norm"), of_q), (head_norm("k_norm"), of_k)] if c.qk_norm else []
        scaling = None
        if c.rope_scaling != "none":
            scaling = RopeScaling(c.rope_scaling, c.rope_factor, c.rope_low_freq, c.rope_high_freq, c.original_context)
        self.rope = RoPE(
            c.head_dim, c.context, c.heads + c.kv_heads, backend, c.rope_theta, f"{at}.rope", scaling=scaling
        )
        self.attention = Attention(c.heads, c.kv_heads, backend, f"{at}.attention", window=c.window or None)
        out = Param(f"{at}.out.weight", (c.dim, queries), std=residual_std(c.layers), matrices=1)
        self.out = Linear(out, backend, f"{at}.out")
        self.out_dropout = Dropout(c.dropout, backend, f"{at}.out_dropout")
        self.down_dropout = Dropout(c.dropout, backend, f"{at}.down_dropout")
        self.norm2 = add_norm(f"{at}.norm2", scaled_backward=False)
        self.next_norm = add_norm(
            "final_norm" if last else f"blocks.{layer + 1}.norm1", scaled=not last, scaled_backward=not c.dropout
        )

    def attend(
        self,
        x: Array,
        h: Array,
        stash: Stash | None,
        *,
        cache: LayerCache | None = None,
        offset: int = 0,
        starts: Array | None = None,
    ) -> tuple[Array, Array]:
        """x with attention added, and its norm2. Arguments as in `Block.forward`."""
        qkv = self.turned(h, stash, offset)
        a = self.attention.forward(qkv, stash, cache=cache, starts=starts)  # (B, T, Hq, D)
        add = adding(self.out, self.out_dropout, x)
        a = self.out.forward(a.reshape(*x.shape[:2], -1), stash, **add)  # (B, T, C)
        a = self.out_dropout.forward(a, stash)
        return self.norm2.forward(a, None, stash) if add else self.norm2.forward(x, a, stash)

    def turned(self, h: Array, stash: Stash | None, offset: int) -> Array:
        """q, k and v after RoPE, (B, T, Hq + 2 Hkv, D)."""
        if not self.head_norms:
            return self.rope.after(self.qkv, h, stash, offset=offset)
        qkv = self.qkv.forward(h, stash)
        qkv = qkv.reshape(*h.shape[:2], -1, self.head_dim)
        for norm, heads in self.head_norms:
            norm.forward(qkv[:, :, heads], stash, out=qkv[:, :, heads])
        return self.rope.forward(qkv, stash, offset=offset, out=qkv)

    def fill(self, h: Array, cache: LayerCache, offset: int) -> None:
        """Append keys and values to the cache, and compute nothing else."""
        _, k, v = split(self.turned(h, None, offset), self.attention.heads)
        cache.append(k, v)

    def attend_backward(self, dx: Array, dh: Array, stash: Stash) -> tuple[Array, Array]:
        dx, da = self.norm2.backward((dx, dh), stash)
        da = self.out.backward(self.out_dropout.backward(da, stash), stash)  # (B, T, Hq D)
        da = da.reshape(*da.shape[:2], -1, self.head_dim)
        dqkv = self.attention.backward(da, stash, rope=self.rope)  # (B, T, Hq + 2 Hkv, D)
        for norm, heads in reversed(self.head_norms):
            norm.backward(dqkv[:, :, heads], stash, out=dqkv[:, :, heads])
        return dx, self.qkv.backward(dqkv.reshape(*da.shape[:2], -1), stash)

    def attend_ops(self) -> list[Op]:
        """In the order of forward."""
        norms = [norm for norm, _ in self.head_norms]
        return [self.qkv, *norms, self.rope, self.attention, self.out, self.out_dropout, self.norm2]


class Block(AttentionHalf):
    """One layer. x, h: the stream and its norm, (B, T, C) each."""

    in_fp8 = True

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        super().__init__(config, layer, backend)
        c, at = config, f"blocks.{layer}"
        gate_up = Param(f"{at}.gate_up.weight", (2 * c.hidden, c.dim), std=STD, matrices=2)
        down = Param(f"{at}.down.weight", (c.dim, c.hidden), std=residual_std(c.layers), matrices=1)
        self.gate_up = (FP8LinearSwiGLU if backend.fp8 else LinearSwiGLU)(gate_up, backend, f"{at}.gate_up")
        swiglu_linear = partial(FP8SwiGLULinear, gives_fp8=True) if backend.fp8 else SwiGLULinear
        self.down = swiglu_linear(down, backend, f"{at}.down")

    def forward(
        self,
        x: Array,
        h: Array,
        stash: Stash | None,
        *,
        cache: LayerCache | None = None,
        offset: int = 0,
        starts: Array | None = None,
    ) -> tuple[Array, Array]:
        """x and h after the block. offset: positions in the cache. starts: first position of each token's document,
        (B, T); RoPE needs no restart, since its scores depend on distances only."""
        x, h = self.attend(x, h, stash, cache=cache, offset=offset, starts=starts)
        add = adding(self.down, self.down_dropout, x)
        f = swiglu_mlp(self.gate_up, self.down, h, stash, **add)  # (B, T, C), by way of (B, T, 2 hidden)
        f = self.down_dropout.forward(f, stash)
        return self.next_norm.forward(f, None, stash) if add else self.next_norm.forward(x, f, stash)

    def backward(self, dx: Array | None, dh: Array, stash: Stash) -> tuple[Array, Array]:
        """The gradients of x and h. dx: gradient of x after the block; None if only its norm is used."""
        dx, df = self.next_norm.backward((dx, dh), stash)
        dgu = self.down.backward(self.down_dropout.backward(df, stash), stash)
        dh = self.gate_up.backward(dgu, stash)
        return self.attend_backward(dx, dh, stash)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        return [*self.attend_ops(), self.gate_up, self.down, self.down_dropout, self.next_norm]

    def fused(self) -> FusedLayer:
        return FusedLayer(*(op.weight.stored for op in (self.qkv, self.out, self.gate_up, self.down)))
