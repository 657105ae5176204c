"""The fast CUDA kernels against their naive siblings in the same files: two codes, one result.

Both run on the GPU on the same inputs, in float64 and float32, and differ in the order of their sums alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import dtype_of
from tinyforge.backends.compile import load

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

cp = pytest.importorskip("cupy", reason="needs CuPy")

SCALARS = {"fp64": "double", "fp32": "float"}
DTYPES = {"fp64": np.float64, "fp32": np.float32}
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5}
SHAPES = ((1, 1), (5, 7), (70, 33), (301, 96), (64, 768), (9, 2000))
each_precision = pytest.mark.parametrize("precision", SCALARS)
each_shape = pytest.mark.parametrize(("rows", "width"), SHAPES)


def launch(file: str, entry: str, precision: str, threads: int, *args: Any, **macros: int) -> None:
    """A naive kernel: one thread for each of `threads` results."""
    kernel = load(f"ops/{file}.cu", entry, **({"SCALAR": SCALARS[precision], "VEC": 1} | macros))
    kernel((-(-threads // 128),), (128,), tuple(np.int32(a) if isinstance(a, int) else a for a in args))


def normal(rng: np.random.Generator, precision: str, *shape: int) -> Any:
    return cp.asarray(rng.normal(size=shape).astype(DTYPES[precision]))


def assert_close(got: Any, expected: Any, precision: str) -> None:
    got, expected = cp.asnumpy(got), cp.asnumpy(expected)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE[precision] * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("file", ["best", "ops/grouped_mma.cu"])
@pytest.mark.parametrize("experts", [1, 5, 40])
@pytest.mark.parametrize(("outs", "ins"), [(8, 8), (136, 72), (264, 200), (2048, 768), (768, 1024)])
def test_grouped_products(outs: int, ins: int, experts: int, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensor cores and the plain way, both in bf16: groups of no row, of one, of whole tiles and of one row more."""
    from tinyforge.backends.cupy_backend import scalar
    from tinyforge.ops import mixture_cuda

    rng = np.random.default_rng(outs + experts)
    counts = rng.choice([0, 1, 127, 128, 129, 300], experts)
    counts[0] = 257
    rows, tokens = int(counts.sum()), 333
    starts = cp.asarray(np.append(0, counts.cumsum()).astype(np.int32))
    which = cp.asarray(rng.integers(0, tokens, rows).astype(np.int32))
    bf16 = dtype_of("bfloat16")

    def drawn(*shape: int) -> Any:
        return cp.asarray(rng.normal(size=shape).astype(bf16))

    x, dy, weight = drawn(tokens, ins), drawn(tokens, outs), drawn(experts, outs, ins)
    by_row, up = drawn(rows, ins), drawn(rows, outs)
    assert scalar(x.dtype) == "bf16"

    def products() -> list[Any]:
        dweight = cp.ones((2, experts, outs, ins), np.float32)
        mixture_cuda.grouped_bwd_weight(dweight[0], dy, by_row, which, None, starts)
        mixture_cuda.grouped_bwd_weight(dweight[1], up, x, None, which, starts)
        return [
            mixture_cuda.grouped_fwd(x, weight, which, starts),
            mixture_cuda.grouped_fwd(by_row, weight, None, starts),
            mixture_cuda.grouped_bwd_input(dy, weight, which, starts),
            mixture_cuda.grouped_bwd_input(up, weight, None, starts),
            dweight,
        ]

    if file != "best":
        monkeypatch.setattr(mixture_cuda, "_file", lambda *_: file)
    fast, again = products(), products()
    monkeypatch.setattr(mixture_cuda, "_file", lambda *_: mixture_cuda.PLAIN)
    plain = products()
    for got, same, expected in zip(fast, again, plain, strict=True):
        got, same, expected = (cp.asnumpy(a).astype(np.float64) for a in (got, same, expected))
        assert np.array_equal(got, same) and np.isfinite(got).all()
        # Results in bf16 may be rounded to neighbours; dW is float32.
        tolerance = 1e-5 if got.ndim == 4 else 2**-7
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@each_precision
@each_shape
def test_rmsnorm_backward(rows: int, width: int, precision: str) -> None:
    from tinyforge.ops.rmsnorm_cuda import rmsnorm_bwd

    rng = np.random.default_rng(0)
    dy, x, weight = (normal(rng, precision, *shape) for shape in ((rows, width), (rows, width), (width,)))
    rstd = 1 / cp.sqrt((x * x).mean(axis=-1) + 1e-5)
    dweight, dx = normal(rng, precision, width), cp.empty_like(x)
    fast = dweight.copy()
    launch(
        "rmsnorm",
        "rmsnorm_bwd_naive",
        precision,
        max(rows, width),
        dx,
        dweight,
        dy,
        weight,
        x,
        rstd,
        rows,
        width,
        PER=0,
    )
    assert_close(rmsnorm_bwd(fast, dy, weight, x, rstd, None), dx, precision)
    assert_close(fast, dweight, precision)


@each_precision
@each_shape
def test_layernorm_backward(rows: int, width: int, precision: str) -> None:
    from tinyforge.ops.layernorm_cuda import layernorm_bwd

    rng = np.random.default_rng(1)
    dy, x, weight = (normal(rng, precision, *shape) for shape in ((rows, width), (rows, width), (width,)))
    mean, dx = x.mean(axis=-1), cp.empty_like(x)
    rstd = 1 / cp.sqrt(((x - mean[:, None]) ** 2).mean(axis=-1) + 1e-5)
    sums = [normal(rng, precision, width) for _ in range(2)]
    fast = [s.copy() for s in sums]
    launch(
        "layernorm",
        "layernorm_bwd_naive",
        precision,
        max(rows, width),
        dx,
        *sums,
        dy,
        weight,
        x,
        mean,
        rstd,
        rows,
        width,
        PER=0,
    )
    assert_close(layernorm_bwd(fast[0], fast[1], dy, weight, x, mean, rstd, None), dx, precision)
    for got, expected in zip(fast, sums, strict=True):
        assert_close(got, expected, precision)


@each_precision
@pytest.mark.parametrize("equal", (False, True))
@each_shape
def test_embedding_backward(rows: int, width: int, equal: bool, precision: str) -> None:
    """`rows` of the table; with `equal`, one id has more tokens than a piece and the others a few."""
    from tinyforge.ops.embedding_cuda import embedding_bwd

    rng = np.random.default_rng(2)
    ids = rng.integers(0, rows, 500).astype(np.int32)
    if equal:
        ids[rng.random(len(ids)) < 0.8] = rows // 2
    ids, dy, dtable = cp.asarray(ids), normal(rng, precision, len(ids), width), normal(rng, precision, rows, width)
    fast = dtable.copy()
    launch("embedding", "embedding_bwd_naive", precision, rows * width, dtable, dy, ids, len(ids), rows, width)
    embedding_bwd(fast, dy, ids)
    assert_close(fast, dtable, precision)


# Rows that are held in shared memory: with and without an edge, fewer vectors than threads, and as long as GPT-2's.
HELD = ((9, 1200), (3, 16_387), (2, 28_600))


@each_precision
@pytest.mark.parametrize("padding", (0, 4, 5))
@pytest.mark.parametrize(("rows", "width"), SHAPES + HELD)
def test_softmax_residual(rows: int, width: int, padding: int, precision: str) -> None:
    from tinyforge.ops.cross_entropy_cuda import softmax_residual_

    rng, pitch = np.random.default_rng(3), width + padding
    logits = 5 * normal(rng, precision, rows, pitch)
    targets = cp.asarray(rng.integers(-1, width, rows).astype(np.int32))
    fast, nll, fast_nll = logits.copy(), cp.empty(rows, logits.dtype), cp.empty(rows, logits.dtype)
    launch("cross_entropy", "softmax_residual_naive", precision, rows, nll, logits, targets, rows, width, pitch, PER=0)
    softmax_residual_(fast_nll, fast, targets, True, width)
    assert_close(fast_nll, nll, precision)
    assert_close(fast, logits, precision)


# Not the longest rows in fp32: the naive kernel's sum of so many numbers, one after the other, is too rough.
SOFT = [(*case, precision) for precision in SCALARS for case in (SHAPES + HELD if precision == "fp64" else SHAPES)]


@pytest.mark.parametrize("padding", (0, 4, 5))
@pytest.mark.parametrize(("rows", "width", "precision"), SOFT)
def test_soft_residual(rows: int, width: int, padding: int, precision: str) -> None:
    from tinyforge.ops.cross_entropy_cuda import soft_residual_

    rng, pitch = np.random.default_rng(3), width + padding
    logits, teacher = (5 * normal(rng, precision, rows, pitch) for _ in range(2))
    targets = cp.asarray(rng.integers(-1, width, rows).astype(np.int32))
    fast, nll, fast_nll = logits.copy(), cp.empty(rows, logits.dtype), cp.empty(rows, logits.dtype)
    launch(
        "cross_entropy",
        "soft_residual_naive",
        precision,
        rows,
        nll,
        logits,
        teacher,
        targets,
        DTYPES[precision](0.7),
        rows,
        width,
        pitch,
        PER=0,
    )
    soft_residual_(fast_nll, fast, teacher, targets, 0.7, width)
    assert_close(fast_nll, nll, precision)
    assert_close(fast, logits, precision)


def test_rows_of_other_lengths_in_between() -> None:
    """A long row, a short one, the long one again: one function of CUDA's, with one limit on shared memory."""
    from tinyforge.ops.cross_entropy_cuda import softmax_residual_

    rng, found = np.random.default_rng(3), []
    long, short = (5 * normal(rng, "fp64", 3, width) for width in (1200, 96))
    targets = cp.asarray(np.array([0, 5, -1], np.int32))
    for logits in (long, short, long):
        nll = cp.empty(3, np.float64)
        softmax_residual_(nll, logits.copy(), targets, True, logits.shape[1])
        found.append(nll)
    assert bool((found[0] == found[2]).all())


# batch, length, channels, states: less and more than a tile, its half and a block's channels, and states that fill
# their lanes, which are read four numbers at a time.
SCANS = ((1, 1, 1, 1), (2, 31, 5, 3), (2, 70, 33, 5), (1, 33, 40, 16), (2, 49, 36, 4), (1, 80, 64, 8), (2, 17, 32, 16))


@each_precision
@pytest.mark.parametrize(("batch", "length", "channels", "states"), SCANS)
def test_causal_conv_backward(batch: int, length: int, channels: int, states: int, precision: str) -> None:
    from tinyforge.ops.causal_conv_cuda import causal_conv_bwd

    rng, shape = np.random.default_rng(4), (batch, length, channels)
    dy, x, weight, bias = (normal(rng, precision, *s) for s in (shape, shape, (channels, 1, 4), (channels,)))
    sums = [normal(rng, precision, *s) for s in ((channels, 1, 4), (channels,))]
    fast, dx = [s.copy() for s in sums], cp.empty_like(x)
    launch(
        "causal_conv",
        "causal_conv_bwd_naive",
        precision,
        channels,
        dx,
        *sums,
        dy,
        x,
        weight,
        bias,
        batch,
        length,
        channels,
        TAPS=4,
    )
    assert_close(causal_conv_bwd(None, *fast, dy, x, weight, bias), dx, precision)
    for got, expected in zip(fast, sums, strict=True):
        assert_close(got, expected, precision)


@each_precision
@pytest.mark.parametrize(("batch", "length", "channels", "states"), SCANS)
def test_selective_scan(batch: int, length: int, channels: int, states: int, precision: str) -> None:
    from tinyforge.ops.selective_scan_cuda import selective_scan_bwd, selective_scan_fwd
    from tinyforge.ops.selective_scan_plan import states_a_lane

    rng, wide, narrow = np.random.default_rng(5), (batch, length, channels), (batch, length, states)
    shapes = (wide, wide, narrow, narrow, wide, (channels, states), (channels,), (channels,))
    u, delta, b, c, z, a_log, skip, bias = inputs = [normal(rng, precision, *shape) for shape in shapes]
    dy, sizes, per = normal(rng, precision, *wide), (batch, length, channels, states), states_a_lane(states)
    y, du, ddelta, dz, up = (cp.empty_like(u) for _ in range(5))
    h, g = (cp.empty((*wide, states), u.dtype) for _ in range(2))
    db, dc, da_parts = cp.empty_like(b), cp.empty_like(c), cp.empty((batch, channels, states), u.dtype)
    vector_parts = cp.empty((batch, 2, channels), u.dtype)
    launch("selective_scan", "selective_scan_fwd_naive", precision, batch * channels, y, h, *inputs, *sizes, PER=per)
    launch(
        "selective_scan",
        "selective_scan_bwd_naive",
        precision,
        batch * channels,
        du,
        ddelta,
        dz,
        g,
        up,
        da_parts,
        vector_parts,
        dy,
        *inputs,
        h,
        *sizes,
        PER=per,
    )
    launch(
        "selective_scan",
        "selective_scan_sum_naive",
        precision,
        batch * length * states,
        db,
        dc,
        g,
        up,
        u,
        delta,
        bias,
        h,
        batch * length,
        channels,
        states,
        PER=per,
    )

    fast, kept = selective_scan_fwd(None, *inputs, True)
    assert_close(fast, y, precision)
    grads = [cp.zeros_like(p) for p in (a_log, skip, bias)]
    found = selective_scan_bwd(None, *grads, dy, *inputs, kept)
    for got, expected in zip(found, (du, ddelta, db, dc, dz), strict=True):
        assert_close(got, expected, precision)
    for got, expected in zip(grads, (da_parts, vector_parts[:, 0], vector_parts[:, 1]), strict=True):
        assert_close(got, expected.sum(axis=0), precision)
