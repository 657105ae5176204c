"""Attention on the GPU against the NumPy reference in float64: values, gradients, layouts, determinism, refusals."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tinyforge.backends import get_backend
from tinyforge.errors import UserError
from tinyforge.kernel import bind
from tinyforge.ops import attention as reference
from tinyforge.ops.attention import Attention

pytestmark = pytest.mark.gpu

cp = pytest.importorskip("cupy", reason="needs CuPy")
ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")

BF16 = np.dtype(ml_dtypes.bfloat16)
TF32 = "tf32"  # where a dtype is asked for: float32, with products that may round their factors
LENGTHS = (1, 7, 17, 63, 65, 127, 200)
HEADS = ((3, 3), (6, 2), (4, 1))  # groups of 1, 3 and 4 query heads a kv head
POISON = 1e30


def has_gpu() -> bool:
    try:
        return cp.cuda.runtime.getDeviceCount() > 0
    except cp.cuda.runtime.CUDARuntimeError:
        return False


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not has_gpu():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(params=("best", "mma.sync"))
def tensor_cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that this GPU gets; with those that every GPU from sm_80 on can run."""
    if request.param != "best" and not kernels().has_wgmma():
        pytest.skip("this GPU has no other")
    if request.param == "mma.sync":
        monkeypatch.setattr(kernels(), "has_wgmma", lambda: False)


def kernels() -> Any:
    from tinyforge.ops import attention_cuda

    return attention_cuda


def storage(dtype: Any) -> Any:
    return np.float32 if isinstance(dtype, str) else dtype


Seen = tuple[bool, int | None]
CAUSAL: Seen = (True, None)
BOTH_WAYS: Seen = (False, None)
Dropped = tuple[tuple[int, int] | None, float]
KEPT: Dropped = (None, 0.0)
DROPPED: Dropped = ((0x9E3779B9, 0xFFFFFFF1), 0.3)


def forward(dtype: Any, *args: Any, seen: Seen = CAUSAL, dropped: Dropped = KEPT, starts: Any = None) -> Any:
    """attention_fwd(q, k, v), computing as `dtype` says."""
    backend = SimpleNamespace(tf32=isinstance(dtype, str))
    return kernels().attention_fwd(*args, None, starts, *seen, *dropped, backend=backend)


def backward(dtype: Any, *args: Any, seen: Seen = CAUSAL, dropped: Dropped = KEPT, starts: Any = None) -> None:
    """attention_bwd(dq, dk, dv, dy, q, k, v, out, lse), computing as `dtype` says."""
    *inputs, out, lse = args
    backend = SimpleNamespace(tf32=isinstance(dtype, str))
    kernels().attention_bwd(*inputs, None, starts, out, lse, *seen, *dropped, backend=backend)


def rounded(x: Any, dtype: Any) -> Any:
    """float64 numbers that `dtype` can hold: what both sides are given."""
    return np.asarray(x).astype(storage(dtype)).astype(np.float64)


def to_tf32(x: Any) -> Any:
    """float64 numbers with the 10 bits of mantissa that a factor of a TF32 product has."""
    bits = np.ascontiguousarray(x).astype(np.float32).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32).astype(np.float64)


def random_inputs(rng: Any, b: int, t: int, heads: int, kv_heads: int, d: int, dtype: Any) -> tuple[Any, Any]:
    """A packed qkv and an upstream gradient."""
    qkv = rounded(rng.normal(size=(b, t, heads + 2 * kv_heads, d)), dtype)
    return qkv, rounded(rng.normal(size=(b, t, heads, d)), dtype)


def split(x: Any, heads: int, kv_heads: int) -> tuple[Any, Any, Any]:
    return x[:, :, :heads], x[:, :, heads : heads + kv_heads], x[:, :, heads + kv_heads :]


def upload(x: Any, dtype: Any) -> Any:
    return cp.asarray(np.ascontiguousarray(x).astype(storage(dtype)))


def download(x: Any) -> Any:
    return cp.asnumpy(cp.ascontiguousarray(x)).astype(np.float64)


def poisoned(shape: tuple[int, ...], dtype: Any) -> Any:
    return upload(np.full(shape, POISON), dtype)


def run(
    qkv: Any,
    dy: Any,
    heads: int,
    kv_heads: int,
    dtype: Any,
    seen: Seen = CAUSAL,
    dropped: Dropped = KEPT,
    starts: Any = None,
) -> dict[str, Any]:
    """Forward and backward on the GPU; the gradients land in one poisoned dqkv."""
    parts = split(upload(qkv, dtype), heads, kv_heads)
    dqkv = poisoned(qkv.shape, dtype)
    options: dict[str, Any] = {
        "seen": seen,
        "dropped": dropped,
        "starts": None if starts is None else cp.asarray(starts),
    }
    out, lse = forward(dtype, *parts, **options)
    backward(dtype, *split(dqkv, heads, kv_heads), upload(dy, dtype), *parts, out, lse, **options)
    return {"out": out, "lse": lse, "dqkv": dqkv}


def expected(
    qkv: Any, dy: Any, heads: int, kv_heads: int, seen: Seen = CAUSAL, dropped: Dropped = KEPT, starts: Any = None
) -> dict[str, Any]:
    parts = split(qkv, heads, kv_heads)
    out, lse = reference.attention_fwd(*parts, None, starts, *seen, *dropped)
    dqkv = np.empty_like(qkv)
    reference.attention_bwd(*split(dqkv, heads, kv_heads), dy, *parts, None, starts, out, lse, *seen, *dropped)
    return {"out": out, "lse": lse, "dqkv": dqkv}


def error(got: Any, wanted: Any) -> float:
    return float(np.linalg.norm(download(got) - wanted) / max(np.linalg.norm(wanted), 1e-300))


def unfused(
    qkv: Any,
    dy: Any,
    heads: int,
    kv_heads: int,
    factor: Callable[[Any], Any],
    result: Callable[[Any], Any],
    seen: Seen = CAUSAL,
    dropped: Dropped = KEPT,
    starts: Any = None,
) -> dict[str, Any]:
    """Attention one product at a time, factors and results rounded: the precision that a user of it expects."""
    q, k, v = (factor(x.transpose(0, 2, 1, 3)) for x in split(qkv, heads, kv_heads))
    group, scale, t = heads // kv_heads, qkv.shape[-1] ** -0.5, qkv.shape[1]
    k, v, dy = np.repeat(k, group, 1), np.repeat(v, group, 1), dy.transpose(0, 2, 1, 3)
    s = result(q @ k.swapaxes(-1, -2)) * scale
    ahead = np.arange(t) - np.arange(t)[:, None]  # of its query, each key
    causal, window = seen
    if causal:
        s[..., ahead > 0] = -np.inf
    if window is not None:
        s[..., ahead <= -window] = -np.inf
    if starts is not None:
        s = np.where(np.arange(t) < starts[:, None, :, None], -np.inf, s)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = result(p / p.sum(axis=-1, keepdims=True))
    key, rate = dropped
    mask: Any = 1.0
    if key is not None:
        whole = (slice(0, len(qkv)), slice(0, t), slice(0, t))
        mask = reference.dropout_mask(*whole, heads, kv_heads, key, rate, qkv.dtype)  # (B, Hkv, keys, G * queries)
        mask = mask.reshape(*k.shape[:1], kv_heads, t, group, t).transpose(0, 1, 3, 4, 2).reshape(p.shape)
    o = result(factor(result(p * mask)) @ v)
    dp = result(result(factor(dy) @ v.swapaxes(-1, -2)) * mask)
    ds = factor(result(p * (dp - (dy * o).sum(axis=-1, keepdims=True))))
    dq, dk, dv = scale * ds @ k, scale * ds.swapaxes(-1, -2) @ q, factor(result(p * mask)).swapaxes(-1, -2) @ factor(dy)
    dk, dv = (x.reshape(x.shape[0], kv_heads, group, t, -1).sum(axis=2) for x in (dk, dv))
    dqkv = np.concatenate([x.transpose(0, 2, 1, 3) for x in (dq, dk, dv)], axis=2)
    return {"out": o.transpose(0, 2, 1, 3), "dqkv": result(dqkv)}


def unfused_bf16(
    qkv: Any, dy: Any, heads: int, kv_heads: int, seen: Seen = CAUSAL, dropped: Dropped = KEPT, starts: Any = None
) -> dict[str, Any]:
    # factors are bf16 as they come
    return unfused(qkv, dy, heads, kv_heads, lambda x: x, lambda x: rounded(x, BF16), seen, dropped, starts)


def unfused_tf32(qkv: Any, dy: Any, heads: int, kv_heads: int, starts: Any = None) -> dict[str, Any]:
    return unfused(qkv, dy, heads, kv_heads, to_tf32, lambda x: rounded(x, np.float32), starts=starts)


def assert_no_worse_than_twice(plain: dict[str, Any], got: dict[str, Any], want: dict[str, Any], t: int) -> None:
    for name in plain:
        allowed = 2 * np.linalg.norm(plain[name] - want[name]) / np.linalg.norm(want[name])
        assert error(got[name], want[name]) <= allowed, (name, t)


@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (32, 64, 128))
@pytest.mark.parametrize("dtype,tolerance", ((np.float64, 1e-13), (np.float32, 2e-6)))
def test_plain_kernels_match_numpy(dtype: Any, tolerance: float, d: int, heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS:
        qkv, dy = random_inputs(rng, 2, t, heads, kv_heads, d, dtype)
        got, want = run(qkv, dy, heads, kv_heads, dtype), expected(qkv, dy, heads, kv_heads)
        for name in want:
            assert error(got[name], want[name]) <= tolerance, (name, t)


@pytest.mark.parametrize("d", (1, 2, 6, 80))
def test_plain_kernels_take_any_head_size_up_to_128(d: int) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 2, 131, 4, 2, d, np.float64)
    got, want = run(qkv, dy, 4, 2, np.float64), expected(qkv, dy, 4, 2)
    for name in want:
        assert error(got[name], want[name]) <= 1e-13, name


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (6, 8, 32, 48, 64, 80, 96, 128))  # 32, 64, 96 and 128 on tensor cores
def test_bf16_is_no_worse_than_twice_unfused_bf16(d: int, heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS:
        qkv, dy = random_inputs(rng, 2, t, heads, kv_heads, d, BF16)
        got, want = run(qkv, dy, heads, kv_heads, BF16), expected(qkv, dy, heads, kv_heads)
        assert error(got["lse"], want["lse"]) <= 1e-5, t
        assert_no_worse_than_twice(unfused_bf16(qkv, dy, heads, kv_heads), got, want, t)


# Windows of one key, within a tile, of about a tile, over several, as wide as the sequence; and all keys both ways.
SEEN: tuple[Seen, ...] = (BOTH_WAYS, *((True, w) for w in (1, 5, 33, 63, 64, 65, 100, 199, 1000)))


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("d", (6, 32, 64, 128))
@pytest.mark.parametrize("dtype,tolerance", ((np.float64, 1e-13), (np.float32, 2e-6), (TF32, 2e-6)))
def test_windows_and_both_ways_match_numpy(dtype: Any, tolerance: float, d: int, seen: Seen) -> None:
    if dtype is TF32 and seen[1] == 1000:
        pytest.skip("a window as wide as the sequence is causal attention, which rounds in TF32")
    rng = np.random.default_rng()
    for t in LENGTHS:
        if seen[1] is not None and seen[1] >= t and dtype is TF32:
            continue
        qkv, dy = random_inputs(rng, 2, t, 6, 2, d, dtype)
        got, want = run(qkv, dy, 6, 2, dtype, seen), expected(qkv, dy, 6, 2, seen)
        for name in want:
            assert error(got[name], want[name]) <= tolerance, (name, t)


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (32, 48, 64, 128))
def test_windows_and_both_ways_in_bf16(d: int, heads: int, kv_heads: int, seen: Seen) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS:
        qkv, dy = random_inputs(rng, 2, t, heads, kv_heads, d, BF16)
        got, want = run(qkv, dy, heads, kv_heads, BF16, seen), expected(qkv, dy, heads, kv_heads, seen)
        assert error(got["lse"], want["lse"]) <= 1e-5, t
        assert_no_worse_than_twice(unfused_bf16(qkv, dy, heads, kv_heads, seen), got, want, t)


# Two masks of 0.3 differ in almost half of the numbers, so a wrong word or a wrong order of them is far beyond these.
@pytest.mark.parametrize("seen", (CAUSAL, BOTH_WAYS, (True, 33)))
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (6, 32, 64, 80, 128))
@pytest.mark.parametrize("dtype,tolerance", ((np.float64, 1e-12), (np.float32, 2e-6), (TF32, 2e-6)))
def test_dropout_matches_numpy(dtype: Any, tolerance: float, d: int, heads: int, kv_heads: int, seen: Seen) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS:
        qkv, dy = random_inputs(rng, 2, t, heads, kv_heads, d, dtype)
        got = run(qkv, dy, heads, kv_heads, dtype, seen, DROPPED)
        want = expected(qkv, dy, heads, kv_heads, seen, DROPPED)
        for name in want:
            if np.linalg.norm(want[name]):  # all may be dropped where there is one key
                assert error(got[name], want[name]) <= tolerance, (name, t)
            else:
                assert not download(got[name]).any(), (name, t)


@pytest.mark.parametrize("seen", (CAUSAL, (True, 33)))
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (6, 32, 48, 64, 128))  # without a window 32, 64 and 128 on tensor cores
def test_dropout_in_bf16(d: int, heads: int, kv_heads: int, seen: Seen) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS[1:]:
        qkv, dy = random_inputs(rng, 2, t, heads, kv_heads, d, BF16)
        got = run(qkv, dy, heads, kv_heads, BF16, seen, DROPPED)
        want = expected(qkv, dy, heads, kv_heads, seen, DROPPED)
        assert error(got["lse"], want["lse"]) <= 1e-5, t
        assert_no_worse_than_twice(unfused_bf16(qkv, dy, heads, kv_heads, seen, DROPPED), got, want, t)


@pytest.mark.parametrize("dtype", (np.float64, np.float32, BF16))
@pytest.mark.parametrize("d", (6, 32, 64, 128))
def test_the_mask_has_the_same_bits_in_every_kernel(d: int, dtype: Any) -> None:
    """With q = 0 a probability is 1 / (t + 1) or dropped; one-hot values and gradients read single ones out."""
    key, rate = DROPPED
    t, heads, kv_heads = 83, 4, 2
    mask = reference.dropout_mask(slice(0, 2), slice(0, t), slice(0, t), heads, kv_heads, key, rate, np.dtype(float))
    mask = mask.reshape(2, kv_heads, t, 2, t).transpose(0, 4, 1, 3, 2).reshape(2, t, heads, t)  # query, head, key
    kept = (mask > 0) & np.tri(t, dtype=bool)[:, None]
    for first in range(0, t, d):
        some = slice(first, min(first + d, t))
        one_hot = np.zeros((2, t, 1, d))
        one_hot[:, np.arange(t)[some], 0, np.arange(t)[some] - first] = 1
        qkv = np.zeros((2, t, heads + 2 * kv_heads, d))
        qkv[:, :, heads + kv_heads :] = one_hot
        out = download(run(qkv, np.zeros((2, t, heads, d)), heads, kv_heads, dtype, dropped=DROPPED)["out"])
        width = some.stop - first
        assert ((out[..., :width] > 0) == kept[..., some]).all()
        for head in range(heads):  # dV[s] = sum over t of M[t, s] P[t, s] dO[t]
            dy = np.zeros((2, t, heads, d))
            dy[:, :, head] = one_hot[:, :, 0]
            dv = download(run(qkv, dy, heads, kv_heads, dtype, dropped=DROPPED)["dqkv"])[:, :, -kv_heads:]
            got = dv[:, :, head // 2, :width] > 0  # key, query
            assert (got == kept[:, some, head].swapaxes(1, 2)).all(), head


@pytest.mark.parametrize("d", (48, 64))
@pytest.mark.parametrize("dtype", (np.float64, np.float32, BF16))
def test_two_runs_with_dropout_give_the_same_bits(dtype: Any, d: int) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 3, 333, 6, 2, d, dtype)
    first, second = (run(qkv, dy, 6, 2, dtype, dropped=DROPPED) for _ in range(2))
    other = run(qkv, dy, 6, 2, dtype, dropped=((1, 2), 0.3))
    for name in first:
        assert cp.asnumpy(first[name]).tobytes() == cp.asnumpy(second[name]).tobytes(), name
        assert name == "lse" or error(other[name], download(first[name])) > 0.1, name
    assert cp.asnumpy(first["lse"]).tobytes() == cp.asnumpy(other["lse"]).tobytes()


@pytest.mark.parametrize("dtype", (np.float64, np.float32, BF16))
def test_a_window_changes_no_bit_of_what_it_hides(dtype: Any) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 1, 300, 4, 2, 64, dtype)
    changed = qkv.copy()
    changed[:, :50, 4:] = rounded(1e4, dtype)  # keys and values that queries from 150 on no longer see
    first, second = (run(x, dy, 4, 2, dtype, (True, 100)) for x in (qkv, changed))
    assert cp.asnumpy(first["out"][:, 150:]).tobytes() == cp.asnumpy(second["out"][:, 150:]).tobytes()
    assert np.isfinite(download(second["out"])).all()


def some_documents(rng: Any, t: int) -> Any:
    """(4, t) int32: where each token's document begins. Drawn; at borders of tiles and next to them; one document; a
    document for each token."""
    begins = np.zeros((4, t), bool)
    begins[0] = rng.random(t) < 1 / 20
    begins[1, [at for at in (1, 16, 63, 64, 96, 128, 129, 192) if at < t]] = True
    begins[3] = True
    return np.maximum.accumulate(np.where(begins, np.arange(t), 0), axis=1).astype(np.int32)


@pytest.mark.parametrize("window", (None, 1, 33, 1000))
@pytest.mark.parametrize("length", (1, 130, 1024))
def test_bounds_of_documents_are_those_of_the_definition(length: int, window: int | None) -> None:
    starts = some_documents(np.random.default_rng(), length)
    t = np.arange(length)
    sees = (t <= t[:, None]) & (t >= starts[..., None]) & (t > t[:, None] - (window or length))  # row, query, key
    first, last = sees.argmax(axis=2), length - sees[:, ::-1].argmax(axis=1)
    got = cp.asnumpy(kernels().document_bounds(cp.asarray(starts), window))
    assert np.array_equal(got[0], first) and np.array_equal(got[1], last)


@pytest.mark.parametrize("dropped", (KEPT, DROPPED), ids=("kept", "dropped"))
@pytest.mark.parametrize("seen", (CAUSAL, (True, 33)))
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (6, 32, 64, 80, 128))
@pytest.mark.parametrize("dtype,tolerance", ((np.float64, 1e-12), (np.float32, 2e-6)))
def test_documents_match_numpy(
    dtype: Any, tolerance: float, d: int, heads: int, kv_heads: int, seen: Seen, dropped: Dropped
) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS[1:]:
        starts = some_documents(rng, t)
        qkv, dy = random_inputs(rng, 4, t, heads, kv_heads, d, dtype)
        got = run(qkv, dy, heads, kv_heads, dtype, seen, dropped, starts)
        want = expected(qkv, dy, heads, kv_heads, seen, dropped, starts)
        for name in want:
            assert error(got[name], want[name]) <= tolerance, (name, t)


@pytest.mark.usefixtures("tensor_cores", "poisoned_memory")
@pytest.mark.parametrize("dropped", (KEPT, DROPPED), ids=("kept", "dropped"))
@pytest.mark.parametrize("seen", (CAUSAL, (True, 33)))
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (32, 48, 64, 96, 128))
def test_documents_in_bf16(d: int, heads: int, kv_heads: int, seen: Seen, dropped: Dropped) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS[1:]:
        starts = some_documents(rng, t)
        qkv, dy = random_inputs(rng, 4, t, heads, kv_heads, d, BF16)
        got = run(qkv, dy, heads, kv_heads, BF16, seen, dropped, starts)
        want = expected(qkv, dy, heads, kv_heads, seen, dropped, starts)
        assert error(got["lse"], want["lse"]) <= 1e-5, t
        assert_no_worse_than_twice(unfused_bf16(qkv, dy, heads, kv_heads, seen, dropped, starts), got, want, t)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("heads,kv_heads", HEADS)
@pytest.mark.parametrize("d", (32, 64, 128))
def test_documents_in_tf32(d: int, heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS[1:]:
        starts = some_documents(rng, t)
        qkv, dy = random_inputs(rng, 4, t, heads, kv_heads, d, TF32)
        got = run(qkv, dy, heads, kv_heads, TF32, starts=starts)
        want = expected(qkv, dy, heads, kv_heads, starts=starts)
        assert_no_worse_than_twice(unfused_tf32(qkv, dy, heads, kv_heads, starts), got, want, t)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("dropped", (KEPT, DROPPED), ids=("kept", "dropped"))
@pytest.mark.parametrize("dtype", (np.float64, np.float32, TF32, BF16))
def test_a_document_changes_no_bit_of_its_neighbours(dtype: Any, dropped: Dropped) -> None:
    """Neither of what they give nor of their gradients. The first begins within a tile, the last where one does."""
    t, borders = 300, (0, 77, 192, 300)
    starts = np.repeat(borders[:-1], np.diff(borders))[None].astype(np.int32)
    qkv, dy = random_inputs(np.random.default_rng(), 1, t, 4, 2, 64, dtype)
    kept = run(qkv, dy, 4, 2, dtype, dropped=dropped, starts=starts)
    for begin, end in zip(borders, borders[1:], strict=False):
        changed, other = qkv.copy(), dy.copy()
        changed[:, begin:end], other[:, begin:end] = rounded(50.0, dtype), rounded(-7.0, dtype)
        found = run(changed, other, 4, 2, dtype, dropped=dropped, starts=starts)
        for name in ("out", "dqkv"):
            before, after = (np.delete(cp.asnumpy(x[name]), np.s_[begin:end], axis=1) for x in (kept, found))
            assert before.tobytes() == after.tobytes(), (name, begin)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("dtype", (np.float64, TF32, BF16))
def test_faults_in_the_bounds_of_documents_show(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that sees its neighbour, that begins a token early, that ends a token late in backward."""
    rng, bounds_of = np.random.default_rng(), kernels().document_bounds
    starts = some_documents(rng, 200)[:2]
    qkv, dy = random_inputs(rng, 2, 200, 4, 2, 64, dtype)
    right = run(qkv, dy, 4, 2, dtype, starts=starts)
    for wrong in (None, np.maximum(starts - 1, 0).astype(np.int32)):
        assert error(run(qkv, dy, 4, 2, dtype, starts=wrong)["out"], download(right["out"])) > 3e-2

    def late(*args: Any) -> Any:
        bounds = bounds_of(*args)
        bounds[1] = cp.minimum(bounds[1] + 1, 200)
        return bounds

    monkeypatch.setattr(kernels(), "document_bounds", late)
    assert error(run(qkv, dy, 4, 2, dtype, starts=starts)["dqkv"], download(right["dqkv"])) > 3e-2


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("heads,kv_heads", (*HEADS, (4, 2)))
@pytest.mark.parametrize("d", (32, 64, 128))
def test_tf32_is_no_worse_than_twice_unfused_tf32(d: int, heads: int, kv_heads: int) -> None:
    rng = np.random.default_rng()
    for t in LENGTHS:
        qkv, dy = random_inputs(rng, 2, t, heads, kv_heads, d, TF32)
        got, want = run(qkv, dy, heads, kv_heads, TF32), expected(qkv, dy, heads, kv_heads)
        assert np.abs(download(got["lse"]) - want["lse"]).max() <= 5e-3, t  # scores of some units, to 2^-11
        assert_no_worse_than_twice(unfused_tf32(qkv, dy, heads, kv_heads), got, want, t)


@pytest.mark.parametrize("d", (64, 80))
def test_only_tf32_rounds_and_only_where_it_has_kernels(d: int) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 2, 100, 4, 2, d, np.float32)
    want = expected(qkv, dy, 4, 2)
    for precision in ("fp32", "tf32"):
        k = bind(Attention.kernels, get_backend("cupy", precision), "test")
        parts = split(upload(qkv, np.float32), 4, 2)
        out, lse = k.attention_fwd(*parts, None, None, *CAUSAL, *KEPT)
        dqkv = poisoned(qkv.shape, np.float32)
        k.attention_bwd(*split(dqkv, 4, 2), upload(dy, np.float32), *parts, None, None, out, lse, *CAUSAL, *KEPT)
        for name, got in (("out", out), ("dqkv", dqkv)):
            rounds = error(got, want[name]) > 1e-5
            assert rounds == (precision == "tf32" and d == 64), (precision, name)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("dtype,tolerance", ((np.float64, 1e-13), (np.float32, 2e-6), (TF32, 1e-3), (BF16, 6e-3)))
@pytest.mark.parametrize("d", (32, 64, 96, 128))
def test_a_cache_longer_than_the_queries(d: int, dtype: Any, tolerance: float) -> None:
    rng = np.random.default_rng()
    for queries, keys in ((1, 1), (1, 100), (5, 64), (65, 200), (130, 131)):
        q = rounded(rng.normal(size=(2, queries, 6, d)), dtype)
        cache = rounded(rng.normal(size=(2, 256, 4, d)), dtype)  # k and v of a preallocated cache, not yet full
        on_gpu = upload(cache, dtype)
        for seen in (CAUSAL, BOTH_WAYS, (True, 1), (True, 70)):
            got = forward(dtype, upload(q, dtype), on_gpu[:, :keys, :2], on_gpu[:, :keys, 2:], seen=seen)
            want = reference.attention_fwd(q, cache[:, :keys, :2], cache[:, :keys, 2:], None, None, *seen, *KEPT)
            assert error(got[0], want[0]) <= tolerance, (queries, keys, seen)
            exact = tolerance if dtype is TF32 else min(tolerance, 1e-5)
            assert error(got[1], want[1]) <= exact, (queries, keys, seen)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("dtype", (np.float64, np.float32, TF32, BF16))
def test_two_runs_give_the_same_bits(dtype: Any, d: int) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 3, 333, 6, 2, d, dtype)
    first, second = (run(qkv, dy, 6, 2, dtype) for _ in range(2))
    for name in first:
        assert cp.asnumpy(first[name]).tobytes() == cp.asnumpy(second[name]).tobytes(), name


@pytest.mark.parametrize(("batch", "heads", "kv_heads", "d"), [(4, 8, 8, 128), (3, 6, 2, 96)])
def test_more_work_than_blocks(batch: int, heads: int, kv_heads: int, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that stay on their multiprocessors: several units of work for each, tiles many times round the ring."""
    if not kernels().has_wgmma():
        pytest.skip("needs a GPU of compute capability 9.0")
    t = 1100
    qkv, dy = random_inputs(np.random.default_rng(), batch, t, heads, kv_heads, d, BF16)
    got, want = run(qkv, dy, heads, kv_heads, BF16), expected(qkv, dy, heads, kv_heads)
    assert error(got["lse"], want["lse"]) <= 1e-5
    assert error(got["out"], want["out"]) <= 6e-3 and error(got["dqkv"], want["dqkv"]) <= 6e-3
    monkeypatch.setattr(kernels(), "has_wgmma", lambda: False)  # head by head next to the other kernels
    other = run(qkv, dy, heads, kv_heads, BF16)
    for name in ("out", "dqkv"):
        a, b = download(got[name]), download(other[name])
        assert (np.linalg.norm(a - b, axis=(1, 3)) <= 1e-2 * np.linalg.norm(b, axis=(1, 3))).all(), name


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("d", (32, 128))
@pytest.mark.parametrize("dtype", (np.float64, TF32, BF16))
def test_the_future_changes_no_bit(dtype: Any, d: int) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 1, 150, 4, 2, d, dtype)
    changed = qkv.copy()
    changed[:, 100:] = rounded(5.0, dtype)
    first, second = run(qkv, dy, 4, 2, dtype), run(changed, dy, 4, 2, dtype)
    assert cp.asnumpy(first["out"][:, :100]).tobytes() == cp.asnumpy(second["out"][:, :100]).tobytes()


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("dtype", (np.float32, TF32, BF16))
def test_large_scores_do_not_overflow(dtype: Any) -> None:
    qkv, dy = random_inputs(np.random.default_rng(), 1, 200, 4, 2, 64, dtype)
    qkv = to_tf32(qkv)  # else rounding alone would change scores so large, and all that follows
    qkv[:, :, :6] *= 32  # scores of some thousands, far beyond what exp() holds
    got = run(qkv, dy, 4, 2, dtype)
    assert all(np.isfinite(download(x)).all() for x in got.values())
    assert error(got["out"], expected(qkv, dy, 4, 2)["out"]) <= (1e-3 if dtype is np.float32 else 1e-2)


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("d", (32, 96, 128))
@pytest.mark.parametrize("dtype,tolerance", ((np.float64, 1e-13), (TF32, 1e-3), (BF16, 6e-3)))
def test_nothing_is_written_beside_the_gradients(dtype: Any, tolerance: float, d: int) -> None:
    heads, kv_heads, t = 4, 2, 77
    qkv, dy = random_inputs(np.random.default_rng(), 2, t, heads, kv_heads, d, dtype)
    wide = poisoned((2, t + 3, heads + 2 * kv_heads + 1, d), dtype)  # rows and a head next to the ones to fill
    parts = split(upload(qkv, dtype), heads, kv_heads)
    inner = wide[:, :t, : heads + 2 * kv_heads]
    out, lse = forward(dtype, *parts)
    backward(dtype, *split(inner, heads, kv_heads), upload(dy, dtype), *parts, out, lse)
    assert error(inner, expected(qkv, dy, heads, kv_heads)["dqkv"]) <= tolerance
    beside = download(wide)
    assert (beside[:, t:] == rounded(POISON, dtype)).all()
    assert (beside[:, :, heads + 2 * kv_heads :] == rounded(POISON, dtype)).all()


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("d", (64, 96, 128))
@pytest.mark.parametrize("dtype", (np.float64, TF32, BF16))
def test_nothing_is_read_beside_the_inputs(dtype: Any, d: int) -> None:
    heads, kv_heads, t = 4, 2, 77
    qkv, dy = random_inputs(np.random.default_rng(), 2, t, heads, kv_heads, d, dtype)
    wide = np.full((2, t + 60, heads + 2 * kv_heads + 1, d), np.nan)
    wide[:, :t, : heads + 2 * kv_heads] = qkv
    parts = split(upload(wide, dtype)[:, :t, : heads + 2 * kv_heads], heads, kv_heads)
    dqkv = poisoned(qkv.shape, dtype)
    out, lse = forward(dtype, *parts)
    backward(dtype, *split(dqkv, heads, kv_heads), upload(dy, dtype), *parts, out, lse)
    for name, found in run(qkv, dy, heads, kv_heads, dtype).items():
        got = {"out": out, "lse": lse, "dqkv": dqkv}[name]
        assert cp.asnumpy(got).tobytes() == cp.asnumpy(found).tobytes(), name


@pytest.mark.parametrize("dtype", (np.float64, np.float32, TF32, BF16))
def test_no_tokens(dtype: Any) -> None:
    got = run(np.zeros((2, 0, 8, 32)), np.zeros((2, 0, 4, 32)), 4, 2, dtype)
    assert got["out"].shape == (2, 0, 4, 32) and got["lse"].shape == (2, 4, 0)


def test_memory_is_linear_in_length() -> None:
    t = 8192
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        qkv, dqkv = (cp.zeros((1, t, 3, 32), np.float32) for _ in range(2))
        dy = cp.zeros((1, t, 1, 32), np.float32)
        out, lse = forward(np.float32, *split(qkv, 1, 1))
        backward(np.float32, *split(dqkv, 1, 1), dy, *split(qkv, 1, 1), out, lse)
        assert pool.total_bytes() < 12 * t * 32 * 4  # one matrix of scores alone would be 256 MB


def test_head_sizes_without_a_kernel_are_refused() -> None:
    for d, dtype, wanted in ((256, BF16, "1 to 128"), (256, np.float32, "1 to 128")):
        x = upload(np.zeros((1, 4, 3, d)), dtype)
        with pytest.raises(UserError, match=wanted) as refusal:
            forward(dtype, *split(x, 1, 1))
        assert str(d) in str(refusal.value) and "\n" not in str(refusal.value)


def test_heads_that_do_not_lie_side_by_side_are_copied() -> None:
    x = upload(np.random.default_rng(0).normal(size=(1, 4, 3, 64)), BF16)[..., ::2]
    out, lse = forward(BF16, *split(x, 1, 1))
    packed, statistics = forward(BF16, *split(x.copy(), 1, 1))
    assert (out == packed).all() and (lse == statistics).all()


def test_layouts_that_kernels_cannot_read_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        flat = upload(np.zeros(4 * 3 * 64 + 1), BF16)
        forward(BF16, *split(flat[1:].reshape(1, 4, 3, 64), 1, 1))


def test_hopper_runs_its_own_kernels() -> None:
    """That CuPy hands -arch=sm_90a on is documented nowhere."""
    if not kernels().has_wgmma():
        pytest.skip("needs a GPU of compute capability 9.0")
    for d, name in ((64, "attention_fwd_wgmma"), (32, "attention_fwd_mma")):
        file = kernels().tensor_core_file(BF16, d, False, ())
        assert kernels().tensor_core(file, "FORWARD", d, ()).kernel.name == name
    for d in (96, 128):
        assert kernels().tensor_core_file(BF16, d, False, ()) == kernels().TMA_FILE
        assert kernels().tma_kernel("FORWARD", d, ()).kernel.name == "attention_fwd_tma"
    for option in ("BAND", "DROP"):  # not its business
        assert kernels().tensor_core_file(BF16, 64, False, (option,)) == kernels().FILE
    assert kernels().tensor_core(kernels().WGMMA_FILE, "FORWARD", 64, ("DOCS",)).kernel.name == "attention_fwd_wgmma"


@pytest.mark.parametrize("dtype", (np.float64, TF32))
def test_a_seeded_fault_shows(dtype: Any) -> None:
    """What the other tests would see of a kernel that forgets the scale in dk: the tolerance is no formality."""
    qkv, dy = random_inputs(np.random.default_rng(), 1, 65, 3, 1, 64, dtype)
    want = expected(qkv, dy, 3, 1)["dqkv"]
    wrong = run(qkv, dy, 3, 1, dtype)["dqkv"]
    wrong[:, :, 3] *= 8.0
    assert error(wrong, want) > 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-6), (BF16, 1e-2)])
@pytest.mark.parametrize("d", [32, 48, 64, 128])
@pytest.mark.parametrize("dropped", [KEPT, DROPPED], ids=["kept", "dropped"])
def test_padding_is_seen_by_none(dtype: Any, tolerance: float, d: int, dropped: Dropped) -> None:
    """Lengths within a tile, of one key, at the border of a tile and of the whole row."""
    lengths = np.array([130, 64, 1, 97, 200], np.int32)
    rng = np.random.default_rng(d)
    qkv, dy = random_inputs(rng, 5, 200, 4, 2, d, dtype)
    parts = split(qkv, 4, 2)
    out, lse = reference.attention_fwd(*parts, lengths, None, *BOTH_WAYS, *dropped)
    wanted = np.empty_like(qkv)
    reference.attention_bwd(*split(wanted, 4, 2), dy, *parts, lengths, None, out, lse, *BOTH_WAYS, *dropped)

    k, backend = kernels(), SimpleNamespace(tf32=False)
    device, ends = split(upload(qkv, dtype), 4, 2), cp.asarray(lengths)
    dqkv = poisoned(qkv.shape, dtype)
    got, got_lse = k.attention_fwd(*device, ends, None, *BOTH_WAYS, *dropped, backend=backend)
    k.attention_bwd(
        *split(dqkv, 4, 2), upload(dy, dtype), *device, ends, None, got, got_lse, *BOTH_WAYS, *dropped, backend=backend
    )
    assert error(got, out) < tolerance and error(got_lse, lse) < tolerance and error(dqkv, wanted) < 2 * tolerance
    for row, end in enumerate(lengths):
        assert not download(dqkv)[row, end:, 4:].any()  # the gradient of what is padding


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("b", "t", "heads", "kv_heads"), [(1, 5, 1, 1), (2, 200, 4, 2), (3, 513, 12, 4)])
def test_gradients_turned_back_in_the_kernels_are_those_of_rope_behind_them(
    b: int, t: int, heads: int, kv_heads: int, documents: bool
) -> None:
    """Bit for bit, at heads of 64; and at heads of 32, where rope is a pass."""
    from tinyforge.ops.rope_cuda import rope

    k = bind(
        (reference.attention_fwd, reference.attention_bwd, reference.attention_rope_bwd),
        get_backend("cupy", "bf16"),
        "test",
    )
    for d in (64, 32):
        rng = np.random.default_rng(t)
        qkv, dy = (upload(x, BF16) for x in random_inputs(rng, b, t, heads, kv_heads, d, BF16))
        starts = cp.asarray(np.arange(t)[None].repeat(b, 0) // 60 * 60, np.int32) if documents else None
        parts, turned = split(qkv, heads, kv_heads), heads + kv_heads
        cos, sin = (cp.asarray(rng.normal(size=(t, d // 2)).astype(np.float32)) for _ in range(2))
        out, lse = k.attention_fwd(*parts, None, starts, *CAUSAL, *KEPT)
        wanted, got = poisoned(qkv.shape, BF16), poisoned(qkv.shape, BF16)
        k.attention_bwd(*split(wanted, heads, kv_heads), dy, *parts, None, starts, out, lse, *CAUSAL, *KEPT)
        rope(wanted, wanted, cos, sin, turned)
        k.attention_rope_bwd(got, dy, qkv, None, starts, out, lse, cos, sin, turned, *CAUSAL, *KEPT)
        assert np.array_equal(download(got), download(wanted))
