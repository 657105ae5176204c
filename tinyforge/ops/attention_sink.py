"""Attention with a sink: one more key for each head, which has a learned score and no value."""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array, kernel
from tinyforge.op import Cases, Param
from tinyforge.ops.attention import TILE, Attention
from tinyforge.params import with_buffer


@kernel
def sink_fwd(out: Array, lse: Array, sinks: Array) -> None:
    """Give each query, of head h, one more key, whose score is sinks[h] and whose value is 0: in place, out shrinks,
    and lse counts it. out: (B, T, Hq, D); lse: (B, Hq, T); sinks: (Hq,)."""
    with_sink = np.logaddexp(lse, sinks[:, None])
    out *= np.exp(lse - with_sink).swapaxes(1, 2)[..., None]
    lse[...] = with_sink


@kernel
def sink_bwd(dsinks: Array, dy: Array, out: Array, lse: Array, sinks: Array) -> None:
    """dsinks += its part. out, lse: from sink_fwd."""
    share = np.exp(sinks[:, None] - lse)  # the sink's probability
    dsinks -= (share * np.vecdot(dy, out).swapaxes(1, 2)).sum(axis=(0, 2))


class SinkAttention(Attention):
    """Attention in which each query of a head h has one more key, with the score sinks[h] and the value 0

    sinks: (Hq,). All else as in Attention. A query's probabilities need not sum to 1, as in gpt-oss. With z the key's
    own, exp(sinks[h] - lse) where lse counts it, o and P are those of Attention times 1 - z, the formulas of its
    backward stay, and

        dsinks[h] -= the sum over b and t of z rowsum(dO * O)

    Sources: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023); OpenAI, "gpt-oss-120b &
    gpt-oss-20b Model Card" (2025).
    """

    sink = sink_fwd
    sink_bwd = sink_bwd

    def __init__(self, sinks: Param, kv_heads: int, backend: Backend, name: str = "", **how: Any) -> None:
        super().__init__(sinks.size, kv_heads, backend, name, **how)
        self.sinks = sinks

    def finish(self, out: Array, lse: Array) -> None:
        self.sink(out, lse, self.sinks.value)

    def learn(self, dy: Array, out: Array, lse: Array) -> None:
        if not self.sinks.frozen:
            self.sink_bwd(self.sinks.grad, dy, out, lse, self.sinks.value)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for t, heads, window, rate in ((7, 2, None, 0.0), (TILE + 3, 2, None, 0.0), (9, 4, 4, 0.4), (0, 2, None, 0.0)):
            sinks = Param("sinks", (heads,), fill=0.5, decay=False)
            op = with_buffer(cls(sinks, heads // 2, backend, window=window, dropout=rate), backend, rng)
            yield op, (backend.asarray(rng.normal(size=(2, t, 2 * heads, 4))),)
