"""A character-level MLP language model (Bengio et al., 2003) from four ops of the box.

The last `context` characters are embedded, laid side by side, pushed through one hidden layer, and scored. It shows
all that a model of your own needs: ops, a forward, the same read upwards as backward, and a case for the checker.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.op import Op, Param, Stash
from tinyforge.ops import GELU, CrossEntropy, Embedding, LayerNorm, Linear
from tinyforge.params import ParamBuffer, with_buffer


class CharMLP(Op):
    """nll = -log p(next | last `context` characters); ids: (N, context), targets: (N,), nll: (N, 1)."""

    per_head = True

    def __init__(self, vocab: int, context: int, dim: int, hidden: int, backend: Backend) -> None:
        super().__init__(backend)
        self.embedding = Embedding(Param("embedding", (vocab, dim), std=0.1), backend)
        self.inner = Linear(Param("inner", (hidden, context * dim), std=(context * dim) ** -0.5), backend)
        gain, bias = Param("norm.gain", (hidden,), fill=1.0, decay=False), Param("norm.bias", (hidden,), decay=False)
        self.norm = LayerNorm(gain, bias, backend)
        self.gelu = GELU(backend)
        self.outer = Linear(Param("outer", (vocab, hidden), std=0.1 * hidden**-0.5), backend)
        self.loss = CrossEntropy(backend)
        self.buffer = ParamBuffer(self.params(), backend)

    def logits(self, ids: Array, stash: Stash | None = None) -> Array:
        e = self.embedding.forward(ids, stash)
        h = self.inner.forward(e.reshape(len(ids), -1), stash)
        h = self.norm.forward(h, stash)
        h = self.gelu.forward(h, stash)
        return self.outer.forward(h, stash)

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array:
        return self.loss.forward(self.logits(ids, stash)[:, None], targets[:, None], stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dlogits, _ = self.loss.backward(dy, stash)
        dh = self.outer.backward(dlogits[:, 0], stash)
        dh = self.gelu.backward(dh, stash)
        dh = self.norm.backward(dh, stash)
        de = self.inner.backward(dh, stash)
        self.embedding.backward(de.reshape(len(de), -1, self.embedding.weight.shape[1]), stash)

    def params(self) -> list[Param]:
        return [p for op in (self.embedding, self.inner, self.norm, self.outer) for p in op.params()]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        for n, vocab, context, dim, hidden in ((6, 7, 3, 4, 8), (1, 3, 1, 2, 3)):
            model = with_buffer(cls(vocab, context, dim, hidden, backend), backend, rng)
            ids, targets = rng.integers(0, vocab, (n, context)), rng.integers(-1, vocab, n)
            yield model, (backend.asarray(ids), backend.asarray(targets))
