"""A mixture of experts, forward and backward: Llama's block with many feed-forward layers instead of one.

Read `Block.forward` and `MoE.forward`, then their `backward` from the bottom up. The attention half of a block is
Llama's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tinyforge.backends import Backend
from tinyforge.kernel import Array
from tinyforge.models.llama.block import STD, AttentionHalf, residual_std
from tinyforge.models.llama.model import LlamaLike
from tinyforge.models.moe.config import Config
from tinyforge.op import Op, Param, Recompute, Stash
from tinyforge.ops import MixtureOfExperts, RouterLosses
from tinyforge.ops.attention import Documents, LayerCache


class Block(AttentionHalf):
    """One layer: x = x + attention(norm1(x));   x = x + experts(norm2(x))."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        super().__init__(config, layer, backend)
        c, at = config, f"blocks.{layer}"
        self.experts = MixtureOfExperts(
            Param(f"{at}.gate.weight", (c.experts, c.dim), std=STD, matrices=1),
            Param(f"{at}.gate_up.weight", (c.experts, 2 * c.hidden, c.dim), std=STD, matrices=2 * c.experts),
            Param(f"{at}.down.weight", (c.experts, c.dim, c.hidden), std=residual_std(c.layers), matrices=c.experts),
            c.active,
            backend,
            f"{at}.experts",
        )

    def forward(
        self,
        x: Array,
        h: Array,
        stash: Stash | None,
        *,
        cache: LayerCache | None = None,
        offset: int = 0,
        starts: Array | None = None,
    ) -> tuple[Array, Array, Array, Array]:
        """x and h after the block, (B, T, C) each, and its router's usage and starts, (E + 1,) each. Arguments as of
        Llama's block."""
        x, h = self.attend(x, h, stash, cache=cache, offset=offset, starts=starts)
        f, usage, bounds = self.experts.forward(h, stash)
        x, h = self.next_norm.forward(x, self.down_dropout.forward(f, stash), stash)
        return x, h, usage, bounds

    def backward(self, dx: Array | None, dh: Array, stash: Stash, dusage: Array) -> tuple[Array, Array]:
        dx, df = self.next_norm.backward((dx, dh), stash)
        dh = self.experts.backward((self.down_dropout.backward(df, stash), dusage, None), stash)
        return self.attend_backward(dx, dh, stash)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        e = self.experts
        return [*self.attend_ops(), e.gate, e.router, e, self.down_dropout, self.next_norm]


class MoE(LlamaLike):
    """nll[b, t, k] = -log p(token t+1+k | tokens 0..t), 0 where there is no target;  terms = (balance, z)

    ids: (B, T) int32; targets: (B, T, K) int32, -1 for none; nll: (B, T, K). terms: (2,), the router's losses over all
    layers; if the config gives them no weight, forward returns only nll. Block, with h = norm2(x):
        x = x + out(attention(rope(qkv(norm1(x)))));   x = x + sum over the chosen experts e of w_e down_e(gate_up_e(h))
    then a final norm and K output heads. recompute, values: as in Llama.

    Source: Jiang et al., "Mixtral of Experts" (2024).
    """

    block = Block
    config: Config

    def __init__(self, config: Config, backend: Backend, *, values: Array = None, recompute: Recompute = "") -> None:
        shape = (config.mtp_heads, config.vocab, config.dim)
        heads = None if config.tied else Param("heads.weight", shape, std=STD)
        self.losses = RouterLosses(config.active, backend, "router_losses") if config.term_weights else None
        super().__init__(config, config, heads, backend, values, recompute)

    def forward(
        self, ids: Array, targets: Array, stash: Stash | None = None, *, documents: Documents | None = None
    ) -> Any:
        h, used = self.trunk(ids, stash, documents=documents)  # usage and starts of each layer's router in turn
        if self.losses is None:
            return self.heads.forward(h, targets, stash)
        terms = self.losses.forward(*used, stash=stash)
        return self.heads.forward(h, targets, stash), terms

    def backward(self, dy: Any, stash: Stash) -> None:
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
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Iterator[tuple[Op, tuple[Any, ...]]]:
        shapes = (
            (
                Config(
                    dim=16,
                    heads=4,
                    kv_heads=2,
                    layers=2,
                    context=9,
                    vocab=11,
                    hidden=6,
                    experts=5,
                    mtp_heads=3,
                    mtp_weights=(1, 1, 1),
                ),
                2,
                9,
            ),
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
                    experts=3,
                    active=1,
                    mtp_heads=1,
                    mtp_weights=(1,),
                    tied=True,
                    window=3,
                ),
                3,
                5,
            ),
            (
                Config(
                    dim=4,
                    heads=1,
                    kv_heads=1,
                    layers=1,
                    context=1,
                    vocab=3,
                    hidden=3,
                    experts=2,
                    mtp_heads=1,
                    mtp_weights=(1,),
                    norm_eps=0.1,
                    balance=0.0,
                    router_z=0.0,
                ),
                3,
                1,
            ),
        )
        yield from cls.cases_of(shapes, backend, rng, std=0.2)
