"""A language model of LSTM layers, forward and backward; read `hidden`, then `backward` from the bottom up.

Its state, h and c of each layer, is all that it knows of the past. Training cuts a text into windows, and may carry the
state from one to the next; the gradient stops at the cut (truncated backpropagation through time).
"""

from __future__ import annotations

import numpy as np

from tinyforge.backends import Backend
from tinyforge.infer.cache import StateCache
from tinyforge.kernel import Array
from tinyforge.model import NextTokenModel
from tinyforge.models.lstm.config import Config
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import LSTM, Dropout, Embedding, LinearCrossEntropy
from tinyforge.params import ParamBuffer


class LSTMModel(NextTokenModel):
    """nll[b, t, 0] = -log p(targets[b, t, 0] | tokens 0..t of row b, and the state), 0 where the target is -1

    ids: (B, T) int32; targets: (B, T, 1) int32; nll: (B, T, 1). The embedding goes through the layers, each reading the
    one below, with dropout before each and after the last; then an output head.
    state: (layers, 2, B, C), h and c of each layer before the first position, overwritten with those after the last;
    None for zeros. No gradient goes into it.

    Sources: Hochreiter and Schmidhuber (1997); dropout as in Zaremba et al., "Recurrent Neural Network Regularization"
    (2014).
    """

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        """recompute: ignored, nothing here would be worth it."""
        super().__init__(backend)
        self.config, self.recompute, width = config, recompute, config.dim
        std = (3 * width) ** -0.5  # as uniform within 1 / sqrt(width)
        self.embedding = Embedding(Param("embedding.weight", (config.vocab, width), std=1.0), backend, "embedding")
        self.layers, self.dropouts = [], []
        for i in range(config.layers):
            inputs, recurrent = (
                Param(f"layers.{i}.{name}", (4 * width, width), std=std, matrices=4) for name in ("inputs", "recurrent")
            )
            bias = Param(f"layers.{i}.bias", (4 * width,), fill=0.0, decay=False)
            self.layers.append(LSTM(inputs, recurrent, bias, backend, f"layers.{i}"))
            self.dropouts.append(Dropout(config.dropout, backend, f"layers.{i}.dropout"))
        self.last_dropout = Dropout(config.dropout, backend, "dropout")
        self.head = LinearCrossEntropy(Param("head.weight", (config.vocab, width), std=std), backend, "head")
        self.buffer = ParamBuffer(self.params(), backend, values)

    def initialise(self, seed: int) -> None:
        """The forget gates begin open, with a bias of 1 (Jozefowicz et al., 2015)."""
        super().initialise(seed)
        open_gates = np.repeat([0.0, 1.0, 0.0, 0.0], self.config.dim)
        for layer in self.layers:
            self.buffer.set_master(layer.bias, open_gates)
        self.buffer.publish()

    def state_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of `state` for `rows` rows."""
        return self.config.layers, 2, rows, self.config.dim

    def hidden(
        self, ids: Array, stash: Stash | None = None, *, cache: StateCache | None = None, state: Array | None = None
    ) -> Array:
        """(B, T) ids to the last layer's outputs, (B, T, C). With a cache, ids continue the text in it."""
        if state is None:
            state = cache.states if cache else self.backend.zeros(self.state_shape(len(ids)))
        fresh = self._fresh(ids)
        x = self.embedding.forward(ids, stash)
        for i, (dropout, layer) in enumerate(zip(self.dropouts, self.layers, strict=True)):
            h, c = state[i, 0].copy(), state[i, 1].copy()  # backward needs their present values
            x, c = layer.forward(dropout.forward(x, stash), h, c, fresh, stash)
            state[i, 0], state[i, 1] = x[:, -1], c
        if fresh is not None:  # after a reset at the last position the state is zero
            state *= (ids[:, -1] != self.config.reset).astype(state.dtype)[:, None]
        if cache:
            cache.length += ids.shape[1]
        return self.last_dropout.forward(x, stash)

    def _fresh(self, ids: Array) -> Array | None:
        """(B, T): 1 where a text begins, after a token `reset`; None without such a token."""
        if self.config.reset < 0:
            return None
        fresh = self.backend.zeros(ids.shape, np.dtype(np.int32))
        fresh[:, 1:] = ids[:, :-1] == self.config.reset
        return fresh

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None, *, state: Array | None = None) -> Array:
        return self.head.forward(self.hidden(ids, stash, state=state), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> None:
        dx, _ = self.head.backward(dy, stash)
        dx = self.last_dropout.backward(dx, stash)
        for dropout, layer in zip(reversed(self.dropouts), reversed(self.layers), strict=True):
            dx, *_ = layer.backward((dx, None), stash)  # the gradient ends at the state before the first position
            dx = dropout.backward(dx, stash)
        self.embedding.backward(dx, stash)

    def make_cache(self, batch: int, capacity: int) -> StateCache:
        """The state; capacity is ignored."""
        return StateCache(self.backend.zeros(self.state_shape(batch)))

    def flop_per_token(self, seq_len: int) -> float:
        """Floating-point operations of a training step, per token: 6 for each parameter in a matrix product."""
        return 6.0 * (self.buffer.count - self.embedding.weight.size)

    def ops(self) -> list[Op]:
        pairs = zip(self.dropouts, self.layers, strict=True)
        return [self.embedding, *(op for pair in pairs for op in pair), self.last_dropout, self.head]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        shapes = (
            (Config(dim=5, layers=2, context=9, vocab=11, dropout=0.3), 2, 9),
            (Config(dim=3, layers=1, context=7, vocab=3, reset=1), 3, 7),
            (Config(dim=4, layers=3, context=4, vocab=5), 2, 4),
        )
        yield from cls.cases_of(shapes, backend, rng)
