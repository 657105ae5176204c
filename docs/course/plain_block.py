"""A block of Llama and NanoEuler written out: the ops of models/llama/block.py, one line each, nothing fused.

It takes the ops of a real block, so both have the same weights, and the same outputs and gradients. Lesson 8 reads it.
"""

from __future__ import annotations

from typing import Any

from tinyforge import Stash
from tinyforge.ops import RMSNorm

Array = Any


class PlainBlock:
    """x = x + out(attention(rope(qkv(norm1(x)))));   x = x + down(up(norm2(x))). x: (B, T, C)."""

    def __init__(self, block: Any) -> None:
        """block: a `tinyforge.models.llama.block.Block`."""
        self.norm1, self.norm2 = (RMSNorm(p.op.weight, p.op.backend, p.op.eps) for p in (block.norm1, block.norm2))
        first, second = block.attention, block.mlp
        self.qkv, self.rope, self.attention, self.out = first.qkv, first.rope, first.attention, first.out
        self.up, self.swiglu_down, self.head_dim = second.up, second.down, first.head_dim

    def forward(self, x: Array, stash: Stash) -> Array:
        h = self.norm1.forward(x, stash)
        qkv = self.heads(self.qkv.forward(h, stash))  # queries, keys and values
        qkv = self.rope.forward(qkv, stash)
        o = self.attention.forward(qkv, stash)
        x = x + self.out.forward(self.flat(o), stash)
        h = self.norm2.forward(x, stash)
        u = self.up.forward(h, stash)  # the gate and what it lets through
        return x + self.swiglu_down.forward(u, stash)

    def backward(self, dy: Array, stash: Stash) -> Array:
        du = self.swiglu_down.backward(dy, stash)
        dh = self.up.backward(du, stash)
        dx = dy + self.norm2.backward(dh, stash)
        do = self.heads(self.out.backward(dx, stash))
        dqkv = self.attention.backward(do, stash)
        dqkv = self.rope.backward(dqkv, stash)
        dh = self.qkv.backward(self.flat(dqkv), stash)
        return dx + self.norm1.backward(dh, stash)

    def heads(self, x: Array) -> Array:
        """(B, T, H D) to (B, T, H, D)."""
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def flat(self, x: Array) -> Array:
        """The reverse."""
        return x.reshape(*x.shape[:2], -1)
