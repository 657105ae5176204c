"""What the ops compute, against formulas written again here the plainest way, slow and in another form."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from tinyforge import ops
from tinyforge.backends import Backend, get_backend
from tinyforge.kernel import Array
from tinyforge.op import Op, Param, Stash
from tinyforge.ops.attention import TILE
from tinyforge.ops.cross_entropy import CHUNK_BYTES, masked_targets, sum_tokens
from tinyforge.params import ParamBuffer, with_buffer
from tinyforge.rng import Stream

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


def naive_attention(qkv: Array, heads: int, kv_heads: int) -> Array:
    """The whole T x T matrix, one head at a time."""
    batch, length, _, dim = qkv.shape
    out = np.empty((batch, length, heads, dim))
    for b in range(batch):
        for h in range(heads):
            kv = h * kv_heads // heads
            q, k, v = qkv[b, :, h], qkv[b, :, heads + kv], qkv[b, :, heads + kv_heads + kv]
            s = q @ k.T / math.sqrt(dim)
            s[np.triu_indices(length, 1)] = -np.inf
            p = np.exp(s - s.max(axis=1, keepdims=True))
            out[b, :, h] = p / p.sum(axis=1, keepdims=True) @ v
    return out


@pytest.mark.parametrize("length", [1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE + 37])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (3, 1)])
def test_attention_is_the_full_matrix_formula(heads: int, kv_heads: int, length: int, rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(2, length, heads + 2 * kv_heads, 6)) * 2
    close(ops.Attention(heads, kv_heads, FP64).forward(qkv), naive_attention(qkv, heads, kv_heads))


@pytest.mark.parametrize("queries", [1, 5, TILE, TILE + 30])
def test_attention_decodes_on_a_cached_prefix(queries: int, rng: np.random.Generator) -> None:
    qkv = rng.normal(size=(2, 2 * TILE + 37, 8, 6))
    got = ops.Attention(4, 2, FP64).decode(qkv[:, -queries:, :4], qkv[:, :, 4:6], qkv[:, :, 6:])
    close(got, naive_attention(qkv, 4, 2)[:, -queries:])


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


def peak_bytes(length: int) -> int:
    """Peak of a forward and backward over one sequence, beyond its inputs."""
    op, qkv, stash = ops.Attention(2, 1, FP32), np.ones((1, length, 4, 8), np.float32), Stash()
    dy = np.ones((1, length, 2, 8), np.float32)
    tracemalloc.start()
    try:
        op.forward(qkv, stash)
        op.backward(dy, stash)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_attention_memory_is_linear_in_length() -> None:
    peak_bytes(256)  # fills the cache of masks
    short, long = peak_bytes(2048), peak_bytes(4096)
    assert long <= 2.3 * short
    assert long < 4096 * 4096 * 4 / 16  # one fp32 T x T matrix of one head is 64 MiB


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
    with pytest.raises(ValueError, match="x has 6 positions, the table 5"):
        positions.forward(np.zeros((1, 6, 3)))


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
        "Attention": (ops.Attention(2, 1, backend), (np.tile(x.reshape(1, 2, 2, 2), (1, 1, 2, 1)),)),
    }[name]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", [FP64, FP32], ids=lambda b: b.precision.name)
@pytest.mark.parametrize(
    "name", ["Softmax", "SwiGLU", "GELU tanh", "GELU erf", "CrossEntropy", "LinearCrossEntropy", "Attention"]
)
def test_extreme_values_stay_finite(name: str, backend: Backend) -> None:
    op, inputs = extreme(name, backend)
    stash = Stash()
    y = op.forward(*inputs, stash=stash)
    dx = op.backward(np.ones_like(y), stash)
    assert np.isfinite(y).all()
    assert np.isfinite(dx[0] if isinstance(dx, tuple) else dx).all()
    if name.endswith("CrossEntropy"):
        close(y, [[2e4 + math.log(2)], [2e4]], 1e-6)


def test_swiglu_linear_is_swiglu_then_linear(rng: np.random.Generator) -> None:
    gu, dy = rng.normal(size=(2, 3, 10)), rng.normal(size=(2, 3, 4))
    fused = with_buffer(ops.SwiGLULinear(Param("w", (4, 5), std=1.0), FP64), FP64, rng)
    swiglu, linear = ops.SwiGLU(FP64), with_buffer(ops.Linear(Param("w", (4, 5), std=1.0), FP64), FP64, rng)
    linear.weight.value[...] = fused.weight.value
    stash, apart = Stash(), Stash()
    close(fused.forward(gu, stash), linear.forward(swiglu.forward(gu, apart), apart))
    close(fused.backward(dy, stash), swiglu.backward(linear.backward(dy, apart), apart))
    close(fused.weight.grad, linear.weight.grad)
