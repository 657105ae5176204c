"""NanoEuler, forward and backward. Read `forward`, then `backward` beside it from the bottom up.

A residual step x <- x + f(x) is one forward-Euler step of dx/dt = f(x) with step size 1: hence the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from models.nanoeuler.config import Config
from tinyforge.backends import Backend
from tinyforge.infer.cache import KVCache
from tinyforge.infer.causal_lm import FusedLayer, FusedWeights
from tinyforge.kernel import Array
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import AddRMSNorm, Attention, Embedding, Linear, LinearCrossEntropy, RMSNorm, RoPE, SwiGLULinear
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.rng import Stream

FLOP_CONVENTION = "6 FLOP a token and parameter outside the embedding, and causal attention; no recomputation"


class Block:
    """The ops of one layer; the norms stand at the joints, where a residual is added, and so belong to the model."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        dim, width = config.dim, (config.heads + 2 * config.kv_heads) * config.head_dim
        # GPT-2: 2 * layers projections add to the residual stream; this keeps its variance from growing with them.
        std, residual_std = 0.02, 0.02 / (2 * config.layers) ** 0.5
        at = f"blocks.{layer}."

        def linear(name: str, rows: int, columns: int, std: float) -> Linear:
            return Linear(Param(f"{at}{name}.weight", (rows, columns), std=std), backend, f"{at}{name}")

        self.qkv = linear("qkv", width, dim, std)
        self.rope = RoPE(
            config.head_dim, config.context, config.heads + config.kv_heads, backend, config.rope_theta, f"{at}rope"
        )
        self.attention = Attention(config.heads, config.kv_heads, backend, f"{at}attention")
        self.out = linear("out", dim, dim, residual_std)
        self.gate_up = linear("gate_up", 2 * config.hidden, dim, std)
        down = Param(f"{at}down.weight", (dim, config.hidden), std=residual_std)
        self.down = SwiGLULinear(down, backend, f"{at}down")


class NanoEuler(Op):
    """nll[b, t, k] = -log p(token t+1+k | tokens 0..t), 0 where there is no target

    ids: (B, T) int32; targets: (B, T, K) int32, -1 for none; nll: (B, T, K). Block, with h the normed stream:
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + down(gate_up(norm2(x))), where down begins with SwiGLU
    then a final norm and K output heads. Handing in `values` shares another model's weights (see ParamBuffer).
    recompute: compute the norms' results again in backward instead of keeping them, which saves a sixth of what a layer
    would keep.
    """

    per_head = True

    def __init__(self, config: Config, backend: Backend, *, values: Array = None, recompute: bool = False) -> None:
        super().__init__(backend)
        self.config = config
        self.prediction_heads = config.mtp_heads
        self.recompute = recompute

        def gain(name: str) -> Param:
            return Param(f"{name}.weight", (config.dim,), fill=1.0, decay=False)

        table = Param("embedding.weight", (config.vocab, config.dim), std=0.02)
        self.embedding = Embedding(table, backend, "embedding")
        self.blocks = [Block(config, i, backend) for i in range(config.layers)]
        # One norm before the first block, one at each joint after it, the last of them the final norm.
        names = [f"blocks.{i}.norm{half}" for i in range(config.layers) for half in (1, 2)] + ["final_norm"]
        self.first_norm = RMSNorm(gain(names[0]), backend, config.norm_eps, names[0])
        self.joints = [AddRMSNorm(gain(n), backend, config.norm_eps, n) for n in names[1:]]
        heads = Param("heads.weight", (config.mtp_heads, config.vocab, config.dim), std=0.02)
        self.heads = LinearCrossEntropy(heads, backend, "heads")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def initialise(self, seed: int) -> None:
        self.buffer.initialise(Stream(seed, "init"))

    def replica(self) -> NanoEuler:
        """A model that reads these weights and owns its gradients: a worker of data-parallel training."""
        return NanoEuler(self.config, self.backend, values=self.buffer.values, recompute=self.recompute)

    def hidden(self, ids: Array, stash: Stash | None = None, *, cache: KVCache | None = None) -> Array:
        """ids: (B, T) to the final-normed stream, (B, T, C). With a cache, ids follow the positions that it holds."""
        offset = cache.length if cache else 0
        shape = (*ids.shape, -1, self.config.head_dim)
        x = self.embedding.forward(ids, stash)
        h = self.first_norm.forward(x, stash)
        normed: Callable[[Array], Array] = self.first_norm.forward  # what computes h again from x
        for i, block in enumerate(self.blocks):
            qkv = block.qkv.forward(h, stash, recompute=self._recompute(normed, x)).reshape(shape)
            qkv = block.rope.forward(qkv, stash, offset=offset, out=qkv)
            a = block.attention.forward(qkv, stash, cache=cache.layer(i) if cache else None)
            a = block.out.forward(a.reshape(x.shape), stash)
            x, h = self.joints[2 * i].forward(x, a, stash)
            gu = block.gate_up.forward(h, stash, recompute=self._recompute(self.joints[2 * i].normed, x))
            f = block.down.forward(gu, stash)
            x, h = self.joints[2 * i + 1].forward(x, f, stash)
            normed = self.joints[2 * i + 1].normed
        if cache:
            cache.advance(ids.shape[1])
        return h

    def logits(self, h: Array, head: int = 0) -> Array:
        return self.heads.logits(h, head)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(self.backend, c.layers, batch, capacity, c.kv_heads, c.head_dim)

    def fused_weights(self) -> FusedWeights:
        c, rope = self.config, self.blocks[0].rope
        layers = [FusedLayer(b.qkv.weight.value, b.out.weight.value, b.gate_up.weight.value, b.down.weight.value)
                  for b in self.blocks]  # fmt: skip
        gains = [param.value for norm in (self.first_norm, *self.joints) for param in norm.params()]
        return FusedWeights(
            c.dim, c.hidden, c.heads, c.kv_heads, c.head_dim, c.context, c.vocab, c.norm_eps, layers, gains,
            self.embedding.weight.value, self.heads.weight.value, rope.cos, rope.sin,
        )  # fmt: skip

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
            da = block.out.backward(da, stash)
            dqkv = block.attention.backward(da.reshape(*da.shape[:-1], -1, self.config.head_dim), stash)
            dqkv = block.rope.backward(dqkv, stash, out=dqkv)
            dh = block.qkv.backward(dqkv.reshape(*da.shape[:-1], -1), stash)
        dx = self.first_norm.backward(dh, stash, residual=dx)
        self.embedding.backward(dx, stash)

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token, by FLOP_CONVENTION.

        Attention: two products of 2 D FLOP per query head and pair of positions s <= t in forward, twice that in
        backward; a token has (seq_len + 1) / 2 pairs on average.
        """
        c = self.config
        pairs = (seq_len + 1) / 2
        return 6 * (self.buffer.count - c.vocab * c.dim) + 3 * 2 * 2 * c.head_dim * c.heads * c.layers * pairs

    def ops(self) -> list[Op]:
        """Every op, in the order of forward."""
        ops: list[Op] = [self.embedding, self.first_norm]
        for i, b in enumerate(self.blocks):
            ops += [b.qkv, b.rope, b.attention, b.out, self.joints[2 * i]]
            ops += [b.gate_up, b.down, self.joints[2 * i + 1]]
        return [*ops, self.heads]

    def params(self) -> list[Param]:
        return [p for op in self.ops() for p in op.params()]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        shapes = (
            (Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, mtp_heads=3, hidden=10,
                    mtp_weights=(1, 1, 1)), 2, 9),
            (Config(dim=4, heads=1, kv_heads=1, layers=1, context=1, vocab=3, mtp_heads=1, hidden=3,
                    mtp_weights=(1,), norm_eps=0.1), 3, 1),
            (Config(dim=12, heads=2, kv_heads=1, layers=3, context=132, vocab=7, mtp_heads=2, hidden=5,
                    mtp_weights=(1, 1)), 1, 131),
        )  # fmt: skip
        for config, batch, length in shapes:
            model = with_buffer(cls(config, backend), backend, rng, std=0.2)
            ids = rng.integers(0, config.vocab, (batch, length))
            targets = rng.integers(-1, config.vocab, (batch, length, config.mtp_heads))
            yield model, (backend.asarray(ids), backend.asarray(targets))
