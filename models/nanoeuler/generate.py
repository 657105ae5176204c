"""Generation: a key/value cache, one position at a time, sampling from head 0."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from models.nanoeuler.model import NanoEuler
from tinyforge.errors import UserError
from tinyforge.op import Array
from tinyforge.rng import Stream


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 cut nothing off.

    max_tokens: the longest reply. The same seed gives the same text.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    max_tokens: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"--temperature is {self.temperature}, wants 0 (greedy) or more")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k}, wants 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}, wants a number above 0 and at most 1")
        if self.max_tokens < 1:
            raise UserError(f"--max-tokens is {self.max_tokens}, wants at least 1")


class KVCache:
    """The rotated keys and the values of every position so far: layers x (1, context, Hkv, D)."""

    def __init__(self, model: NanoEuler) -> None:
        c = model.config
        shape = (1, c.context, c.kv_heads, c.head_dim)
        self.keys = [model.backend.empty(shape) for _ in range(c.layers)]
        self.values = [model.backend.empty(shape) for _ in range(c.layers)]
        self.length = 0


def advance(model: NanoEuler, ids: Array, cache: KVCache) -> Array:
    """Append ids: (1, T) to the cache; returns the final-normed stream of those positions, (1, T, C).

    The same ops as `NanoEuler.hidden`, but attention reads the cache: only the new positions are computed.
    """
    c, past = model.config, cache.length
    cache.length = past + ids.shape[1]
    x = model.embedding.forward(ids)
    h = model.first_norm.forward(x)
    for i, block in enumerate(model.blocks):
        qkv = block.qkv.forward(h).reshape(*ids.shape, -1, c.head_dim)
        qkv = block.rope.forward(qkv, offset=past, out=qkv)
        cache.keys[i][:, past : cache.length] = qkv[:, :, c.heads : c.heads + c.kv_heads]
        cache.values[i][:, past : cache.length] = qkv[:, :, c.heads + c.kv_heads :]
        a = block.attention.decode(
            qkv[:, :, : c.heads], cache.keys[i][:, : cache.length], cache.values[i][:, : cache.length]
        )
        x, h = model.joints[2 * i].forward(x, block.out.forward(a.reshape(x.shape)))
        x, h = model.joints[2 * i + 1].forward(x, block.down.forward(block.gate_up.forward(h)))
    return h


def sample(logits: np.ndarray, sampling: Sampling, uniform: float) -> int:
    """Draw an id from logits: (V,) in float64, by inverting the distribution at `uniform` in [0, 1)."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    z = logits[order].astype(np.float64) / sampling.temperature
    p = np.exp(z - z[0])
    p /= p.sum()
    # Nucleus: the fewest most likely tokens whose sum reaches top_p.
    kept = int(np.searchsorted(np.cumsum(p), sampling.top_p)) + 1
    total = np.cumsum(p[:kept])
    return int(order[min(int(np.searchsorted(total, uniform * total[-1], side="right")), len(total) - 1)])


def generate(
    model: NanoEuler, prompt: Sequence[int], sampling: Sampling, stop: frozenset[int] = frozenset()
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, until one in `stop` (not yielded), max_tokens, or the context is full."""
    if not prompt:
        raise UserError("the prompt is empty; give at least one character")
    if len(prompt) >= model.config.context:
        raise UserError(
            f"the prompt takes {len(prompt)} tokens, the model's context is {model.config.context}; shorten the prompt"
        )
    stream = Stream(sampling.seed, "sample")
    cache = KVCache(model)
    new = list(prompt)
    for _ in range(min(sampling.max_tokens, model.config.context - len(prompt))):
        h = advance(model, model.backend.asarray(np.asarray([new])), cache)
        logits = model.backend.to_numpy(model.heads.logits(h[:, -1]))[0]
        token = sample(logits, sampling, float(stream.uniform()))
        if token in stop:
            return
        yield token
        new = [token]
