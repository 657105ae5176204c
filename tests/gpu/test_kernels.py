"""Every CUDA kernel against the NumPy one of the same name: float64 and float32 by their difference, bf16 by its error.

bf16 errors are measured against float64, on inputs that bf16 holds exactly, and may be at most twice those of the plain
computation: float32 arithmetic, results rounded to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import Backend, dtype_of, get_backend
from tinyforge.op import Param, Stash
from tinyforge.ops.conv2d import output_shape
from tinyforge.ops.cross_entropy import SoftTargets, sum_tokens
from tinyforge.ops.linear import linear_bwd_bias
from tinyforge.optim import AdamWConfig
from tinyforge.optim.adamw import adamw_, clip_factor, square_sums, step_rates
from tinyforge.params import with_buffer
from tinyforge.rng import Stream

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

KERNELS = {k.name: k for k in (*(k for kind in ops.ALL for k in kind.kernels), linear_bwd_bias)}  # no op lists the last
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-6}
Rng = np.random.Generator


@dataclass(frozen=True)
class Activation:
    """An argument in the storage type; a `sum` that the kernel adds to is made by the op, and never strided."""

    value: np.ndarray
    sum: bool = False


@dataclass(frozen=True)
class Master:
    """An argument in the precision of sums; `out` if the kernel adds to it."""

    value: np.ndarray
    out: bool = False


def backend_of(precision: str) -> Backend:
    return get_backend("cupy", precision)


def normal(rng: Rng, *shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def act(rng: Rng, *shape: int) -> Activation:
    return Activation(normal(rng, *shape))


def acc(rng: Rng, *shape: int) -> Master:
    return Master(normal(rng, *shape), out=True)


def some_rstd(rng: Rng, n: int | tuple[int, ...]) -> Master:
    return Master(rng.uniform(0.5, 2, n))


def angles(rng: Rng, *shape: int) -> Master:
    return Master(rng.uniform(-1, 1, shape))


def turns(rng: Rng, n: int, c: int) -> tuple[Master, Master]:
    """Cosines and sines, (n, c)."""
    angle = rng.uniform(-3, 3, (n, c))
    return Master(np.cos(angle)), Master(np.sin(angle))


def begins(rng: Rng, n: int) -> np.ndarray:
    """Where each token's document begins, (2, n)."""
    first = np.where(rng.random((2, n)) < 0.3, np.arange(n), 0).astype(np.int32)
    return np.maximum.accumulate(first, axis=1)


def scan_inputs(rng: Rng, batch: int, length: int, channels: int, states: int) -> tuple[Any, ...]:
    """u, delta, b, c, z, a_log, skip, bias."""
    wide, narrow = (batch, length, channels), (batch, length, states)
    inputs = (act(rng, *shape) for shape in (wide, wide, narrow, narrow, wide))
    return (*inputs, act(rng, channels, states), act(rng, channels), act(rng, channels))


def tokens(rng: Rng, n: int, vocab: int) -> np.ndarray:
    """Ids of which one is as frequent as in text, and some never come."""
    ids = rng.integers(0, vocab, n).astype(np.int32)
    ids[rng.random(n) < 0.3] = vocab // 2
    ids[ids == vocab - 1] = 0
    return ids


def places(rng: Rng, rows: int, length: int) -> np.ndarray:
    """Half of the places of each row, none twice, some of them -1."""
    where = np.stack([rng.permutation(length)[: -(-length // 2)] for _ in range(rows)]).astype(np.int32)
    where[rng.random(where.shape) < 0.2] = -1
    return where


def distinct(rng: Rng, n: int, experts: int, active: int) -> np.ndarray:
    """(n, active): experts of each token, none of them twice."""
    return rng.permuted(np.tile(np.arange(experts), (n, 1)), axis=1)[:, :active].astype(np.int32)


def groups(rng: Rng, rows: int, experts: int = 5) -> np.ndarray:
    """Where the rows of each expert begin, (experts + 1,); the second has none."""
    shares = np.array([0.4, 0.0, *[0.6 / (experts - 2)] * (experts - 2)])
    return np.append(0, rng.multinomial(rows, shares).cumsum()).astype(np.int32)


def order(rng: Rng, rows: int) -> np.ndarray:
    return rng.permutation(rows).astype(np.int32)


def images(rng: Rng, n: int, c: int, high: int = 7, wide: int = 6) -> Activation:
    """(B, H, W, c), a few of them."""
    return act(rng, 1 + n % 3, high + n % 4, wide, c)


def like_conv(
    rng: Rng, n: int, ins: int, outs: int, taps: tuple[int, int] = (3, 3), stride: int = 1, padding: int = 1
) -> tuple[Any, Any, Any]:
    """Images, a weight, and an array like the result of the convolution."""
    x, weight = images(rng, n, ins), act(rng, outs, *taps, ins)
    return x, weight, act(rng, *output_shape(x.value.shape, weight.value.shape, stride, padding))


def few(c: int) -> int:
    """Channels of an image."""
    return min(c, 136)


def conv_forward(rng: Rng, n: int, c: int, *, outs: int | None = None, plain: bool = False, **how: Any) -> Any:
    x, weight, y = like_conv(rng, n, few(c), outs or few(c) + 3, **how)
    bias = act(rng, weight.value.shape[0])
    more = (None, None) if plain else (bias, y)
    return x, weight, *more, how.get("stride", 1), how.get("padding", 1)


def conv_back_input(rng: Rng, n: int, c: int, **how: Any) -> Any:
    x, weight, dy = like_conv(rng, n, few(c), 72, **how)
    return dy, weight, x.value.shape, how.get("stride", 1), how.get("padding", 1)


def conv_back_weight(rng: Rng, n: int, c: int, *, outs: int = 72, **how: Any) -> Any:
    x, weight, dy = like_conv(rng, n, few(c), outs, **how)
    sums = acc(rng, *weight.value.shape), acc(rng, weight.value.shape[0])
    return *sums, dy, x, how.get("stride", 1), how.get("padding", 1)


def norm_back(rng: Rng, n: int, c: int, groups: int, silu: bool, shifted: bool = False) -> Any:
    x = images(rng, n, groups * few(c))
    batch, channels = x.value.shape[0], groups * few(c)
    sums, shape = (acc(rng, channels), acc(rng, channels)), x.value.shape
    shift = act(rng, batch, channels) if shifted else None
    stats = angles(rng, batch, groups), some_rstd(rng, (batch, groups))
    return *sums, act(rng, *shape), act(rng, channels), act(rng, channels), x, shift, *stats, silu


def mix_norm_back(rng: Rng, n: int, c: int, dfirst: Activation | None) -> Any:
    sums, rows = (acc(rng, c), acc(rng, 1), acc(rng, 1)), [act(rng, n, c) for _ in range(5)]
    dy, residual, y, *more = rows
    return *sums, dfirst, dy, residual, act(rng, c), y, some_rstd(rng, n), *more, act(rng, 1), act(rng, 1)


# Arguments of each kernel for n rows of width c. What stands after a space in a name is one way to call it.
ARGUMENTS: dict[str, Callable[[Rng, int, int], tuple[Any, ...]]] = {
    "rmsnorm_fwd": lambda r, n, c: (act(r, n, c), act(r, c), 1e-5),
    "rmsnorm_fwd plus": lambda r, n, c: (act(r, n, c), act(r, c), 1e-5, True),
    # x is recovered from y by dividing by 1 + w, which is near 1 in the models that have it.
    "rmsnorm_bwd plus": lambda r, n, c: (
        acc(r, c),
        act(r, n, c),
        Activation(np.clip(normal(r, c), -0.5, 0.5)),
        act(r, n, c),
        some_rstd(r, n),
        None,
        True,
    ),
    "add_rmsnorm_fwd plus": lambda r, n, c: (act(r, n, c), act(r, n, c), act(r, c), 1e-5, True),
    "rmsnorm_bwd": lambda r, n, c: (acc(r, c), act(r, n, c), act(r, c), act(r, n, c), some_rstd(r, n), None),
    "rmsnorm_bwd residual": lambda r, n, c: (
        acc(r, c),
        act(r, n, c),
        act(r, c),
        act(r, n, c),
        some_rstd(r, n),
        act(r, n, c),
    ),
    "add_rmsnorm_fwd": lambda r, n, c: (act(r, n, c), act(r, n, c), act(r, c), 1e-5),
    "layernorm_fwd": lambda r, n, c: (act(r, n, c), act(r, c), act(r, c), 1e-5),
    "add_layernorm_fwd": lambda r, n, c: (act(r, n, c), act(r, n, c), act(r, c), act(r, c), 1e-5),
    "add_layernorm_fwd plain": lambda r, n, c: (act(r, n, c), act(r, n, c), act(r, c), None, 1e-5),
    "layernorm_bwd": lambda r, n, c: (
        acc(r, c),
        acc(r, c),
        act(r, n, c),
        act(r, c),
        act(r, n, c),
        angles(r, n),
        some_rstd(r, n),
        None,
    ),
    "layernorm_fwd plain": lambda r, n, c: (act(r, n, c), act(r, c), None, 1e-5),
    "layernorm_bwd plain": lambda r, n, c: (
        acc(r, c),
        None,
        act(r, n, c),
        act(r, c),
        act(r, n, c),
        angles(r, n),
        some_rstd(r, n),
        None,
    ),
    "layernorm_bwd residual": lambda r, n, c: (
        acc(r, c),
        acc(r, c),
        act(r, n, c),
        act(r, c),
        act(r, n, c),
        angles(r, n),
        some_rstd(r, n),
        act(r, n, c),
    ),
    **{f"{name}_fwd": lambda r, n, c: (act(r, n, c),) for name in ("relu", "sigmoid", "silu")},
    **{f"{name}_bwd": lambda r, n, c: (act(r, n, c), act(r, n, c)) for name in ("relu", "sigmoid", "silu")},
    "scale_fwd": lambda r, n, c: (act(r, n, c), -2.5),
    "add_fwd": lambda r, n, c: (act(r, n, c), act(r, n, c)),
    "geglu_fwd": lambda r, n, c: (act(r, n, 2 * c), "tanh"),
    "geglu_fwd erf": lambda r, n, c: (act(r, n, 2 * c), "erf"),
    "geglu_bwd": lambda r, n, c: (act(r, n, c), act(r, n, 2 * c), "tanh"),
    "geglu_bwd erf": lambda r, n, c: (act(r, n, c), act(r, n, 2 * c), "erf"),
    "mse_fwd": lambda r, n, c: (act(r, n, c), act(r, n, c)),
    "mse_bwd": lambda r, n, c: (angles(r, n), act(r, n, c), act(r, n, c)),
    "binary_cross_entropy_fwd": lambda r, n, c: (act(r, n, c), Activation(r.random((n, c)))),
    "binary_cross_entropy_bwd": lambda r, n, c: (angles(r, n), act(r, n, c), Activation(r.random((n, c)))),
    "conv2d_fwd": conv_forward,
    "conv2d_fwd plain": lambda r, n, c: conv_forward(r, n, c, plain=True),
    "conv2d_fwd one": lambda r, n, c: conv_forward(r, n, c, outs=1),
    "conv2d_fwd stride": lambda r, n, c: conv_forward(r, n, c, taps=(4, 3), stride=2, padding=1),
    "conv2d_fwd tap": lambda r, n, c: conv_forward(r, n, c, outs=130, taps=(1, 1), padding=0),
    "conv2d_bwd_input": conv_back_input,
    "conv2d_bwd_input stride": lambda r, n, c: conv_back_input(r, n, c, taps=(4, 3), stride=2, padding=1),
    "conv2d_bwd_input rest": lambda r, n, c: conv_back_input(r, n, c, taps=(2, 2), stride=3, padding=0),
    "conv2d_bwd_weight": conv_back_weight,
    "conv2d_bwd_weight wide": lambda r, n, c: conv_back_weight(r, n, c, outs=130),
    "conv2d_bwd_weight one": lambda r, n, c: conv_back_weight(r, n, c, outs=1),
    "conv2d_bwd_weight stride": lambda r, n, c: conv_back_weight(r, n, c, taps=(4, 3), stride=2, padding=1),
    "groupnorm_fwd": lambda r, n, c: (
        images(r, n, 2 * few(c)),
        None,
        act(r, 2 * few(c)),
        act(r, 2 * few(c)),
        2,
        1e-5,
        False,
    ),
    "groupnorm_fwd silu": lambda r, n, c: (
        images(r, n, 3 * few(c), 28, 28),
        act(r, 1 + n % 3, 3 * few(c)),
        act(r, 3 * few(c)),
        act(r, 3 * few(c)),
        3,
        1e-5,
        True,
    ),
    "groupnorm_bwd": lambda r, n, c: norm_back(r, n, c, 2, False),
    "groupnorm_bwd silu": lambda r, n, c: norm_back(r, n, c, 1, True),
    "groupnorm_bwd shift": lambda r, n, c: norm_back(r, n, c, 3, True, shifted=True),
    **{f"{kind}_pool_fwd": lambda r, n, c: (images(r, n, few(c)), 2, 2) for kind in ("average", "max")},
    **{f"{kind}_pool_fwd over": lambda r, n, c: (images(r, n, few(c)), 3, 1) for kind in ("average", "max")},
    "average_pool_bwd": lambda r, n, c: (act(r, 2, 3, 4, few(c)), (2, 7, 8, few(c)), 2, 2),
    "average_pool_bwd over": lambda r, n, c: (act(r, 2, 5, 6, few(c)), (2, 7, 8, few(c)), 3, 1),
    "max_pool_bwd": lambda r, n, c: (
        act(r, 2, 5, 6, few(c)),
        r.integers(0, 9, (2, 5, 6, few(c))).astype(np.uint8),
        (2, 7, 8, few(c)),
        3,
        1,
    ),
    "max_pool_bwd apart": lambda r, n, c: (
        act(r, 2, 2, 3, few(c)),
        r.integers(0, 4, (2, 2, 3, few(c))).astype(np.uint8),
        (2, 6, 8, few(c)),
        2,
        3,
    ),
    "upsample_fwd": lambda r, n, c: (images(r, n, few(c), 3, 4), 2),
    "upsample_bwd": lambda r, n, c: (act(r, 1 + n % 3, 6, 9, few(c)), 3),
    "softmax_fwd": lambda r, n, c: (act(r, n, c),),
    "softmax_bwd": lambda r, n, c: (act(r, n, c), act(r, n, c)),
    "swiglu_fwd": lambda r, n, c: (act(r, n, 2 * c),),
    "swiglu_bwd": lambda r, n, c: (None, act(r, n, c), act(r, n, 2 * c)),
    "gelu_fwd": lambda r, n, c: (act(r, n, c), None, "tanh"),
    "gelu_fwd erf": lambda r, n, c: (act(r, n, c), None, "erf"),
    "gelu_fwd bias": lambda r, n, c: (act(r, n, c), act(r, c), "tanh"),
    "gelu_bwd": lambda r, n, c: (None, None, act(r, n, c), act(r, n, c), None, "tanh"),
    "gelu_bwd erf": lambda r, n, c: (None, None, act(r, n, c), act(r, n, c), None, "erf"),
    "gelu_bwd bias": lambda r, n, c: (None, acc(r, c), act(r, n, c), act(r, n, c), act(r, c), "tanh"),
    "gelu_bwd bias erf": lambda r, n, c: (None, acc(r, c), act(r, n, c), act(r, n, c), act(r, c), "erf"),
    "rope": lambda r, n, c: (None, act(r, 2, n, 5, 2 * c), angles(r, n, c), angles(r, n, c), 3),
    "dropout": lambda r, n, c: (act(r, n, c), Stream(1).key, 0.3),
    "positions_fwd": lambda r, n, c: (act(r, 3, n, c), act(r, n + 1, c), None),
    "positions_bwd": lambda r, n, c: (acc(r, n + 1, c), act(r, 19, n, c), None),
    "positions_fwd restarting": lambda r, n, c: (act(r, 3, n, c), act(r, 37, c), tokens(r, 3 * n, 37).reshape(3, n)),
    "positions_bwd restarting": lambda r, n, c: (acc(r, 37, c), act(r, 3, n, c), tokens(r, 3 * n, 37).reshape(3, n)),
    "embedding_fwd": lambda r, n, c: (tokens(r, n, 37), act(r, 37, c)),
    "embedding_order": lambda r, n, c: (tokens(r, n, 37), 37),
    "embedding_bwd": lambda r, n, c: (acc(r, 37, c), act(r, n, c), tokens(r, n, 37)),
    "causal_conv_fwd": lambda r, n, c: (None, act(r, 2, n, c), act(r, c, 1, 4), act(r, c)),
    "causal_conv_fwd tail": lambda r, n, c: (
        Activation(normal(r, 2, 2, c)),
        act(r, 2, n, c),
        act(r, c, 1, 3),
        act(r, c),
    ),
    "causal_conv_bwd": lambda r, n, c: (
        None,
        acc(r, c, 1, 4),
        acc(r, c),
        act(r, 2, n, c),
        act(r, 2, n, c),
        act(r, c, 1, 4),
        act(r, c),
    ),
    "selective_scan_fwd": lambda r, n, c: (None, *scan_inputs(r, 2, n, c, 16), True),
    "selective_scan_fwd state": lambda r, n, c: (acc(r, 2, c, 5), *scan_inputs(r, 2, n, c, 5), True),
    "selective_scan_bwd": lambda r, n, c: (
        None,
        acc(r, c, 3),
        acc(r, c),
        acc(r, c),
        act(r, 2, n, c),
        *scan_inputs(r, 2, n, c, 3),
        Master(normal(r, 2, -(-n // 32), c, 3)),
    ),
    "selective_scan_bwd wide": lambda r, n, c: (
        None,
        acc(r, c, 16),
        acc(r, c),
        acc(r, c),
        act(r, 1, n, c),
        *scan_inputs(r, 1, n, c, 16),
        Master(normal(r, 1, -(-n // 32), c, 16)),
    ),
    "linear_fwd": lambda r, n, c: (act(r, n, c), act(r, 24, c), None),
    "linear_fwd bias": lambda r, n, c: (act(r, n, 24), act(r, c, 24), act(r, c)),
    "linear_add_fwd": lambda r, n, c: (act(r, n, 24), act(r, c, 24), None, act(r, n, c)),
    "linear_add_fwd bias": lambda r, n, c: (act(r, n, 24), act(r, c, 24), act(r, c), act(r, n, c)),
    "linear_bwd_bias": lambda r, n, c: (acc(r, c), act(r, n, c)),
    "linear_bwd": lambda r, n, c: (acc(r, 24, c), None, act(r, n, 24), act(r, n, c), act(r, 24, c)),
    "linear_bwd blank": lambda r, n, c: (acc(r, 24, c), None, act(r, n, 24), act(r, n, c), act(r, 24, c), False),
    "linear_bwd bias": lambda r, n, c: (acc(r, c, 24), acc(r, c), act(r, n, c), act(r, n, 24), act(r, c, 24)),
    "linear_bwd frozen": lambda r, n, c: (None, None, act(r, n, 24), None, act(r, 24, c)),
    "rmsnorm_bwd frozen": lambda r, n, c: (None, act(r, n, c), act(r, c), act(r, n, c), some_rstd(r, n), None),
    "layernorm_bwd frozen": lambda r, n, c: (
        None,
        None,
        act(r, n, c),
        act(r, c),
        act(r, n, c),
        angles(r, n),
        some_rstd(r, n),
        None,
    ),
    "layernorm_bwd frozen gain": lambda r, n, c: (
        None,
        acc(r, c),
        act(r, n, c),
        act(r, c),
        act(r, n, c),
        angles(r, n),
        some_rstd(r, n),
        None,
    ),
    "gelu_bwd frozen bias": lambda r, n, c: (None, None, act(r, n, c), act(r, n, c), act(r, c), "tanh"),
    "swiglu_linear_bwd frozen": lambda r, n, c: (None, act(r, n, 24), act(r, n, 2 * c), act(r, 24, c)),
    "lora_fwd": lambda r, n, c: (
        act(r, n, c),
        act(r, 24, c),
        act(r, 24),
        act(r, 8, c),
        act(r, 24, 8),
        1.7,
        Stream(1).key,
        0.3,
    ),
    "lora_fwd whole": lambda r, n, c: (act(r, n, c), act(r, 24, c), None, act(r, 3, c), act(r, 24, 3), 0.5, None, 0.0),
    "lora_bwd": lambda r, n, c: (
        acc(r, 8, c),
        acc(r, 24, 8),
        act(r, n, 24),
        act(r, n, c),
        act(r, n, 8),
        act(r, 24, c),
        act(r, 8, c),
        act(r, 24, 8),
        1.7,
        Stream(1).key,
        0.3,
    ),
    "lora_bwd whole": lambda r, n, c: (
        acc(r, 3, c),
        acc(r, 24, 3),
        act(r, n, 24),
        act(r, n, c),
        act(r, n, 3),
        act(r, 24, c),
        act(r, 3, c),
        act(r, 24, 3),
        0.5,
        None,
        0.0,
    ),
    "lora_merge": lambda r, n, c: (act(r, n, c), act(r, 8, c), act(r, n, 8), 1.7),
    "swiglu_linear_fwd": lambda r, n, c: (act(r, n, 2 * c), None, act(r, 24, c), None),
    "swiglu_linear_fwd hidden": lambda r, n, c: (act(r, n, 2 * c), act(r, n, c), act(r, 24, c), None),
    "swiglu_linear_fwd add": lambda r, n, c: (act(r, n, 2 * c), act(r, n, c), act(r, 24, c), act(r, n, 24)),
    "linear_swiglu_fwd": lambda r, n, c: (act(r, n, 24), act(r, 2 * c, 24)),
    "gelu_linear_fwd": lambda r, n, c: (act(r, n, c), act(r, 24, c), act(r, 24), None, None, "tanh"),
    "gelu_linear_fwd bias": lambda r, n, c: (act(r, n, c), act(r, 24, c), act(r, 24), act(r, c), None, "tanh"),
    "gelu_linear_fwd erf": lambda r, n, c: (act(r, n, c), act(r, 24, c), act(r, 24), act(r, c), act(r, n, 24), "erf"),
    "gelu_linear_bwd": lambda r, n, c: (
        acc(r, 24, c),
        acc(r, 24),
        None,
        act(r, n, 24),
        act(r, n, c),
        act(r, 24, c),
        None,
        "tanh",
    ),
    "gelu_linear_bwd bias": lambda r, n, c: (
        acc(r, 24, c),
        acc(r, 24),
        acc(r, c),
        act(r, n, 24),
        act(r, n, c),
        act(r, 24, c),
        act(r, c),
        "tanh",
    ),
    "gelu_linear_bwd erf": lambda r, n, c: (
        acc(r, 24, c),
        acc(r, 24),
        acc(r, c),
        act(r, n, 24),
        act(r, n, c),
        act(r, 24, c),
        act(r, c),
        "erf",
    ),
    **{
        f"qk_norm_rope_fwd{kind}": lambda r, n, c, kind=kind: (
            None,
            act(r, 1, n, 5, 2 * c),
            act(r, 3) if kind else None,
            *turns(r, n, c),
            3,
            4,
            1.3,
            1e-5,
        )
        for kind in ("", " learned")
    },
    **{
        f"qk_norm_rope_bwd{kind}": lambda r, n, c, kind=kind: (
            None,
            acc(r, 3) if kind else None,
            act(r, 1, n, 5, 2 * c),
            Activation(r.uniform(0.5, 1.5, 3)) if kind else None,
            act(r, 1, n, 5, 2 * c),
            some_rstd(r, (1, n, 4)),
            *turns(r, n, c),
            3,
            4,
            1.3,
        )
        for kind in ("", " learned")
    },
    "value_embedding_fwd": lambda r, n, c: (
        None,
        act(r, 1, n, 4, c),
        act(r, 1, n, 48),
        tokens(r, n, 9).reshape(1, n),
        act(r, 9, 2 * c),
        act(r, 2, 37),
    ),
    "value_embedding_bwd": lambda r, n, c: (
        acc(r, 9, 2 * c),
        acc(r, 2, 37),
        act(r, 1, n, 4, c),
        act(r, 1, n, 48),
        tokens(r, n, 9).reshape(1, n),
        act(r, 9, 2 * c),
        act(r, 2, 37),
        Master(r.uniform(0, 2, (1, n, 2))),
    ),
    "mix_fwd": lambda r, n, c: (act(r, n, c), act(r, n, c), act(r, 1), act(r, 1)),
    "mix_bwd": lambda r, n, c: (acc(r, 1), acc(r, 1), None, *(act(r, n, c) for _ in range(3)), act(r, 1), act(r, 1)),
    "mix_rmsnorm_fwd": lambda r, n, c: (*(act(r, n, c) for _ in range(2)), act(r, c), act(r, 1), act(r, 1), 1e-5),
    "mix_rmsnorm_bwd": lambda r, n, c: mix_norm_back(r, n, c, None),
    "mix_rmsnorm_bwd into": lambda r, n, c: mix_norm_back(r, n, c, Activation(normal(r, n, c), sum=True)),
    "smear_fwd": lambda r, n, c: (act(r, 2, n, c), act(r, -(-c // 2)), act(r, 1), begins(r, n), act(r, 2, c)),
    "smear_bwd": lambda r, n, c: (
        acc(r, -(-c // 2)),
        acc(r, 1),
        act(r, 2, n, c),
        act(r, 2, n, c),
        Master(r.uniform(0, 1, (2, n))),
        act(r, -(-c // 2)),
        act(r, 1),
        begins(r, n),
    ),
    "fork_bwd": lambda r, n, c: (act(r, n, c), act(r, n, c)),
    "tanh_fwd": lambda r, n, c: (act(r, n, c),),
    "tanh_bwd": lambda r, n, c: (act(r, n, c), act(r, n, c)),
    "class_token_fwd": lambda r, n, c: (act(r, 3, n, c), act(r, c)),
    "class_token_bwd": lambda r, n, c: (acc(r, c), act(r, 19, n + 1, c)),
    "take_fwd": lambda r, n, c: (act(r, 3, n, c), places(r, 3, n)),
    "take_bwd": lambda r, n, c: (act(r, 3, -(-n // 2), c), places(r, 3, n), n),
    "patches_bwd": lambda r, n, c: (
        act(r, 2, 6 * n, 3 * min(c, 9) ** 2),
        (2, 3, 2 * min(c, 9), 3 * n * min(c, 9)),
        min(c, 9),
        0.5,
    ),
    "router_fwd": lambda r, n, c: (act(r, n, min(c, 70)), min(c, 3)),
    "router_fwd plain": lambda r, n, c: (act(r, n, min(c, 70)), min(c, 3), False),
    "router_bwd plain": lambda r, n, c: (
        angles(r, n, min(c, 3)),
        angles(r, min(c, 70) + 1),
        act(r, n, min(c, 70)),
        some_rstd(r, (n, min(c, 3))),
        distinct(r, n, min(c, 70), min(c, 3)),
        False,
    ),
    "router_bwd": lambda r, n, c: (
        angles(r, n, min(c, 3)),
        angles(r, min(c, 70) + 1),
        act(r, n, min(c, 70)),
        some_rstd(r, (n, min(c, 3))),
        distinct(r, n, min(c, 70), min(c, 3)),
    ),
    "sort_by_expert": lambda r, n, c: (distinct(r, n, min(c, 300) + 1, 2 if c > 1 else 1), min(c, 300) + 2),
    "grouped_fwd": lambda r, n, c: (act(r, n, c), act(r, 5, 24, c), tokens(r, 2 * n, n), groups(r, 2 * n)),
    "grouped_fwd in order": lambda r, n, c: (act(r, n, 24), act(r, 5, c, 24), None, groups(r, n)),
    "grouped_bwd_input": lambda r, n, c: (act(r, n, c), act(r, 5, c, 24), tokens(r, 2 * n, n), groups(r, 2 * n)),
    "grouped_bwd_input in order": lambda r, n, c: (act(r, n, 24), act(r, 5, 24, c), None, groups(r, n)),
    "grouped_bwd_weight": lambda r, n, c: (
        acc(r, 5, c, 24),
        act(r, n, c),
        act(r, 2 * n, 24),
        tokens(r, 2 * n, n),
        None,
        groups(r, 2 * n),
    ),
    "grouped_bwd_weight by x": lambda r, n, c: (
        acc(r, 5, 136, c),
        act(r, 2 * n, 136),
        act(r, n, c),
        None,
        tokens(r, 2 * n, n),
        groups(r, 2 * n),
    ),
    "weighted_swiglu_fwd": lambda r, n, c: (act(r, n, 2 * c), some_rstd(r, (n, 1)), order(r, n)),
    "weighted_swiglu_bwd": lambda r, n, c: (act(r, n, c), act(r, n, 2 * c), some_rstd(r, (n, 1)), order(r, n)),
    "sum_of_rows": lambda r, n, c: (act(r, 3 * n, c), order(r, 3 * n).reshape(n, 3), act(r, n, c)),
    "sum_of_rows alone": lambda r, n, c: (act(r, 2 * n, c), order(r, 2 * n).reshape(n, 2), None),
    "swiglu_linear_bwd": lambda r, n, c: (acc(r, 24, c), act(r, n, 24), act(r, n, 2 * c), act(r, 24, c)),
    "swiglu_linear_bwd blank": lambda r, n, c: (acc(r, 24, c), act(r, n, 24), act(r, n, 2 * c), act(r, 24, c), False),
}

# A lane's vectors: none (odd widths), one, three (four, six, eight), and rows too wide for registers.
SHAPES = [(1, 1), (7, 33), (3, 8), (5, 128), (65, 768), (19, 1024), (4, 4096), (3000, 64)]
# Rows of which a warp takes several, one more or one less than others, and more than are under way at a time.
MANY_ROWS = [(9001, 200), (9001, 768), (9001, 1024)]
OVER_MANY_ROWS = (
    "rmsnorm_bwd",
    "rmsnorm_bwd residual",
    "layernorm_bwd",
    "layernorm_bwd plain",
    "layernorm_bwd residual",
    "gelu_bwd bias",
)
# Some argument of two axes or more is a weight.
WITH_WEIGHTS = (
    "positions_fwd",
    "embedding_fwd",
    "causal_conv_fwd",
    "causal_conv_bwd",
    "selective_scan_fwd",
    "selective_scan_bwd",
    "grouped_fwd",
    "grouped_bwd_input",
    "conv2d_fwd",
    "conv2d_bwd_input",
    "value_embedding_fwd",
    "value_embedding_bwd",
)
ARRAYS = (Activation, Master)


def shapes(name: str) -> list[tuple[int, int]]:
    return SHAPES + (MANY_ROWS if name in OVER_MANY_ROWS else [])


def numpy_of(name: str) -> Callable[..., Any]:
    return KERNELS[name.split()[0]].body


def cupy_of(name: str, backend: Backend) -> Callable[..., Any]:
    return KERNELS[name.split()[0]].bind(backend)


def run(kernel: Callable[..., Any], arguments: tuple[Any, ...], place: Callable[[Any], Any]) -> list[Any]:
    """All results, written arguments included."""
    placed = [place(a) for a in arguments]
    result = kernel(*placed)
    results = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None]
    return results + [p for p, a in zip(placed, arguments, strict=True) if isinstance(a, Master) and a.out]


def on_numpy(dtype: Any) -> Callable[[Any], Any]:
    return lambda a: a.value.astype(dtype) if isinstance(a, ARRAYS) else a


def on_gpu(backend: Backend) -> Callable[[Any], Any]:
    def place(a: Any) -> Any:
        if isinstance(a, Activation):
            return backend.asarray(a.value)
        if isinstance(a, Master):
            return backend.asarray(a.value, backend.master_dtype)
        dtype = np.dtype(np.uint8) if isinstance(a, np.ndarray) and a.dtype == np.uint8 else None
        return backend.asarray(a, dtype) if isinstance(a, np.ndarray) else a

    return place


def error(got: np.ndarray, expected: np.ndarray) -> float:
    """|got - expected| / |expected|; infinite if anything is not finite."""
    found = np.linalg.norm(np.float64(got) - expected) / max(np.linalg.norm(expected), 1e-30)
    return float(found) if np.isfinite(found) else np.inf


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_kernel_computes_what_numpy_computes(name: str, precision: str) -> None:
    backend = backend_of(precision)
    for n, c in shapes(name):
        arguments = ARGUMENTS[name](np.random.default_rng([n, c]), n, c)
        expected = run(numpy_of(name), arguments, on_numpy(np.float64))
        got = run(cupy_of(name, backend), arguments, on_gpu(backend))
        assert len(got) == len(expected)
        for g, w in zip(got, expected, strict=True):
            assert g.dtype == (w.dtype if w.dtype.kind in "iu" else backend.dtype) and g.shape == w.shape
            # One number is the sum of all, whose signs differ.
            few = 8 if "layernorm_fwd" in name or w.size == 1 else 1
            assert error(backend.to_numpy(g), w) <= TOLERANCE[precision] * few, (n, c)


def rounded(a: Any) -> Any:
    """Activations as bf16 holds them."""
    return replace(a, value=a.value.astype(dtype_of("bfloat16")).astype(np.float64)) if isinstance(a, Activation) else a


def add_then_rmsnorm(residual: np.ndarray, delta: np.ndarray, weight: np.ndarray, *more: Any) -> Any:
    """The sum is stored, and so rounded, before it is normalised."""
    x = (residual + delta).astype(dtype_of("bfloat16")).astype(np.float32)
    return (x, *KERNELS["rmsnorm_fwd"](x, weight, *more))


def mix_then_rmsnorm(*a: Any) -> Any:
    mixed = KERNELS["mix_fwd"](*a[:2], *a[3:5]).astype(dtype_of("bfloat16")).astype(np.float32)
    return (mixed, *KERNELS["rmsnorm_fwd"](mixed, a[2], *a[5:]))


def rmsnorm_then_mix(dweight: Any, da: Any, db: Any, dfirst: Any, dy: Any, residual: Any, *a: Any) -> Any:
    between = KERNELS["rmsnorm_bwd"](dweight, dy, *a[:3], residual)
    return KERNELS["mix_bwd"](da, db, dfirst, between.astype(dtype_of("bfloat16")).astype(np.float32), *a[3:])


def add_then_layernorm(residual: np.ndarray, delta: np.ndarray, *more: Any) -> Any:
    x = (residual + delta).astype(dtype_of("bfloat16")).astype(np.float32)
    return (x, *KERNELS["layernorm_fwd"](x, *more))


def gelu_then_linear(
    u: np.ndarray, weight: np.ndarray, bias: np.ndarray, input_bias: Any, add: Any, how: str
) -> np.ndarray:
    """What the activation gives is stored, and so rounded, before it is multiplied."""
    hidden = KERNELS["gelu_fwd"](u, input_bias, how).astype(dtype_of("bfloat16")).astype(np.float32)
    return KERNELS["linear_fwd"](hidden, weight, bias) + (0 if add is None else add)


def gelu_linear_backwards(
    dweight: np.ndarray,
    dbias: np.ndarray,
    dinput_bias: Any,
    dy: np.ndarray,
    u: np.ndarray,
    weight: np.ndarray,
    input_bias: Any,
    how: str,
) -> np.ndarray:
    """The gradient that the GELU gets is stored, and so rounded, and what it gives again."""
    bf16, hidden = dtype_of("bfloat16"), np.empty_like(u)
    dhidden = (dy @ weight).astype(bf16).astype(np.float32)
    du = KERNELS["gelu_bwd"](hidden, dinput_bias, dhidden, u, input_bias, how)
    dweight += dy.T @ hidden.astype(bf16).astype(np.float32)
    dbias += dy.sum(axis=0)
    return du


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(dtype_of("bfloat16")).astype(np.float32)


def lora_forwards(x: np.ndarray, weight: np.ndarray, bias: Any, a: np.ndarray, b: np.ndarray, *more: Any) -> Any:
    """The frozen map's result is stored, and so rounded, before the adapter's is added, and so is what A gives."""
    scale, key, rate = more
    dropped = x if key is None else bf16(KERNELS["dropout"](x, key, rate))
    u = bf16(dropped @ a.T)
    return bf16(KERNELS["linear_fwd"](x, weight, bias)) + (u @ b.T) * np.float32(scale), u


def lora_backwards(da: np.ndarray, db: np.ndarray, dy: np.ndarray, x: np.ndarray, u: np.ndarray, *more: Any) -> Any:
    """The gradient after A is stored, and so is the adapter's part of dx."""
    weight, a, b, scale, key, rate = more
    du = bf16((dy @ b) * np.float32(scale))
    db += (dy.T @ u) * np.float32(scale)
    da += du.T @ (x if key is None else bf16(KERNELS["dropout"](x, key, rate)))
    dx = bf16(du @ a)
    return (dx if key is None else bf16(KERNELS["dropout"](dx, key, rate))) + dy @ weight


PLAIN = {
    "lora_fwd": lora_forwards,
    "lora_fwd whole": lora_forwards,
    "lora_bwd": lora_backwards,
    "lora_bwd whole": lora_backwards,
    **{f"gelu_linear_fwd{which}": gelu_then_linear for which in ("", " bias", " erf")},
    **{f"gelu_linear_bwd{which}": gelu_linear_backwards for which in ("", " bias", " erf")},
    "add_rmsnorm_fwd": add_then_rmsnorm,
    "add_rmsnorm_fwd plus": add_then_rmsnorm,
    "mix_rmsnorm_fwd": mix_then_rmsnorm,
    **{f"mix_rmsnorm_bwd{which}": rmsnorm_then_mix for which in ("", " into")},
    "add_layernorm_fwd": add_then_layernorm,
    "add_layernorm_fwd plain": add_then_layernorm,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bf16_is_as_exact_as_it_can_be(name: str) -> None:
    backend, bf16 = backend_of("bf16"), dtype_of("bfloat16")
    for n, c in shapes(name)[1:]:
        arguments = tuple(map(rounded, ARGUMENTS[name](np.random.default_rng([n, c]), n, c)))
        expected = run(numpy_of(name), arguments, on_numpy(np.float64))
        plain = run(PLAIN.get(name, numpy_of(name)), arguments, on_numpy(np.float32))
        got = run(cupy_of(name, backend), arguments, on_gpu(backend))
        for g, p, w in zip(got, plain, expected, strict=True):
            assert g.dtype in (backend.dtype, backend.master_dtype, np.int32, np.uint8) and g.shape == w.shape
            if w.dtype.kind in "iu":
                assert np.array_equal(backend.to_numpy(g), w)
                continue
            # Of a sum that is one number, rounding may by chance undo the errors of its terms.
            allowed = 2 * max(error(p.astype(bf16).astype(np.float32), w), error(p, w))
            assert error(backend.to_numpy(g), w) <= max(allowed, 1e-7), (n, c)


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_every_time(name: str, precision: str) -> None:
    backend = backend_of(precision)
    arguments = ARGUMENTS[name](np.random.default_rng(0), 5000, 96)
    runs = [run(cupy_of(name, backend), arguments, on_gpu(backend)) for _ in range(3)]
    for results in zip(*runs, strict=True):
        assert len({backend.to_numpy(r).tobytes() for r in results}) == 1


@pytest.mark.parametrize("name", OVER_MANY_ROWS)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 2e-6), ("bf16", 2e-6)])
def test_sums_over_rows_launch_after_launch(name: str, precision: str, tolerance: float) -> None:
    """One row, fewer rows than blocks, and more than all warps take at once: each launch leaves all as it found it."""
    backend = backend_of(precision)
    for n, c in ((1, 768), (9, 768), (700, 768), (5000, 192)):
        arguments = tuple(map(rounded, ARGUMENTS[name](np.random.default_rng([n, c]), n, c)))
        expected = run(numpy_of(name), arguments, on_numpy(np.float64))[1:]
        placed = list(map(on_gpu(backend), arguments))
        sums = [i for i, a in enumerate(arguments) if isinstance(a, Master) and a.out]
        launches = []
        for _ in range(40):
            again = [a.copy() if i in sums else a for i, a in enumerate(placed)]
            launches.append([cupy_of(name, backend)(*again), *(again[i] for i in sums)])
        for results in zip(*launches, strict=True):
            assert len({backend.to_numpy(r).tobytes() for r in results}) == 1, (n, c)
        for got, w in zip(launches[0][1:], expected, strict=True):
            assert error(backend.to_numpy(got), w) <= tolerance, (n, c)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_dropout_keeps_what_numpy_keeps(precision: str) -> None:
    backend = backend_of(precision)
    dropout = KERNELS["dropout"]
    for size in (1, 5, 8, 4096, 100_003):
        expected = dropout(np.ones(size), Stream(3).key, 0.4) != 0
        for x in (backend.asarray(np.ones(size)), backend.asarray(np.ones(size + 1))[1:]):  # the second is not aligned
            got = backend.to_numpy(dropout.bind(backend)(x, Stream(3).key, 0.4)) != 0
            assert np.array_equal(got, expected)


def loss_case(kind: Any, backend: Backend, vocab: int, heads: int) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(vocab)
    n, dim = 37, 40
    targets = rng.integers(-1, vocab, (n, heads)).astype(np.int32)
    if kind is ops.CrossEntropy:
        return kind(backend), rounded(Activation(3 * normal(rng, n, heads, vocab))).value, targets
    op = with_buffer(kind(Param("weight", (heads, vocab, dim), std=1.0), backend), backend, rng)
    op.weight.value[...] = backend.asarray(rounded(Activation(0.2 * normal(rng, heads, vocab, dim))).value)
    return op, rounded(act(rng, n, dim)).value, targets


@pytest.mark.parametrize(
    ("kind", "frozen", "taught"),
    [
        (ops.CrossEntropy, False, False),
        (ops.LinearCrossEntropy, False, False),
        (ops.LinearCrossEntropy, True, False),
        (ops.LinearCrossEntropy, False, True),
    ],
)
@pytest.mark.parametrize("heads", [1, 3])  # one head with an odd vocabulary has padded rows
@pytest.mark.parametrize("vocab", [1, 5, 65, 96, 512, 4096, 8192, 8195, 40_000, 50_257, 120_001])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("shared", [True, False])
def test_losses(kind: Any, frozen: bool, taught: bool, vocab: int, heads: int, precision: str, shared: bool) -> None:
    """The residual is laid out otherwise on the two backends; what goes in and comes out is the same. taught: with a
    teacher's probabilities among the targets."""
    dnll = np.array([0.5, -2.0, 1e-4])[:heads]
    if not shared:
        dnll = dnll * np.random.default_rng(vocab).normal(size=(37, heads))

    def results(backend: Backend) -> list[np.ndarray]:
        op, x, targets = loss_case(kind, backend, vocab, heads)
        for p in op.params():
            p.frozen = frozen
            if vocab % 2 and not frozen:  # its memory is not to be read
                p.grad.fill(np.nan)
                p.grad_is_zero = True
        stash, expected = Stash(), backend.asarray(targets)
        if taught:
            rng = np.random.default_rng(1)
            teacher = (
                rounded(Activation(size * normal(rng, *shape))).value
                for size, shape in ((1.0, (37, 24)), (0.2, (heads + 1, vocab, 24)))
            )
            expected = SoftTargets(expected, *map(backend.asarray, teacher), share=0.7)
        nll = op.forward(backend.asarray(x), expected, stash)
        again = op.forward(backend.asarray(x), expected)
        assert backend.name == "numpy" or np.array_equal(backend.to_numpy(again), backend.to_numpy(nll))
        dx, _ = op.backward(backend.asarray(dnll, backend.master_dtype), stash)
        assert nll.dtype == backend.master_dtype
        summed = sum_tokens.bind(backend)(nll)
        return [backend.to_numpy(a) for a in (nll, summed, dx, *(p.grad for p in op.params() if not p.frozen))]

    expected = results(get_backend("numpy", "fp64", 1))
    for got, w in zip(results(backend_of(precision)), expected, strict=True):
        assert got.shape == w.shape
        scale = np.linalg.norm(w)
        tolerance = {"fp64": 1e-12, "fp32": 5e-6, "bf16": 1e-2}[precision]
        assert np.linalg.norm(got - w) <= tolerance * scale + (1e-9 if vocab == 1 else 0)


# Rows that end just before, at and just after the length at which they are cut into pieces, empty ones, and long ones
# from and to all kinds of places; rows of several blocks of the sort; more tokens than a warp looks at in one go.
LENGTHS = [64, 65, 0, 63, 128, 129, 1, 9000, 3, 2, 192, 193, 255, 257, 0, 0, *range(100), 4096, 5000]


@pytest.mark.parametrize(
    ("precision", "width"),
    [("fp64", 6), ("fp64", 5), ("fp32", 4), ("fp32", 2056), ("bf16", 768), ("bf16", 33), ("bf16", 2064)],
)
def test_embedding_rows_of_any_number_of_tokens(precision: str, width: int) -> None:
    backend = backend_of(precision)
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(len(LENGTHS)), LENGTHS)).astype(np.int32)
    dy, start = rounded(act(rng, len(ids), width)).value, normal(rng, len(LENGTHS), width)
    expected = start.copy()
    KERNELS["embedding_bwd"](expected, dy, ids)
    on_device, after_another = backend.asarray(dy), backend.asarray(np.append(0, ids))[1:]  # an odd address
    found = []
    for _ in range(3):
        got = backend.asarray(start, backend.master_dtype)
        KERNELS["embedding_bwd"].bind(backend)(got, on_device, after_another)
        found.append(backend.to_numpy(got))
    assert error(found[0], expected) <= (1e-13 if precision == "fp64" else 2e-6)
    assert len({f.tobytes() for f in found}) == 1


@pytest.mark.parametrize("id", [0, 36])
def test_embedding_of_one_token_alone(id: int) -> None:
    backend = backend_of("fp64")
    rng = np.random.default_rng(0)
    for count in (1, 63, 64, 65, 1000, 40_000):
        dy, expected = normal(rng, count, 3), np.zeros((37, 3))
        expected[id] = dy.sum(axis=0)
        got = backend.zeros((37, 3))
        KERNELS["embedding_bwd"].bind(backend)(got, backend.asarray(dy), backend.asarray(np.full(count, id)))
        assert error(backend.to_numpy(got), expected) < 1e-12


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_adamw_and_the_norm(precision: str) -> None:
    backend, reference = backend_of(precision), get_backend("numpy", "fp64", 1)
    rng, config = np.random.default_rng(1), AdamWConfig()
    size = 100_000
    start, grads = normal(rng, size), normal(rng, size)
    w = start.copy()
    m, v = np.zeros(size), np.zeros(size)
    master = backend.asarray(start, backend.master_dtype)
    values = master if backend.dtype == backend.master_dtype else backend.zeros((size,))
    moments = [backend.zeros((size,), backend.master_dtype) for _ in range(2)]
    update = adamw_.bind(backend)
    factor: Any = 1.0
    for step in (1, 2, 3):
        g = grads * step
        norm, wanted_factor = norm_of(reference, g, 1.0, 1.0)
        rates = step_rates(step, 1e-2, config)[0]
        adamw_(w, w, m, v, g, rates, wanted_factor, config)
        on_device = backend.asarray(g, backend.master_dtype)
        got_norm, factor = norm_of(backend, on_device, factor, 1.0)
        assert float(got_norm) == pytest.approx(norm, rel=1e-6) and float(factor) == pytest.approx(1 / norm, rel=1e-6)
        update(values, master, *moments, on_device, backend.asarray(rates, backend.master_dtype), factor, config)
    tolerance = 1e-12 if precision == "fp64" else 1e-6
    for got, expected in ((master, w), (moments[0], m), (moments[1], v)):
        assert error(backend.to_numpy(got), expected) <= tolerance
    assert np.array_equal(backend.to_numpy(values), backend.to_numpy(master.astype(backend.dtype)))
    assert reference.dtype == np.float64


def norm_of(backend: Any, grads: Any, previous: Any, limit: float) -> tuple[Any, Any]:
    half = grads.size // 8 * 4
    bounds = backend.asarray(np.array([(0, half), (0, 0), (half, grads.size)]), np.dtype(np.int64))
    sums = backend.zeros((3, backend.blocks), np.dtype(np.float64))
    sums.fill(7)
    square_sums.bind(backend)(sums, grads, bounds)
    return clip_factor.bind(backend)(sums.reshape(-1), previous, limit)


def test_a_norm_that_is_not_finite_stops_all_further_steps() -> None:
    backend = backend_of("fp32")
    update = adamw_.bind(backend)
    size = 64
    good = backend.asarray(np.ones(size))
    bad = good.copy()
    bad[5] = np.inf
    arrays = [backend.asarray(np.full(size, x)) for x in (1.0, 0.0, 0.0)]
    factor: Any = 1.0
    changed = []
    rates = backend.asarray(step_rates(1, 1e-2, AdamWConfig())[0])
    for grads in (good, bad, good):
        _, factor = norm_of(backend, grads, factor, 0.0)
        before = [a.copy() for a in arrays]
        update(arrays[0], *arrays, grads, rates, factor, AdamWConfig())
        changed.append(any(bool((a != b).any()) for a, b in zip(arrays, before, strict=True)))
    assert changed == [True, False, False]


def test_rope_in_place_and_elsewhere() -> None:
    backend = backend_of("fp32")
    rng = np.random.default_rng(2)
    arguments = [backend.asarray(normal(rng, *s)) for s in ((2, 5, 4, 16), (5, 8), (5, 8))]
    rope = KERNELS["rope"].bind(backend)
    expected = rope(None, *arguments, 3)
    elsewhere, in_place, gaps = arguments[0] * 0, arguments[0].copy(), backend.zeros((2, 5, 4, 32))[..., ::2]
    assert rope(elsewhere, *arguments, 3) is elsewhere
    assert rope(in_place, in_place, *arguments[1:], 3) is in_place
    assert rope(gaps, *arguments, 3) is gaps
    for got in (elsewhere, in_place, gaps):
        assert np.array_equal(backend.to_numpy(got), backend.to_numpy(expected))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_strides_do_not_matter(name: str) -> None:
    backend = backend_of("fp64")
    arguments = ARGUMENTS[name](np.random.default_rng(3), 6, 10)

    def spread(a: Any) -> Any:
        placed = on_gpu(backend)(a)
        if not isinstance(a, Activation) or a.sum or placed.ndim < 2:  # parameters are never strided
            return placed
        wide = backend.xp.full((*placed.shape[:-1], 2 * placed.shape[-1]), np.nan)
        wide[..., ::2] = placed
        return wide[..., ::2]

    weighed = name.split()[0] in WITH_WEIGHTS
    if ("linear" in name and name != "linear_bwd_bias") or "lora" in name or weighed:
        pytest.skip("the last argument of two axes is a weight; test_contract covers the inputs")
    expected = run(cupy_of(name, backend), arguments, on_gpu(backend))
    for got, w in zip(run(cupy_of(name, backend), arguments, spread), expected, strict=True):
        assert np.array_equal(backend.to_numpy(got), backend.to_numpy(w))
