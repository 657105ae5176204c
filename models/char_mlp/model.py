"""A character-level MLP language model (Bengio et al., 2003) made of five ops.

The last `window` characters are embedded, concatenated, passed through one hidden layer, and scored. It shows
everything that a model of your own needs: ops, a forward, a backward that is the forward read upwards, a cache for
generation, and cases for the gradient checker.
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.model import NextTokenModel
from tinyforge.models.char_mlp.config import Config
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import GELU, Embedding, LayerNorm, Linear, LinearCrossEntropy
from tinyforge.params import ParamBuffer


class IdCache:
    """The ids of the text so far, (B, capacity), from which windows are cut."""

    can_rewind = True

    def __init__(self, backend: Backend, batch: int, capacity: int) -> None:
        self.ids, self.length = backend.zeros((batch, capacity), np.dtype(np.int32)), 0

    def append(self, ids: Array) -> None:
        self.ids[:, self.length : self.length + ids.shape[1]] = ids
        self.length += ids.shape[1]

    def rewind(self, length: int) -> None:
        self.length = length

    def saved(self, start: int) -> Array:
        return self.ids[:, start : self.length].copy()

    def restore(self, saved: Array) -> None:
        self.append(saved)


class CharMLP(NextTokenModel):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | the last `window` tokens up to t), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). An extra id, `vocab`, pads the window before the first
    token.
    """

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        """recompute: ignored, nothing here would be worth it."""
        super().__init__(backend)
        self.config, inputs, hidden = config, config.window * config.dim, config.hidden
        self.embedding = Embedding(Param("embedding", (config.vocab + 1, config.dim), std=0.1), backend, "embedding")
        self.inner = Linear(Param("inner", (hidden, inputs), std=inputs**-0.5, matrices=1), backend, "inner")
        gain, bias = (
            Param("norm.gain", (hidden,), fill=1.0, decay=False),
            Param("norm.bias", (hidden,), fill=0.0, decay=False),
        )
        self.norm = LayerNorm(gain, bias, backend, name="norm")
        self.gelu = GELU(backend, name="gelu")
        self.head = LinearCrossEntropy(Param("outer", (config.vocab, hidden), std=0.1 * hidden**-0.5), backend, "head")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def windows(self, ids: Array, cache: IdCache | None = None) -> Array:
        """(B, T) ids to (B, T, window): each id after those before it, oldest first."""
        (batch, length), back = ids.shape, self.config.window - 1
        text = self.backend.zeros((batch, back + length), np.dtype(np.int32))
        text[:, :back] = self.config.vocab
        if cache:
            known = min(back, cache.length)
            text[:, back - known : back] = cache.ids[:, cache.length - known : cache.length]
            cache.append(ids)
        text[:, back:] = ids
        made = self.backend.zeros((batch, length, back + 1), np.dtype(np.int32))
        for place in range(back + 1):
            made[:, :, place] = text[:, place : place + length]
        return made

    def hidden(self, ids: Array, stash: Stash | None = None, *, cache: IdCache | None = None) -> Array:
        """(B, T) to (B, T, hidden). With a cache, ids continue the text in it."""
        e = self.embedding.forward(self.windows(ids, cache), stash)  # (B, T, window, dim)
        h = self.inner.forward(e.reshape(*ids.shape, -1), stash)
        h = self.norm.forward(h, stash)
        return self.gelu.forward(h, stash)

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array:
        return self.head.forward(self.hidden(ids, stash), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dh, _ = self.head.backward(dy, stash)
        dh = self.gelu.backward(dh, stash)
        dh = self.norm.backward(dh, stash)
        de = self.inner.backward(dh, stash)
        self.embedding.backward(de.reshape(*de.shape[:2], self.config.window, -1), stash)

    def make_cache(self, batch: int, capacity: int) -> IdCache:
        return IdCache(self.backend, batch, capacity)

    def flop_per_token(self, seq_len: int) -> float:
        return 6.0 * (self.inner.weight.size + self.head.weight.size)

    def ops(self) -> list[Op]:
        return [self.embedding, self.inner, self.norm, self.gelu, self.head]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        shapes = [
            (Config(context=length, vocab=vocab, window=window, dim=4, hidden=8), batch, length)
            for batch, length, vocab, window in ((2, 5, 7, 3), (1, 1, 3, 1), (3, 2, 5, 4))
        ]
        yield from cls.cases_of(shapes, backend, rng)
