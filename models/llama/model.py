"""Llama and its kin, forward and backward. Read `hidden` and `forward`, then `backward` beside them from the bottom up.

NanoEuler's block, with the options of the family: a head that is the embedding, Qwen2's biases, Qwen3's norms on
queries and keys, Mistral's window, rotary angles stretched to longer contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from models.llama.config import Config
from tinyforge.backends import Backend
from tinyforge.infer.cache import Cache, KVCache
from tinyforge.infer.causal_lm import FusedLayer, FusedWeights
from tinyforge.kernel import Array
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import (
    AddRMSNorm, Attention, Embedding, Linear, LinearCrossEntropy, RMSNorm, RoPE, RopeScaling, SwiGLULinear,
)  # fmt: skip
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.rng import Stream


class Block:
    """The ops of one layer; the norms stand at the joints, where a residual is added, and so belong to the model."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        c, at = config, f"blocks.{layer}"
        width, heads = c.heads * c.head_dim, c.heads + 2 * c.kv_heads
        # 2 * layers projections add to the residual stream; this keeps its variance from growing with them.
        std, residual_std = 0.02, 0.02 / (2 * c.layers) ** 0.5

        def weight(name: str, rows: int, columns: int, std: float) -> Param:
            return Param(f"{at}.{name}.weight", (rows, columns), std=std)

        def head_norm(name: str) -> RMSNorm:
            gain = Param(f"{at}.{name}.weight", (c.head_dim,), fill=1.0, decay=False)
            return RMSNorm(gain, backend, c.norm_eps, f"{at}.{name}")

        bias = Param(f"{at}.qkv.bias", (heads * c.head_dim,), decay=False) if c.qkv_bias else None
        self.qkv = Linear(weight("qkv", heads * c.head_dim, c.dim, std), backend, f"{at}.qkv", bias=bias)
        # Qwen3: a norm for all query heads, one for all key heads.
        of_q, of_k = slice(0, c.heads), slice(c.heads, c.heads + c.kv_heads)
        self.normed_heads = [(head_norm("q_norm"), of_q), (head_norm("k_norm"), of_k)] if c.qk_norm else []
        self.rope = RoPE(c.head_dim, c.context, c.heads + c.kv_heads, backend, c.rope_theta, f"{at}.rope",
                         scaling=scaling(c))  # fmt: skip
        self.attention = Attention(c.heads, c.kv_heads, backend, f"{at}.attention", window=c.window or None)
        self.out = Linear(weight("out", c.dim, width, residual_std), backend, f"{at}.out")
        self.gate_up = Linear(weight("gate_up", 2 * c.hidden, c.dim, std), backend, f"{at}.gate_up")
        self.down = SwiGLULinear(weight("down", c.dim, c.hidden, residual_std), backend, f"{at}.down")


def scaling(c: Config) -> RopeScaling | None:
    if c.rope_scaling == "none":
        return None
    return RopeScaling(c.rope_scaling, c.rope_factor, c.rope_low_freq, c.rope_high_freq, c.original_context)


class Llama(Op):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | tokens 0..t of row b), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). Block, with h the normed stream:
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + down(gate_up(norm2(x))), where down begins with SwiGLU
    then a final norm and an output head, its own or the embedding. recompute: keep the stream, not the norms' outputs,
    and compute these again in backward. Handing in `values` shares another model's weights (see ParamBuffer).

    Sources: Touvron et al., "LLaMA" (2023), "Llama 2" (2023); Jiang et al., "Mistral 7B" (2023); the Qwen2 (2024) and
    Qwen3 (2025) technical reports.
    """

    prediction_heads = 1
    per_head = True

    def __init__(self, config: Config, backend: Backend, *, values: Array = None, recompute: bool = False) -> None:
        super().__init__(backend)
        self.config, self.recompute = config, recompute

        def gain(name: str) -> Param:
            return Param(f"{name}.weight", (config.dim,), fill=1.0, decay=False)

        table = Param("embedding.weight", (config.vocab, config.dim), std=0.02)
        self.embedding = Embedding(table, backend, "embedding")
        self.blocks = [Block(config, i, backend) for i in range(config.layers)]
        # One norm before the first block, one at each joint after it, the last of them the final norm.
        names = [f"blocks.{i}.norm{half}" for i in range(config.layers) for half in (1, 2)] + ["final_norm"]
        self.first_norm = RMSNorm(gain(names[0]), backend, config.norm_eps, names[0])
        self.joints = [AddRMSNorm(gain(n), backend, config.norm_eps, n) for n in names[1:]]
        own = Param("heads.weight", (1, config.vocab, config.dim), std=0.02)
        self.heads = LinearCrossEntropy(table if config.tied else own, backend, "heads")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def initialise(self, seed: int) -> None:
        self.buffer.initialise(Stream(seed, "init"))

    def replica(self) -> Llama:
        """A model that reads these weights and owns its gradients: a worker of data-parallel training."""
        return Llama(self.config, self.backend, values=self.buffer.values, recompute=self.recompute)

    def hidden(self, ids: Array, stash: Stash | None = None, *, cache: Cache | None = None) -> Array:
        """(B, T) ids to the final-normed stream, (B, T, C). With a cache, the ids follow what it holds."""
        shape = (*ids.shape, -1, self.config.head_dim)
        x = self.embedding.forward(ids, stash)
        h = self.first_norm.forward(x, stash)
        normed: Callable[[Array], Array] = self.first_norm.forward  # what computes h again from x
        for i, block in enumerate(self.blocks):
            qkv = block.qkv.forward(h, stash, recompute=self._recompute(normed, x)).reshape(shape)  # (B, T, H + 2 Hkv, D)
            for norm, heads in block.normed_heads:
                norm.forward(qkv[:, :, heads], stash, out=qkv[:, :, heads])
            qkv = block.rope.forward(qkv, stash, offset=cache.length if cache else 0, out=qkv)
            a = block.attention.forward(qkv, stash, cache=cache.layer(i) if cache else None)  # (B, T, H, D)
            a = block.out.forward(a.reshape(*ids.shape, -1), stash)  # (B, T, C)
            x, h = self.joints[2 * i].forward(x, a, stash)
            gu = block.gate_up.forward(h, stash, recompute=self._recompute(self.joints[2 * i].normed, x))
            f = block.down.forward(gu, stash)  # (B, T, 2 hidden) to (B, T, C)
            x, h = self.joints[2 * i + 1].forward(x, f, stash)
            normed = self.joints[2 * i + 1].normed
        if cache:
            cache.advance(ids.shape[1])
        return h

    def _recompute(self, function: Callable[[Array], Array], x: Array) -> Callable[[], Array] | None:
        return partial(function, x) if self.recompute else None

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array:
        return self.heads.forward(self.hidden(ids, stash), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dh, _ = self.heads.backward(dy, stash)
        # The stream ends at the final norm: nothing else reads it.
        dx: Array | None = None
        for i in reversed(range(self.config.layers)):
            block, joint = self.blocks[i], self.joints[2 * i + 1]
            dx, df = joint.backward((dx, dh), stash)
            dgu = block.down.backward(df, stash)
            dh = block.gate_up.backward(dgu, stash)
            dx, da = self.joints[2 * i].backward((dx, dh), stash)
            da = block.out.backward(da, stash)  # (B, T, H D)
            dqkv = block.attention.backward(da.reshape(*da.shape[:-1], -1, self.config.head_dim), stash)
            dqkv = block.rope.backward(dqkv, stash, out=dqkv)  # (B, T, H + 2 Hkv, D)
            for norm, heads in reversed(block.normed_heads):
                norm.backward(dqkv[:, :, heads], stash, out=dqkv[:, :, heads])
            dh = block.qkv.backward(dqkv.reshape(*da.shape[:-1], -1), stash)
        dx = self.first_norm.backward(dh, stash, residual=dx)
        self.embedding.backward(dx, stash)

    def logits(self, h: Array, head: int = 0) -> Array:
        """(..., V) from the final-normed stream."""
        return self.heads.logits(h, head)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(self.backend, c.layers, batch, capacity, c.kv_heads, c.head_dim)

    def fused_weights(self) -> FusedWeights | None:
        c = self.config
        if c.qkv_bias or c.qk_norm or c.window:
            return None
        layers = [FusedLayer(*(op.weight.value for op in (b.qkv, b.out, b.gate_up, b.down))) for b in self.blocks]
        table = self.embedding.weight.value
        return FusedWeights(
            c.dim, c.hidden, c.heads, c.kv_heads, c.head_dim, c.context, c.vocab, c.norm_eps, layers,
            [norm.weight.value for norm in (self.first_norm, *self.joints)], table,
            table[None] if c.tied else self.heads.weight.value, self.blocks[0].rope.cos, self.blocks[0].rope.sin,
        )  # fmt: skip

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter that is multiplied with, a tied
        embedding counted once; and attention over the pairs of positions that see each other. No recomputation."""
        c = self.config
        window = min(c.window or seq_len, seq_len)
        pairs = window - window * (window - 1) / (2 * seq_len)  # a token's, on average
        looked_up = 0 if c.tied else c.vocab * c.dim
        return 6 * (self.buffer.count - looked_up) + 3 * 2 * 2 * c.head_dim * c.heads * c.layers * pairs

    def ops(self) -> list[Op]:
        """Every op, in the order of forward."""
        ops: list[Op] = [self.embedding, self.first_norm]
        for i, b in enumerate(self.blocks):
            ops += [b.qkv, *(norm for norm, _ in b.normed_heads), b.rope, b.attention, b.out, self.joints[2 * i]]
            ops += [b.gate_up, b.down, self.joints[2 * i + 1]]
        return [*ops, self.heads]

    def params(self) -> list[Param]:
        return list(dict.fromkeys(p for op in self.ops() for p in op.params()))

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        llama3 = {"rope_scaling": "llama3", "rope_factor": 4.0, "original_context": 12, "rope_theta": 50.0}
        shapes = (
            (Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=10), 2, 9),
            (Config(dim=12, heads=3, kv_heads=1, head_dim=6, layers=1, context=9, vocab=5, hidden=7, tied=False,
                    qkv_bias=True, rope_scaling="linear", rope_factor=2.0), 3, 5),
            (Config(dim=10, heads=2, kv_heads=1, head_dim=8, layers=2, context=9, vocab=5, hidden=7, qk_norm=True,
                    window=3, **llama3), 2, 7),
            (Config(dim=4, heads=1, kv_heads=1, layers=1, context=1, vocab=3, hidden=3, norm_eps=0.1), 3, 1),
            (Config(dim=12, heads=2, kv_heads=1, layers=2, context=132, vocab=7, hidden=5, window=100), 1, 131),
        )  # fmt: skip
        for config, batch, length in shapes:
            model = with_buffer(cls(config, backend), backend, rng, std=0.2)
            ids = rng.integers(0, config.vocab, (batch, length))
            targets = rng.integers(-1, config.vocab, (batch, length, 1))
            yield model, (backend.asarray(ids), backend.asarray(targets))
