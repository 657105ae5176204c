"""Llama and its kin, forward and backward. Read `hidden` and `forward`, then `backward` beside them from the bottom up.

The blocks are in block.py. NanoEuler is the same model with several output heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.infer.cache import KVCache
from tinyforge.infer.causal_lm import FusedWeights
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.models.llama.block import STD, Block, gain
from tinyforge.models.llama.config import Config
from tinyforge.op import Again, Op, Param, Recompute, Stash, WithKeywords
from tinyforge.ops import AddRMSNorm, Embedding, FP8RMSNorm, LinearCrossEntropy, RMSNorm
from tinyforge.ops.attention import Documents
from tinyforge.ops.fp8_linear import FP8Weights
from tinyforge.params import ParamBuffer, with_buffer


class LlamaLike(Model):
    """An embedding, blocks, and K output heads on the final norm, shared by Llama, NanoEuler and MoE.

    config: of the model. shape: of its trunk. heads: (K, V, C); None to use the embedding as the only head. block: the
    class of its layers.
    """

    per_head = True
    block: Any = Block

    def __init__(
        self,
        config: ModelConfig,
        shape: Config,
        heads: Param | None,
        backend: Backend,
        values: Array,
        recompute: Recompute,
    ) -> None:
        super().__init__(backend)
        self.config, self.shape, self.recompute = config, shape, recompute
        table = Param("embedding.weight", (shape.vocab, shape.dim), std=STD)
        self.embedding = Embedding(table, backend, "embedding")
        norm = FP8RMSNorm if backend.fp8 and self.block.in_fp8 else RMSNorm
        self.first_norm = norm(gain("blocks.0.norm1", shape.dim), backend, shape.norm_eps, "blocks.0.norm1")
        self.blocks = [self.block(shape, i, backend) for i in range(shape.layers)]
        self.again = [Again(backend, f"blocks.{i}") for i in range(shape.layers)]
        self.heads = LinearCrossEntropy(heads or table, backend, "heads")
        self.prediction_heads = self.heads.shape[0]
        self.buffer = ParamBuffer(self.params(), backend, values)
        self.fp8_weights = FP8Weights(self.ops(), backend)

    def hidden(
        self,
        ids: Array,
        stash: Stash | None = None,
        *,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Array:
        """ids: (B, T) to the final-normed stream, (B, T, C). With a cache, ids continue the positions in it. documents:
        a token attends to its own document only; restarting positions makes no difference to RoPE."""
        return self.trunk(ids, stash, cache, documents)[0]

    def trunk(
        self, ids: Array, stash: Stash | None, cache: KVCache | None = None, documents: Documents | None = None
    ) -> tuple[Array, list[Array]]:
        """The final-normed stream, and the further outputs of the blocks."""
        more: list[Array] = []
        self.fp8_weights.refresh()
        x = self.embedding.forward(ids, stash)
        h = self.first_norm.forward(x, stash)
        normed: Callable[[Array], Array] = self.first_norm.forward  # recomputes h from x
        for i, block in enumerate(self.blocks):
            layer = partial(
                block.forward,
                cache=cache.layer(i) if cache else None,
                offset=cache.length if cache else 0,
                starts=documents.starts if documents else None,
            )
            if self.recompute == "blocks":
                x, h, *beside = self.again[i].run(layer, x, h, normed, stash)
            else:
                x, h, *beside = layer(x, h, stash)
            normed = block.next_norm.normed
            more += beside
        if cache:
            cache.advance(ids.shape[1])
        return h, more

    def fill(self, ids: Array, cache: KVCache) -> Array:
        """Append ids to the cache, as `hidden` does, but end at the last layer's keys and values; returns the stream
        that this layer reads, (B, T, C)."""
        self.fp8_weights.refresh()
        x = self.embedding.forward(ids)
        h = self.first_norm.forward(x)
        *blocks, last = self.blocks
        for i, block in enumerate(blocks):
            x, h, *_ = block.forward(x, h, None, cache=cache.layer(i), offset=cache.length)
        last.fill(h, cache.layer(len(blocks)), cache.length)
        cache.advance(ids.shape[1])
        return x

    def forward(
        self, ids: Array, targets: Array, stash: Stash | None = None, *, documents: Documents | None = None
    ) -> Array:
        return self.heads.forward(self.hidden(ids, stash, documents=documents), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dh, _ = self.heads.backward(dy, stash)
        self.trunk_backward(dh, stash)

    def trunk_backward(self, dh: Array, stash: Stash, *beside: Array) -> None:
        """beside: the gradients of the further outputs of each block."""
        # Only the final norm reads the stream here.
        dx: Array | None = None
        for block, again in zip(reversed(self.blocks), reversed(self.again), strict=True):
            if self.recompute == "blocks":
                again.restore(stash)
            dx, dh = block.backward(dx, dh, stash, *beside)
        dx = self.first_norm.backward(dh, stash, residual=dx)
        self.embedding.backward(dx, stash)

    def logits(self, h: Array, head: int = 0) -> Array:
        return self.heads.logits(h, head)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.shape
        return KVCache(self.backend, c.layers, batch, capacity, c.kv_heads, c.head_dim)

    def fused_weights(self) -> FusedWeights | None:
        c, rope = self.shape, self.blocks[0].rope
        if c.qkv_bias or c.qk_norm or c.window:
            return None
        norms: list[RMSNorm | AddRMSNorm] = [self.first_norm]
        for block in self.blocks:
            norms += [block.norm2, block.next_norm]
        return FusedWeights(
            c.dim,
            c.hidden,
            c.heads,
            c.kv_heads,
            c.head_dim,
            c.context,
            c.vocab,
            c.norm_eps,
            [block.fused() for block in self.blocks],
            [norm.weight.value for norm in norms],
            self.embedding.weight.value,
            self.heads.weight.stored.reshape(*self.heads.shape),
            rope.cos,
            rope.sin,
        )

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter in a matrix product, and
        attention over the pairs of positions that attend to each other. Recomputation is not counted.

        An embedding lookup costs nothing; a tied embedding is multiplied as the head. Attention: two
        products of 2 D FLOP per query head and pair in forward, twice that in backward; without a window a token has
        (seq_len + 1) / 2 pairs on average.
        """
        c = self.shape
        window = min(c.window or seq_len, seq_len)
        pairs = window - window * (window - 1) / (2 * seq_len)
        multiplied = self.buffer.count - (0 if c.tied else c.vocab * c.dim)
        return 6 * multiplied + 3 * 2 * 2 * c.head_dim * c.heads * c.layers * pairs

    def ops(self) -> list[Op]:
        blocks = [op for block in self.blocks for op in block.ops()]
        return [self.embedding, self.first_norm, *blocks, self.heads]


class Llama(LlamaLike):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | tokens 0..t of row b), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). Block, with h the normed stream:
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + down(gate_up(norm2(x))), where down begins with SwiGLU
    then a final norm and an output head, its own or the embedding. recompute: "blocks": keep only the input of each
    block, and run the block again in backward. `values` shares another model's weights (see ParamBuffer).

    Sources: Touvron et al., "LLaMA" (2023), "Llama 2" (2023); Jiang et al., "Mistral 7B" (2023); the Qwen2 (2024) and
    Qwen3 (2025) technical reports.
    """

    def __init__(self, config: Config, backend: Backend, *, values: Array = None, recompute: Recompute = "") -> None:
        own = None if config.tied else Param("heads.weight", (1, config.vocab, config.dim), std=STD)
        super().__init__(config, config, own, backend, values, recompute)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        shapes = (
            (Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=10), 2, 9),
            (
                Config(
                    dim=12,
                    heads=3,
                    kv_heads=1,
                    head_dim=6,
                    layers=1,
                    context=9,
                    vocab=5,
                    hidden=7,
                    tied=False,
                    qkv_bias=True,
                    rope_scaling="linear",
                    rope_factor=2.0,
                ),
                3,
                5,
            ),
            (
                Config(
                    dim=10,
                    heads=2,
                    kv_heads=1,
                    head_dim=8,
                    layers=2,
                    context=9,
                    vocab=5,
                    hidden=7,
                    qk_norm=True,
                    window=3,
                    rope_scaling="llama3",
                    rope_factor=4.0,
                    original_context=12,
                    rope_theta=50.0,
                ),
                2,
                7,
            ),
            (Config(dim=4, heads=1, kv_heads=1, layers=1, context=1, vocab=3, hidden=3, norm_eps=0.1), 3, 1),
            (Config(dim=4, heads=2, kv_heads=1, layers=1, context=132, vocab=7, hidden=3, window=100), 1, 131),
            (Config(dim=12, heads=2, kv_heads=1, layers=2, context=9, vocab=5, hidden=7, dropout=0.3), 2, 7),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.2)
        config = Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=10, window=4)
        packed = WithKeywords(with_buffer(cls(config, backend), backend, rng, std=0.2), documents=Documents)
        ids, targets = rng.integers(0, 11, (2, 9)), rng.integers(-1, 11, (2, 9, 1))
        starts = np.array([[0, 0, 0, 3, 3, 3, 3, 3, 8], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
        yield packed, (backend.asarray(ids), backend.asarray(targets), backend.asarray(starts))
