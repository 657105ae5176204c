"""A look inside a model's pass over one text: every head's distributions, and its attention weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tinyforge.infer.causal_lm import CausalLM, check_causal_lm
from tinyforge.kernel import Array
from tinyforge.op import Stash
from tinyforge.ops import Attention, SinkAttention
from tinyforge.ops.attention import cap_, scaling
from tinyforge.ops.softmax import softmax_fwd


class Trace(NamedTuple):
    """probabilities: (T, heads, V), of each output head after each token. attention: (query heads, T, T) for each
    attention op of the model, in the order of forward; empty for a model without attention."""

    probabilities: np.ndarray
    attention: tuple[np.ndarray, ...]


def trace(model: CausalLM, ids: Sequence[int]) -> Trace:
    """Trace one pass over a text; float64 NumPy arrays.

    `attention[l][h, t, s]` = softmax over the visible s of q_t . k_s / sqrt(D), scaled and capped as the op does. The
    query heads of a group share keys.
    """
    h, attended = _hidden(check_causal_lm(model), ids)
    to_numpy = model.backend.to_numpy
    logits = [to_numpy(model.logits(h, k))[0] for k in range(model.prediction_heads)]
    attention = tuple(weights_of(op, to_numpy(qkv)[0]) for op, qkv in attended)
    return Trace(softmax_fwd(np.stack(logits, axis=1).astype(np.float64)), attention)


def _hidden(model: CausalLM, ids: Sequence[int]) -> tuple[Array, list[tuple[Attention, Array]]]:
    """The final hidden states, and each attention op with the q, k and v that it saved for backward."""
    stash = Stash()
    h = model.hidden(model.backend.asarray(np.asarray([ids], np.int32)), stash)
    return h, [(op, saved[0]) for op, saved in stash if isinstance(op, Attention)]


def weights_of(op: Attention, qkv: Array) -> np.ndarray:
    """The attention weights of an op: (T, Hq + 2 Hkv, D) to (Hq, T, T). Next to a sink they do not sum to 1."""
    q, k = np.split(qkv[:, : op.heads + op.kv_heads].astype(np.float64), [op.heads], axis=1)
    scores = np.einsum("thd,shd->hts", q, k.repeat(op.heads // op.kv_heads, axis=1)) * scaling(q.shape[-1], op.scale)
    if op.softcap:
        cap_(scores, op.softcap)
    visible = np.ones(scores.shape[1:], bool)
    if op.causal:
        visible = np.tril(visible)
    if op.window is not None:
        visible = np.triu(visible, 1 - op.window)
    scores = np.where(visible, scores, -np.inf)
    if not isinstance(op, SinkAttention):
        return softmax_fwd(scores)
    sinks = op.backend.to_numpy(op.sinks.value).astype(np.float64)[:, None, None]
    return softmax_fwd(np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:2], 1))], axis=-1))[..., :-1]


def attention_ops(model: CausalLM) -> list[Attention]:
    """The model's attention ops, in the order of forward."""
    return [op for op, _ in _hidden(model, [0])[1]]


def attention_of(model: CausalLM, ids: Sequence[int], layer: int) -> np.ndarray:
    """`Trace.attention` of one layer, (query heads, T, T), without the logits."""
    op, qkv = _hidden(model, ids)[1][layer]
    return weights_of(op, model.backend.to_numpy(qkv)[0])
