"""NanoEuler: the Llama block with K output heads. Forward and backward are in models/llama: model.py and block.py.

A residual step x <- x + f(x) is one forward-Euler step of dx/dt = f(x) with step size 1: hence the name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.llama.model import LlamaLike
from tinyforge.models.nanoeuler.config import Config
from tinyforge.op import Cases, Param, Recompute
from tinyforge.ops.attention import Documents


class NanoEuler(LlamaLike):
    """nll[b, t, k] = -log p(token t+1+k | tokens 0..t), 0 where there is no target

    ids: (B, T) int32; targets: (B, T, K) int32, -1 for none; nll: (B, T, K). Block, with h the normed stream:
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + down(gate_up(norm2(x))), where down begins with SwiGLU
    then a final norm and K output heads. `values` shares another model's weights (see ParamBuffer). recompute:
    "blocks": keep only the stream before each block, and run the block again in backward.
    """

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        heads = Param("heads.weight", (config.mtp_heads, config.vocab, config.dim), std=0.02)
        super().__init__(config, config.trunk, heads, backend, values, recompute)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        tiny = Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=10)
        one = Config(dim=4, heads=1, kv_heads=1, layers=1, context=1, vocab=3, hidden=3, norm_eps=0.1)
        long = Config(dim=12, heads=2, kv_heads=1, layers=3, context=132, vocab=7, hidden=5)
        two = {"mtp_heads": 2, "mtp_weights": (1, 1)}
        dropped = Config(dim=12, heads=2, kv_heads=2, layers=2, context=9, vocab=5, hidden=5, dropout=0.3)
        shapes = (
            (tiny.override({"mtp_heads": 3, "mtp_weights": (1, 1, 1)}), 2, 9),
            (one.override({"mtp_heads": 1, "mtp_weights": (1,)}), 3, 1),
            (long.override(two), 1, 131),
            (dropped.override(two), 2, 7),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.2)
        options: tuple[dict[str, Any], ...] = (
            {"qk_scale": "learned", "window": 3, "full_every": 2, "rotary_dim": 2, "norm_eps": 0.01},
            {"mix_first": True, "smear": 5, "logit_softcap": 1.5, "embedding_norm": True, "norm_eps": 0.01},
            {
                "qk_scale": "fixed",
                "attention_scale": 0.7,
                "gated": False,
                "activation": "relu2",
                "norm_eps": 0.01,
                "value_every": 1,
                "value_gate": 4,
            },
        )
        yield from cls.cases_of([(tiny.override(two | given), 2, 7) for given in options], backend, rng, std=0.2)
        yield cls.packed_case(tiny.override(two), backend, rng, Documents)
