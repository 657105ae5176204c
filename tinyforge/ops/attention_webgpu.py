"""Launches attention.wgsl."""

from __future__ import annotations

from typing import Any

from tinyforge.backends.webgpu_array import contiguous, launch, new, whole
from tinyforge.kernel import Array
from tinyforge.op import Key
from tinyforge.ops import attention as op
from tinyforge.ops.attention import scaling, split
from tinyforge.ops.rope_webgpu import rope

FILE, THREADS = "ops/attention.wgsl", 64
SHARED = 16384
"""Bytes of a group's memory that every adapter has."""


def rows(x: Array) -> Array:
    """x, or a copy, with the numbers of a head next to each other."""
    return x if x.strides[-1] == 1 or x.shape[-1] == 1 else x.copy()


def place(x: Any) -> list[int]:
    """Where x, (B, T, heads, D), begins in its buffer, and its steps."""
    return [0, 0, 0, 0] if x is None else [x.at, *x.strides[:3]]


def block_of(x: Any) -> Any:
    return x.block


class Problem:
    """The arguments that forward and backward share, as the kernels take them."""

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        lengths: Array | None,
        starts: Array | None,
        causal: bool,
        window: int | None,
        key: Key | None,
        rate: float,
        scale: float | None,
        softcap: float,
    ) -> None:
        (batch, queries, heads, dim), (keys, kv_heads) = q.shape, k.shape[1:3]
        self.q, self.k, self.v = q, k, v
        self.heads, self.kv_heads, self.batch, self.queries, self.keys = heads, kv_heads, batch, queries, keys
        key0, key1 = (0, 0) if key is None else map(int, key)
        self.sizes = [scaling(dim, scale), softcap or 1.0, 1.0 / (1.0 - rate), batch, queries, keys, heads, kv_heads]
        self.sizes += [int(causal), window or 0, int(rate * 2**32), key0, key1]
        self.arrays: dict[str, Any] = {
            "q": whole(q),
            "k": whole(k),
            "v": whole(v),
            "lengths": lengths if lengths is None else contiguous(lengths),
        }
        self.arrays["starts"] = None if starts is None else contiguous(starts)
        self.flags = {"LENGTHS": lengths is not None, "STARTS": starts is not None, "DROPOUT": key is not None}
        self.flags["SOFTCAP"] = bool(softcap)
        tile = 1 << max(0, (SHARED // (2 * max(dim, 1) * q.itemsize + 2 * q.itemsize)).bit_length() - 1)
        self.constants = {"HEAD": dim, "TILE": min(32, tile)}

    def launch(self, entry: str, count: int, heads: int, more: dict[str, Any], **places: Array) -> None:
        """places: q, k and v are known; those of the others that the entry point uses."""
        known = {"q": self.q, "k": self.k, "v": self.v} | places
        sizes = list(self.sizes)
        for name in ("q", "k", "v", "o", "dy", "dq", "dk", "dv"):
            sizes += place(known.get(name))
        grid = -(-count // THREADS), heads, self.batch
        launch(FILE, entry, grid, more, sizes, self.flags, constants=self.constants)


@op.attention_fwd.on("webgpu")
def attention_fwd(
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Array, Array]:
    q, k, v = rows(q), rows(k), rows(v)
    p = Problem(q, k, v, lengths, starts, causal, window, key, rate, scale, softcap)
    out = new(q, q.shape)
    lse = new(q, (p.batch, p.heads, p.queries))
    p.launch("attention_fwd", p.queries, p.heads, {"out": out, "lse": lse, **p.arrays}, o=out)
    return out, lse


@op.attention_bwd.on("webgpu")
def attention_bwd(
    dq: Array,
    dk: Array,
    dv: Array,
    dy: Array,
    q: Array,
    k: Array,
    v: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    scale: float | None = None,
    softcap: float = 0.0,
) -> None:
    if block_of(dk) is not block_of(dv):
        raise ValueError("attention_bwd: dk and dv are in two buffers, expected views of a packed dqkv")
    q, k, v, dy, out = map(rows, (q, k, v, dy, out))
    p = Problem(q, k, v, lengths, starts, causal, window, key, rate, scale, softcap)
    delta = new(q, lse.shape)
    both = {"dy": whole(dy), "saved_out": whole(out)}
    p.launch("attention_delta", p.queries, p.heads, {"delta": delta, **both}, o=out, dy=dy)
    saved = {"dy": whole(dy), "saved_lse": lse, "saved_delta": delta, **p.arrays}
    p.launch("attention_bwd_queries", p.queries, p.heads, {"dq": whole(dq), **saved}, dy=dy, dq=dq)
    p.launch("attention_bwd_keys", p.keys, p.kv_heads, {"dkv": whole(dk), **saved}, dy=dy, dk=dk, dv=dv)


@op.attention_rope_bwd.on("webgpu")
def attention_rope_bwd(
    dqkv: Array,
    dy: Array,
    qkv: Array,
    lengths: Array | None,
    starts: Array | None,
    out: Array,
    lse: Array,
    cos: Array,
    sin: Array,
    rotated: int,
    causal: bool,
    window: int | None,
    key: Key | None,
    rate: float,
    scale: float | None = None,
    softcap: float = 0.0,
) -> None:
    heads = dy.shape[2]
    how: Any = (causal, window, key, rate, scale, softcap)
    attention_bwd(*split(dqkv, heads), dy, *split(qkv, heads), lengths, starts, out, lse, *how)
    rope(dqkv, dqkv, cos, sin, rotated)
