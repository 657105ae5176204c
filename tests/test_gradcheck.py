"""The gradient checker: it passes every op and model as they are, and catches every fault seeded here.

Both at the same tolerance. A checker that has never failed proves nothing: each fault below is a mistake
easily made in writing a backward by hand, put into one kernel or one joint of a model.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinyforge import gradcheck, ops
from tinyforge.backends import Backend, get_backend
from tinyforge.contract import ContractError, violations
from tinyforge.errors import UserError
from tinyforge.gradcheck import TOLERANCE, check, check_op, directional_error, examine
from tinyforge.kernel import Array, Kernel, override
from tinyforge.model import Model
from tinyforge.models.bert import BERT
from tinyforge.models.char_mlp.model import CharMLP
from tinyforge.models.gpt2 import GPT2
from tinyforge.models.llama import Llama
from tinyforge.models.lstm import LSTMModel
from tinyforge.models.mamba import Mamba
from tinyforge.models.moe import MoE
from tinyforge.models.nanoeuler import NanoEuler
from tinyforge.models.vit import ViT
from tinyforge.op import Cases, Op, Param, Stash
from tinyforge.ops import attention
from tinyforge.ops.activations import relu2_bwd, relu_bwd, sigmoid_bwd, silu_bwd, tanh_bwd
from tinyforge.ops.add import add_fwd
from tinyforge.ops.add_layernorm import add_layernorm_fwd
from tinyforge.ops.add_rmsnorm import add_rmsnorm_fwd
from tinyforge.ops.attention import TILE, attention_bwd, attention_fwd, attention_rope_bwd
from tinyforge.ops.attention_sink import sink_bwd
from tinyforge.ops.causal_conv import causal_conv_bwd, causal_conv_fwd
from tinyforge.ops.class_token import class_token_bwd, class_token_fwd
from tinyforge.ops.conv2d import conv2d_bwd_input, conv2d_bwd_weight
from tinyforge.ops.cross_entropy import (
    cross_entropy_bwd,
    cross_entropy_fwd,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from tinyforge.ops.dropout import dropout
from tinyforge.ops.embedding import embedding_bwd
from tinyforge.ops.fork import fork_bwd
from tinyforge.ops.geglu import geglu_bwd
from tinyforge.ops.gelu import gelu_bwd
from tinyforge.ops.gelu_linear import gelu_linear_bwd, gelu_linear_fwd
from tinyforge.ops.groupnorm import groupnorm_bwd
from tinyforge.ops.layernorm import layernorm_bwd
from tinyforge.ops.linear import linear_add_fwd, linear_bwd
from tinyforge.ops.lora import lora_bwd, lora_fwd
from tinyforge.ops.losses import binary_cross_entropy_bwd, mse_bwd
from tinyforge.ops.lstm import lstm_bwd, lstm_fwd
from tinyforge.ops.mix import mix_bwd
from tinyforge.ops.mix_rmsnorm import mix_rmsnorm_bwd
from tinyforge.ops.mixture import (
    grouped_bwd_input,
    grouped_bwd_weight,
    sort_by_expert,
    sum_of_rows,
    weighted_swiglu_bwd,
)
from tinyforge.ops.mixture_biased import clamped_swiglu_bwd
from tinyforge.ops.patches import patches_bwd, patches_fwd
from tinyforge.ops.pooling import average_pool_bwd, max_pool_bwd, upsample_bwd
from tinyforge.ops.positions import positions_bwd
from tinyforge.ops.qk_norm_rope import qk_norm_rope_bwd
from tinyforge.ops.rmsnorm import rmsnorm_bwd
from tinyforge.ops.rope import linear_rope_fwd, rope
from tinyforge.ops.router import router_bwd, router_fwd
from tinyforge.ops.router_losses import router_losses_bwd, router_losses_fwd
from tinyforge.ops.scale import scale_fwd
from tinyforge.ops.selective_scan import selective_scan_bwd, selective_scan_fwd
from tinyforge.ops.sigmoid_gate import sigmoid_gate_bwd
from tinyforge.ops.smear import smear_bwd
from tinyforge.ops.softmax import softmax_bwd
from tinyforge.ops.swiglu import swiglu_bwd, swiglu_fwd
from tinyforge.ops.swiglu_linear import swiglu_linear_bwd, swiglu_linear_fwd, swiglu_mlp
from tinyforge.ops.take import take_bwd, take_fwd
from tinyforge.ops.value_embedding import value_embedding_bwd, value_gate_bwd
from tinyforge.params import with_buffer

FP64 = get_backend("numpy", "fp64", workers=1)
LEDGER = tuple(gradcheck.known_ops())

Function = Callable[..., Any]


def worst(kind: type[Op]) -> float:
    return max(row.error for row in check_op(kind, FP64))


def caught(kind: type[Op]) -> bool:
    """Whether any case of it, up to the first that does, has an error above the tolerance: along one direction, fewer
    than the ledger's, which are so sure to see it too."""
    rng = np.random.default_rng(0)
    return any(max(check(op, inputs, rng, directions=1).values()) > TOLERANCE for op, inputs in kind.cases(FP64, rng))


def measured_worst(kind: type[Op]) -> float:
    """The worst error in the ledger, whatever rules of the contract are broken."""
    return max(row.error for row in examine(kind, FP64, contract=False).rows)


@pytest.mark.parametrize("kind", LEDGER, ids=lambda kind: kind.__name__)
def test_every_gradient_is_right(kind: type[Op]) -> None:
    """A whole model along one direction: along three its ops are here, and it is in the ledger of all."""
    ledger = examine(kind, FP64, directions=1 if issubclass(kind, Model) else gradcheck.DIRECTIONS)
    rows = ledger.rows
    assert [row for row in rows if not row.error <= TOLERANCE] == ledger.refused == []
    op, inputs = next(kind.cases(FP64, np.random.default_rng(0)))
    floats = {f"input {i}" for i, x in enumerate(inputs) if x.dtype.kind == "f"}
    assert floats | {p.name for p in op.params() if not p.frozen} <= {row.name for row in rows}  # nothing is left out


def test_the_tolerance_is_the_published_one() -> None:
    assert TOLERANCE == 1e-8 and gradcheck.DIRECTIONS == 3


@dataclass(frozen=True)
class Fault:
    """`broken(right)` makes the kernel with the fault from the right one."""

    op: type[Op]
    what: str
    kernel: Kernel[..., Any]
    broken: Callable[[Function], Function]


def scaled(factor: float) -> Callable[[Function], Function]:
    """The returned gradient times `factor`."""
    return lambda right: lambda *a: right(*a) * factor


def then(damage: Callable[..., None]) -> Callable[[Function], Function]:
    """The right kernel, and then `damage` done to what it wrote into its arguments."""

    def broken(right: Function) -> Function:
        def kernel(*a: Any) -> Any:
            result = right(*a)
            damage(*a)
            return result

        return kernel

    return broken


def with_args(change: Callable[..., tuple[Any, ...]]) -> Callable[[Function], Function]:
    """The right kernel on changed arguments."""
    return lambda right: lambda *a: right(*change(*a))


def no_tail(x: Array) -> Array:
    """x with its last row lost."""
    return np.concatenate([x[:-1], np.zeros_like(x[-1:])])


def lost_repeats(dweight: Array, dy: Array, ids: Array, *_: Any) -> None:
    dweight[ids] += dy  # NumPy keeps one of the rows that share an id


def rmsnorm_without_mean(
    dweight: Array, dy: Array, weight: Array, y: Array, rstd: Array, residual: Array | None, *_: Any
) -> Array:
    dweight += (dy * y / weight).reshape(-1, y.shape[-1]).sum(axis=0)
    return dy * weight * rstd[..., None]


def swiglu_without_slope(_: Array | None, dy: Array, gu: Array) -> Array:
    gate, up = np.split(gu, 2, axis=-1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dy * up * s, dy * gate * s], axis=-1)


def unmasked(right: Function) -> Function:
    """The loss is right, but a position without a target gets the gradient of target 0."""
    return lambda logits, targets: (right(logits, targets)[0], right(logits, np.maximum(targets, 0))[1])


def shifted_residual(right: Function) -> Function:
    def kernel(logits: Array, targets: Array) -> tuple[Array, Array]:
        nll, residual = right(logits, targets)
        return nll, np.roll(residual, 1, axis=0)

    return kernel


def drawn_anew(right: Function) -> Function:
    number = itertools.count()
    return lambda x, key, rate: right(x, (next(number), key[1]), rate)


def another_mask_in(kind: int) -> Callable[[Function], Function]:
    """Backward of LoRA with another mask: in A's gradient (0), or in the input's (1)."""

    def broken(right: Function) -> Function:
        def kernel(da: Array, db: Array, *a: Any) -> Any:
            key = a[-2] and (a[-2][0] ^ 1, a[-2][1])
            kept = (np.zeros_like(da), np.zeros_like(db))
            if kind == 0:
                right(da, kept[1], *a[:-2], key, a[-1])
                return right(kept[0], db, *a)
            right(da, db, *a)
            return right(*kept, *a[:-2], key, a[-1])

        return kernel

    return broken


def first_for_all(dnll: Array) -> Array:
    """Upstream gradients (n, K) with the first row's in every row; (K,) as it is."""
    return dnll if dnll.ndim == 1 else np.tile(dnll[:1], (len(dnll), 1))


def zero(a: Array) -> None:
    a[...] = 0


def times(a: Array, factor: float) -> None:
    a *= factor


def one_place_early(starts: Array | None) -> Array | None:
    return None if starts is None else np.maximum(starts - 1, 0)


def one_place_late(starts: Array | None) -> Array | None:
    """Each document's second token on sees no more its first."""
    return None if starts is None else np.minimum(starts + 1, np.arange(starts.shape[1]))


def unscaled_mask(right: Function) -> Function:
    scaled_mask = attention.dropout_mask

    def broken(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "dropout_mask", lambda *a: np.sign(scaled_mask(*a)))
            right(*args)

    return broken


def weights_not_renormalised(right: Function) -> Function:
    """The probabilities among all experts, not among the chosen."""

    def kernel(logits: Array, active: int, normalised: bool) -> tuple[Array, Array, Array]:
        weights, chosen, usage = right(logits, active, normalised)
        p = np.exp(logits - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return np.take_along_axis(p, chosen, axis=-1), chosen, usage

    return kernel


def router_without_softmax(
    dweights: Array, dusage: Array, logits: Array, weights: Array, chosen: Array, normalised: bool
) -> Array:
    """The weights' gradients at the chosen logits, as if a weight were the logit."""
    dlogits = router_bwd(0 * dweights, dusage, logits, weights, chosen, normalised)
    np.put_along_axis(dlogits, chosen, np.take_along_axis(dlogits, chosen, -1) + dweights, axis=-1)
    return dlogits


def last_slot_dropped(right: Function) -> Function:
    """The last choice of the last token has no row: its place is that of another."""

    def kernel(chosen: Array, experts: int) -> tuple[Array, Array, Array, Array]:
        slots, tokens, places, starts = right(chosen, experts)
        if places.size > 1:
            places[-1, -1] = places[0, 0]
        return slots, tokens, places, starts

    return kernel


def without_the_decays_gradient(right: Function) -> Function:
    """The term e . A of ddt is dropped: what is left is u (g . B), and g . B is told by du = D ds + dt (g . B)."""

    def broken(*a: Any) -> tuple[Array, ...]:
        du, _, *rest = right(*a)
        dy, u, delta, z, skip, bias = (a[i] for i in (4, 5, 6, 9, 11, 12))
        dt = np.log1p(np.exp(delta + bias))
        along_b = (du - skip * dy * z / (1 + np.exp(-z))) / dt
        return du, u * along_b / (1 + np.exp(-delta - bias)), *rest

    return broken


def kept_of_the_row_before(right: Function) -> Function:
    def broken(*a: Any) -> tuple[Array, Array | None]:
        y, kept = right(*a)
        return y, None if kept is None else np.roll(kept, 1, axis=0)

    return broken


def replaced(number: int, change: Callable[[Array], Array]) -> Callable[[Function], Function]:
    """One of the arrays that a kernel returns, changed."""

    def broken(right: Function) -> Function:
        def kernel(*a: Any) -> tuple[Array, ...]:
            found = list(right(*a))
            found[number] = change(found[number])
            return tuple(found)

        return kernel

    return broken


FAULTS = [
    Fault(ops.ReLU, "the gradient passes below 0 too", relu_bwd, lambda _: lambda dy, y: dy),
    Fault(ops.SquaredReLU, "factor 2 forgotten", relu2_bwd, lambda _: lambda dy, x: dy * np.maximum(x, 0)),
    Fault(ops.SigmoidGate, "a tenth too much", sigmoid_gate_bwd, replaced(1, lambda dz: 1.1 * dz)),
    Fault(ops.Sigmoid, "1 - y forgotten", sigmoid_bwd, lambda _: lambda dy, y: dy * y),
    Fault(ops.SiLU, "no slope of the gate", silu_bwd, lambda _: lambda dy, x: dy / (1 + np.exp(-x))),
    Fault(ops.GeGLU, "gate and up exchanged", geglu_bwd, lambda right: lambda *a: np.roll(right(*a), 1, axis=-1)),
    Fault(ops.Add, "the second counts twice", add_fwd, lambda _: lambda a, b: a + 2 * b),
    Fault(ops.MSE, "factor 2 forgotten", mse_bwd, replaced(0, lambda dx: dx / 2)),
    Fault(ops.MSE, "the target's sign", mse_bwd, replaced(1, lambda dt: -dt)),
    Fault(
        ops.BinaryCrossEntropy,
        "the sum in place of the mean",
        binary_cross_entropy_bwd,
        lambda right: lambda dy, x, t: right(dy * max(1, x[:1].size), x, t),
    ),
    Fault(ops.Conv2d, "taps not flipped", conv2d_bwd_input, with_args(lambda dy, w, *a: (dy, w[:, ::-1, ::-1], *a))),
    Fault(ops.Conv2d, "no padding in dx", conv2d_bwd_input, lambda right: lambda *a: np.roll(right(*a), 1, axis=1)),
    Fault(
        ops.Conv2d,
        "dW without the last image",
        conv2d_bwd_weight,
        with_args(lambda dw, db, dy, x, *a: (dw, db, dy[:-1], x[:-1], *a)),
    ),
    Fault(ops.Conv2d, "no db", conv2d_bwd_weight, with_args(lambda dw, db, *a: (dw, None, *a))),
    Fault(
        ops.GroupNorm,
        "no mean of dy xhat",
        groupnorm_bwd,
        lambda _: (
            lambda dw, db, dy, w, b, x, shift, mean, rstd, silu: (
                dy * w * np.repeat(rstd, w.size // rstd.shape[1], axis=-1).reshape(len(x), *(1,) * (x.ndim - 2), -1),
                None if shift is None else 0 * shift,
            )
        ),
    ),
    Fault(ops.GroupNorm, "the activation's slope left out", groupnorm_bwd, with_args(lambda *a: (*a[:-1], False))),
    Fault(ops.GroupNorm, "no gradient of the shift", groupnorm_bwd, replaced(1, lambda d: d if d is None else 0 * d)),
    Fault(ops.AveragePool2d, "one of all pixels", average_pool_bwd, scaled(4.0)),
    Fault(ops.MaxPool2d, "another pixel", max_pool_bwd, with_args(lambda dy, where, *a: (dy, 0 * where, *a))),
    Fault(ops.Upsample, "one copy of four", upsample_bwd, lambda _: lambda dy, f: dy[:, ::f, ::f]),
    Fault(ops.Sequential, "a factor in one of its ops", linear_bwd, scaled(2.0)),
    Fault(ops.TopKRouter, "no softmax in the weights' gradient", router_bwd, lambda _: router_without_softmax),
    Fault(ops.TopKRouter, "weights not renormalised", router_fwd, weights_not_renormalised),
    Fault(ops.TopKRouter, "normalised backward", router_bwd, with_args(lambda *a: (*a[:5], True))),
    Fault(ops.TopKRouter, "the losses' gradient left out", router_bwd, with_args(lambda dw, du, *a: (dw, 0 * du, *a))),
    Fault(
        ops.TopKRouter,
        "the choices' gradients exchanged",
        router_bwd,
        with_args(lambda dw, du, *a: (dw[..., ::-1], du, *a)),
    ),
    Fault(
        ops.TopKRouter,
        "z-loss: no log-sum-exp",
        router_bwd,
        with_args(lambda dw, du, *a: (dw, np.append(du[:-1], du[-1] / 2), *a)),
    ),
    Fault(
        ops.RouterLosses,
        "balance times k forgotten",
        router_losses_bwd,
        with_args(lambda d, slope: (np.append(d[0] / 2, d[1:]), slope)),
    ),
    Fault(ops.RouterLosses, "z lost", router_losses_bwd, with_args(lambda d, slope: (d * [1, 0], slope))),
    Fault(
        ops.RouterLosses,
        "one layer's usage for all",
        router_losses_fwd,
        with_args(lambda u, s, k: ((u[0],) * len(u), s, k)),
    ),
    Fault(
        ops.RouterLosses,
        "f of the next expert",
        router_losses_bwd,
        with_args(lambda d, slope: (d, np.append(np.roll(slope[:-1], 1), slope[-1]))),
    ),
    Fault(
        ops.QKNormRoPE,
        "no mean of dy xhat",
        qk_norm_rope_bwd,
        with_args(lambda out, ds, dy, scale, y, *a: (out, ds, dy, scale, 0 * y, *a)),
    ),
    Fault(ops.QKNormRoPE, "rotated forward", qk_norm_rope_bwd, with_args(lambda *a: (*a[:7], -a[7], *a[8:]))),
    Fault(
        ops.ValueEmbedding,
        "the gate's slope left out",
        value_embedding_bwd,
        with_args(lambda *a: (*a[:-2], 0 * a[-2], a[-1])),
    ),
    Fault(ops.ValueEmbedding, "no gradient of x", value_gate_bwd, lambda _: lambda *a: None),
    Fault(ops.Smear, "documents not kept apart", smear_bwd, with_args(lambda *a: (*a[:-1], None))),
    Fault(ops.Smear, "no slope of the gate", smear_bwd, with_args(lambda *a: (None, *a[1:]))),
    Fault(ops.MixRMSNorm, "the two exchanged", mix_rmsnorm_bwd, lambda right: lambda *a: right(*a)[::-1]),
    Fault(ops.Mix, "the two exchanged", mix_bwd, lambda right: lambda *a: right(*a)[::-1]),
    Fault(ops.Mix, "no sum for a", mix_bwd, with_args(lambda da, *a: (None, *a))),
    Fault(ops.SinkAttention, "the sink's sign", sink_bwd, lambda right: lambda ds, *a: right(ds, -a[0], *a[1:])),
    Fault(ops.BiasedExperts, "h 1 % too large", clamped_swiglu_bwd, replaced(1, lambda h: 1.01 * h)),
    Fault(ops.MixtureOfExperts, "a token's choice dropped", sort_by_expert, last_slot_dropped),
    Fault(
        ops.MixtureOfExperts,
        "the weights' gradient missing",
        weighted_swiglu_bwd,
        lambda right: lambda *a: (*right(*a)[:2], 0 * right(*a)[2]),
    ),
    Fault(
        ops.MixtureOfExperts,
        "the weight missing in dgu",
        weighted_swiglu_bwd,
        lambda right: lambda dh, gu, w, slots: (right(dh, gu, w * 0 + 1, slots)[0], *right(dh, gu, w, slots)[1:]),
    ),
    Fault(
        ops.MixtureOfExperts,
        "the weight missing in dD",
        weighted_swiglu_bwd,
        lambda right: (
            lambda dh, gu, w, slots: (
                right(dh, gu, w, slots)[0],
                right(dh, gu, w * 0 + 1, slots)[1],
                right(dh, gu, w, slots)[2],
            )
        ),
    ),
    Fault(
        ops.MixtureOfExperts,
        "weights of other slots",
        weighted_swiglu_bwd,
        with_args(lambda dh, gu, w, slots: (dh, gu, w, slots[::-1])),
    ),
    Fault(
        ops.MixtureOfExperts,
        "dx by the next expert's matrix",
        grouped_bwd_input,
        with_args(lambda dy, w, t, starts: (dy, np.roll(w, 1, axis=0), t, starts)),
    ),
    Fault(
        ops.MixtureOfExperts,
        "dW assigned to the next expert",
        grouped_bwd_weight,
        with_args(lambda dw, dy, x, dt, xt, s: (dw[::-1], dy, x, dt, xt, s)),
    ),
    Fault(
        ops.MixtureOfExperts,
        "dW without its last row",
        grouped_bwd_weight,
        with_args(lambda dw, dy, x, dt, xt, s: (dw, dy, x, dt, xt, np.minimum(s, max(s[-1] - 1, 0)))),
    ),
    Fault(
        ops.MixtureOfExperts,
        "one choice's gradient in dx",
        sum_of_rows,
        lambda right: lambda rows, places, more: right(rows, places if more is None else places[:, :1], more),
    ),
    Fault(
        ops.MixtureOfExperts,
        "the gate's part of dx missing",
        sum_of_rows,
        with_args(lambda rows, places, more: (rows, places, None)),
    ),
    Fault(ops.Embedding, "repeated ids lost", embedding_bwd, lambda _: lost_repeats),
    Fault(ops.Embedding, "wrong row", embedding_bwd, with_args(lambda dw, dy, ids, _: (dw, dy, (ids + 1) % len(dw)))),
    Fault(
        ops.LearnedPositions,
        "last position lost",
        positions_bwd,
        with_args(lambda dw, dy, p: (dw, dy[:, :-1], p if p is None else p[:, :-1])),
    ),
    Fault(ops.LearnedPositions, "wrong row", positions_bwd, with_args(lambda dw, dy, p: (dw, dy[:, ::-1], p))),
    Fault(
        ops.Patches,
        "rows and columns of a patch swapped",
        patches_bwd,
        lambda right: (
            lambda dy, shape, size, scale: right(
                dy.reshape(*dy.shape[:2], -1, size, size).swapaxes(-1, -2).reshape(dy.shape), shape, size, scale
            )
        ),
    ),
    Fault(ops.Patches, "patches in the wrong order", patches_bwd, with_args(lambda dy, *a: (dy[:, ::-1], *a))),
    Fault(
        ops.Patches,
        "last patch lost",
        patches_bwd,
        with_args(lambda dy, *a: (np.concatenate([dy[:, :-1], 0 * dy[:, -1:]], axis=1), *a)),
    ),
    Fault(
        ops.Patches,
        "pixels scaled in forward alone",
        patches_fwd,
        with_args(lambda x, size, scale, *a: (x, size, scale / 255, *a)),
    ),
    Fault(
        ops.ClassToken,
        "the first sequence's gradient alone",
        class_token_bwd,
        lambda right: lambda dtoken, dy: (right(0 * dtoken, dy), dtoken.__iadd__(dy[0, 0]))[0],
    ),
    Fault(
        ops.ClassToken,
        "one place off",
        class_token_bwd,
        lambda right: lambda dtoken, dy: (right(dtoken, dy), dy[:, :-1].copy())[1],
    ),
    Fault(
        ops.ClassToken,
        "token's gradient from the last place",
        class_token_bwd,
        lambda right: lambda dtoken, dy: (right(0 * dtoken, dy), dtoken.__iadd__(dy[:, -1].sum(axis=0)))[0],
    ),
    Fault(
        ops.ClassToken,
        "token after the sequence",
        class_token_fwd,
        lambda right: lambda *a: np.roll(right(*a), -1, axis=1),
    ),
    Fault(ops.Take, "wrong place", take_bwd, with_args(lambda dy, where, n: (dy, (where + 1) % n, n))),
    Fault(
        ops.Take,
        "what is not taken has a gradient",
        take_bwd,
        with_args(lambda dy, where, n: (dy, np.maximum(where, 0), n)),
    ),
    Fault(
        ops.Take, "the first of each row alone", take_bwd, with_args(lambda dy, where, n: (dy[:, :1], where[:, :1], n))
    ),
    Fault(ops.Take, "another sequence's", take_fwd, with_args(lambda x, where: (np.roll(x, 1, axis=0), where))),
    Fault(ops.Fork, "the second reader's gradient lost", fork_bwd, lambda _: lambda first, second: first.copy()),
    Fault(ops.Fork, "the first reader's gradient twice", fork_bwd, lambda _: lambda first, second: 2 * first),
    Fault(ops.Fork, "difference for sum", fork_bwd, lambda _: lambda first, second: first - second),
    Fault(ops.Tanh, "slope not squared", tanh_bwd, lambda _: lambda dy, y: dy * (1 - y)),
    Fault(ops.Tanh, "sign", tanh_bwd, scaled(-1)),
    Fault(ops.Tanh, "slope of another row", tanh_bwd, with_args(lambda dy, y: (dy, np.roll(y, 1)))),
    Fault(ops.Linear, "sign of dx", linear_bwd, scaled(-1)),
    Fault(ops.Linear, "dx 1 %", linear_bwd, scaled(1.01)),
    Fault(
        ops.Linear,
        "dW of the last row lost",
        linear_bwd,
        with_args(lambda dw, db, dy, x, *a: (dw, db, dy, no_tail(x), *a)),
    ),
    Fault(ops.Linear, "dW 1 %", linear_bwd, with_args(lambda dw, db, dy, x, *a: (dw, db, dy, x * 1.01, *a))),
    Fault(
        ops.Linear,
        "db of the first row alone",
        linear_bwd,
        then(lambda dw, db, dy, *_: None if db is None else db.__setitem__(..., dy.reshape(-1, len(db))[:1].sum(0))),
    ),
    Fault(ops.Linear, "db lost", linear_bwd, with_args(lambda dw, db, *a: (dw, None, *a))),
    Fault(ops.RMSNorm, "no mean term", rmsnorm_bwd, lambda _: rmsnorm_without_mean),
    Fault(ops.RMSNorm, "dw sign", rmsnorm_bwd, then(lambda dw, *_: times(dw, -1))),
    Fault(ops.RMSNorm, "1 %", rmsnorm_bwd, scaled(0.99)),
    Fault(ops.RMSNorm, "not over the gain", rmsnorm_bwd, with_args(lambda dw, dy, w, y, *a: (dw, dy, w, y * w, *a))),
    Fault(ops.AddRMSNorm, "no residual term", rmsnorm_bwd, with_args(lambda *a: (*a[:5], None, *a[6:]))),
    Fault(ops.AddRMSNorm, "residual sign", rmsnorm_bwd, with_args(lambda *a: (*a[:5], -a[5], *a[6:]))),
    Fault(
        ops.AddRMSNorm,
        "norm of the residual alone",
        add_rmsnorm_fwd,
        lambda right: lambda r, d, *a: (right(r, d, *a)[0], *right(r, 0 * d, *a)[1:]),
    ),
    Fault(ops.LayerNorm, "r of another row", layernorm_bwd, with_args(lambda *a: (*a[:-2], np.roll(a[-2], 1), a[-1]))),
    Fault(
        ops.LayerNorm, "mean of another row", layernorm_bwd, with_args(lambda *a: (*a[:-3], np.roll(a[-3], 1), *a[-2:]))
    ),
    Fault(
        ops.LayerNorm,
        "no term along xhat",
        layernorm_bwd,
        with_args(lambda dw, db, dy, w, x, mean, *a: (dw, db, dy, w, x * 0 + mean[..., None], mean, *a)),
    ),
    Fault(ops.AddLayerNorm, "no residual term", layernorm_bwd, with_args(lambda *a: (*a[:-1], None))),
    Fault(ops.AddLayerNorm, "residual sign", layernorm_bwd, with_args(lambda *a: (*a[:-1], -a[-1]))),
    Fault(
        ops.AddLayerNorm,
        "norm of the residual alone",
        add_layernorm_fwd,
        lambda right: lambda r, d, *a: (right(r, d, *a)[0], *right(r, 0 * d, *a)[1:]),
    ),
    Fault(ops.LayerNorm, "db 1 %", layernorm_bwd, then(lambda dw, db, *_: db is not None and times(db, 1.01))),
    Fault(
        ops.RoPE,
        "turned the same way twice",
        rope,
        with_args(lambda out, x, cos, sin, *a: (out, x, cos, np.abs(sin), *a)),
    ),
    Fault(ops.Attention, "no row sum of dO O", attention_bwd, with_args(lambda *a: (*a[:9], 0 * a[9], *a[10:]))),
    Fault(ops.Attention, "sign of dq", attention_bwd, then(lambda dq, *_: times(dq, -1))),
    Fault(ops.Attention, "dv 1 %", attention_bwd, then(lambda dq, dk, dv, *_: times(dv, 1.01))),
    Fault(ops.Attention, "last key lost", attention_bwd, then(lambda dq, dk, *_: zero(dk[:, -1:]))),
    Fault(ops.Attention, "keys past the first tile lost", attention_bwd, then(lambda dq, dk, *_: zero(dk[:, TILE:]))),
    Fault(
        ops.Attention,
        "log-sum-exp of another row",
        attention_bwd,
        with_args(lambda *a: (*a[:10], np.roll(a[10], 1, -1), *a[11:])),
    ),
    Fault(ops.Attention, "backward forgets the window", attention_bwd, with_args(lambda *a: (*a[:12], None, *a[13:]))),
    Fault(
        ops.Attention,
        "window one key too wide in backward",
        attention_bwd,
        with_args(lambda *a: (*a[:12], a[12] and a[12] + 1, *a[13:])),
    ),
    Fault(ops.Attention, "always causal in backward", attention_bwd, with_args(lambda *a: (*a[:11], True, *a[12:]))),
    Fault(
        ops.Attention,
        "mask drawn anew in backward",
        attention_bwd,
        with_args(lambda *a: (*a[:13], a[13] and (a[13][0] ^ 1, a[13][1]), a[14])),
    ),
    Fault(ops.Attention, "mask forgotten in backward", attention_bwd, with_args(lambda *a: (*a[:13], None, a[14]))),
    Fault(ops.Attention, "mask not scaled in backward", attention_bwd, unscaled_mask),
    Fault(ops.Attention, "padding seen in backward", attention_bwd, with_args(lambda *a: (*a[:7], None, *a[8:]))),
    Fault(
        ops.Attention,
        "one padded key seen in backward",
        attention_bwd,
        with_args(lambda *a: (*a[:7], a[7] if a[7] is None else a[7] + 1, *a[8:])),
    ),
    Fault(
        ops.Attention,
        "another sequence's padding",
        attention_bwd,
        with_args(lambda *a: (*a[:7], a[7] if a[7] is None else np.roll(a[7], 1), *a[8:])),
    ),
    Fault(
        ops.Attention,
        "a document sees its neighbour",
        attention_fwd,
        with_args(lambda q, k, v, lengths, starts, *a: (q, k, v, lengths, None, *a)),
    ),
    Fault(
        ops.Attention, "gradients leak into the neighbour", attention_bwd, with_args(lambda *a: (*a[:8], None, *a[9:]))
    ),
    Fault(
        ops.Attention,
        "a document's first token sees the one before it",
        attention_fwd,
        with_args(lambda q, k, v, lengths, starts, *a: (q, k, v, lengths, one_place_early(starts), *a)),
    ),
    Fault(
        ops.Attention,
        "a document begins one token late in backward",
        attention_bwd,
        with_args(lambda *a: (*a[:8], one_place_late(a[8]), *a[9:])),
    ),
    Fault(
        ops.Attention,
        "every row has the documents of the first",
        attention_bwd,
        with_args(lambda *a: (*a[:8], None if a[8] is None else np.broadcast_to(a[8][:1], a[8].shape), *a[9:])),
    ),
    Fault(
        ops.LearnedPositions,
        "positions do not restart in backward",
        positions_bwd,
        with_args(lambda dw, dy, positions: (dw, dy, None)),
    ),
    Fault(
        ops.LearnedPositions,
        "a position that tokens share gets the gradient of one",
        positions_bwd,
        lambda right: lambda dw, dy, p: right(dw, dy, p) if p is None else lost_repeats(dw, dy, p),
    ),
    Fault(ops.SwiGLU, "no slope of the sigmoid", swiglu_bwd, lambda _: swiglu_without_slope),
    Fault(ops.SwiGLU, "1 %", swiglu_bwd, scaled(1.01)),
    Fault(ops.LinearSwiGLU, "dx 1 %", linear_bwd, scaled(1.01)),
    Fault(ops.SwiGLULinear, "sign", swiglu_linear_bwd, scaled(-1)),
    Fault(ops.SwiGLULinear, "dW 1 %", swiglu_linear_bwd, then(lambda dw, *_: times(dw, 1.01))),
    Fault(ops.GELU, "slope of the other formula", gelu_bwd, with_args(lambda *a: (*a[:-1], "tanh"))),
    Fault(ops.GELU, "sign", gelu_bwd, scaled(-1)),
    Fault(ops.GELULinear, "sign", gelu_linear_bwd, scaled(-1)),
    Fault(ops.GELULinear, "dW 1 %", gelu_linear_bwd, then(lambda dw, *_: times(dw, 1.01))),
    Fault(ops.GELULinear, "db 1 %", gelu_linear_bwd, then(lambda dw, db, *_: db is not None and times(db, 1.01))),
    Fault(
        ops.GELULinear,
        "no input bias in backward",
        gelu_linear_bwd,
        with_args(lambda *a: (*a[:6], None if a[6] is None else 0 * a[6], *a[7:])),
    ),
    Fault(
        ops.GELULinear, "slope of the other formula", gelu_linear_bwd, with_args(lambda *a: (*a[:7], "tanh", *a[8:]))
    ),
    Fault(
        ops.GELULinear,
        "input bias after the GELU",
        gelu_linear_fwd,
        with_args(
            lambda u, w, b, b_in, *a: (u, w, b if b_in is None else (0 if b is None else b) + w @ b_in, None, *a)
        ),
    ),
    Fault(
        ops.GELULinear,
        "db_in 1 %",
        gelu_linear_bwd,
        then(lambda dw, db, db_in, *_: db_in is not None and times(db_in, 1.01)),
    ),
    Fault(ops.LoRA, "scale forgotten in backward", lora_bwd, with_args(lambda *a: (*a[:8], 1.0, *a[9:]))),
    Fault(
        ops.LoRA,
        "dB without the scale",
        lora_bwd,
        lambda right: lambda da, db, *a: (lambda own: (right(da, own, *a), db.__iadd__(own / a[6]))[0])(0 * db),
    ),
    Fault(
        ops.LoRA,
        "dx of the frozen map alone",
        lora_bwd,
        lambda right: lambda da, db, dy, x, u, w, *a: (right(da, db, dy, x, u, w, *a), (dy @ w).reshape(x.shape))[1],
    ),
    Fault(ops.LoRA, "dx without the frozen map", lora_bwd, with_args(lambda *a: (*a[:5], 0 * a[5], *a[6:]))),
    Fault(
        ops.LoRA, "dA of the last row lost", lora_bwd, with_args(lambda da, db, dy, x, *a: (da, db, dy, no_tail(x), *a))
    ),
    Fault(ops.LoRA, "mask forgotten in backward", lora_bwd, with_args(lambda *a: (*a[:-2], None, a[-1]))),
    Fault(ops.LoRA, "another mask in dA", lora_bwd, another_mask_in(0)),
    Fault(ops.LoRA, "another mask in dx", lora_bwd, another_mask_in(1)),
    Fault(
        ops.LoRA,
        "what A sees is dropped in the frozen map too",
        lora_fwd,
        lambda right: lambda x, *a: right(x if a[-2] is None else dropout(x, *a[-2:]), *a),
    ),
    Fault(ops.Softmax, "no sum term", softmax_bwd, lambda _: lambda dy, y: dy * y),
    Fault(ops.Softmax, "wrong row", softmax_bwd, with_args(lambda dy, y: (dy, np.roll(y, 1, axis=0)))),
    Fault(ops.Dropout, "mask drawn anew in backward", dropout, drawn_anew),
    Fault(
        ops.CausalConv,
        "not causal: backward sees one position ahead",
        causal_conv_bwd,
        with_args(lambda dx, dw, db, dy, x, *a: (dx, dw, db, dy, np.roll(x, -1, axis=1), *a)),
    ),
    Fault(
        ops.CausalConv,
        "not causal: forward sees one position ahead",
        causal_conv_fwd,
        with_args(lambda tail, x, *a: (tail, np.roll(x, -1, axis=1), *a)),
    ),
    Fault(
        ops.CausalConv,
        "taps in the wrong order",
        causal_conv_bwd,
        with_args(lambda dx, dw, db, dy, x, w, b: (dx, dw, db, dy, x, w[..., ::-1], b)),
    ),
    Fault(
        ops.CausalConv,
        "last position's dx lost",
        causal_conv_bwd,
        lambda right: lambda *a: (dx := right(*a), zero(dx[:, -1:]))[0],
    ),
    Fault(ops.CausalConv, "db 1 %", causal_conv_bwd, then(lambda dx, dw, db, *_: times(db, 1.01))),
    Fault(ops.SelectiveScan, "the decay's own gradient dropped", selective_scan_bwd, without_the_decays_gradient),
    Fault(
        ops.SelectiveScan,
        "A without its exponential",
        selective_scan_bwd,
        then(lambda dz, da, *a: np.divide(da, np.exp(a[8]), out=da)),
    ),
    Fault(ops.SelectiveScan, "state carried into the next row", selective_scan_fwd, kept_of_the_row_before),
    Fault(
        ops.SelectiveScan,
        "backward starts each tile from zeros",
        selective_scan_bwd,
        with_args(lambda *a: (*a[:-1], 0 * a[-1])),
    ),
    Fault(
        ops.SelectiveScan,
        "no slope of softplus",
        selective_scan_bwd,
        lambda right: (
            lambda *a: [(found[0], found[1] * (1 + np.exp(-a[6] - a[12])), *found[2:]) for found in [right(*a)]][0]
        ),
    ),
    Fault(ops.SelectiveScan, "no skip in du", selective_scan_bwd, with_args(lambda *a: (*a[:11], 0 * a[11], *a[12:]))),
    Fault(
        ops.SelectiveScan,
        "dB and dC swapped",
        selective_scan_bwd,
        lambda right: lambda *a: [(f[0], f[1], f[3], f[2], f[4]) for f in [right(*a)]][0],
    ),
    Fault(ops.SelectiveScan, "dC of the position before", selective_scan_bwd, replaced(3, lambda x: np.roll(x, 1, 1))),
    Fault(ops.SelectiveScan, "dz 1 %", selective_scan_bwd, replaced(4, lambda x: 1.01 * x)),
    Fault(ops.LSTM, "state carried across a document in backward", lstm_bwd, with_args(lambda *a: (*a[:-1], None))),
    Fault(ops.LSTM, "state carried across a document in forward", lstm_fwd, with_args(lambda *a: (*a[:-1], None))),
    Fault(
        ops.LSTM, "initial h of another row", lstm_bwd, with_args(lambda *a: (*a[:6], np.roll(a[6], 1, axis=0), *a[7:]))
    ),
    Fault(
        ops.LSTM, "initial c of another row", lstm_bwd, with_args(lambda *a: (*a[:7], np.roll(a[7], 1, axis=0), *a[8:]))
    ),
    Fault(ops.LSTM, "last cell's gradient lost", lstm_bwd, with_args(lambda *a: (*a[:2], None, *a[3:]))),
    Fault(ops.LSTM, "no gradient through h[t-1]", lstm_bwd, with_args(lambda *a: (*a[:8], 0 * a[8], a[9]))),
    Fault(
        ops.LSTM,
        "gates i and f swapped",
        lstm_bwd,
        with_args(
            lambda *a: (*a[:3], np.concatenate(np.split(a[3], 4, -1)[1::-1] + np.split(a[3], 4, -1)[2:], -1), *a[4:])
        ),
    ),
    Fault(
        ops.LSTM,
        "cells of the next position",
        lstm_bwd,
        with_args(lambda *a: (*a[:5], np.roll(a[5], -1, axis=1), *a[6:])),
    ),
    Fault(ops.LSTM, "dU 1 %", lstm_bwd, then(lambda dw, *_: times(dw, 1.01))),
    Fault(ops.CrossEntropy, "sign", cross_entropy_bwd, scaled(-1)),
    Fault(ops.CrossEntropy, "1 %", cross_entropy_bwd, scaled(1.01)),
    Fault(ops.CrossEntropy, "masked tail not masked", cross_entropy_fwd, unmasked),
    Fault(ops.CrossEntropy, "wrong row", cross_entropy_fwd, shifted_residual),
    Fault(
        ops.CrossEntropy,
        "the first token's upstream for all",
        cross_entropy_bwd,
        with_args(lambda dnll, *a: (first_for_all(dnll), *a)),
    ),
    Fault(
        ops.LinearCrossEntropy,
        "upstream lost",
        linear_cross_entropy_bwd,
        with_args(lambda dw, dnll, *a: (dw, np.ones_like(dnll), *a)),
    ),
    Fault(
        ops.LinearCrossEntropy,
        "head weights in the wrong order",
        linear_cross_entropy_bwd,
        with_args(lambda dw, dnll, *a: (dw, dnll[..., ::-1], *a)),
    ),
    Fault(
        ops.LinearCrossEntropy,
        "the same for all tokens: wrong order",
        linear_cross_entropy_bwd,
        with_args(lambda dw, dnll, *a: (dw, dnll[::-1] if dnll.ndim == 1 else dnll, *a)),
    ),
    Fault(
        ops.LinearCrossEntropy,
        "the first token's upstream for all",
        linear_cross_entropy_bwd,
        with_args(lambda dw, dnll, *a: (dw, first_for_all(dnll), *a)),
    ),
    Fault(
        ops.LinearCrossEntropy,
        "dW of the last row lost",
        linear_cross_entropy_bwd,
        with_args(lambda dw, dnll, h, *a: (dw, dnll, no_tail(h), *a)),
    ),
    Fault(
        ops.LinearCrossEntropy,
        "nll of another token",
        linear_cross_entropy_fwd,
        lambda right: lambda *a: (np.roll(right(*a)[0], 1, axis=0), right(*a)[1]),
    ),
    Fault(ops.Scale, "x squared", scale_fwd, lambda _: lambda x, factor: factor * x * x),
    Fault(ops.CappedCrossEntropy, "slope of the cap lost", tanh_bwd, lambda _: lambda dy, y: dy),
    Fault(ops.CappedCrossEntropy, "dx 1 %", linear_bwd, scaled(1.01)),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.op.__name__}: {f.what}")
def test_a_fault_in_a_kernel_is_caught(fault: Fault) -> None:
    with override(fault.kernel, "numpy", fault.broken(fault.kernel.body)):
        assert caught(fault.op)


def test_every_op_has_a_fault() -> None:
    assert {fault.op for fault in FAULTS} == set(ops.ALL)


def test_an_override_ends_with_its_block() -> None:
    with pytest.raises(ZeroDivisionError), override(softmax_bwd, "numpy", lambda dy, y: dy):
        assert softmax_bwd.bind(FP64) is not softmax_bwd.body
        raise ZeroDivisionError
    assert softmax_bwd.bind(FP64) is softmax_bwd.body


def broken_backward(op: Op, broken: Callable[..., Any]) -> None:
    """Let `broken(backward, dy, stash, **out)` stand for the backward of this one op."""
    right = op.backward
    op.backward = lambda dy, stash, **out: broken(right, dy, stash, **out)  # type: ignore[method-assign]


def swapped_halves(x: Array) -> Array:
    return np.roll(x, x.shape[-1] // 2, axis=-1)


def other_formula(op: Any, dy: Array, stash: Stash) -> Array:
    op.approximate = "tanh"
    try:
        return type(op).backward(op, dy, stash)
    finally:
        op.approximate = "erf"


def not_turned_back(rope: Any) -> None:
    right = rope.turn_back
    rope.turn_back = lambda stash: (*right(stash)[:2], 0)


WIRING: list[tuple[type[Op], str, Callable[[Any], None]]] = [
    (
        NanoEuler,
        "residual gradient lost at one joint",
        lambda m: broken_backward(m.blocks[0].norm2.op, lambda right, dy, stash: right((None, dy[1]), stash)),
    ),
    (
        NanoEuler,
        "residual gradient counted twice",
        lambda m: broken_backward(m.blocks[0].norm2.op, lambda right, dy, stash: right((2 * dy[0], dy[1]), stash)),
    ),
    (
        NanoEuler,
        "first norm's gradient lost",
        lambda m: broken_backward(m.blocks[0].norm1.op, lambda right, dy, stash: (right(dy, stash), dy[:1] * 2)[1]),
    ),
    (
        NanoEuler,
        "residual gradient lost at the first norm",
        lambda m: broken_backward(m.blocks[0].norm1.op, lambda right, dy, stash: right((None, dy[1]), stash)),
    ),
    (NanoEuler, "q and k not turned back", lambda m: not_turned_back(m.blocks[0].attention.rope)),
    (
        NanoEuler,
        "gate and up gradients swapped",
        lambda m: broken_backward(m.blocks[-1].mlp.down, lambda right, dy, stash: swapped_halves(right(dy, stash))),
    ),
    (
        NanoEuler,
        "upstream of the later heads lost",
        lambda m: broken_backward(
            m, lambda right, dy, stash: right(np.where(np.arange(dy.shape[-1]) > 0, 0, dy), stash)
        ),
    ),
    (
        NanoEuler,
        "upstream of the last token lost",
        lambda m: broken_backward(
            m,
            lambda right, dy, stash: right(
                dy if dy.ndim == 1 else np.where(np.arange(dy.shape[1])[:, None] > 4, 0, dy), stash
            ),
        ),
    ),
    (
        Llama,
        "a tied head's gradient lost",
        lambda m: broken_backward(m.heads, lambda right, dy, stash: (right(dy, stash), zero(m.heads.weight.grad))[0]),
    ),
    (
        Llama,
        "q and k norms left out",
        lambda m: [
            broken_backward(norm, lambda right, dy, stash, out: (right(dy, stash), dy)[1])
            for norm, _ in m.blocks[0].attention.head_norms
        ],
    ),
    (
        Llama,
        "residual gradient lost between two blocks",
        lambda m: broken_backward(
            m.blocks[1].norm1.op if len(m.blocks) > 1 else m.final_norm.op,
            lambda right, dy, stash: right((None, dy[1]), stash),
        ),
    ),
    (
        Llama,
        "gradient of the biases lost",
        lambda m: broken_backward(
            m.blocks[0].attention.qkv,
            lambda right, dy, stash: (
                right(dy, stash),
                m.blocks[0].attention.qkv.bias and zero(m.blocks[0].attention.qkv.bias.grad),
            )[0],
        ),
    ),
    (
        Llama,
        "heads' gradients in the wrong order",
        lambda m: broken_backward(
            m.blocks[-1].attention.attention, lambda right, dy, stash, rope: right(dy[:, :, ::-1], stash, rope=rope)
        ),
    ),
    (
        GPT2,
        "the embedding's share of a tied gradient lost",
        lambda m: broken_backward(m.embedding, lambda right, dy, stash: right(0 * dy, stash)),
    ),
    (
        GPT2,
        "stream and branch mixed up",
        lambda m: broken_backward(m.blocks[0].norm2.op, lambda right, dy, stash: right(dy[::-1], stash)),
    ),
    (
        GPT2,
        "residual gradient counted twice",
        lambda m: broken_backward(m.blocks[0].norm2.op, lambda right, dy, stash: right((2 * dy[0], dy[1]), stash)),
    ),
    (
        GPT2,
        "positions' gradient one place off",
        lambda m: broken_backward(m.positions, lambda right, dy, stash: right(np.roll(dy, 1, axis=1), stash)),
    ),
    (
        GPT2,
        "GELU left out",
        lambda m: broken_backward(
            m.blocks[0].mlp.down, lambda right, dy, stash: (right(dy, stash), dy @ m.blocks[0].mlp.down.weight.value)[1]
        ),
    ),
    (
        MoE,
        "the balance's gradient left out",
        lambda m: broken_backward(m.losses, lambda right, dy, stash: (0 * right(dy, stash)[0],)) if m.losses else None,
    ),
    (
        MoE,
        "layers' usage in one place alone",
        lambda m: broken_backward(
            m.blocks[0].mlp.experts, lambda right, dy, stash: right((dy[0], 0 * dy[1], dy[2]), stash)
        ),
    ),
    (
        MoE,
        "stream and experts mixed up",
        lambda m: broken_backward(m.blocks[0].norm2.op, lambda right, dy, stash: right(dy[::-1], stash)),
    ),
    (
        MoE,
        "experts' gradient 1 %",
        lambda m: broken_backward(m.blocks[-1].mlp.experts, lambda right, dy, stash: 1.01 * right(dy, stash)),
    ),
    (
        Mamba,
        "gradient through the step sizes lost",
        lambda m: broken_backward(m.blocks[0].mixer.step, lambda right, dy, stash: 0 * right(dy, stash)),
    ),
    (
        Mamba,
        "gate and input swapped",
        lambda m: broken_backward(m.blocks[0].mixer.input, lambda right, dy, stash: right(swapped_halves(dy), stash)),
    ),
    (
        Mamba,
        "residual gradient lost at one joint",
        lambda m: broken_backward(
            m.blocks[1].norm.op if len(m.blocks) > 1 else m.final_norm.op,
            lambda right, dy, stash: right((None, dy[1]), stash),
        ),
    ),
    (
        Mamba,
        "gradients of B and C swapped",
        lambda m: broken_backward(
            m.blocks[0].mixer.scan,
            lambda right, dy, stash, out: [(f[0], f[1], f[3], f[2], f[4]) for f in [right(dy, stash, out=out)]][0],
        ),
    ),
    (
        LSTMModel,
        "the head's gradient in the wrong order",
        lambda m: broken_backward(
            m.head, lambda right, dy, stash: [(dh[..., ::-1], rest) for dh, rest in [right(dy, stash)]][0]
        ),
    ),
    (
        LSTMModel,
        "gradient of the layer below lost",
        lambda m: broken_backward(
            m.layers[-1], lambda right, dy, stash: [(0 * dx, *rest) for dx, *rest in [right(dy, stash)]][0]
        ),
    ),
    (
        LSTMModel,
        "mask not drawn again in backward",
        lambda m: broken_backward(m.dropouts[0], lambda right, dy, stash: (right(dy, stash), dy)[1]),
    ),
    (
        BERT,
        "segments' gradient lost",
        lambda m: broken_backward(m.segments, lambda right, dy, stash: right(0 * dy, stash)),
    ),
    (
        BERT,
        "positions' gradient one place off",
        lambda m: broken_backward(m.positions, lambda right, dy, stash: right(np.roll(dy, 1, axis=1), stash)),
    ),
    (
        BERT,
        "padding seen in backward",
        lambda m: setattr(m.blocks[0].attention.attention, "bwd", lambda *a: attention_bwd(*a[:7], None, *a[8:])),
    ),
    (
        BERT,
        "stream's gradient lost at a fork",
        lambda m: broken_backward(m.blocks[0].fork2, lambda right, dy, stash: right((0 * dy[0], dy[1]), stash)),
    ),
    (
        BERT,
        "the embedding's share of a tied gradient lost",
        lambda m: broken_backward(m.embedding, lambda right, dy, stash: right(0 * dy, stash)),
    ),
    (
        BERT,
        "hidden words' gradients in the wrong order",
        lambda m: broken_backward(m.take, lambda right, dy, stash: right(dy[:, ::-1], stash)),
    ),
    (
        ViT,
        "class token's gradient lost",
        lambda m: broken_backward(
            m.class_token, lambda right, dy, stash: (right(dy, stash), zero(m.class_token.token.grad))[0]
        ),
    ),
    (
        ViT,
        "positions' gradient one place off",
        lambda m: broken_backward(m.positions, lambda right, dy, stash: right(np.roll(dy, 1, axis=1), stash)),
    ),
    (
        ViT,
        "read off the last token",
        lambda m: broken_backward(m.take, lambda right, dy, stash: (right(dy, stash)[0][:, ::-1], None)),
    ),
    (
        ViT,
        "the other GELU in backward",
        lambda m: setattr(m.blocks[0].mlp.down, "backward", partial(other_formula, m.blocks[0].mlp.down)),
    ),
    (
        ViT,
        "stream's gradient lost at a joint",
        lambda m: broken_backward(m.blocks[0].norm2.op, lambda right, dy, stash: right((None, dy[1]), stash)),
    ),
    (
        CharMLP,
        "characters' gradients in the wrong order",
        lambda m: broken_backward(m.embedding, lambda right, dy, stash: right(dy[:, :, ::-1], stash)),
    ),
    (
        CharMLP,
        "gradient of the last layer 1 %",
        lambda m: broken_backward(m.gelu, lambda right, dy, stash: right(1.01 * dy, stash)),
    ),
]


@pytest.mark.parametrize(
    ("model", "what", "miswire"), WIRING, ids=[f"{model.__name__}: {what}" for model, what, _ in WIRING]
)
def test_a_fault_in_a_models_wiring_is_caught(model: Any, what: str, miswire: Callable[[Any], None]) -> None:
    class Miswired(model):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            miswire(self)

        @classmethod
        def cases(cls, backend: Backend, rng: np.random.Generator) -> Any:
            # The long texts are there for the kernels' tiles; a wrong wire shows in short ones.
            return (case for case in super().cases(backend, rng) if case[1][0].size < 100)

    assert caught(Miswired)


def test_a_fault_in_a_kernel_is_caught_through_the_whole_model() -> None:
    def without_slope(dweight: Array, dy: Array, gu: Array, weight: Array, accumulate: bool) -> Array:
        linear_bwd(dweight, None, dy, swiglu_fwd(gu), weight, accumulate)
        return swiglu_without_slope(None, dy @ weight, gu)

    with override(swiglu_linear_bwd, "numpy", without_slope):
        assert caught(NanoEuler)


class ShiftedPositions(ops.LearnedPositions):
    """Positions from an offset on."""

    def forward(self, x: Array, stash: Stash | None = None, *, offset: int = 0) -> Array:
        return super().forward(x, stash, offset=2)

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        op = with_buffer(cls(Param("weight", (7, 3)), backend), backend, rng)
        yield op, (backend.asarray(rng.normal(size=(2, 4, 3))),)


class NormedHeads(ops.RMSNorm):
    """Two heads of a packed array, normalised in place."""

    def forward(self, x: Array, stash: Stash | None = None, **_: Any) -> Array:
        packed = x.copy()
        super().forward(packed[:, :, 1:3], stash, out=packed[:, :, 1:3])
        return packed

    def backward(self, dy: Array, stash: Stash, residual: Array | None = None, **_: Any) -> Array:
        packed = dy.copy()
        super().backward(packed[:, :, 1:3], stash, out=packed[:, :, 1:3])
        return packed

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        op = with_buffer(cls(Param("weight", (4,), fill=1.0), backend), backend, rng)
        yield op, (backend.asarray(rng.normal(size=(2, 3, 5, 4))),)


class Tied(Op):
    """An embedding and a head that share their weight."""

    per_head = True

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        table = Param("table", (6, 4))
        self.embedding, self.head = ops.Embedding(table, backend), ops.LinearCrossEntropy(table, backend)

    def params(self) -> list[Param]:
        return self.head.params()

    def forward(self, ids: Array, targets: Array, stash: Stash | None = None) -> Array:
        return self.head.forward(self.embedding.forward(ids, stash), targets, stash)

    def backward(self, dy: Array, stash: Stash) -> tuple[None, None]:
        dh, _ = self.head.backward(dy, stash)
        self.embedding.backward(dh, stash)
        return None, None

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        ids, targets = rng.integers(0, 6, (2, 5)), rng.integers(-1, 6, (2, 5, 1))
        yield with_buffer(cls(backend), backend, rng), (backend.asarray(ids), backend.asarray(targets))


class Residual(Op):
    """Half of a block, whose products add the stream."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.mlp = (
            ops.LinearSwiGLU(Param("gate_up", (8, 3), std=1.0), backend, "gate_up"),
            ops.SwiGLULinear(Param("down", (3, 4), std=1.0), backend, "down"),
        )
        self.norm = ops.AddRMSNorm(Param("gain", (3,), fill=1.0, decay=False), backend, 0.1)
        self.out = ops.Linear(Param("out", (3, 3), std=1.0), backend, "out")

    def params(self) -> list[Param]:
        return [p for op in (*self.mlp, self.norm, self.out) for p in op.params()]

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        x, h = self.norm.forward(swiglu_mlp(*self.mlp, x, stash, add=x), None, stash)
        return self.out.forward(h, stash, add=x)

    def backward(self, dy: Array, stash: Stash) -> Array:
        gate_up, down = self.mlp
        dx, _ = self.norm.backward((dy, self.out.backward(dy, stash)), stash)
        return dx + gate_up.backward(down.backward(dx, stash), stash)

    @classmethod
    def cases(cls, backend: Any, rng: np.random.Generator) -> Cases:
        yield with_buffer(cls(backend), backend, rng), (backend.asarray(rng.normal(size=(2, 5, 3))),)


class BiasedResidual(Op):
    """The same of GPT-2: products that add a bias and the stream."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        biases = [Param(f"bias{i}", (3,), std=1.0, decay=False) for i in range(3)]
        self.down = ops.GELULinear(Param("down", (3, 3), std=1.0), backend, "down", bias=biases[0])
        self.norm = ops.AddLayerNorm(Param("gain", (3,), fill=1.0, decay=False), biases[1], backend, 0.1)
        self.out = ops.Linear(Param("out", (3, 3), std=1.0), backend, "out", bias=biases[2])

    def params(self) -> list[Param]:
        return [p for op in (self.down, self.norm, self.out) for p in op.params()]

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        x, h = self.norm.forward(self.down.forward(x, stash, add=x), None, stash)
        return self.out.forward(h, stash, add=x)

    def backward(self, dy: Array, stash: Stash) -> Array:
        dx, _ = self.norm.backward((dy, self.out.backward(dy, stash)), stash)
        return dx + self.down.backward(dx, stash)

    @classmethod
    def cases(cls, backend: Any, rng: np.random.Generator) -> Cases:
        yield with_buffer(cls(backend), backend, rng), (backend.asarray(rng.normal(size=(2, 5, 3))),)


class Turned(Op):
    """q|k|v with RoPE done by the map before it, forward, and by the attention after it, backward."""

    def __init__(self, backend: Any) -> None:
        super().__init__(backend)
        self.qkv = ops.Linear(Param("qkv", (16, 3), std=1.0), backend, "qkv")
        self.rope = ops.RoPE(4, 9, 3, backend, 50.0, "rope")
        self.attention = ops.Attention(2, 1, backend, "attention")

    def params(self) -> list[Param]:
        return self.qkv.params()

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        return self.attention.forward(self.rope.after(self.qkv, x, stash, offset=2), stash)

    def backward(self, dy: Array, stash: Stash) -> Array:
        dqkv = self.attention.backward(dy, stash, rope=self.rope)
        return self.qkv.backward(dqkv.reshape(*dy.shape[:2], -1), stash)

    @classmethod
    def cases(cls, backend: Any, rng: np.random.Generator) -> Cases:
        yield with_buffer(cls(backend), backend, rng), (backend.asarray(rng.normal(size=(2, 7, 3))),)


def assigned(dweight: Array, dy: Array, ids: Array, _: Any) -> None:
    """embedding_bwd that assigns: right alone, wrong where another op has added to the gradient before."""
    dweight[...] = 0
    embedding_bwd(dweight, dy, ids)


USES: list[tuple[type[Op], Kernel[..., Any], Callable[[Function], Function]]] = [
    (ShiftedPositions, positions_bwd, with_args(lambda dw, dy, *p: (dw[1:], dy, *p))),
    (NormedHeads, rmsnorm_bwd, with_args(lambda dw, dy, w, y, *a: (dw, dy, w, y[..., ::-1], *a))),
    (Tied, embedding_bwd, lambda _: assigned),
    (Residual, linear_add_fwd, with_args(lambda x, w, b, add: (x, w, b, 0 * add))),
    (Residual, swiglu_linear_fwd, with_args(lambda gu, h, w, add: (gu, h, w, 2 * add))),
    (Turned, linear_rope_fwd, with_args(lambda x, w, cos, sin, n: (x, w, cos, sin, n - 1))),
    (Turned, attention_rope_bwd, with_args(lambda *a: (*a[:8], -a[8], *a[9:]))),  # turned the same way twice
    (Turned, attention_rope_bwd, with_args(lambda *a: (*a[:9], a[9] - 1, *a[10:]))),
    (BiasedResidual, linear_add_fwd, with_args(lambda x, w, b, add: (x, w, b, 2 * add))),
    (BiasedResidual, gelu_linear_fwd, with_args(lambda u, w, b, b_in, add, how: (u, w, b, b_in, 0 * add, how))),
]


@pytest.mark.parametrize(("kind", "kernel", "broken"), USES, ids=[kind.__name__ for kind, *_ in USES])
def test_other_uses_of_an_op_are_right_and_faults_in_them_caught(
    kind: type[Op], kernel: Kernel[..., Any], broken: Callable[[Function], Function]
) -> None:
    assert worst(kind) <= TOLERANCE
    with override(kernel, "numpy", broken(kernel.body)):
        assert measured_worst(kind) > TOLERANCE or any(violations(kind, FP64))


def test_a_record_left_on_the_stash_is_an_error() -> None:
    class Untidy(ops.Softmax):
        def forward(self, *inputs: Array, stash: Stash | None = None) -> Array:
            if stash is not None:
                stash.push(self, *inputs)
            return super().forward(inputs[0], stash)

    with pytest.raises(ContractError, match="Untidy: stash: backward left 1 records"):
        check_op(Untidy, FP64)
    with pytest.raises(ContractError, match="Untidy: stash: backward left 1 records"):
        check(Untidy(FP64), [np.ones((2, 3))], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda dx: [dx], "Odd: gradients: backward returned a list; return a tuple"),
        (lambda dx: (dx, dx), "Odd: gradients: backward returned 2 gradients for 1 inputs"),
        (lambda dx: None, "Odd: gradients: backward returned no gradient for input 0"),
    ],
)
def test_what_backward_may_not_return(result: Callable[[Array], Any], message: str) -> None:
    class Odd(ops.Softmax):
        def backward(self, dy: Array, stash: Stash) -> Any:
            return result(super().backward(dy, stash))

    with pytest.raises(ContractError, match=message):
        check_op(Odd, FP64)


def test_a_gradient_that_is_not_finite_is_a_failure() -> None:
    with override(softmax_bwd, "numpy", lambda dy, y: dy * np.nan):
        assert measured_worst(ops.Softmax) == np.inf


def test_why_a_sum_is_no_loss() -> None:
    """A softmax gradient three times too large passes with .sum() as the loss, not with random upstream.

    The sum is 1 whatever x is, so the true gradient is 0, and so is any multiple of it.
    """
    rng = np.random.default_rng(0)
    with override(softmax_bwd, "numpy", scaled(3)(softmax_bwd.body)):
        op, x, stash = ops.Softmax(FP64), rng.normal(size=(1, 3)), Stash()
        grad = op.backward(np.ones_like(op.forward(x, stash)), stash)
        assert directional_error(lambda: float(op.forward(x).sum()), x, grad, rng, magnitude=1.0) <= TOLERANCE
        assert worst(ops.Softmax) > 0.5


def test_a_wrong_gradient_is_measured_and_x_restored() -> None:
    """L = sum(x^3) / 3, on which the stencil is exact: a gradient 1 % too large reads as nearly 0.01."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(3, 5)) + 2
    start = x.copy()

    def loss() -> float:
        return float((x**3).sum() / 3)

    assert directional_error(loss, x, x * x, rng) < 1e-10
    assert 0.005 < directional_error(loss, x, 1.01 * x * x, rng) < 0.01
    assert np.array_equal(x, start)


LAST_LINE = re.compile(r"worst relative error (\d\.\de[+-]\d\d) over (\d+) ops?, (\d+) cases, seeds? .*")


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param([], id="all", marks=pytest.mark.slow),
        pytest.param(["tinyforge.ops.linear", "tinyforge.ops.swiglu", "models.char_mlp.model"], id="three"),
    ],
)
def test_the_command_prints_the_ledger_and_writes_json(
    modules: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, ledger_ops = tmp_path / "ledger.json", gradcheck.known_ops(modules)
    assert gradcheck.main([*modules, "--json", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = LAST_LINE.fullmatch(lines[-1])
    assert last is not None
    ledger = json.loads(target.read_text(encoding="utf-8"))
    cases = [case for kind in ledger_ops for case in kind.cases(FP64, np.random.default_rng(0))]
    count = sum(bool(op.params()) or any(np.asarray(x).dtype.kind == "f" for x in inputs) for op, inputs in cases)
    assert (int(last[2]), int(last[3])) == (len(ledger_ops), count)
    assert f"{ledger['worst']:.1e}" == last[1]
    assert ledger["tolerance"] == TOLERANCE and ledger["worst"] == max(row["error"] for row in ledger["rows"])
    in_fp8 = len(ledger["fp8"]) + bool(ledger["fp8"])  # with a heading
    assert bool(in_fp8) == (not modules) and ledger["refused"] == []
    assert len(ledger["rows"]) == len(lines) - 2 - in_fp8  # a heading and the last line
    for row, line in zip(ledger["rows"], lines[1:], strict=False):
        assert line.split()[0] == row["op"] and row["name"] in line
    whole_model = {row["name"] for row in ledger["rows"] if row["op"] == "CharMLP"}
    assert {"embedding", "inner", "norm.gain", "norm.bias", "outer"} <= whole_model


def test_the_command_fails_on_a_fault_and_marks_it(capsys: pytest.CaptureFixture[str]) -> None:
    with override(linear_bwd, "numpy", scaled(1.01)(linear_bwd.body)):
        assert gradcheck.main(["--op", "linear"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["Linear"] * 3
    assert "ABOVE 1e-08" in lines[1] and "ABOVE" not in lines[2] + lines[3]
    assert LAST_LINE.fullmatch(lines[-1])


def test_an_unknown_op_is_a_one_line_error() -> None:
    with pytest.raises(UserError, match="no op is called 'Lineal'; known: .*Linear"):
        gradcheck.main(["--op", "Lineal"])
    command = [sys.executable, "-m", "tinyforge.gradcheck", "--op", "Lineal"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(gradcheck.__file__).parents[1])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: no op is called 'Lineal'") and done.stderr.count("\n") == 1


def test_an_op_whose_cases_check_nothing_is_refused() -> None:
    class Unchecked(Op):
        @classmethod
        def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
            yield from ()

    with pytest.raises(UserError, match="Unchecked: cases: none has a parameter or a floating-point input"):
        check_op(Unchecked, get_backend("numpy", "fp64", workers=1))


class Raises(Op):
    """Its second case has an input that forward does not expect."""

    def forward(self, x: Array, stash: Stash | None = None) -> Array:
        return x.reshape(len(x), 2)

    def backward(self, dy: Array, stash: Stash) -> Array:
        return dy

    @classmethod
    def cases(cls, backend: Backend, rng: np.random.Generator) -> Cases:
        for columns in (2, 3):
            yield cls(backend), (backend.asarray(rng.normal(size=(4, columns))),)


def test_an_op_that_raises_in_a_case_is_refused_with_its_shapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gradcheck, "known_ops", lambda modules: [Raises])
    assert gradcheck.main(["--op", "raises", "--seeds", "3"]) == 1
    refusal = capsys.readouterr().out.splitlines()[1]
    assert refusal.startswith("REFUSED Raises: forward: a pass raises ValueError for inputs of (4, 3): cannot reshape")


def test_the_command_checks_the_modules_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gradcheck.main(["models.char_mlp.model", "tinyforge.ops.swiglu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[1:-1]} == {"CharMLP", "SwiGLU"}
    with pytest.raises(UserError, match="cannot import no_such_module"):
        gradcheck.main(["no_such_module"])
    with pytest.raises(UserError, match="tinyforge.rng defines no op"):
        gradcheck.main(["tinyforge.rng"])
    for path in ("./gated", ".gated", "folder/gated.py", "gated.py", "..", ""):
        with pytest.raises(UserError, match=f"^{re.escape(path)} is no module's name|is empty"):
            gradcheck.main([path])


def test_the_seeds_are_printed_and_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a flag the first one is random; the line says which to name."""
    seen = []
    for flags in ((), ("--seeds", "2"), ("--seed", "1000", "--seeds", "10"), ("--seed", "4")):
        assert gradcheck.main(["--op", "tanh", *flags]) == 0
        seen.append(capsys.readouterr().out.splitlines()[-1].split(", ")[-1])
    first, last = map(int, re.fullmatch(r"seeds (\d+) to (\d+)", seen[0]).groups())  # type: ignore[union-attr]
    assert last == first + 2 and seen[2:] == ["seeds 1000 to 1009", "seed 4"]
    first, last = map(int, seen[1].split()[1::2])
    assert last == first + 1
    with pytest.raises(UserError, match="--seed 1 --seeds 0: expected"):
        gradcheck.main(["--seed", "1", "--seeds", "0"])


def test_ill_conditioned_derivatives_pass_and_small_faults_do_not() -> None:
    """exp(60 x): at the first step the fifth derivative is seen, at the second it is not."""
    rng, x = np.random.default_rng(0), np.linspace(-0.1, 0.1, 5)

    def loss() -> float:
        return float(np.exp(60 * x).sum())

    assert directional_error(loss, x, 60 * np.exp(60 * x), rng) <= TOLERANCE
    assert directional_error(loss, x, (1 + 1e-6) * 60 * np.exp(60 * x), rng) > 10 * TOLERANCE


def test_json_goes_to_stdout_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert gradcheck.main(["--op", "linear", "--json"]) == 0
    out, err = capsys.readouterr()
    assert {row["op"] for row in json.loads(out)["rows"]} == {"Linear"}
    assert LAST_LINE.fullmatch(err.splitlines()[-1])


def test_a_file_for_json_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--json: .*ledger.json is in a folder that does not exist; make it first"):
        gradcheck.main(["--op", "linear", "--json", str(tmp_path / "absent" / "ledger.json")])
    with pytest.raises(UserError, match=f"--json: {tmp_path} is a folder; name a file in it"):
        gradcheck.main(["--op", "linear", "--json", str(tmp_path)])
