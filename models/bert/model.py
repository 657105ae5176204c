"""BERT, forward and backward. Read `hidden` and `forward`, then `backward` next to them from the bottom up.

Differences from GPT-2: every token attends to every other except padding, segments are embedded besides words and
positions, norms come after each addition instead of before each branch, and the model predicts masked words, or the
class of the whole text from its first token. The blocks are in block.py.
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.errors import UserError
from tinyforge.kernel import Array
from tinyforge.model import Model
from tinyforge.models.bert.block import Block
from tinyforge.models.bert.config import Config
from tinyforge.models.gpt2.parts import STD, linear, norm
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import GELU, CrossEntropy, Dropout, Embedding, LayerNorm, LearnedPositions, Linear, Take, Tanh
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.residual import AttentionContext


def sines(rows: int, columns: int) -> np.ndarray:
    """Waves of increasing length, with mean square STD^2: table[t, 2 i] and [t, 2 i + 1] are the sine and the cosine of
    t / 10000^(2 i / columns). A shift by k positions is one linear map for all t, so every position helps to learn it.

    Source: Vaswani et al., "Attention Is All You Need" (2017), where they are fixed. Here they initialise positions
    that are learned, as in BERT.
    """
    column = np.arange(columns)
    angle = np.arange(rows)[:, None] * 10000.0 ** (-(column - column % 2) / columns)
    return STD * 2**0.5 * np.where(column % 2, np.cos(angle), np.sin(angle))


class BERT(Model):
    """nll[b, m, 0] = -log p(targets[b, m, 0] | text b, at its place places[b, m]), 0 where the target is -1; or with
    classes, nll[b, 0, 0] = -log p(targets[b, 0, 0] | text b)

    ids: (B, T) int32, of words; segments: (B, T) int32, 0 or 1; lengths: (B,) int32, of the rows without padding;
    places: (B, M) int32, of the masked words, -1 for none; targets: (B, M, 1), or (B, 1, 1) with classes.
    The stream starts as x = norm(word + position + segment); block, with the norm after the addition:
        x = norm1(x + out(attention(qkv(x))));   x = norm2(x + down(gelu(up(x))))
    Masked words: norm(gelu(transform(x))) at their places, and the embedding as the output matrix, with a bias.
    Classes: tanh(pooler(x)) at place 0, and a linear map. recompute: ignored, nothing here would be worth it.

    Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2018).
    """

    per_head = True

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        super().__init__(backend)
        self.config = c = config
        table = Param("embedding.weight", (c.vocab, c.dim), std=STD)
        self.embedding = Embedding(table, backend, "embedding")
        self.positions = LearnedPositions(Param("positions.weight", (c.context, c.dim), std=STD), backend, "positions")
        self.segments = Embedding(Param("segments.weight", (c.segments, c.dim), std=STD), backend, "segments")
        self.norm = norm("norm", c, backend)
        self.dropout = Dropout(c.dropout, backend, "dropout")
        self.blocks = [Block(c, i, backend) for i in range(c.layers)]
        self.take = Take(backend, "take")
        self.head: list[Op] = []
        if c.classes:
            self.head = [
                linear("pooler", c.dim, c.dim, backend),
                Tanh(backend, "pooler.tanh"),
                Dropout(c.dropout, backend, "pooler.dropout"),
                linear("head", c.classes, c.dim, backend, matrices=0),
            ]
        elif not c.trunk:
            gain = Param("transform.norm.weight", (c.dim,), fill=1.0, decay=False)
            bias = Param("transform.norm.bias", (c.dim,), fill=0.0, decay=False)
            self.head = [
                linear("transform", c.dim, c.dim, backend),
                GELU(backend, "erf", "transform.gelu"),
                LayerNorm(gain, bias, backend, c.norm_eps, "transform.norm"),
                Linear(table, backend, "head", bias=Param("head.bias", (c.vocab,), fill=0.0, decay=False)),
            ]
        self.loss = CrossEntropy(backend, "loss")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def initialise(self, seed: int) -> None:
        super().initialise(seed)
        self.buffer.set_master(self.positions.weight, sines(*self.positions.weight.shape))
        self.buffer.publish()

    def hidden(self, ids: Array, segments: Array, lengths: Array, stash: Stash | None = None) -> Array:
        """(B, T) ids to the stream, (B, T, C)."""
        x = self.positions.forward(self.embedding.forward(ids, stash), stash)
        _, x = self.norm.forward(x, self.segments.forward(segments, stash), stash)
        x = self.dropout.forward(x, stash)
        for block in self.blocks:
            x = block.forward(x, stash, AttentionContext(lengths=lengths))
        return x

    def encode(self, ids: Array) -> Array:
        """Texts of equal length, (B, T), with [CLS] and [SEP], to the stream, (B, T, C)."""
        lengths = self.backend.asarray(np.full(len(ids), ids.shape[1], np.int32))
        return self.hidden(ids, self.backend.zeros(ids.shape, np.dtype(np.int32)), lengths)

    def predict(self, x: Array, places: Array, stash: Stash | None = None) -> Array:
        """The stream, (B, T, C), at its places, (B, M), to logits: (B, M, words or classes)."""
        y = self.take.forward(x, places, stash)
        for op in self.head:
            y = op.forward(y, stash=stash)
        return y

    def classify(self, ids: Array, segments: Array, lengths: Array, stash: Stash | None = None) -> Array:
        """Logits of the classes, (B, 1, classes)."""
        return self.predict(self.hidden(ids, segments, lengths, stash), self._first(ids), stash)

    def _first(self, ids: Array) -> Array:
        return self.backend.zeros((len(ids), 1), np.dtype(np.int32))

    def forward(
        self,
        ids: Array,
        targets: Array,
        segments: Array,
        lengths: Array,
        places: Array | None = None,
        stash: Stash | None = None,
    ) -> Array:
        if not self.head:
            raise UserError("this BERT has no output layer and cannot be trained; use another one as --base")
        x = self.hidden(ids, segments, lengths, stash)
        if self.config.classes:
            places = self._first(ids)
        assert places is not None, "without classes, places are given"
        z = self.predict(x, places, stash)
        return self.loss.forward(z[:, :, None], targets, stash)  # of (B, M, 1, words or classes)

    def backward(self, dy: Array, stash: Stash) -> None:
        dz, _ = self.loss.backward(dy, stash)
        dz = dz[:, :, 0]
        for op in reversed(self.head):
            dz = op.backward(dz, stash)
        dx, _ = self.take.backward(dz, stash)
        for block in reversed(self.blocks):
            dx = block.backward(dx, stash)
        dx = self.dropout.backward(dx, stash)
        dx, dsegments = self.norm.backward((None, dx), stash)
        self.segments.backward(dsegments, stash)
        self.embedding.backward(self.positions.backward(dx, stash), stash)

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter of the blocks; the head's
        weighted by the share of masked words, since it reads only those; and attention over all tokens."""
        c = self.config
        blocks = sum(p.size for block in self.blocks for op in block.ops() for p in op.params())
        head = 0 if c.classes else c.hidden_words(seq_len) / seq_len * (c.vocab * c.dim + c.dim * c.dim)
        return 6.0 * (blocks + head) + 12.0 * c.layers * c.dim * seq_len

    def ops(self) -> list[Op]:
        blocks = [op for block in self.blocks for op in block.ops()]
        first: list[Op] = [self.embedding, self.positions, self.segments, self.norm, self.dropout]
        return [*first, *blocks, self.take, *self.head, self.loss]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        tiny = Config(dim=6, heads=2, layers=2, context=9, vocab=11, hidden=5, dropout=0.0)
        for config, batch, length in (
            (tiny, 3, 7),
            (tiny.override({"dropout": 0.3, "attention_dropout": 0.2}), 2, 5),
            (tiny.override({"layers": 1}), 1, 1),
            (tiny.override({"classes": 3}), 3, 6),
            (tiny.override({"classes": 2, "dropout": 0.3, "layers": 1}), 2, 9),
        ):
            model = with_buffer(cls(config, backend), backend, rng, std=0.3)
            ids, segments = rng.integers(0, config.vocab, (batch, length)), rng.integers(0, 2, (batch, length))
            lengths = rng.integers(1, length + 1, batch)
            places = np.full((batch, 2 if length > 1 else 1), -1)
            for row, end in zip(places, lengths, strict=True):
                row[: min(end, len(row))] = rng.permutation(end)[: len(row)]
            if config.classes:
                inputs = [ids, rng.integers(0, config.classes, (batch, 1, 1)), segments, lengths]
            else:
                targets = np.where(places < 0, -1, rng.integers(0, config.vocab, places.shape))[..., None]
                inputs = [ids, targets, segments, lengths, places]
            yield model, tuple(map(backend.asarray, inputs))
