"""The block of Llama, its kin, and NanoEuler, forward and backward: the two lines of the paper, then the same two lines
read upwards.

The parts are built in parts.py, which chooses the ops of FP8. Which kernels are fused is decided in
tinyforge/residual.py: the addition is part of the product before it or of the norm after it.
"""

from __future__ import annotations

from typing import Any

from tinyforge.backends import Backend
from tinyforge.infer.causal_lm import FusedLayer
from tinyforge.models.llama.config import Config
from tinyforge.models.llama.parts import first_norm, mlp, norm_before, pre_norm, self_attention
from tinyforge.op import Op, Stash
from tinyforge.ops import Add
from tinyforge.residual import NO_CONTEXT, AttentionContext, NoNorm, PreNorm, ResidualStream


class Block:
    """x = x + attention(norm1(x));   x = x + mlp(norm2(x)), with x the residual stream, (B, T, C)."""

    in_fp8 = True
    """Whether --precision fp8 applies to the layer."""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        fp8, at = backend.fp8 and self.in_fp8, f"blocks.{layer}"
        # The MLP of the layer before takes its gradient from norm1. There is none before the first layer, and dropout
        # would have to be applied to the codes as well.
        scaled = layer > 0 and not config.dropout
        self.norm1 = first_norm(at, config, backend, fp8=fp8, scaled_backward=scaled)
        self.attention = self_attention(config, layer, backend, fp8=fp8)
        self.norm2 = norm_before(f"{at}.norm2", config, backend, fp8=fp8, scaled_backward=False)
        self.mlp = self.make_mlp(config, layer, backend)

    def make_mlp(self, config: Any, layer: int, backend: Backend) -> Any:
        return mlp(config, layer, backend, fp8=backend.fp8)

    def forward(
        self, stream: ResidualStream, stash: Stash | None = None, context: AttentionContext = NO_CONTEXT
    ) -> None:
        stream.add(self.attention.forward(self.norm1.forward(stream, stash), stash, context))
        stream.add(self.mlp.forward(self.norm2.forward(stream, stash), stash))

    def backward(self, dx: Any, stash: Stash) -> Any:
        """The gradient of the stream before the block, from that after it."""
        dx = self.norm2.backward(self.mlp.backward(dx, stash), stash, residual=dx)
        return self.norm1.backward(self.attention.backward(dx, stash), stash, residual=dx)

    def fill(self, stream: ResidualStream, context: AttentionContext) -> None:
        """Append keys and values to the cache, and compute nothing else."""
        self.attention.fill(self.norm1.forward(stream), context)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        return [*self.norm1.ops(), *self.attention.ops(), *self.norm2.ops(), *self.mlp.ops()]

    def fused(self) -> FusedLayer:
        maps: tuple[Any, ...] = (self.attention.qkv, self.attention.out, self.mlp.up, self.mlp.down)
        return FusedLayer(*(op.weight.stored for op in maps))

    @classmethod
    def final_norm(cls, config: Config, backend: Backend) -> PreNorm | NoNorm:
        """The norm after the last block; the output heads read its value in full precision."""
        if config.norms == "sum":
            return NoNorm(backend, "final_norm")
        fp8 = backend.fp8 and cls.in_fp8
        return pre_norm("final_norm", config, backend, fp8=fp8, scaled=False, scaled_backward=not config.dropout)


class ParallelBlock(Block):
    """x = x + attention(h) + mlp(h),  h = norm1(x);  or, with parallel_norms, mlp(norm2(x))"""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        super().__init__(config, layer, backend)
        self.own_norms, self.sum = config.parallel_norms, Add(backend, f"blocks.{layer}.sum")
        if not self.own_norms:
            self.norm2 = self.norm1

    def forward(
        self, stream: ResidualStream, stash: Stash | None = None, context: AttentionContext = NO_CONTEXT
    ) -> None:
        h = self.norm1.forward(stream, stash)
        attended = self.attention.forward(h, stash, context).value()
        if self.own_norms:
            h = self.norm2.forward(stream, stash)
        stream.add(self.sum.forward(attended, self.mlp.forward(h, stash).value()))

    def backward(self, dx: Any, stash: Stash) -> Any:
        dh = self.mlp.backward(dx, stash)
        if self.own_norms:
            dstream = self.norm2.backward(dh, stash, residual=dx)
            return self.norm1.backward(self.attention.backward(dx, stash), stash, residual=dstream)
        dh = self.sum.forward(dh, self.attention.backward(dx, stash))
        return self.norm1.backward(dh, stash, residual=dx)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        norm2 = self.norm2.ops() if self.own_norms else []
        return [*self.norm1.ops(), *self.attention.ops(), *norm2, *self.mlp.ops()]


class SumBlock(Block):
    """x = norm1(x + attention(x));   x = norm2(x + mlp(x))"""

    def __init__(self, config: Config, layer: int, backend: Backend) -> None:
        super().__init__(config, layer, backend)
        self.plain = NoNorm(backend, f"blocks.{layer}.plain")

    def forward(
        self, stream: ResidualStream, stash: Stash | None = None, context: AttentionContext = NO_CONTEXT
    ) -> None:
        # A branch apart from the stream: its map may not add into x, which it has saved.
        stream.add(self.attention.forward(self.plain.forward(stream), stash, context).value())
        stream.x = self.norm1.forward(stream, stash)
        stream.add(self.mlp.forward(self.plain.forward(stream), stash).value())
        stream.x = self.norm2.forward(stream, stash)

    def backward(self, dx: Any, stash: Stash) -> Any:
        dsum = self.norm2.backward(dx, stash)
        dx = self.plain.backward(self.mlp.backward(dsum, stash), stash, residual=dsum)
        dsum = self.norm1.backward(dx, stash)
        return self.plain.backward(self.attention.backward(dsum, stash), stash, residual=dsum)

    def fill(self, stream: ResidualStream, context: AttentionContext) -> None:
        self.attention.fill(self.plain.forward(stream), context)

    def ops(self) -> list[Op]:
        """In the order of forward."""
        return [*self.attention.ops(), *self.norm1.ops(), *self.mlp.ops(), *self.norm2.ops()]
