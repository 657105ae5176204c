"""GPT-2, forward and backward. Read `hidden` and `forward`, then `backward` from the bottom up.

What differs from NanoEuler: LayerNorm, learned positions, GELU, biases, dropout, and an output head that is the
embedding. The blocks are in block.py.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tinyforge.backends import Backend
from tinyforge.infer.cache import KVCache
from tinyforge.kernel import Array
from tinyforge.model import NextTokenModel
from tinyforge.models.gpt2.block import Block
from tinyforge.models.gpt2.config import Config
from tinyforge.models.gpt2.parts import STD, norm
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import Dropout, Embedding, LearnedPositions, LinearCrossEntropy
from tinyforge.ops.attention import Documents
from tinyforge.params import ParamBuffer
from tinyforge.residual import AttentionContext, PreNorm, ResidualStream, layers_of


class GPT2(NextTokenModel):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | tokens 0..t of row b), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). The stream starts as x = embedding + position; block:
        x = x + out(attention(qkv(norm1(x))));   x = x + down(gelu(up(norm2(x))))
    then a final norm, and the embedding again as the output head; down begins with the GELU. In training, dropout on
    the start, on the attention probabilities and on both additions. recompute: "norms": keep the stream instead of the
    norms' outputs; "blocks": keep only the input of each block; the rest is computed again in backward. `values` shares
    another model's weights (see ParamBuffer).

    Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); the start as in nanoGPT.
    """

    batched_steps = True

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        super().__init__(backend)
        self.config, self.recompute = config, recompute

        table = Param("embedding.weight", (config.vocab, config.dim), std=STD)
        self.embedding = Embedding(table, backend, "embedding")
        self.positions = LearnedPositions(
            Param("positions.weight", (config.context, config.dim), std=STD), backend, "positions"
        )
        self.dropout = Dropout(config.dropout, backend, "dropout")
        norms = recompute == "norms"
        self.blocks = [Block(config, i, backend, recompute=norms) for i in range(config.layers)]
        self.layers = layers_of(self.blocks, backend, recompute)
        self.final_norm = PreNorm(norm("final_norm", config, backend, bias=config.bias))
        self.head = LinearCrossEntropy(table, backend, "head")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def hidden(
        self,
        ids: Array,
        stash: Stash | None = None,
        *,
        cache: KVCache | None = None,
        documents: Documents | None = None,
    ) -> Array:
        """(B, T) ids to the final-normed stream, (B, T, C). With a cache, ids continue the positions in it. documents:
        a token attends to its own document only."""
        starts = documents.starts if documents else None
        x = self.embedding.forward(ids, stash)
        x = self.positions.forward(
            x, stash, offset=cache.length if cache else 0, starts=starts if documents and documents.restart else None
        )
        x = self.dropout.forward(x, stash)
        stream = ResidualStream(x)
        for i, layer in enumerate(self.layers):
            layer.forward(stream, stash, AttentionContext(cache.layer(i) if cache else None, starts=starts))
        if cache:
            cache.advance(ids.shape[1])
        return self.final_norm.forward(stream, stash)

    def forward(
        self, ids: Array, targets: Array, stash: Stash | None = None, *, documents: Documents | None = None
    ) -> Array:
        return self.head.forward(self.hidden(ids, stash, documents=documents), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dh, _ = self.head.backward(dy, stash)
        dx = self.final_norm.backward(dh, stash)
        for layer in reversed(self.layers):
            dx = layer.backward(dx, stash)
        dx = self.dropout.backward(dx, stash)
        dx = self.positions.backward(dx, stash)
        self.embedding.backward(dx, stash)

    def make_cache(self, batch: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(self.backend, c.layers, batch, capacity, c.heads, c.head_dim)

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter in a matrix product, the
        embedding counted once, as the output head; and causal attention, as in NanoEuler, without recomputation."""
        c = self.config
        pairs = (seq_len + 1) / 2
        return 6 * (self.buffer.count - c.context * c.dim) + 3 * 2 * 2 * c.dim * c.layers * pairs

    def ops(self) -> list[Op]:
        blocks = [op for block in self.blocks for op in block.ops()]
        return [self.embedding, self.positions, self.dropout, *blocks, self.final_norm.op, self.head]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        shapes = (
            (Config(dim=12, heads=3, layers=2, context=9, vocab=11, dropout=0.3), 2, 9),
            (Config(dim=10, heads=5, layers=1, context=7, vocab=3, bias=False), 3, 5),
            (Config(dim=4, heads=1, layers=1, context=1, vocab=5, norm_eps=0.1), 2, 1),
            (Config(dim=8, heads=2, layers=1, context=140, vocab=7), 1, 131),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.2)
        for restart in (False, True):
            config = Config(dim=12, heads=3, layers=2, context=9, vocab=11)
            yield cls.packed_case(config, backend, rng, partial(Documents, restart=restart))
