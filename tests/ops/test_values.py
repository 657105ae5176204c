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
from tinyforge.gradcheck import TOLERANCE, check_op
from tinyforge.kernel import Array, override
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.attention import TILE, attention_bwd, attention_fwd, dropout_mask
from tinyforge.ops.cross_entropy import CHUNK_BYTES, masked_targets, sum_tokens
from tinyforge.ops.mixture import sort_by_expert
from tinyforge.ops.selective_scan import TILE as SCAN_TILE
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


def close(got: Array, wanted: Array, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


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
        assert max(row.error for row in check_op(ops.Attention, FP64)) <= TOLERANCE
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
    with pytest.raises(ValueError, match="dropout is 1.0, wants 0 <= dropout < 1"):
        ops.Attention(2, 1, FP64, dropout=1.0)


class Prefix:
    """A cache of one layer that holds the keys and values of the tokens before."""

    def __init__(self, k: Array, v: Array) -> None:
        self.k, self.v = k, v

    def append(self, k: Array, v: Array) -> tuple[Array, Array]:
        return np.concatenate([self.k, k], axis=1), np.concatenate([self.v, v], axis=1)


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
    wanted = naive_conv(x, weight, bias)
    close(op.forward(x), wanted)
    tail = np.zeros((2, taps - 1, 5))  # in pieces, the tail in between
    pieces = [op.forward(part, tail=tail) for part in np.split(x, [1, 2] if length > 2 else [], axis=1)]
    close(np.concatenate(pieces, axis=1), wanted)
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
    wanted = naive_scan(inputs, *values)
    close(op.forward(*inputs), wanted)
    state = np.zeros((2, 3, 4))  # in pieces, the state in between
    cuts = [1, length // 2] if length > 2 else []
    pieces = [op.forward(*part, state=state) for part in zip(*(np.split(x, cuts, 1) for x in inputs), strict=True)]
    close(np.concatenate(pieces, axis=1), wanted)
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
        with pytest.raises(ValueError, match="wants a causal window of 1 or more"):
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
    wanted = np.arange(7)[:, None] * naive_frequencies(32, 500.0, scaling)
    close(op.cos, np.cos(wanted))
    close(op.sin, np.sin(wanted))
    plain = ops.RoPE(32, 7, 1, FP64, theta=500.0)
    assert np.array_equal(op.cos[:, 0], plain.cos[:, 0]) == (scaling.kind == "llama3")  # fast turns stay as they are
    assert not np.array_equal(op.sin[:, -1], plain.sin[:, -1])


def test_rope_llama3_is_that_of_transformers() -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    )
    wanted, attention_factor = utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    op = ops.RoPE(64, 2, 1, FP64, theta=500000.0, scaling=ops.RopeScaling("llama3", 8.0, original_context=128))
    np.testing.assert_allclose(np.arctan2(op.sin[1], op.cos[1]), wanted.numpy(), rtol=1e-5)
    assert attention_factor == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("yarn", 2.0), "RoPE scaling 'yarn' is unknown; use linear or llama3"),
        (("linear", 0.0), "factor is 0.0, wants a number above 0"),
        (("llama3", 8.0, 4.0, 1.0), "wants 0 < low < high and a context"),
    ],
)
def test_rope_scalings_that_make_no_sense_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ops.RopeScaling(*arguments)


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
    wanted = learned.forward(h, targets, stash)
    dh = learned.backward(dnll, stash)[0]
    assert np.array_equal(frozen.forward(h, targets), wanted)
    assert np.array_equal(frozen.forward(h, targets, stash), wanted)
    assert [x.size for _, saved in stash for x in saved if isinstance(x, np.ndarray)] == [rows * heads * dim]
    close(frozen.backward(dnll, stash)[0], dh)
    frozen.forward(h[:, None], targets[:, None], stash)
    assert frozen.backward(dnll if shared else dnll[:, None], stash)[0].shape == (rows, 1, dim)


def test_gelu_erf_is_the_math_librarys(rng: np.random.Generator) -> None:
    x = np.concatenate([np.linspace(-10, 10, 4001), rng.normal(size=2000), [0.0, 1e-300, -1e-20, 5e3, -5e3]])
    root = 0.5**0.5
    wanted = [0.5 * v * (1 + math.erf(v * root)) for v in x.tolist()]
    np.testing.assert_allclose(ops.GELU(FP64, "erf").forward(x), wanted, rtol=1e-15, atol=2e-15)


def test_gelu_tanh_is_gpt2s(rng: np.random.Generator) -> None:
    x = np.linspace(-8, 8, 1001)
    wanted = [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x.tolist()]
    got = ops.GELU(FP64, "tanh").forward(x)
    close(got, wanted, 1e-15)
    apart = np.abs(got - ops.GELU(FP64, "erf").forward(x)).max()
    assert 1e-5 < apart < 1e-3  # close, but not the same formula
    with pytest.raises(ValueError, match="approximate is 'sigmoid', wants 'tanh' or 'erf'"):
        ops.GELU(FP64, "sigmoid")


def test_swiglu(rng: np.random.Generator) -> None:
    gate, up = rng.normal(size=(2, 5, 3)) * 3
    wanted = [g / (1 + math.exp(-g)) * u for g, u in zip(gate.flat, up.flat, strict=True)]
    close(ops.SwiGLU(FP64).forward(np.concatenate([gate, up], axis=-1)).reshape(-1), wanted)


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
    wanted = apart.forward(np.ascontiguousarray(qkv[:, :, 1:4]), stash)
    dwanted = apart.backward(np.ascontiguousarray(dqkv[:, :, 1:4]), stash)
    for got, given, inner in ((packed, qkv, wanted), (dpacked, dqkv, dwanted)):
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
    with pytest.raises(ValueError, match="rate is 1.0, wants 0 <= rate < 1"):
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
    plain, right, handed = ops.Linear(before.weight, FP64), before.k.linear_swiglu_fwd, []
    before.k.linear_swiglu_fwd = lambda *a: handed.append(right(*a)) or handed[0]
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
    wanted, grads = np.zeros_like(y), [np.zeros_like(p.value) for p in op.params()]
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
        wanted[at] = sum(outs)
        dz = np.zeros(experts)
        dz[best] = w * (np.array(dws) - w @ dws)
        grads[0] += np.outer(dz, x[at])
        dx_wanted[at] += gate.T @ dz
    close(y, wanted)
    close(dx, dx_wanted)
    for p, grad in zip(op.params(), grads, strict=True):
        close(p.grad, grad)
