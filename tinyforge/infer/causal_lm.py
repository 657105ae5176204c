"""What generation needs of a model: the protocol `CausalLM`, and `FusedWeights` for the fused decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from tinyforge.backends import Backend
from tinyforge.config import ModelConfig
from tinyforge.errors import UserError
from tinyforge.infer.cache import Cache
from tinyforge.kernel import Array
from tinyforge.op import Stash
from tinyforge.registry import models, next_token_model


class FusedLayer(NamedTuple):
    """The matrices of a layer, each an array or `Quantised`; W = (heads + 2 kv_heads) head_dim, A = heads head_dim."""

    qkv: Any  # W x dim, rows in the order q, k, v
    out: Any  # dim x A
    gate_up: Any  # 2 hidden x dim, the gate first
    down: Any  # dim x hidden


@dataclass(frozen=True)
class FusedWeights:
    """The weights of a model of Llama's shape: the model's own arrays, which a fused decoder copies into its layout.

    The shape: each layer is x + out(attention(rope(qkv(rmsnorm(x))))), then x + down(silu(gate(h)) up(h)) with
    h = rmsnorm(x); no biases, causal attention over all positions with grouped queries, RoPE with split halves. A
    final RMSNorm and `lm_heads` follow. gains: of the norms in the order of forward, 2 layers + 1. embedding: (vocab,
    dim), and lm_heads: (K, vocab, dim), each an array or `Quantised`; head k predicts the token k + 1 positions ahead.
    cos, sin: of RoPE's angles, (context, head_dim / 2).
    """

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    vocab: int
    norm_eps: float
    layers: Sequence[FusedLayer]
    gains: Sequence[Array]
    embedding: Any
    lm_heads: Any
    cos: Array
    sin: Array


class CausalLM(Protocol):
    """A model that predicts each token from the tokens before it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def backend(self) -> Backend: ...

    @property
    def prediction_heads(self) -> int:
        """K, the number of output heads; head k predicts the token k + 1 positions ahead. 1 for most models."""

    def hidden(self, ids: Array, stash: Stash | None = None, *, cache: Any = None) -> Array:
        """ids: (B, T) int32 to the final hidden states, (B, T, C). With a cache of this model's `make_cache`, the ids
        follow the positions that it holds, and are appended to it. A model that sets `batched_steps` also takes a
        `BatchedStep`, whose `length` is an array: ids (1, B) then continue B texts."""

    def logits(self, h: Array, head: int = 0) -> Array:
        """h: (..., C) to the logits of one output head, (..., V)."""

    def make_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for `batch` rows of up to `capacity` positions."""

    def fused_weights(self) -> FusedWeights | None:
        """The weights for the fused decoders, None where the model is not of their shape. A model that has them must
        access its cache only through the methods of `KVCache`: a fused decoder passes in a cache of its own. For
        prompts it may have `fill(ids, cache)`, which appends ids, need not compute what follows the last layer's keys
        and values, and returns the residual stream that this layer reads, (B, T, C)."""


_WANTED = ("config", "backend", "prediction_heads", "hidden", "logits", "make_cache", "fused_weights")


def check_causal_lm(model: Any) -> CausalLM:
    """The model, if it can generate text; else UserError says what it lacks."""
    missing = [name for name in _WANTED if not hasattr(model, name)]
    if missing:
        for spec in models().values():
            if spec.build is type(model):
                next_token_model(spec.name)
        raise UserError(
            f"{type(model).__name__} cannot generate text: it lacks {', '.join(missing)}; use a causal language model "
            "(tinyforge.infer.CausalLM)"
        )
    return model


def logits(model: CausalLM, ids: Any) -> np.ndarray:
    """The logits of head 0 after every token. ids: (B, T); returns (B, T, V) in host memory, in the model's master
    precision, float64 or float32. Nothing is cached.

    UserError for ids outside the vocabulary, and for more tokens than the model's context.
    """
    model = check_causal_lm(model)
    ids, c = np.asarray(ids), model.config
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError(f"logits: ids are {ids.dtype} of shape {ids.shape}, expected integers of shape (B, T)")
    if ids.shape[1] > c.context:
        raise UserError(f"logits: {ids.shape[1]} tokens, the model's context is {c.context}; give fewer")
    if ids.size and not (ids.min() >= 0 and ids.max() < c.vocab):
        raise UserError(f"logits: ids {ids.min()} to {ids.max()}, expected 0 to {c.vocab - 1}; use its own tokenizer")
    h = model.hidden(model.backend.asarray(ids))
    return model.backend.to_numpy(model.logits(h)).astype(model.backend.master_dtype, copy=False)
