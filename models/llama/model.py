"""Llama and its kin, forward and backward. Read `trunk` and `forward`, then `backward` from the bottom up.

The blocks are in block.py. NanoEuler is the same model with several output heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.infer.cache import KVCache
from tinyforge.infer.causal_lm import FusedWeights
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.models.llama.block import Block, ParallelBlock, SumBlock
from tinyforge.models.llama.config import FUSED, Config
from tinyforge.models.llama.parts import STD, bias, projection, rms_norm
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import Add, CappedCrossEntropy, Embedding, LearnedPositions, LinearCrossEntropy, Scale, Smear
from tinyforge.ops.attention import Documents
from tinyforge.ops.fp8_linear import FP8Weights
from tinyforge.params import ParamBuffer
from tinyforge.residual import AttentionContext, ResidualStream, layers_of


class LlamaLike(Model):
    """An embedding, blocks, and K output heads on the final norm, shared by Llama, NanoEuler and MoE.

    config: of the model. shape: of its trunk. heads: (K, V, C); None to use the embedding as the only head. block: the
    class of its layers.
    """

    per_head = batched_steps = True
    block: Any = Block

    def __init__(
        self,
        config: ModelConfig,
        shape: Config,
        heads: Param | None,
        backend: Backend,
        values: Array | None,
        recompute: Recompute,
    ) -> None:
        super().__init__(backend)
        self.config, self.shape, self.recompute = config, shape, recompute
        table = Param("embedding.weight", (shape.vocab, shape.embedding_width), std=STD)
        self.embedding = Embedding(table, backend, "embedding")
        self.positions: LearnedPositions | None = None
        if shape.learned_positions:
            rows = Param("positions.weight", (shape.context + 2, shape.dim), std=STD)
            self.positions = LearnedPositions(rows, backend, "positions", first=2)
        kind: Any = ParallelBlock if shape.parallel else SumBlock if shape.norms == "sum" else self.block
        self.blocks = [kind(shape, i, backend) for i in range(shape.layers)]
        self.layers = layers_of(self.blocks, backend, recompute)
        self.final_norm = self.block.final_norm(shape, backend)
        self.heads = output_heads(shape, heads or table, backend)
        self.project_in = projection("project_in", shape.dim, shape.embedding_dim, backend)
        self.project_out = projection("project_out", shape.embedding_dim, shape.dim, backend)
        self.embedding_scale = scale("embedding_scale", shape.embedding_scale, backend)
        self.embedding_norm = rms_norm("embedding_norm", shape.dim, shape, backend) if shape.embedding_norm else None
        self.add, self.smear = Add(backend, "first"), smear(shape, backend) if shape.smear else None
        self.logit_scale = scale("logit_scale", shape.logit_scale, backend)
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
        return self.normed(self.trunk(ids, stash, cache=cache, documents=documents), stash)

    def normed(self, stream: ResidualStream, stash: Stash | None) -> Array:
        """What the output heads read: the final norm's value, with the scale of the logits."""
        h: Array = self.final_norm.forward(stream, stash)
        if self.project_out:
            h = self.project_out.forward(h, stash)
        return self.logit_scale.forward(h, stash) if self.logit_scale else h

    def fill(self, ids: Array, cache: KVCache) -> Array:
        """Append ids to the cache, as `hidden` does, but end at the last layer's keys and values; returns the stream
        that this layer reads, (B, T, C)."""
        return self.trunk(ids, cache=cache, fill=True).x

    def trunk(
        self,
        ids: Array,
        stash: Stash | None = None,
        *,
        cache: KVCache | None = None,
        documents: Documents | None = None,
        fill: bool = False,
    ) -> ResidualStream:
        """The stream after the blocks. fill: of the last block, compute the keys and values only."""
        self.fp8_weights.refresh()
        offset, learned = cache.length if cache else 0, not self.embedding.weight.frozen
        shared = stash is not None and learned and any(block.attention.values for block in self.blocks)
        order = self.embedding.order(ids) if shared else None
        x = self.embedding.forward(ids, stash, order=order)
        for op in (self.project_in, self.embedding_scale):
            if op:
                x = op.forward(x, stash)
        starts = documents.starts if documents else None
        if self.positions:
            restart = starts if documents and documents.restart else None
            x = self.positions.forward(x, stash, offset=offset, starts=restart)
        if self.embedding_norm:
            x = self.embedding_norm.forward(x, stash)
        if self.smear:
            previous = cache.previous(x) if cache else None
            texts = x if previous is None else x.reshape(len(previous), -1, x.shape[2])
            x = self.smear.forward(texts, stash, starts=starts, previous=previous).reshape(x.shape)
        stream = ResidualStream(x)
        for i, layer in enumerate(self.layers):
            context = AttentionContext(cache.layer(i) if cache else None, offset, starts, ids=ids, order=order)
            if fill and i == len(self.blocks) - 1:
                self.blocks[i].fill(stream, context)
            else:
                layer.forward(stream, stash, context)
        if cache:
            cache.advance(ids.shape[1])
        return stream

    def forward(
        self, ids: Array, targets: Array, stash: Stash | None = None, *, documents: Documents | None = None
    ) -> Array:
        return self.heads.forward(self.hidden(ids, stash, documents=documents), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dh, _ = self.heads.backward(dy, stash)
        self.trunk_backward(dh, stash)

    def trunk_backward(self, dh: Array, stash: Stash, *doutputs: Array) -> None:
        """dh: the gradient of `normed`. doutputs: those of each block's further outputs."""
        for after in (self.logit_scale, self.project_out):
            if after:
                dh = after.backward(dh, stash)
        dx = self.final_norm.backward(dh, stash)
        for layer in reversed(self.layers):
            dx = layer.backward(dx, stash, *doutputs)
        if stash.first is not None:
            dx, stash.first = self.add.forward(dx, stash.first), None
        for before in (self.smear, self.embedding_norm, self.positions, self.embedding_scale, self.project_in):
            if before:
                dx = before.backward(dx, stash)
        self.embedding.backward(dx, stash)

    def logits(self, h: Array, head: int = 0) -> Array:
        return self.heads.logits(h, head)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.shape
        width = c.dim if c.smear else 0
        return KVCache(self.backend, c.layers, batch, capacity, c.kv_heads, c.head_dim, width)

    def fused_weights(self) -> FusedWeights | None:
        c, rope = self.shape, self.blocks[0].attention.rope
        if c.options().keys() - FUSED:
            return None
        norms = [norm for block in self.blocks for norm in (block.norm1, block.norm2)] + [self.final_norm]
        sizes = (c.dim, c.hidden, c.heads, c.kv_heads, c.head_dim, c.context, c.vocab, c.norm_eps)
        layers, gains = [block.fused() for block in self.blocks], [norm.op.weight.value for norm in norms]
        heads = self.heads.weight.stored.reshape(*self.heads.shape)
        return FusedWeights(*sizes, layers, gains, self.embedding.weight.stored, heads, rope.cos, rope.sin)

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter in a matrix product, and
        attention over the pairs of positions that attend to each other. Recomputation is not counted.

        An embedding lookup costs nothing; a tied embedding is multiplied as the head. Attention: two
        products of 2 D FLOP per query head and pair in forward, twice that in backward; without a window a token has
        (seq_len + 1) / 2 pairs on average.
        """
        c = self.shape
        windows = [min(c.window_of(layer) or seq_len, seq_len) for layer in range(c.layers)]
        pairs = sum(window - window * (window - 1) / (2 * seq_len) for window in windows)
        looked_up = (0 if c.tied else c.vocab * c.embedding_width) + (c.context * c.dim if c.learned_positions else 0)
        looked_up += sum(block.attention.values.table.size for block in self.blocks if block.attention.values)
        multiplied = self.buffer.count - looked_up
        return 6 * multiplied + 3 * 2 * 2 * c.head_dim * c.heads * pairs

    def ops(self) -> list[Op]:
        blocks = [op for block in self.blocks for op in block.ops()]
        first = (self.embedding, self.project_in, self.embedding_scale, self.positions, self.embedding_norm, self.smear)
        last = (*self.final_norm.ops(), self.project_out, self.logit_scale, self.heads)
        return [op for op in (*first, *blocks, *last) if op]


def scale(name: str, factor: float, backend: Backend) -> Scale | None:
    return None if factor == 1 else Scale(factor, backend, name)


def smear(c: Config, backend: Backend) -> Smear:
    gate, factor = (
        Param(f"smear_{name}", (size,), fill=0.0, decay=False) for name, size in (("gate", c.smear), ("scale", 1))
    )
    return Smear(gate, factor, backend, "smear")


def output_heads(c: Config, weight: Param, backend: Backend) -> LinearCrossEntropy:
    if c.head_bias:
        return CappedCrossEntropy(weight, c.logit_softcap, backend, "heads", bias=bias("heads", c.vocab))
    return LinearCrossEntropy(weight, backend, "heads", cap=c.logit_softcap)


class Llama(LlamaLike):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | tokens 0..t of row b), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). Block, with h the normed stream:
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + down(gate_up(norm2(x))), where down begins with SwiGLU
    then a final norm and an output head, its own or the embedding. recompute: "blocks": keep only the input of each
    block, and run the block again in backward. `values` shares another model's weights (see ParamBuffer).

    Sources: Touvron et al., "LLaMA" (2023), "Llama 2" (2023); Jiang et al., "Mistral 7B" (2023); the Qwen2 (2024) and
    Qwen3 (2025) technical reports.
    """

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        own = None if config.tied else Param("heads.weight", (1, config.vocab, config.embedding_width), std=STD)
        super().__init__(config, config, own, backend, values, recompute)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        tiny = Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=10)
        odd = Config(dim=12, heads=3, kv_heads=1, head_dim=6, layers=1, context=9, vocab=5, hidden=7)
        linear = {"tied": False, "qkv_bias": True, "rope_scaling": "linear", "rope_factor": 2.0}
        qwen = Config(dim=10, heads=2, kv_heads=1, head_dim=8, layers=2, context=9, vocab=5, hidden=7, qk_norm=True)
        llama3 = {"window": 3, "rope_scaling": "llama3", "rope_factor": 4.0, "original_context": 12, "rope_theta": 50.0}
        shapes = (
            (tiny, 2, 9),
            (odd.override(linear), 3, 5),
            (qwen.override(llama3), 2, 7),
            (Config(dim=4, heads=1, kv_heads=1, layers=1, context=1, vocab=3, hidden=3, norm_eps=0.1), 3, 1),
            (Config(dim=4, heads=2, kv_heads=1, layers=1, context=132, vocab=7, hidden=3, window=100), 1, 131),
            (Config(dim=12, heads=2, kv_heads=1, layers=2, context=9, vocab=5, hidden=7, dropout=0.3), 2, 7),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.2)
        gemma = {"norms": "both", "norm_plus_one": True, "activation": "gelu_tanh", "embedding_scale": 3.5}
        gemma |= {"window": 3, "full_every": 2, "attention_scale": 0.3}
        neox = {"norm": "layer", "norm_bias": True, "gated": False, "mlp_bias": True, "parallel": True, "layers": 2}
        granite = {"residual_scale": 0.3, "logit_scale": 0.4, "out_bias": True, "mlp_bias": True, "no_rope_every": 2}
        families: tuple[dict[str, Any], ...] = (
            {**gemma, "layers": 2, "attention_softcap": 1.5, "logit_softcap": 2.5},
            {
                **gemma,
                "layers": 2,
                "qk_norm": True,
                "local_rope_theta": 50.0,
                "rope_scaling": "yarn",
                "rope_factor": 2.0,
            },
            {"norms": "after", "qk_norm": True, "qk_norm_width": True, "rotary_dim": 4},
            {**granite, "layers": 2},
            {"norm": "layer", "norm_bias": True, "parallel": True, "layers": 2},
            {**neox, "parallel_norms": True, "activation": "gelu", "head_bias": True},
            {**neox, "gated": True, "activation": "gelu"},
            {**neox, "parallel": False, "activation": "silu", "learned_positions": True, "no_rope_every": 1},
            {**neox, "parallel": False, "activation": "silu", "norms": "sum", "embedding_dim": 7},
            {"rotary_dim": 4, "rope_scaling": "yarn", "rope_factor": 2.0, "original_context": 4},  # fused decoders too
        )
        # The norm of a small branch is steep: a large eps gives it a gradient that can be measured.
        steady = odd.override({"norm_eps": 0.05})
        yield from cls.cases_of([(steady.override(options), 2, 6) for options in families], backend, rng, std=0.2)
        yield cls.packed_case(tiny.override({"window": 4}), backend, rng, Documents)
