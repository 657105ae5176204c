"""What the ops compute, against formulas written again here the plainest way, slow and in another form."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import Backend, get_backend
from tinyforge.errors import UserError
from tinyforge.gradcheck import TOLERANCE, check
from tinyforge.kernel import Array, bind, override
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.attention import TILE, attention_bwd, attention_fwd, dropout_mask
from tinyforge.ops.conv2d import chunk_rows as window_rows
from tinyforge.ops.conv2d import conv2d_bwd_weight
from tinyforge.ops.cross_entropy import (
    CHUNK_BYTES,
    SoftTargets,
    chunk_rows,
    exp_needs_shift,
    masked_targets,
    row_pitch,
    soft_residual_,
    sum_tokens,
)
from tinyforge.ops.dropout import dropout
from tinyforge.ops.mixture import sort_by_expert
from tinyforge.ops.patches import patches_fwd
from tinyforge.ops.rmsnorm import gain_of
from tinyforge.ops.selective_scan import TILE as SCAN_TILE
from tinyforge.ops.sigmoid import sigmoid, silu_slope
from tinyforge.ops.swiglu_linear import swiglu_mlp
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.rng import Stream, philox

FP64 = get_backend("numpy", "fp64", workers=1)
FP32 = get_backend("numpy", "fp32", workers=1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def param(name: str, value: Array) -> Param:
    """A parameter with a buffer of its own and this value."""
    p = Param(name, value.shape)
    ParamBuffer([p], FP64)
    p.value[...] = value
    return p


def close(got: Array, expected: Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def naive_attention(
    qkv: Array, heads: int, kv_heads: int, causal: bool = True, window: int | None = None, mask: Array = None
) -> Array:
    """The whole T x T matrix, one head at a time. mask: (B, Hq, T, T), multiplies the probabilities."""
    batch, length, _, dim = qkv.shape
    out = np.empty((batch, length, heads, dim))
    for b in range(batch):
        for h in range(heads):
            kv = h * kv_heads // heads
            q, k, v = qkv[b, :, h], qkv[b, :, heads + kv], qkv[b, :, heads + kv_heads + kv]
            s = q @ k.T / math.sqrt(dim)
            for t in range(length if causal else 0):
                s[t, t + 1 :] = -np.inf
                if window is not None:
                    s[t, : max(0, t - window + 1)] = -np.inf
            p = np.exp(s - s.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            out[b, :, h] = (p if mask is None else p * mask[b, h]) @ v
    return out


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_lora_is_two_linear_maps_behind_a_dropout_beside_a_third(rate: float, rng: np.random.Generator) -> None:
    weight, a, b, bias = (rng.normal(size=shape) for shape in ((5, 7), (3, 7), (5, 3), (5,)))
    x, dy, noise = rng.normal(size=(2, 4, 7)), rng.normal(size=(2, 4, 5)), Stream(3, "step 1")
    shapes = [Param(name, value.shape) for name, value in (("w", weight), ("a", a), ("b", b), ("bias", bias))]
    op = ops.LoRA(*shapes[:3], FP64, "lora", bias=shapes[3], alpha=6.0, rate=rate)
    ParamBuffer(op.params(), FP64)
    for p, value in zip(shapes, (weight, a, b, bias), strict=True):
        p.value[...] = value
    linear, drop = ops.Linear(param("w", weight), FP64, bias=param("bias", bias)), ops.Dropout(rate, FP64, "lora")
    down, up = ops.Linear(param("a", a), FP64), ops.Linear(param("b", b), FP64)
    stash, plain = Stash(noise), Stash(noise)
    close(
        op.forward(x, stash),
        linear.forward(x, plain) + 2.0 * up.forward(down.forward(drop.forward(x, plain), plain), plain),
    )
    adapter = drop.backward(down.backward(up.backward(2.0 * dy, plain), plain), plain)
    close(op.backward(dy, stash), adapter + linear.backward(dy, plain))
    close(op.a.grad, down.weight.grad)
    close(op.b.grad, up.weight.grad)
    assert op.weight.grad is None and op.bias is not None and op.bias.grad is None
    close(op.forward(x), x @ op.merged().T + bias)


def test_lora_of_shapes_that_do_not_fit() -> None:
    shapes = [Param("w", (5, 7)), Param("a", (3, 6)), Param("b", (5, 3))]
    with pytest.raises(ValueError, match=r"W \(5, 7\), A \(3, 6\), B \(5, 3\); want \(O, I\), \(R, I\), \(O, R\)"):
        ops.LoRA(*shapes, FP64, alpha=1.0)


@pytest.mark.parametrize("length", [1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE + 37])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)])
def test_attention_is_the_full_matrix_formula(heads: int, kv_heads: int, length: int, rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(2, length, heads + 2 * kv_heads, 6)) * 2
    close(ops.Attention(heads, kv_heads, FP64).forward(qkv), naive_attention(qkv, heads, kv_heads))


@pytest.mark.parametrize("length", [1, 5, TILE, 2 * TILE + 37])
@pytest.mark.parametrize("window", [1, 2, 17, TILE, TILE + 9, 10_000])
def test_a_window_hides_what_lies_too_far_back(window: int, length: int, rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(2, length, 8, 6)) * 2
    got = ops.Attention(4, 2, FP64, window=window).forward(qkv)
    close(got, naive_attention(qkv, 4, 2, window=window))
    if window >= length:
        assert np.array_equal(got, ops.Attention(4, 2, FP64).forward(qkv))
    elif length > window + 1:
        changed = qkv.copy()
        changed[:, 0, 4:] = 1e3  # what the last query no longer sees changes no bit of its result
        assert np.array_equal(ops.Attention(4, 2, FP64, window=window).forward(changed)[:, window:], got[:, window:])


# Where documents begin: within a tile, at the border of one, one that later tiles leave out, one token long, none.
DOCUMENTS = ((0, 3, 4), (0, 64, TILE, TILE + 1, 200), (0, 150), (0,))


@pytest.mark.parametrize("length", [1, 5, TILE, 2 * TILE + 37])
@pytest.mark.parametrize("window", [None, 40])
def test_packed_documents_attend_as_if_alone(window: int | None, length: int, rng: np.random.Generator) -> None:
    """Forward and backward, to 1e-12: other tiles, other sums. A neighbour changes no bit at all."""
    qkv, dy = rng.normal(size=(4, length, 8, 6)) * 2, rng.normal(size=(4, length, 4, 6))
    borders = [[*(at for at in begins if at < length), length] for begins in DOCUMENTS]
    starts = np.stack([np.repeat(ends[:-1], np.diff(ends)) for ends in borders]).astype(np.int32)
    op, stash = ops.Attention(4, 2, FP64, window=window), Stash()

    def packed(qkv: Array, dy: Array) -> tuple[Array, Array]:
        return op.forward(qkv, stash, starts=starts), op.backward(dy, stash)

    found = packed(qkv, dy)
    for row, ends in enumerate(borders):
        for begin, end in zip(ends, ends[1:], strict=False):
            part = np.s_[row : row + 1, begin:end]
            close(found[0][part], op.forward(qkv[part], stash))
            close(found[1][part], op.backward(dy[part], stash))
            changed = [x.copy() for x in (qkv, dy)]
            for x in changed:
                x[part] = 100.0
            for before, after in zip(found, packed(*changed), strict=True):
                before, after = (np.delete(x[row], np.s_[begin:end], axis=0) for x in (before, after))
                assert before.tobytes() == after.tobytes()


def test_a_document_of_one_token_is_hidden_from_the_next(rng: np.random.Generator) -> None:
    """It begins the only row, so that no other document begins after position 1."""
    qkv, op = rng.normal(size=(1, 5, 3, 4)), ops.Attention(1, 1, FP64)
    packed = op.forward(qkv, starts=np.array([[0, 1, 1, 1, 1]], np.int32))
    close(packed[:, 1:], op.forward(qkv[:, 1:]))


@pytest.mark.parametrize("kind", ["sees its neighbour", "begins a token early", "begins a token late"])
def test_a_fault_of_both_passes_shows_in_the_values(kind: str, rng: np.random.Generator) -> None:
    """Forward and backward agree, so the gradient check has nothing to say."""
    wrong = {
        "sees its neighbour": lambda starts: None,
        "begins a token early": lambda starts: np.maximum(starts - 1, 0),
        "begins a token late": lambda starts: np.minimum(starts + 1, np.arange(starts.shape[1])),
    }[kind]

    def spoilt(right: Any, place: int) -> Any:
        return lambda *a: right(*a[:place], None if a[place] is None else wrong(a[place]), *a[place + 1 :])

    with (
        override(attention_fwd, "numpy", spoilt(attention_fwd.body, 4)),
        override(attention_bwd, "numpy", spoilt(attention_bwd.body, 8)),
    ):
        for op, inputs in ops.Attention.cases(FP64, np.random.default_rng(0)):
            assert max(check(op, inputs, rng, directions=1).values()) <= TOLERANCE
        with pytest.raises(AssertionError):
            test_packed_documents_attend_as_if_alone(None, 5, rng)


def test_documents_go_with_causal_attention_and_no_cache() -> None:
    starts = np.zeros((1, 3), np.int32)
    with pytest.raises(ValueError, match="starts of documents go with causal attention, and with no cache"):
        ops.Attention(2, 2, FP64, causal=False).forward(np.zeros((1, 3, 6, 2)), starts=starts)


@pytest.mark.parametrize("length", [1, 5, TILE, 2 * TILE + 37])
def test_attention_in_both_directions(length: int, rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(2, length, 8, 6)) * 2
    close(ops.Attention(4, 2, FP64, causal=False).forward(qkv), naive_attention(qkv, 4, 2, causal=False))


def attention_mask(batch: int, heads: int, length: int, key: tuple[int, int], rate: float) -> Array:
    """(B, Hq, T, T) of 0 and 1 / (1 - rate), one block of Philox for each number."""
    b, h, t, s = np.indices((batch, heads, length, length))
    counter = np.stack([s // 16 * 8 + s % 8, t // 16 * 8 + t % 8, h, b], axis=-1).reshape(-1, 4)
    word = 2 * (t // 8 % 2) + s // 8 % 2
    bits = np.take_along_axis(philox(counter, key), word.reshape(-1, 1), axis=1).reshape(b.shape)
    return (bits >= int(rate * 2**32)) / (1 - rate)


@pytest.mark.parametrize("length", [1, 9, 40, TILE, TILE + 37])
@pytest.mark.parametrize("seen", [{}, {"window": 20}, {"causal": False}], ids=str)
def test_attention_drops_probabilities(seen: dict[str, Any], length: int, rng: np.random.Generator) -> None:
    # 9 sequences: more than one slice of the batch, at the longest
    qkv, noise = rng.normal(size=(9, length, 8, 6)) * 2, Stream(3, "step 1")
    op = ops.Attention(4, 2, FP64, "blocks.0.attention", dropout=0.3, **seen)
    plain = ops.Attention(4, 2, FP64, **seen).forward(qkv)
    mask = attention_mask(9, 4, length, noise.fork("blocks.0.attention").key, 0.3)
    got = op.forward(qkv, Stash(noise))
    close(got, naive_attention(qkv, 4, 2, **seen, mask=mask))
    assert not np.array_equal(got, plain) and not np.array_equal(got, op.forward(qkv, Stash(Stream(3, "step 2"))))
    assert np.array_equal(op.forward(qkv), plain) and np.array_equal(op.forward(qkv, Stash()), plain)


def test_attention_keeps_the_stated_share_independently() -> None:
    rate, whole = 0.2, slice(0, 2 * TILE)
    mask = dropout_mask(slice(0, 2), whole, whole, 4, 2, Stream(0, "noise").key, rate, np.dtype(np.float64))
    assert set(np.unique(mask)) == {0.0, 1 / (1 - rate)}
    kept = (mask > 0).reshape(2, 2, 2 * TILE, 2, 2 * TILE)  # sequence, kv head, key, head of the group, query
    assert abs(kept.mean() - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / kept.size)
    for axis in range(5):
        along = np.moveaxis(kept, axis, 0)
        for step in (1, 8, 16) if len(along) > 16 else (1,):
            one, other = along[:-step].ravel(), along[step:].ravel()
            assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(one.size), (axis, step)
    with pytest.raises(ValueError, match="dropout is 1.0, expected 0 <= dropout < 1"):
        ops.Attention(2, 1, FP64, dropout=1.0)


class Prefix:
    """A cache of one layer that holds the keys and values of the tokens before."""

    def __init__(self, k: Array, v: Array) -> None:
        self.k, self.v = k, v

    def append(self, k: Array, v: Array, window: int | None) -> tuple[Array, Array, None]:
        return np.concatenate([self.k, k], axis=1), np.concatenate([self.v, v], axis=1), None


@pytest.mark.parametrize("queries", [1, 5, TILE, TILE + 30])
@pytest.mark.parametrize("window", [None, 3, TILE + 1])
def test_attention_decodes_on_a_cached_prefix(window: int | None, queries: int, rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(2, 2 * TILE + 37, 8, 6))
    op, prefix = ops.Attention(4, 2, FP64, window=window), Prefix(qkv[:, :-queries, 4:6], qkv[:, :-queries, 6:])
    got = op.forward(qkv[:, -queries:], cache=prefix)
    close(got, naive_attention(qkv, 4, 2, window=window)[:, -queries:])
    with pytest.raises(ValueError, match="a cache and a stash"):
        op.forward(qkv[:, -queries:], Stash(), cache=prefix)


def naive_conv(x: Array, weight: Array, bias: Array) -> Array:
    batch, length, channels = x.shape
    taps, y = weight.shape[-1], np.empty(x.shape)
    for b, t, c in np.ndindex(batch, length, channels):
        s = bias[c]
        for k in range(taps):
            if t - (taps - 1) + k >= 0:
                s += weight[c, 0, k] * x[b, t - (taps - 1) + k, c]
        y[b, t, c] = s / (1 + math.exp(-s))
    return y


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_causal_conv_is_the_sum_over_the_last_positions(length: int, taps: int, rng: np.random.Generator) -> None:
    x, weight, bias = rng.normal(size=(2, length, 5)), rng.normal(size=(5, 1, taps)), rng.normal(size=5)
    op = ops.CausalConv(param("w", weight), param("b", bias), FP64)
    expected = naive_conv(x, weight, bias)
    close(op.forward(x), expected)
    tail = np.zeros((2, taps - 1, 5))  # in pieces, the tail in between
    pieces = [op.forward(part, tail=tail) for part in np.split(x, [1, 2] if length > 2 else [], axis=1)]
    close(np.concatenate(pieces, axis=1), expected)
    with pytest.raises(ValueError, match="a tail and a stash"):
        op.forward(x, Stash(), tail=tail)


def naive_scan(inputs: tuple[Array, ...], a_log: Array, skip: Array, bias: Array) -> Array:
    u, delta, b, c, z = inputs
    y = np.empty(u.shape)
    for row, e in np.ndindex(u.shape[0], u.shape[2]):
        h = np.zeros(a_log.shape[1])
        for t in range(u.shape[1]):
            dt = math.log(1 + math.exp(delta[row, t, e] + bias[e]))
            for n in range(len(h)):
                h[n] = math.exp(-math.exp(a_log[e, n]) * dt) * h[n] + dt * u[row, t, e] * b[row, t, n]
            gate = z[row, t, e]
            y[row, t, e] = (c[row, t] @ h + skip[e] * u[row, t, e]) * gate / (1 + math.exp(-gate))
    return y


@pytest.mark.parametrize("length", [1, 7, SCAN_TILE, SCAN_TILE + 1, 2 * SCAN_TILE + 5])
def test_selective_scan_is_the_recurrence(length: int, rng: np.random.Generator) -> None:
    inputs = tuple(rng.normal(size=(2, length, width)) for width in (3, 3, 4, 4, 3))
    values = rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=3)
    op = ops.SelectiveScan(*(param(name, v) for name, v in zip("abc", values, strict=True)), FP64)
    expected = naive_scan(inputs, *values)
    close(op.forward(*inputs), expected)
    state = np.zeros((2, 3, 4))  # in pieces, the state in between
    cuts = [1, length // 2] if length > 2 else []
    pieces = [op.forward(*part, state=state) for part in zip(*(np.split(x, cuts, 1) for x in inputs), strict=True)]
    close(np.concatenate(pieces, axis=1), expected)
    with pytest.raises(ValueError, match="a state and a stash"):
        op.forward(*inputs, Stash(), state=state)


def test_lstm_is_the_formula_and_continues_from_its_state(rng: np.random.Generator) -> None:
    width, x = 4, rng.normal(size=(2, 7, 3))
    w, u, b = rng.normal(size=(16, 3)), rng.normal(size=(16, width)), rng.normal(size=16)
    start_h, start_c = rng.normal(size=(2, 2, width))
    fresh = np.array([[0, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 1, 1, 0]])
    op = ops.LSTM(*(param(name, v) for name, v in zip("wub", (w, u, b), strict=True)), FP64)
    y, last = op.forward(x, start_h, start_c, fresh)
    for row in range(2):
        h, c = start_h[row], start_c[row]
        for t in range(7):
            if fresh[row, t]:
                h, c = 0 * h, 0 * c
            a = w @ x[row, t] + u @ h + b
            i, f, o = (1 / (1 + np.exp(-a[k * width : (k + 1) * width])) for k in (0, 1, 3))
            c = f * c + i * np.tanh(a[2 * width : 3 * width])
            h = o * np.tanh(c)
            close(y[row, t], h)
        close(last[row], c)
    first, c = op.forward(x[:, :3], start_h, start_c, fresh[:, :3])
    rest, end = op.forward(x[:, 3:], first[:, -1], c, fresh[:, 3:])
    close(np.concatenate([first, rest], axis=1), y)
    close(end, last)


def test_the_scans_memory_for_states_is_linear_in_the_length(rng: np.random.Generator) -> None:
    """No (B, T, E, N) array: what backward takes on top of its results does not grow with the length."""
    values = rng.normal(size=(8, 16)), rng.normal(size=8), rng.normal(size=8)
    op = ops.SelectiveScan(*(param(name, v) for name, v in zip("abc", values, strict=True)), FP64)
    extra = []
    for length in (8 * SCAN_TILE, 32 * SCAN_TILE):
        inputs, stash = [rng.normal(size=(1, length, width)) for width in (8, 8, 16, 16, 8)], Stash()
        y = op.forward(*inputs, stash)
        tracemalloc.start()
        op.backward(y, stash)
        extra.append(tracemalloc.get_traced_memory()[1] / length)
        tracemalloc.stop()
    assert extra[1] < extra[0] < 8 * 8 * 16 * 4  # bytes a position: fewer than four arrays of states would take


def test_attention_cannot_see_the_future(rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(1, TILE + 20, 4, 6))
    op = ops.Attention(2, 1, FP64)
    before = op.forward(qkv)
    for t in (1, TILE - 1, TILE, TILE + 19):
        changed = qkv.copy()
        changed[:, t:] = 1e3
        assert np.array_equal(op.forward(changed)[:, :t], before[:, :t])


def test_attention_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="4 query heads do not divide among 3"):
        ops.Attention(4, 3, FP64)
    for options in ({"window": 0}, {"window": 3, "causal": False}):
        with pytest.raises(ValueError, match="expected a causal window of 1 or more"):
            ops.Attention(4, 2, FP64, **options)  # type: ignore[arg-type]


def peak_bytes(length: int, dropout: float) -> int:
    """Peak of a forward and backward over one sequence, beyond its inputs."""
    op, qkv = ops.Attention(2, 1, FP32, dropout=dropout), np.ones((1, length, 4, 8), np.float32)
    stash = Stash(Stream(0, "noise"))
    dy = np.ones((1, length, 2, 8), np.float32)
    tracemalloc.start()
    try:
        op.forward(qkv, stash)
        op.backward(dy, stash)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_memory_is_linear_in_length(dropout: float) -> None:
    peak_bytes(256, dropout)  # fills the cache of masks
    short, long = peak_bytes(1024, dropout), peak_bytes(2048, dropout)
    assert long <= 2.3 * short
    assert long < 2048 * 2048 * 4 / 8  # one fp32 T x T matrix of one head is 16 MiB


def test_rope_is_a_complex_rotation(rng: np.random.Generator) -> None:
    dim, offset = 8, 3
    x = rng.normal(size=(2, 7, 5, dim))
    got = ops.RoPE(dim, 16, 4, FP64, theta=50.0).forward(x, offset=offset)
    z = x[..., : dim // 2] + 1j * x[..., dim // 2 :]
    position, pair = np.arange(offset, offset + 7), np.arange(dim // 2)
    z = z * np.exp(1j * position[:, None] * 50.0 ** (-2 * pair / dim))[:, None]
    close(got[:, :, :4], np.concatenate([z.real, z.imag], axis=-1)[:, :, :4])
    assert np.array_equal(got[:, :, 4:], x[:, :, 4:])


def test_rope_depends_on_distance_only(rng: np.random.Generator) -> None:
    op, q, k = ops.RoPE(8, 64, 1, FP64), rng.normal(size=(1, 1, 1, 8)), rng.normal(size=(1, 1, 1, 8))

    def score(i: int, j: int) -> float:
        return float((op.forward(q, offset=i) * op.forward(k, offset=j)).sum())

    assert score(9, 4) == pytest.approx(score(45, 40), rel=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-3)


def test_rope_in_place_gives_the_same_bits(rng: np.random.Generator) -> None:
    op, x, stash = ops.RoPE(8, 16, 2, FP64), rng.normal(size=(2, 5, 3, 8)), Stash()
    apart, y = op.forward(x), x.copy()
    assert op.forward(y, stash, out=y) is y and np.array_equal(y, apart)
    assert op.backward(y, stash, out=y) is y
    close(y, x, 1e-14)  # turned there and back


def naive_frequencies(dim: int, theta: float, scaling: ops.RopeScaling) -> list[float]:
    """Pair by pair, in the words of the published code: by wave lengths and with branches."""
    found = []
    for i in range(0, dim, 2):
        f = 1.0 / theta ** (i / dim)
        wavelength = 2 * math.pi / f
        if scaling.kind == "linear" or wavelength > scaling.original_context / scaling.low_freq_factor:
            f /= scaling.factor
        elif wavelength >= scaling.original_context / scaling.high_freq_factor:
            smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
                scaling.high_freq_factor - scaling.low_freq_factor
            )
            f = (1 - smooth) * f / scaling.factor + smooth * f
        found.append(f)
    return found


@pytest.mark.parametrize(
    "scaling", [ops.RopeScaling("linear", 4.0), ops.RopeScaling("llama3", 8.0, 1.0, 4.0, 64)], ids=lambda s: s.kind
)
def test_rope_scalings_change_the_frequencies(scaling: ops.RopeScaling) -> None:
    op = ops.RoPE(32, 7, 1, FP64, theta=500.0, scaling=scaling)
    expected = np.arange(7)[:, None] * naive_frequencies(32, 500.0, scaling)
    close(op.cos, np.cos(expected))
    close(op.sin, np.sin(expected))
    plain = ops.RoPE(32, 7, 1, FP64, theta=500.0)
    assert np.array_equal(op.cos[:, 0], plain.cos[:, 0]) == (scaling.kind == "llama3")  # fast turns stay as they are
    assert not np.array_equal(op.sin[:, -1], plain.sin[:, -1])


LONG = {"short_factor": [1.0 + i / 8 for i in range(32)], "long_factor": [1.5 + i for i in range(32)]}


@pytest.mark.parametrize(
    ("kind", "theirs", "ours"),
    [
        ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}, {}),
        ("yarn", {}, {"low_freq_factor": 1.0, "high_freq_factor": 32.0}),
        ("yarn", {"attention_factor": 0.7, "beta_fast": 9.0}, {"attention": 0.7, "high_freq_factor": 9.0}),
        ("longrope", LONG, {"short": tuple(LONG["short_factor"]), "long": tuple(LONG["long_factor"])}),
    ],
)
def test_rope_scalings_are_those_of_transformers(kind: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": kind,
            "rope_theta": 500000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 128,
            **theirs,
        },
    )
    expected, attention_factor = utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=1024)
    scaling = ops.RopeScaling(kind, 8.0, original_context=128, context=1024, **ours)
    op = ops.RoPE(64, 2, 1, FP64, theta=500000.0, scaling=scaling)
    np.testing.assert_allclose(np.arctan2(op.sin[1], op.cos[1]), expected.numpy(), rtol=1e-5)
    np.testing.assert_allclose(np.hypot(op.sin[1], op.cos[1]), attention_factor, rtol=1e-12)


@pytest.mark.parametrize(("context", "stretch"), [(16, 1.0), (32, 1.0), (64, 5.0)])
def test_dynamic_rope_raises_theta_with_the_context(context: int, stretch: float) -> None:
    """theta (s L / L0 - (s - 1))^(d / (d - 2)) beyond the original context L0, plain theta up to it."""
    scaling = ops.RopeScaling("dynamic", 4.0, original_context=32, context=context)
    theta = 100.0 * stretch ** (8 / 6)
    found = scaling.apply(100.0 ** (-np.arange(0, 8, 2) / 8))
    np.testing.assert_allclose(found, theta ** (-np.arange(0, 8, 2) / 8), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ntk", 2.0), "RoPE scaling 'ntk' is unknown; use linear, llama3, yarn"),
        (("longrope", 2.0, 1.0, 4.0, 9, 0.0, 0, (0.0,)), "longrope: a factor of 0 or less"),
        (("linear", 0.0), "factor is 0.0, expected a number above 0"),
        (("llama3", 8.0, 4.0, 1.0), "expected 0 < low < high and a context"),
    ],
)
def test_rope_scalings_that_make_no_sense_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ops.RopeScaling(*arguments)


def published_yarn(dim: int, theta: float, scaling: ops.RopeScaling) -> Any:
    """The published code's ramp, by the dimension at which a pair makes so many turns; dim > 2."""

    def dimension(turns: float) -> float:
        return dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.high_freq_factor), dimension(scaling.low_freq_factor)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    f = theta ** (-np.arange(0, dim, 2) / dim)
    return f / scaling.factor * ramp + f * (1 - ramp)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("dim", "context"), [(4, 30), (4, 3000), (8, 200), (16, 100_000), (64, 4096)])
def test_yarns_ramp_is_the_published_one_at_its_ends(dim: int, context: int, truncate: bool) -> None:
    for low, high in ((1.0, 32.0), (0.01, 3.0), (1e-9, 1e-8)):
        scaling = ops.RopeScaling("yarn", 4.0, low, high, context, truncate=truncate)
        found = scaling.apply(100.0 ** (-np.arange(0, dim, 2) / dim))
        np.testing.assert_allclose(found, published_yarn(dim, 100.0, scaling), rtol=1e-12)


def test_rope_scalings_at_their_limits() -> None:
    f = 100.0 ** (-np.arange(0, 4, 2) / 4)
    assert ops.RopeScaling("llama3", 8.0) == ops.RopeScaling("llama3", 8.0, 1.0, 4.0, 8192, 0.0, 0, (), (), True)
    assert np.array_equal(ops.RopeScaling("linear", 1.0).apply(f), f)
    for factor, magnitude in ((0.5, 1.0), (1.5, 1 + 0.1 * math.log(1.5))):
        assert ops.RopeScaling("yarn", factor).magnitude == pytest.approx(magnitude, rel=1e-14)
    close(ops.RopeScaling("dynamic", 4.0, original_context=32, context=64).apply(f), f / [1, 5])
    for context, divisor in ((63, 2.0), (64, 2.0), (65, 3.0)):
        longrope = ops.RopeScaling("longrope", 2.0, original_context=64, context=context, short=(2, 2), long=(3, 3))
        close(longrope.apply(f), f / divisor)
    one = ops.RopeScaling("yarn", 4.0, 1.0, 32.0, 400)  # of a single pair the ramp is 0
    close(one.apply(np.ones(1)), [1.0])


def test_ropes_angles_are_computed_as_far_as_they_are_read(rng: np.random.Generator) -> None:
    op, x = ops.RoPE(4, 1 << 40, 1, FP64, theta=50.0), rng.normal(size=(1, 3, 1, 4))
    far = op.forward(x, offset=300)
    angles = np.arange(300, 303)[:, None] * 50.0 ** (-np.arange(0, 4, 2) / 4)
    first, second = x[0, :, 0, :2], x[0, :, 0, 2:]
    close(far[0, :, 0, :2], first * np.cos(angles) - second * np.sin(angles))
    assert 303 <= len(op.cos._values) < 1000


def test_rope_of_a_part_copies_the_rest(rng: np.random.Generator) -> None:
    x = rng.normal(size=(1, 5, 2, 8))
    turned = ops.RoPE(8, 16, 2, FP64, width=4, scaling=ops.RopeScaling("yarn", 4.0, 1.0, 32.0, 64)).forward(x)
    for rest in (slice(2, 4), slice(6, 8)):  # pairs 2 and 3
        assert np.array_equal(turned[..., rest], x[..., rest])
    assert not np.allclose(turned[:, :, :, :2], x[:, :, :, :2])


def test_softmax(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4, 5)) * 3
    close(ops.Softmax(FP64).forward(x), np.exp(x - np.logaddexp.reduce(x, axis=-1)[..., None]))


def naive_nll(logits: Array, targets: Array) -> Array:
    nll = np.zeros(targets.shape)
    for where in np.ndindex(targets.shape):
        if targets[where] >= 0:
            nll[where] = np.logaddexp.reduce(logits[where]) - logits[where][targets[where]]
    return nll


@pytest.mark.parametrize("lead", [(17,), (3, 6), ()])
def test_cross_entropy_is_log_sum_exp(lead: tuple[int, ...], rng: np.random.Generator) -> None:
    logits = rng.normal(size=(*lead, 3, 9)) * 4
    targets = masked_targets(rng, int(np.prod(lead)), 3, 9).reshape(*lead, 3)
    op, residual = ops.CrossEntropy(FP64), np.exp(logits - np.logaddexp.reduce(logits, axis=-1)[..., None])
    residual = (residual - np.eye(9)[targets]) * (targets >= 0)[..., None]
    for dnll in (np.array([0.5, 2.0, -1.0]), rng.normal(size=targets.shape)):
        stash = Stash()
        nll = op.forward(logits, targets, stash)
        close(nll, naive_nll(logits, targets))
        close(sum_tokens(nll), naive_nll(logits, targets).reshape(-1, 3).sum(axis=0))
        dz, nothing = op.backward(dnll, stash)
        close(dz, residual * dnll[..., None])
        assert nothing is None


def test_rows_without_a_target_give_exactly_nothing(rng: np.random.Generator) -> None:
    logits, targets = rng.normal(size=(5, 2, 4)), np.full((5, 2), -1, np.int32)
    targets[3, 1] = 2
    op, stash = ops.CrossEntropy(FP64), Stash()
    nll = op.forward(logits, targets, stash)
    dz, _ = op.backward(np.ones(2), stash)
    touched = np.zeros((5, 2), bool)
    touched[3, 1] = True
    assert np.array_equal(nll > 0, touched)
    assert np.array_equal(dz.any(axis=-1), touched)


@pytest.mark.parametrize("rows", [7, CHUNK_BYTES // (4096 * 8) + 1, 3 * (CHUNK_BYTES // (4096 * 8))])
@pytest.mark.parametrize("shared", [True, False])
def test_linear_cross_entropy_is_linear_then_cross_entropy(rows: int, shared: bool, rng: np.random.Generator) -> None:
    """Below one chunk of logits, one row over, and a whole number of chunks. shared: one dnll for all tokens."""
    heads, vocab, dim = 3, 4096, 5
    h, weight = rng.normal(size=(rows, dim)), rng.normal(size=(heads, vocab, dim))
    targets, dnll = masked_targets(rng, rows, heads, vocab), rng.normal(size=heads if shared else (rows, heads))
    fused = ops.LinearCrossEntropy(param("fused", weight), FP64)
    linear, loss = ops.Linear(param("plain", weight.reshape(-1, dim)), FP64), ops.CrossEntropy(FP64)
    stash, plain_stash = Stash(), Stash()
    nll = fused.forward(h, targets, stash)
    close(nll, loss.forward(linear.forward(h, plain_stash).reshape(rows, heads, vocab), targets, plain_stash))
    dlogits, _ = loss.backward(dnll, plain_stash)
    close(fused.backward(dnll, stash)[0], linear.backward(dlogits.reshape(rows, -1), plain_stash))
    close(fused.weight.grad.reshape(-1, dim), linear.weight.grad)
    close(fused.logits(h, head=1), h @ weight[1].T)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_frozen_heads_give_the_same_gradient_and_keep_no_logits(
    heads: int, shared: bool, rng: np.random.Generator
) -> None:
    """Over several chunks. What is saved is as wide as the stream, not as the vocabulary."""
    rows, vocab, dim = 150, 4096, 5
    h, weight = rng.normal(size=(rows, dim)), rng.normal(size=(heads, vocab, dim))
    targets, dnll = masked_targets(rng, rows, heads, vocab), rng.normal(size=heads if shared else (rows, heads))
    learned, frozen = (ops.LinearCrossEntropy(param("heads", weight), FP64) for _ in range(2))
    frozen.weight.frozen = True
    stash = Stash()
    expected = learned.forward(h, targets, stash)
    dh = learned.backward(dnll, stash)[0]
    assert np.array_equal(frozen.forward(h, targets), expected)
    assert np.array_equal(frozen.forward(h, targets, stash), expected)
    assert [x.size for _, saved in stash for x in saved if isinstance(x, np.ndarray)] == [rows * heads * dim]
    close(frozen.backward(dnll, stash)[0], dh)
    frozen.forward(h[:, None], targets[:, None], stash)
    assert frozen.backward(dnll if shared else dnll[:, None], stash)[0].shape == (rows, 1, dim)


def test_pixels_of_floats_stay_as_they_are(rng: np.random.Generator) -> None:
    images = rng.normal(size=(1, 1, 4, 4))
    assert np.array_equal(ops.Patches(4, FP64, mean=0.2, std=0.3).forward(images)[0, 0], images.reshape(-1))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_pixels_of_integers_run_from_0_to_255(dtype: Any) -> None:
    images = np.arange(256, dtype=dtype).reshape(1, 1, 16, 16)
    for mean, std in ((0.5, 0.5), (0.25, 0.125)):
        y = ops.Patches(16, FP64, mean=mean, std=std).forward(images)
        np.testing.assert_allclose(y[0, 0], (np.arange(256) / 255 - mean) / std, rtol=1e-14, atol=1e-14)


def test_a_teachers_logits_may_be_large(rng: np.random.Generator) -> None:
    """exp(1000) overflows: the maxima of both sides are subtracted first."""
    h, hidden = rng.normal(size=(4, 3)) * 300, rng.normal(size=(4, 2)) * 300
    weight, teacher = rng.normal(size=(5, 3)) * 3, rng.normal(size=(1, 5, 2)) * 3
    ids = np.array([[0], [4], [-1], [2]])
    op = with_buffer(ops.LinearCrossEntropy(Param("w", (5, 3)), FP64), FP64, rng)
    op.weight.value[...] = weight
    stash = Stash()
    nll = op.forward(h, SoftTargets(ids, hidden, teacher, 0.7), stash)
    dh, _ = op.backward(np.ones_like(nll), stash)

    def log_softmax(x: Any) -> Any:
        x = x - x.max(axis=-1, keepdims=True)
        return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))

    q = 0.7 * np.exp(log_softmax(hidden @ teacher[0].T)) + 0.3 * np.eye(5)[ids[:, 0]]
    logp, there = log_softmax(h @ weight.T), ids >= 0
    np.testing.assert_allclose(nll, -(q * logp).sum(axis=-1, keepdims=True) * there, rtol=1e-12)
    np.testing.assert_allclose(dh, (np.exp(logp) - q) * there @ weight, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shift", [30.0, 59.9, 60.1, 100.0, 1000.0, -30.0, -60.1, -100.0, -1000.0])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_the_softmax_of_a_loss_does_not_depend_on_where_its_logits_lie(
    shift: float, precision: str, rng: np.random.Generator
) -> None:
    """All of them far above 0, or far below; in one row alone."""
    backend = get_backend("numpy", precision, workers=1)
    logits, targets = rng.normal(size=(4, 1, 6)), rng.integers(-1, 6, (4, 1))
    where, found = np.array([shift, shift, shift, 0])[:, None, None], []
    for given in (logits, logits + shift, logits + where):
        op, stash = ops.CrossEntropy(backend), Stash()
        nll = op.forward(backend.asarray(given), targets, stash)
        found.append((nll, op.backward(np.ones(1, backend.master_dtype), stash)[0]))
    for other in found[1:]:
        for got, expected in zip(other, found[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=3e-4 if precision == "fp32" else 1e-12)


def test_gelu_erf_is_the_math_librarys(rng: np.random.Generator) -> None:
    x = np.concatenate([np.linspace(-10, 10, 4001), rng.normal(size=2000), [0.0, 1e-300, -1e-20, 5e3, -5e3]])
    root = 0.5**0.5
    expected = [0.5 * v * (1 + math.erf(v * root)) for v in x.tolist()]
    np.testing.assert_allclose(ops.GELU(FP64, "erf").forward(x), expected, rtol=1e-15, atol=2e-15)


def worst_relative_error(found: Any, exact: Any) -> float:
    return float(np.max(np.abs(found - exact) / np.abs(exact)))


def test_the_tails_of_the_gates_keep_their_digits() -> None:
    """In float32 from -30 to 30, compared with the formulas in long double; (1 + tanh) / 2 was off by 13 times at -20.
    The slope of silu is 0 at -1.2785, so its error there is relative to 0.001."""
    x = np.linspace(-30, 30, 6001).astype(np.float32)
    exact = x.astype(np.longdouble)
    s = 1 / (1 + np.exp(-exact))
    slope = s * (1 + exact / (1 + np.exp(exact)))
    assert worst_relative_error(sigmoid(x), s) < 4e-7
    for dtype, bound in ((np.float32, 4e-7), (np.float64, 1e-15)):
        backend = get_backend("numpy", "fp32" if dtype == np.float32 else "fp64", workers=1)
        op, stash = ops.SwiGLU(backend), Stash()
        gu = np.stack([x, np.ones_like(x)], axis=-1).astype(dtype)
        y = op.forward(gu, stash)
        dgate, dup = op.backward(np.ones((len(x), 1), dtype), stash).T
        assert worst_relative_error(y[x != 0, 0], (exact * s)[x != 0]) < bound
        assert worst_relative_error(dup[x != 0], (exact * s)[x != 0]) < bound
        assert (
            np.max(np.abs(dgate - slope) / np.maximum(np.abs(slope), np.where(np.abs(x + 1.28) < 0.1, 1e-3, 0)))
            < 20 * bound
        )
    assert silu_slope(np.float32([-1e4, 1e4]), np.float32([0, 1])).tolist() == [0, 1]
    u = math.sqrt(2 / math.pi) * (-6 - 0.044715 * 6**3)
    assert ops.GELU(FP64, "tanh").forward(np.array([-6.0]))[0] == pytest.approx(-6 / (1 + math.exp(-2 * u)), rel=1e-14)


def test_gradients_in_float32_are_as_good_as_torchs() -> None:
    torch = pytest.importorskip("torch")
    fp32 = get_backend("numpy", "fp32", workers=1)
    x = np.linspace(-30, 30, 60001).astype(np.float32)
    exact = x.astype(np.longdouble)

    def theirs(function: Any) -> Any:
        leaf = torch.tensor(x, requires_grad=True)
        function(leaf).sum().backward()
        return leaf.grad.numpy()

    def ours(op: Op, given: Any) -> Any:
        stash = Stash()
        return op.backward(np.ones_like(op.forward(given, stash)), stash)

    s, phi = 1 / (1 + np.exp(-exact)), np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    gate = ours(ops.SwiGLU(fp32), np.stack([x, np.ones_like(x)], axis=-1))[:, 0]
    normal = np.exp(-exact * exact / 2) / np.sqrt(2 * np.longdouble(np.pi))
    for found, peer, right in (
        (gate, theirs(torch.nn.functional.silu), s * (1 + exact / (1 + np.exp(exact)))),
        (ours(ops.GELU(fp32, "erf"), x), theirs(torch.nn.functional.gelu), phi + exact * normal),
    ):
        seen = np.abs(right) > 1e-37  # below, float32 is denormal
        assert worst_relative_error(found[seen], right[seen]) <= 2 * worst_relative_error(peer[seen], right[seen])


@pytest.mark.parametrize("ends", [(3, 130), (TILE + 2, TILE + 9), (2 * TILE, 5)])
def test_attention_to_padded_sequences_is_that_to_each_alone(ends: tuple[int, int], rng: np.random.Generator) -> None:
    """Padding within a tile, in the second tile alone, and of whole tiles."""
    qkv = rng.normal(size=(2, 2 * TILE + 7, 4, 4))
    op = ops.Attention(2, 1, FP64, causal=False)
    padded = op.forward(qkv, lengths=np.array(ends))
    for row, end in enumerate(ends):
        close(padded[row, :end], op.forward(qkv[row : row + 1, :end])[0])


def test_attention_keeps_its_probabilities_at_scores_of_a_million(rng: np.random.Generator) -> None:
    """There float32 holds log-sum-exp to 0.03. One key has all the weight, so dv is a sum of rows of dy."""
    qkv, dy = rng.normal(size=(2, 70, 3, 16)).astype(np.float32), rng.normal(size=(2, 70, 1, 16)).astype(np.float32)
    qkv[:, :, :2] *= 700
    found = []
    for precision in ("fp32", "fp64"):
        backend, stash = get_backend("numpy", precision, workers=1), Stash()
        op = ops.Attention(1, 1, backend)
        y = op.forward(qkv.astype(backend.dtype), stash)
        found.append((y, op.backward(dy.astype(backend.dtype).reshape(y.shape), stash)[:, :, 2]))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max())


def test_gelu_tanh_is_gpt2s(rng: np.random.Generator) -> None:
    x = np.linspace(-8, 8, 1001)
    expected = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()]
    got = ops.GELU(FP64, "tanh").forward(x)
    close(got, expected, 1e-15)
    apart = np.abs(got - ops.GELU(FP64, "erf").forward(x)).max()
    assert 1e-5 < apart < 1e-3  # close, but not the same formula
    with pytest.raises(ValueError, match="approximate is 'sigmoid', expected 'tanh' or 'erf'"):
        ops.GELU(FP64, "sigmoid")


def test_swiglu(rng: np.random.Generator) -> None:
    gate, up = rng.normal(size=(2, 5, 3)) * 3
    expected = [g / (1 + math.exp(-g)) * u for g, u in zip(gate.flat, up.flat, strict=True)]
    close(ops.SwiGLU(FP64).forward(np.concatenate([gate, up], axis=-1)).reshape(-1), expected)


def test_norms(rng: np.random.Generator) -> None:
    x, w, b = rng.normal(size=(4, 3, 6)) + 1, rng.normal(size=6), rng.normal(size=6)
    gain, bias = param("gain", w), param("bias", b)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    close(ops.RMSNorm(gain, FP64, 0.1).forward(x), x / np.sqrt(mean**2 + variance + 0.1) * w)
    close(ops.LayerNorm(gain, bias, FP64, 0.1).forward(x), (x - mean) / np.sqrt(variance + 0.1) * w + b)


def test_add_rmsnorm_is_the_add_then_rmsnorm(rng: np.random.Generator) -> None:
    residual, delta, dx, dy = rng.normal(size=(4, 3, 5, 6))
    w = rng.normal(size=6)
    fused, plain = ops.AddRMSNorm(param("fused", w), FP64), ops.RMSNorm(param("plain", w), FP64)
    stash, plain_stash = Stash(), Stash()
    x, y = fused.forward(residual, delta, stash)
    assert np.array_equal(x, residual + delta)
    assert np.array_equal(y, plain.forward(x, plain_stash))
    dresidual, ddelta = fused.backward((dx, dy), stash)
    assert dresidual is ddelta
    close(dresidual, dx + plain.backward(dy, plain_stash))
    close(fused.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("gain", [0.0, -0.0, 1e-20, -1e-300])
def test_a_gain_of_0_has_a_gradient(rng: np.random.Generator, gain: float) -> None:
    """Backward has y and not x: what it divides by the gain must still be there."""
    x, dy, weight = rng.normal(size=(4, 6)), rng.normal(size=(4, 6)), rng.normal(size=6)
    weight[2] = gain
    op, stash = ops.RMSNorm(param("gain", weight), FP64, 0.1), Stash()
    y = op.forward(x, stash)
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(y, x * r * weight, rtol=1e-12, atol=1e-14)
    along = (dy * weight * x * r).mean(-1, keepdims=True)
    np.testing.assert_allclose(op.backward(dy, stash), r * (dy * weight - x * r * along), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(op.weight.grad, (dy * x * r).sum(0), rtol=1e-12)


def test_rmsnorm_takes_the_gradient_of_the_stream_along(rng: np.random.Generator) -> None:
    x, dx, dy = rng.normal(size=(3, 3, 5, 6))
    op, stash = ops.RMSNorm(param("gain", rng.normal(size=6)), FP64), Stash()
    op.forward(x, stash)
    alone = op.backward(dy, stash)
    gradient = op.weight.grad.copy()
    op.forward(x, stash)
    assert np.array_equal(op.backward(dy, stash, residual=dx), alone + dx)
    close(op.weight.grad, 2 * gradient)


def test_embedding_linear_and_positions(rng: np.random.Generator) -> None:
    table, weight, x = rng.normal(size=(5, 3)), rng.normal(size=(4, 3)), rng.normal(size=(2, 5, 3))
    ids = np.array([[4, 0, 4], [1, 1, 1]], np.int32)
    rows = ops.Embedding(param("table", table), FP64).forward(ids)
    assert np.array_equal(rows, np.stack([[table[i] for i in line] for line in ids]))
    close(ops.Linear(param("weight", weight), FP64).forward(x), np.einsum("btc,oc->bto", x, weight))
    positions = ops.LearnedPositions(param("positions", table), FP64)
    close(positions.forward(x[:, :4]), x[:, :4] + np.broadcast_to(table[:4], (2, 4, 3)))
    close(positions.forward(x[:, :2], offset=3), x[:, :2] + table[3:])
    with pytest.raises(ValueError, match="x has positions 0 to 6, the table 5"):
        positions.forward(np.zeros((1, 6, 3)))
    restarted = positions.forward(x[:, :4], starts=np.array([[0, 0, 2, 2], [0, 1, 2, 3]]))
    close(restarted, x[:, :4] + np.stack([table[[0, 1, 0, 1]], table[[0, 0, 0, 0]]]))
    with pytest.raises(ValueError, match="starts of documents and offset 1"):
        positions.forward(x[:, :2], offset=1, starts=np.zeros((2, 2), np.int32))
    with pytest.raises(ValueError, match="x has positions 4 to 6, the table 5"):
        positions.forward(np.zeros((1, 2, 3)), offset=4)


def test_a_bias_is_added_to_every_row(rng: np.random.Generator) -> None:
    weight, bias, x, dy = (rng.normal(size=shape) for shape in ((4, 3), (4,), (2, 5, 3), (2, 5, 4)))
    op, stash = ops.Linear(param("weight", weight), FP64, bias=param("bias", bias)), Stash()
    close(op.forward(x, stash), np.einsum("btc,oc->bto", x, weight) + bias)
    op.backward(dy, stash)
    assert [p.name for p in op.params()] == ["weight", "bias"]
    close(op.params()[1].grad, np.einsum("bto->o", dy))


def test_a_head_of_two_axes_is_one_head(rng: np.random.Generator) -> None:
    h, weight, dnll = rng.normal(size=(7, 3)), rng.normal(size=(5, 3)), np.ones(1)
    targets = masked_targets(rng, 7, 1, 5)
    flat = ops.LinearCrossEntropy(param("flat", weight), FP64)
    deep = ops.LinearCrossEntropy(param("deep", weight[None]), FP64)
    stash = Stash()
    assert np.array_equal(flat.forward(h, targets, stash), deep.forward(h, targets, stash))
    assert np.array_equal(deep.backward(dnll, stash)[0], flat.backward(dnll, stash)[0])
    assert np.array_equal(flat.weight.grad, deep.weight.grad[0]) and flat.weight.grad.any()
    assert np.array_equal(flat.logits(h), deep.logits(h))


def test_rmsnorm_of_the_heads_of_a_packed_array_in_place(rng: np.random.Generator) -> None:
    """The q/k norm: the heads of q are normalised, those of k and v stay, and so do their gradients."""
    qkv, dqkv = rng.normal(size=(2, 2, 5, 7, 6))
    apart, inside = ops.RMSNorm(param("a", rng.normal(size=6)), FP64), ops.RMSNorm(param("b", np.zeros(6)), FP64)
    inside.weight.value[...] = apart.weight.value
    packed, dpacked, stash = qkv.copy(), dqkv.copy(), Stash()
    heads = packed[:, :, 1:4]
    assert inside.forward(heads, stash, out=heads) is heads
    dheads = dpacked[:, :, 1:4]
    assert inside.backward(dheads, stash, out=dheads) is dheads
    expected = apart.forward(np.ascontiguousarray(qkv[:, :, 1:4]), stash)
    dwanted = apart.backward(np.ascontiguousarray(dqkv[:, :, 1:4]), stash)
    for got, given, inner in ((packed, qkv, expected), (dpacked, dqkv, dwanted)):
        close(got[:, :, 1:4], inner)
        assert np.array_equal(got[:, :, :1], given[:, :, :1]) and np.array_equal(got[:, :, 4:], given[:, :, 4:])
    close(inside.weight.grad, apart.weight.grad)


def test_dropout_keeps_the_stated_share_and_the_mean() -> None:
    rate, shape = 0.3, (400, 501)
    op, x = ops.Dropout(rate, FP64), np.ones(shape)
    assert op.forward(x) is x and op.forward(x, Stash()) is x  # inference; and a pass with nothing random
    y = op.forward(x, Stash(Stream(0, "noise")))
    assert set(np.unique(y)) == {0.0, 1 / (1 - rate)}
    deviation = math.sqrt(rate * (1 - rate) / x.size)
    assert abs((y > 0).mean() - (1 - rate)) < 4 * deviation
    assert abs(np.corrcoef(y.ravel()[:-1], y.ravel()[1:])[0, 1]) < 4 / math.sqrt(x.size)


def test_dropout_draws_its_mask_from_the_stashs_noise(rng: np.random.Generator) -> None:
    op, x, stash = ops.Dropout(0.5, FP64, "blocks.0.dropout"), np.ones((7, 11)), Stash(Stream(3, "step 1"))
    y = op.forward(x, stash)
    other = op.forward(x, Stash(Stream(3, "step 2")))
    dy = rng.normal(size=x.shape)
    assert np.array_equal(op.backward(dy, stash), dy * y)
    assert not np.array_equal(other, y)
    words = Stream(3, "step 1").fork("blocks.0.dropout").bits(x.size)
    assert np.array_equal(y > 0, (words >= 2**31).reshape(x.shape))
    off = ops.Dropout(0.0, FP64)
    assert off.forward(x, stash) is x and off.backward(dy, stash) is dy  # no kernel runs
    with pytest.raises(ValueError, match="rate is 1.0, expected 0 <= rate < 1"):
        ops.Dropout(1.0, FP64)


def extreme(name: str, backend: Backend) -> tuple[Op, tuple[Array, ...]]:
    """The op and +-1e4 for its input: exp of it overflows in both precisions."""
    x = backend.asarray(np.array([[1e4, -1e4, 0.0, 1e4], [-1e4, -1e4, -1e4, 1e4]]))
    targets = backend.asarray(np.array([[1], [0]]))
    if name == "LinearCrossEntropy":
        weight = Param("weight", (1, 4, 4))
        ParamBuffer([weight], backend)
        weight.value[0] = np.eye(4)
        return ops.LinearCrossEntropy(weight, backend), (x, targets)
    return {
        "Softmax": (ops.Softmax(backend), (x,)),
        "SwiGLU": (ops.SwiGLU(backend), (x,)),
        "GELU tanh": (ops.GELU(backend, "tanh"), (x,)),
        "GELU erf": (ops.GELU(backend, "erf"), (x,)),
        "CrossEntropy": (ops.CrossEntropy(backend), (x[:, None], targets)),
        "TopKRouter": (ops.TopKRouter(2, backend), (x,)),
        "Attention": (ops.Attention(2, 1, backend), (np.tile(x.reshape(1, 2, 2, 2), (1, 1, 2, 1)),)),
    }[name]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", [FP64, FP32], ids=lambda b: b.precision.name)
@pytest.mark.parametrize(
    "name",
    ["Softmax", "SwiGLU", "GELU tanh", "GELU erf", "CrossEntropy", "LinearCrossEntropy", "TopKRouter", "Attention"],
)
def test_extreme_values_stay_finite(name: str, backend: Backend) -> None:
    op, inputs = extreme(name, backend)
    stash = Stash()
    y = op.forward(*inputs, stash=stash)
    ones = tuple(map(np.ones_like, y)) if isinstance(y, tuple) else np.ones_like(y)
    dx = op.backward(ones, stash)
    assert all(np.isfinite(part).all() for part in (y if isinstance(y, tuple) else (y,)))
    assert np.isfinite(dx[0] if isinstance(dx, tuple) else dx).all()
    if name.endswith("CrossEntropy"):
        close(y, [[2e4 + math.log(2)], [2e4]], 1e-6)


@pytest.mark.parametrize("adapted", ["", "before", "behind"])
def test_h_is_handed_on_and_changes_no_bit(adapted: str, rng: np.random.Generator) -> None:
    """Linear, SwiGLU, Linear with h from one to the other; with an adapter in either place gate|up alone is."""
    x, dy = rng.normal(size=(2, 3, 6)), rng.normal(size=(2, 3, 4))
    before = with_buffer(ops.LinearSwiGLU(Param("b", (10, 6), std=1.0), FP64), FP64, rng)
    behind = with_buffer(ops.SwiGLULinear(Param("w", (4, 5), std=1.0), FP64), FP64, rng)
    plain, right, handed = ops.Linear(before.weight, FP64), before.hidden_fwd, []
    before.hidden_fwd = lambda *a: handed.append(right(*a)) or handed[0]
    found = []
    for first, second in (
        (plain, None),
        (plain if adapted == "before" else before, _Adapter(behind) if adapted == "behind" else behind),
    ):
        stash, grads = Stash(), [op.weight.grad for op in (before, behind)]
        for grad in grads:
            grad[...] = 0
        y = swiglu_mlp(first, second, x, stash) if second else behind.forward(first.forward(x, stash), stash)
        dx = first.backward(behind.backward(dy, stash), stash)
        found.append([y, dx, *(grad.copy() for grad in grads)])
    assert len(handed) == (not adapted)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


class _Adapter:
    """Takes gate|up, and knows of no h."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def forward(self, gu: Array, stash: Stash) -> Array:
        return self.op.forward(gu, stash=stash)


def test_swiglu_linear_is_swiglu_then_linear(rng: np.random.Generator) -> None:
    gu, dy = rng.normal(size=(2, 3, 10)), rng.normal(size=(2, 3, 4))
    fused = with_buffer(ops.SwiGLULinear(Param("w", (4, 5), std=1.0), FP64), FP64, rng)
    swiglu, linear = ops.SwiGLU(FP64), with_buffer(ops.Linear(Param("w", (4, 5), std=1.0), FP64), FP64, rng)
    linear.weight.value[...] = fused.weight.value
    stash, apart = Stash(), Stash()
    close(fused.forward(gu, stash), linear.forward(swiglu.forward(gu, apart), apart))
    close(fused.backward(dy, stash), swiglu.backward(linear.backward(dy, apart), apart))
    close(fused.weight.grad, linear.weight.grad)


def test_the_router_chooses_the_most_likely_and_the_first_of_equals() -> None:
    logits = np.array([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -3.0, -2.0, -4.0]])
    weights, chosen, usage = ops.TopKRouter(2, FP64).forward(logits)
    assert chosen.dtype == np.int32 and chosen.tolist() == [[1, 3], [0, 1], [0, 2]]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for row, (experts, shares) in enumerate(zip(chosen, weights, strict=True)):
        close(shares, p[row, experts] / p[row, experts].sum())
    close(usage, [*p.sum(axis=0), (np.log(np.exp(logits).sum(axis=-1)) ** 2).sum()])


def test_the_routers_losses_are_switchs_and_st_moes(rng: np.random.Generator) -> None:
    """Over the tokens of all layers at once, as if they were one long batch."""
    router, losses = ops.TopKRouter(2, FP64), ops.RouterLosses(2, FP64)
    logits = rng.normal(size=(3, 7, 5))  # three layers of seven tokens
    used = []
    for layer in logits:
        _, chosen, usage = router.forward(layer)
        used += [usage, np.append(0, np.bincount(chosen.reshape(-1), minlength=5).cumsum()).astype(np.int32)]
    balance, z = losses.forward(*used)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    best = np.argsort(-p, axis=-1)[..., :2].reshape(-1)
    close(balance, 5 * sum((best == e).sum() / 21 * p[..., e].mean() for e in range(5)))
    close(z, (np.log(np.exp(logits).sum(axis=-1)) ** 2).mean())


def test_a_balanced_router_has_a_loss_of_k_and_a_collapsed_one_of_e() -> None:
    balanced = [np.full(9, 4.0), np.arange(9, dtype=np.int32) * 8]  # 32 tokens, 64 choices, p of 1/8 each
    collapsed = [np.array([32.0, 0, 0, 0, 0, 0, 0, 0, 1]), np.array([0, *[32] * 8], np.int32)]
    close(ops.RouterLosses(2, FP64).forward(*balanced)[0], 2)
    close(ops.RouterLosses(1, FP64).forward(*collapsed)[0], 8)


def test_sorting_by_expert_is_stable_and_loses_nothing(rng: np.random.Generator) -> None:
    chosen = rng.integers(0, 6, (50, 3)).astype(np.int32)
    chosen[chosen == 4] = 0  # one that nobody chooses
    slots, tokens, places, starts = sort_by_expert(chosen, 6)
    assert sorted(slots.tolist()) == list(range(150)) and np.array_equal(tokens, slots // 3)
    assert np.array_equal(places.reshape(-1)[slots], np.arange(150))
    for e in range(6):
        mine = slots[starts[e] : starts[e + 1]]
        assert np.array_equal(mine, np.flatnonzero(chosen.reshape(-1) == e))  # in the order of the tokens


def test_a_mixture_is_a_loop_over_tokens_and_their_experts(rng: np.random.Generator) -> None:
    """And its gradients are those of single experts, made of the plain ops."""
    experts, hidden, dim = 5, 4, 6
    shapes = {"gate": (experts, dim), "gate_up": (experts, 2 * hidden, dim), "down": (experts, dim, hidden)}
    op = with_buffer(ops.MixtureOfExperts(*(Param(n, s, std=1.0) for n, s in shapes.items()), 2, FP64), FP64, rng)
    x, dy = rng.normal(size=(3, 4, dim)), rng.normal(size=(3, 4, dim))
    stash = Stash()
    y, _, starts = op.forward(x, stash)
    dx = op.backward((dy, np.zeros(experts + 1), None), stash)
    assert starts[-1] == 24

    gate, gate_up, down = (p.value for p in op.params())
    expected, grads = np.zeros_like(y), [np.zeros_like(p.value) for p in op.params()]
    dx_wanted = np.zeros_like(dx)
    for at in np.ndindex(3, 4):
        z = gate @ x[at]
        p = np.exp(z) / np.exp(z).sum()
        best = sorted(range(experts), key=lambda e: -p[e])[:2]
        w, outs, dws = p[best] / p[best].sum(), [], []
        for share, e in zip(w, best, strict=True):
            a, b, swiglu, apart = param("a", gate_up[e]), param("b", down[e]), ops.SwiGLU(FP64), Stash()
            first, second = ops.Linear(a, FP64), ops.Linear(b, FP64)
            out = second.forward(swiglu.forward(first.forward(x[at][None], apart), apart), apart)[0]
            outs.append(share * out)
            dws.append(dy[at] @ out)
            dh = second.backward(share * dy[at][None], apart)
            dx_wanted[at] += first.backward(swiglu.backward(dh, apart), apart)[0]
            grads[1][e] += a.grad
            grads[2][e] += b.grad
        expected[at] = sum(outs)
        dz = np.zeros(experts)
        dz[best] = w * (np.array(dws) - w @ dws)
        grads[0] += np.outer(dz, x[at])
        dx_wanted[at] += gate.T @ dz
    close(y, expected)
    close(dx, dx_wanted)
    for p, grad in zip(op.params(), grads, strict=True):
        close(p.grad, grad)


def test_relu_sigmoid_silu_are_their_formulas(rng: np.random.Generator) -> None:
    x = rng.normal(size=(3, 4)) * 5
    s = np.array([1 / (1 + math.exp(-v)) for v in x.flat]).reshape(x.shape)
    close(ops.ReLU(FP64).forward(x), np.where(x > 0, x, 0))
    close(ops.SquaredReLU(FP64).forward(x), np.where(x > 0, x * x, 0))
    close(ops.Sigmoid(FP64).forward(x), s)
    close(ops.SiLU(FP64).forward(x), x * s)
    assert np.isnan(ops.ReLU(FP64).forward(np.array([np.nan]))).all()


@pytest.mark.parametrize("approximate", ["tanh", "erf"])
def test_geglu_is_a_gelu_times_the_other_half(approximate: str, rng: np.random.Generator) -> None:
    gu = rng.normal(size=(5, 6))
    close(ops.GeGLU(FP64, approximate).forward(gu), ops.GELU(FP64, approximate).forward(gu[:, :3]) * gu[:, 3:])


def test_mse_and_binary_cross_entropy_are_means_over_each_row(rng: np.random.Generator) -> None:
    x, t = rng.normal(size=(3, 2, 5)), rng.random((3, 2, 5))
    close(ops.MSE(FP64).forward(x, t), np.array([sum((x[b] - t[b]).ravel() ** 2) / 10 for b in range(3)]))
    p = 1 / (1 + np.exp(-x))
    close(ops.BinaryCrossEntropy(FP64).forward(x, t), -(t * np.log(p) + (1 - t) * np.log(1 - p)).mean(axis=(1, 2)))
    far = np.array([[1e3], [-1e3]])
    close(
        ops.BinaryCrossEntropy(FP64).forward(far, np.array([[0.0], [1.0]])), np.array([1e3, 1e3])
    )  # nothing overflows


@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1), (3, 2)])
def test_conv2d_is_a_sum_over_taps(stride: int, padding: int, rng: np.random.Generator) -> None:
    x, weight, bias = rng.normal(size=(2, 6, 5, 3)), rng.normal(size=(4, 3, 2, 3)), rng.normal(size=4)
    op = ops.Conv2d(param("w", weight), FP64, bias=param("b", bias), stride=stride, padding=padding)
    down, across = (6 + 2 * padding - 3) // stride + 1, (5 + 2 * padding - 2) // stride + 1
    expected = np.tile(bias, (2, down, across, 1))
    for b, r, c, o, i, j in np.ndindex(2, down, across, 4, 3, 2):
        p, q = r * stride + i - padding, c * stride + j - padding
        if 0 <= p < 6 and 0 <= q < 5:
            expected[b, r, c, o] += weight[o, i, j] @ x[b, p, q]
    close(op.forward(x), expected)
    add = rng.normal(size=expected.shape)
    close(op.forward(x, add=add), expected + add)


def test_conv2d_without_an_input_gradient_gives_none(rng: np.random.Generator) -> None:
    op, stash = with_buffer(ops.Conv2d(2, 1, 3, FP64, padding=1, input_gradient=False), FP64, rng), Stash()
    y = op.forward(rng.normal(size=(1, 4, 4, 1)), stash)
    assert op.backward(np.ones_like(y), stash) is None and op.weight.grad.any() and op.bias.grad.all()


def test_groupnorm_has_mean_0_and_deviation_1_in_each_group(rng: np.random.Generator) -> None:
    x, shift, w, b = (
        rng.normal(size=(2, 4, 3, 6)) * 3 + 1,
        rng.normal(size=(2, 6)),
        rng.normal(size=6),
        rng.normal(size=6),
    )
    v = x + shift[:, None, None]
    expected = np.empty_like(x)
    for n, g in np.ndindex(2, 3):
        part = v[n, :, :, 2 * g : 2 * g + 2]
        expected[n, :, :, 2 * g : 2 * g + 2] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
    z = expected * w + b
    close(ops.GroupNorm(param("w", w), param("b", b), 3, FP64).forward(x, shift=shift), z)
    silu = ops.GroupNorm(param("w2", w), param("b2", b), 3, FP64, silu=True)
    close(silu.forward(x, shift=shift), z / (1 + np.exp(-z)))


def test_pools_and_upsampling_are_loops(rng: np.random.Generator) -> None:
    x = rng.normal(size=(2, 5, 7, 3))
    for size, stride in ((2, 2), (3, 1), (2, 3)):
        mean, most = (
            ops.AveragePool2d(size, FP64, stride=stride).forward(x),
            ops.MaxPool2d(size, FP64, stride=stride).forward(x),
        )
        for n, r, c, k in np.ndindex(*mean.shape):
            seen = x[n, r * stride : r * stride + size, c * stride : c * stride + size, k]
            assert mean[n, r, c, k] == pytest.approx(seen.mean()) and most[n, r, c, k] == seen.max()
    y = ops.Upsample(3, FP64).forward(x)
    for n, r, c in np.ndindex(*y.shape[:3]):
        assert np.array_equal(y[n, r, c], x[n, r // 3, c // 3])


def test_sequential_is_its_ops_and_numbers_their_parameters(rng: np.random.Generator) -> None:
    op = with_buffer(
        ops.Sequential(ops.Linear(4, 3, FP64), ops.ReLU(FP64), ops.Linear(2, 4, FP64, bias=False)), FP64, rng
    )
    x = rng.normal(size=(5, 3))
    first, _, last = op.ops
    close(op.forward(x), np.maximum(x @ first.weight.value.T + first.bias.value, 0) @ last.weight.value.T)
    assert [p.name for p in op.params()] == ["0.weight", "0.bias", "2.weight"]


def test_layers_made_from_sizes_keep_the_scale_of_what_they_read(rng: np.random.Generator) -> None:
    """A parameter starts at 0 only where it was asked to."""
    for op, x in (
        (ops.Linear(200, 300, FP64), rng.normal(size=(50, 300))),
        (ops.Conv2d(40, 30, 3, FP64), rng.normal(size=(4, 8, 8, 30))),
    ):
        ParamBuffer(op.params(), FP64).initialise(0)
        assert op.forward(x).std() == pytest.approx(1, rel=0.1) and not op.bias.value.any()
    assert Param("any", (4, 9)).std == 1 / 3 and Param("vector", (4,)).std == 1 / 2
    assert Param("told", (4, 9), fill=0.0).std == 0 and Param("gain", (4,), fill=1.0).std == 0


@pytest.mark.parametrize(
    ("op", "x", "message"),
    [
        (
            ops.Conv2d(2, 3, 3, FP64, "first"),
            (1, 5, 5, 2),
            r"first: an input of \(1, 5, 5, 2\), expected \(B, H, W, 3\)",
        ),
        (ops.Conv2d(2, 3, 3, FP64, "first"), (1, 2, 5, 3), r"first: .* at least \(3, 3\)"),
        (ops.MaxPool2d(3, FP64), (1, 2, 5, 3), "MaxPool2d: .* at least 3 x 3"),
        (ops.GeGLU(FP64), (2, 3), r"GeGLU: an input of shape \(2, 3\), expected \(..., 2\)"),
    ],
)
def test_shapes_that_do_not_fit_name_the_op(op: Op, x: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        op.forward(np.zeros(x))


def test_a_gain_of_1_plus_w_and_capped_scores(rng: np.random.Generator) -> None:
    x, w = rng.normal(size=(5, 6)), rng.normal(size=6)
    expected = (1 + w) * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5)
    close(ops.RMSNorm(param("w", w), FP64, plus_one=True).forward(x), expected)
    close(ops.AddRMSNorm(param("w2", w), FP64, plus_one=True).forward(x - 1, np.ones_like(x))[1], expected)
    qkv, scale, cap = rng.normal(size=(1, 9, 3, 4)) * 3, 0.7, 2.0
    q, k, v = (qkv[0, :, i] for i in range(3))
    s = cap * np.tanh(q @ k.T * scale / cap)
    p = np.exp(np.where(np.tri(9) > 0, s, -np.inf))
    got = ops.Attention(1, 1, FP64, scale=scale, softcap=cap).forward(qkv)
    close(got[0, :, 0], p / p.sum(axis=-1, keepdims=True) @ v)


def test_rows_of_logits_are_padded_for_one_head_with_a_large_odd_vocabulary() -> None:
    sizes = ((1, 1025, 2), (1, 1025, 4), (1, 1023, 2), (1, 1024, 2), (1, 1032, 2), (2, 1025, 2), (3, 7, 4))
    assert [row_pitch(*size) for size in sizes] == [1088, 1056, 1023, 1024, 1032, 2050, 21]


def test_a_word_of_exactly_the_rate_is_kept() -> None:
    """bits >= floor(p 2^32), as the kernels of a GPU compare."""
    key = (3, 4)
    words = philox(np.array([[0, 0, 0, 0]], np.uint32), key).reshape(-1)
    assert dropout(np.ones(4), key, float(words[2]) / 2**32)[2] > 0
    whole = slice(0, 1), slice(0, 16), slice(0, 16), 1, 1, key
    least = np.float64(words[0]) / 2**32  # the word of key 0 and query 0
    assert dropout_mask(*whole, least, np.dtype(np.float64))[0, 0, 0, 0] > 0
    assert dropout_mask(*whole, least + 2.0**-32, np.dtype(np.float64))[0, 0, 0, 0] == 0


@pytest.mark.parametrize(("queries", "keys"), [(17, 33), (1, 49), (33, 17)])
def test_a_mask_of_any_size_is_a_part_of_a_larger_ones(queries: int, keys: int) -> None:
    rest: Any = (2, 1, (3, 4), 0.4, np.dtype(np.float64))
    part = dropout_mask(slice(0, 2), slice(0, queries), slice(0, keys), *rest)
    whole = dropout_mask(slice(0, 2), slice(0, 64), slice(0, 64), *rest).reshape(2, 1, 64, 2, 64)
    assert np.array_equal(part.reshape(2, 1, keys, 2, queries), whole[:, :, :keys, :, :queries])


def test_losses_refuse_ids_and_dtypes_that_they_would_compute_with() -> None:
    weight = param("weight", np.ones((3, 2)))
    h = np.ones((1, 2))
    for op in (ops.LinearCrossEntropy(weight, FP64), ops.CappedCrossEntropy(weight, 5.0, FP64)):
        for wrong in (-2, 3):
            with pytest.raises(IndexError, match=str(wrong)):
                op.forward(h, np.array([[wrong]], np.int32))
    for loss in (ops.MSE(FP32), ops.BinaryCrossEntropy(FP32)):
        with pytest.raises(TypeError, match="float64"):
            loss.forward(np.ones((2, 3)), np.ones((2, 3)))


def test_a_shift_of_another_shape_is_refused() -> None:
    op = ops.GroupNorm(param("gain", np.ones(4)), param("bias", np.zeros(4)), 2, FP64)
    with pytest.raises(ValueError, match=r"\(2, 4\)"):
        op.forward(np.ones((2, 3, 3, 4)), shift=np.ones((1, 4)))


def test_softcapped_logits_in_several_chunks_are_those_in_one(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    h, targets, dy = rng.normal(size=(300, 3)), rng.integers(-1, 5, (300, 1)), rng.normal(size=(300, 1))
    value = rng.normal(size=(5, 3))
    for logits in (1 << 25, 5 * 128):
        monkeypatch.setattr("tinyforge.ops.cross_entropy.FROZEN_LOGITS", logits)
        for upstream in (dy, np.ones(1)):
            op = ops.CappedCrossEntropy(param("weight", value), 2.0, FP64)
            stash = Stash()
            nll = op.forward(h, targets, stash)
            dh, _ = op.backward(upstream, stash)
            found.append((nll, dh, op.weight.grad.copy()))
    for one, several in zip(found[:2], found[2:], strict=True):
        for got, expected in zip(several, one, strict=True):
            close(got, expected)


def test_sizes_of_chunks_on_a_gpu() -> None:
    assert [chunk_rows(pitch) for pitch in (1, 16384, 50304, 1 << 30)] == [4096, 2048, 640, 128]
    assert [window_rows(depth, 4) for depth in (1000, 1 << 30)] == [(64 << 20) // 4000, 1]


def test_rows_after_the_teachers_have_the_ids_alone(rng: np.random.Generator) -> None:
    weight, h = param("weight", rng.normal(size=(2, 5, 3))), rng.normal(size=(5, 3))
    ids = np.array([[1, 2], [0, -1], [4, 3], [-1, 0], [2, 2]], np.int32)
    op, stash, plain = ops.LinearCrossEntropy(weight, FP64), Stash(), Stash()
    nll = op.forward(h, SoftTargets(ids, rng.normal(size=(2, 4)), rng.normal(size=(2, 5, 4)), 0.6), stash)
    alone = op.forward(h, ids, plain)
    close(nll[2:], alone[2:])
    assert not np.allclose(nll[:2], alone[:2])
    dy = rng.normal(size=(5, 2))
    close(op.backward(dy, stash)[0][2:], op.backward(dy, plain)[0][2:])


def test_a_teacher_of_a_vocabulary_of_one_token() -> None:
    logits, teacher = np.ones((1, 1, 2)), np.ones((1, 1, 2))
    assert soft_residual_(logits, teacher, np.array([[-1], [0]]), 0.5).tolist() == [[0.0], [0.0]]


def test_one_large_score_needs_the_shift() -> None:
    assert exp_needs_shift(np.array([100.0])) and exp_needs_shift(np.array([-100.0]))
    assert not exp_needs_shift(np.array([59.0, -59.0])) and not exp_needs_shift(np.empty(0))


def test_a_convolution_in_parts_is_the_one_of_each_image(rng: np.random.Generator) -> None:
    """Images whose windows exceed a core's cache are taken one by one."""
    x, dy = rng.normal(size=(3, 40, 48, 8)), rng.normal(size=(3, 40, 48, 2))
    k = bind((conv2d_bwd_weight,), FP64, "test")
    dweight, each, dbias = np.zeros((2, 3, 3, 8)), np.zeros((2, 3, 3, 8)), np.zeros(2)
    k.conv2d_bwd_weight(dweight, None, dy, x, 1, 1)
    for i in range(3):
        k.conv2d_bwd_weight(each, dbias, dy[i : i + 1], x[i : i + 1], 1, 1)
    close(dweight, each, 1e-10)
    frozen = np.zeros(2)
    k.conv2d_bwd_weight(None, frozen, dy, x, 1, 1)
    close(frozen, dbias, 1e-10)


def test_scales_of_pixels_and_of_streams() -> None:
    x, k = np.arange(4.0).reshape(1, 1, 2, 2), bind((patches_fwd,), FP64, "test")
    for scale, shift in ((2.0, 0.0), (1.0, 1.0), (0.5, -1.0), (1.0, 0.0)):
        assert np.array_equal(k.patches_fwd(x, 2, scale, shift, x.dtype)[0, 0], x.ravel() * scale + shift)
    assert ops.Scale(4.0, FP64).forward(np.array([0.5, 3.0])).tolist() == [2.0, 12.0]


def test_a_place_that_is_not_there_is_zeros() -> None:
    found = ops.Take(FP64).forward(np.ones((1, 2, 3)), np.array([[1, -1]], np.int32))
    assert found.tolist() == [[[1.0] * 3, [0.0] * 3]]


def test_one_token_for_one_expert() -> None:
    usage, starts = np.array([0.25, 0.75, 3.0]), np.array([0, 0, 1])
    close(ops.RouterLosses(1, FP64).forward(usage, starts), [2 * 0.75, 3.0])


def test_a_gain_of_zero_counts_as_the_least_one() -> None:
    assert gain_of(np.array([0.0, 1.0])).tolist() == [2.0**-50, 1.0]  # as in rmsnorm.cu
