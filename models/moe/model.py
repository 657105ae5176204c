"""A mixture of experts, forward and backward: Llama's block with many feed-forward layers instead of one.

Read `Block.forward` and `MoE.forward`, then their `backward` from the bottom up. The attention half of a block is
Llama's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.llama import block as llama
from tinyforge.models.llama.model import LlamaLike
from tinyforge.models.llama.parts import STD, residual_std
from tinyforge.models.moe.config import Config
from tinyforge.op import Cases, Op, Param, Recompute, Stash
from tinyforge.ops import (
    Add,
    BiasedExperts,
    Dropout,
    Linear,
    LinearSwiGLU,
    MixtureOfExperts,
    RouterLosses,
    SigmoidGate,
    SwiGLULinear,
)
from tinyforge.ops.attention import Documents
from tinyforge.ops.swiglu_linear import swiglu_mlp
from tinyforge.residual import NO_CONTEXT, AttentionContext, ResidualStream


class Experts:
    """The branch in place of the MLP: each token passes through some of the experts."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        c, at = config, f"blocks.{layer}"
        gate = Param(f"{at}.gate.weight", (c.experts, c.dim), std=STD, matrices=1)
        gate_up = Param(f"{at}.gate_up.weight", (c.experts, 2 * c.hidden, c.dim), std=STD, matrices=2 * c.experts)
        down = Param(f"{at}.down.weight", (c.experts, c.dim, c.hidden), std=residual_std(c), matrices=c.experts)
        how: dict[str, Any] = {"name": f"{at}.experts", "normalised": c.normalised}
        if c.clamp:
            of_gate, of_gate_up, of_down = (
                Param(f"{at}.{name}.bias", shape, fill=0.0, decay=False)
                for name, shape in (("gate", gate.shape[:1]), ("gate_up", gate_up.shape[:2]), ("down", down.shape[:2]))
            )
            pairs = (gate, of_gate), (gate_up, of_gate_up), (down, of_down)
            self.experts: MixtureOfExperts = BiasedExperts(*pairs, c.active, backend, limit=c.clamp, **how)
        else:
            self.experts = MixtureOfExperts(gate, gate_up, down, c.active, backend, **how)
        self.dropout = Dropout(c.dropout, backend, f"{at}.down_dropout")
        if c.shared:
            up = Param(f"{at}.shared_up.weight", (2 * c.shared, c.dim), std=STD, matrices=2)
            down = Param(f"{at}.shared_down.weight", (c.dim, c.shared), std=residual_std(c), matrices=1)
            self.shared_up = LinearSwiGLU(up, backend, f"{at}.shared_up")
            self.shared_down = SwiGLULinear(down, backend, f"{at}.shared_down")
            self.shared_gate = Linear(
                Param(f"{at}.shared_gate.weight", (1, c.dim), std=STD), backend, f"{at}.shared_gate"
            )
            self.gate, self.sum = SigmoidGate(backend, f"{at}.gate"), Add(backend, f"{at}.shared_sum")
        self.has_shared = c.shared > 0

    def forward(self, h: Array, stash: Stash | None, outputs: list[Array]) -> Array:
        """outputs: receives the router's usage and starts, (E + 1,) each."""
        f, *used = self.experts.forward(h, stash)
        outputs += used
        if self.has_shared:
            always = swiglu_mlp(self.shared_up, self.shared_down, h, stash)
            gated = self.gate.forward(always, self.shared_gate.forward(h, stash), stash)
            f = self.sum.forward(f, gated)
        return self.dropout.forward(f, stash)

    def backward(self, dy: Array, stash: Stash, dusage: Array) -> Array:
        df = self.dropout.backward(dy, stash)
        if not self.has_shared:
            dh: Array = self.experts.backward((df, dusage, None), stash)
            return dh
        dalways, dz = self.gate.backward(df, stash)
        dh = self.shared_gate.backward(dz, stash)
        dh = self.sum.forward(dh, self.shared_up.backward(self.shared_down.backward(dalways, stash), stash))
        return self.sum.forward(dh, self.experts.backward((df, dusage, None), stash))

    def ops(self) -> list[Op]:
        """In the order of forward."""
        routed = [self.experts.gate, self.experts.router, self.experts]
        shared = [self.shared_up, self.shared_down, self.shared_gate, self.gate, self.sum] if self.has_shared else []
        return [*routed, *shared, self.dropout]


class Block(llama.Block):
    """x = x + attention(norm1(x));   x = x + experts(norm2(x)), with x the residual stream, (B, T, C)."""

    in_fp8 = False

    def make_mlp(self, config: Config, layer: int, backend: Backend) -> Experts:
        return Experts(config, layer, backend)

    def forward(
        self, stream: ResidualStream, stash: Stash | None = None, context: AttentionContext = NO_CONTEXT
    ) -> None:
        stream.add(self.attention.forward(self.norm1.forward(stream, stash), stash, context))
        stream.add(self.mlp.forward(self.norm2.forward(stream, stash), stash, stream.outputs))

    def backward(self, dx: Array, stash: Stash, dusage: Array) -> Array:
        """dusage: the gradient of the router's usage."""
        dx = self.norm2.backward(self.mlp.backward(dx, stash, dusage), stash, residual=dx)
        return self.norm1.backward(self.attention.backward(dx, stash), stash, residual=dx)


class MoE(LlamaLike):
    """nll[b, t, k] = -log p(token t+1+k | tokens 0..t), 0 where there is no target;  terms = (balance, z)

    ids: (B, T) int32; targets: (B, T, K) int32, -1 for none; nll: (B, T, K). terms: (2,), the router's losses over all
    layers; if the config gives them no weight, forward returns only nll. Block, with h = norm2(x):
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + sum over the chosen experts e of w_e down_e(gate_up_e(h))
    and with a shared expert, + s(g . h) down(gate_up(h));
    then a final norm and K output heads. recompute, values: as in Llama.

    Source: Jiang et al., "Mixtral of Experts" (2024).
    """

    block = Block
    config: Config

    def __init__(
        self, config: Config, backend: Backend, *, values: Array | None = None, recompute: Recompute = ""
    ) -> None:
        shape = (config.mtp_heads, config.vocab, config.embedding_width)
        heads = None if config.tied else Param("heads.weight", shape, std=STD)
        self.losses = RouterLosses(config.active, backend, "router_losses") if config.term_weights else None
        super().__init__(config, config, heads, backend, values, recompute)

    def forward(
        self, ids: Array, targets: Array, stash: Stash | None = None, *, documents: Documents | None = None
    ) -> Any:
        stream = self.trunk(ids, stash, documents=documents)
        h = self.normed(stream, stash)
        if self.losses is None:
            return self.heads.forward(h, targets, stash)
        terms = self.losses.forward(*stream.outputs, stash=stash)  # usage and starts of each layer's router
        return self.heads.forward(h, targets, stash), terms

    def backward(self, dy: Any, stash: Stash) -> None:
        dterms: Any
        dnll, dterms = (dy, None) if self.losses is None else dy
        dh, _ = self.heads.backward(dnll, stash)
        if self.losses is None:
            dusage = self.backend.zeros((self.config.experts + 1,), self.backend.master_dtype)
        else:
            dusage = self.losses.backward(dterms, stash)[0]  # of every layer
        self.trunk_backward(dh, stash, dusage)

    def fused_weights(self) -> None:
        """None: the fused decoders take layers without experts."""

    def flop_per_token(self, seq_len: int) -> float:
        """As in Llama, counting only the experts that a token passes through."""
        c = self.config
        idle = c.layers * (c.experts - c.active) * 3 * c.hidden * c.dim
        return super().flop_per_token(seq_len) - 6 * idle

    def ops(self) -> list[Op]:
        *trunk, heads = super().ops()
        return [*trunk, self.losses, heads] if self.losses else [*trunk, heads]

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        tiny = Config(dim=16, heads=4, kv_heads=2, layers=2, context=9, vocab=11, hidden=6, experts=5)
        odd = Config(dim=12, heads=3, kv_heads=1, head_dim=6, layers=1, context=9, vocab=5, hidden=7, experts=3)
        one = Config(dim=4, heads=1, kv_heads=1, layers=1, context=1, vocab=3, hidden=3, experts=2, norm_eps=0.1)
        single = {"mtp_heads": 1, "mtp_weights": (1,)}
        shapes = (
            (tiny.override({"mtp_heads": 3, "mtp_weights": (1, 1, 1)}), 2, 9),
            (odd.override({**single, "active": 1, "tied": True, "window": 3}), 3, 5),
            (odd.override({**single, "normalised": False, "qk_norm": True, "qk_norm_width": True}), 2, 4),
            (
                odd.override({**single, "clamp": 0.7, "sinks": True, "rope_scaling": "yarn", "rope_truncate": False}),
                2,
                4,
            ),
            (odd.override({**single, "normalised": False, "shared": 5, "dropout": 0.2}), 2, 4),
            (one.override({**single, "balance": 0.0, "router_z": 0.0}), 3, 1),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.2)
