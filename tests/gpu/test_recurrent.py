"""Mamba's and LSTM's kernels on the GPU where they differ from other kernels: packed rows, states, loops over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinyforge.backends import Backend, dtype_of, get_backend
from tinyforge.backends.compile import load
from tinyforge.kernel import bind
from tinyforge.ops import LSTM, CausalConv, SelectiveScan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

cp = pytest.importorskip("cupy", reason="needs CuPy")

TOLERANCE = {"fp64": 1e-12, "fp32": 5e-6, "bf16": 3e-2}
each_precision = pytest.mark.parametrize("precision", TOLERANCE)


def error(got: np.ndarray, expected: np.ndarray) -> float:
    assert got.shape == expected.shape
    found = np.linalg.norm(np.float64(got) - expected) / max(np.linalg.norm(expected), 1e-30)
    return float(found) if np.isfinite(found) else np.inf


def exact(array: np.ndarray) -> np.ndarray:
    """As bf16 holds it, in float64."""
    return array.astype(dtype_of("bfloat16")).astype(np.float64)


def check(backend: Backend, found: Any, expected: Any, tolerance: float) -> None:
    for number, (f, w) in enumerate(zip(found, expected, strict=True)):
        assert error(backend.to_numpy(f), w) <= tolerance, number


@each_precision
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (7, 33, 40), (3, 9, 129)])
def test_lstm_is_numpys(shape: tuple[int, int, int], fresh: bool, precision: str) -> None:
    (batch, length, width), backend = shape, get_backend("cupy", precision)
    rng = np.random.default_rng(0)
    gates, h, c, dy, dc = (
        exact(rng.normal(size=s))
        for s in ((batch, length, 4 * width), (batch, width), (batch, width), shape, (batch, width))
    )
    weight = exact(rng.normal(size=(4 * width, width)) * width**-0.5)
    marks = (rng.random((batch, length)) < 0.3).astype(np.int32) if fresh else None
    k, numpy = bind(LSTM.kernels, backend, "test"), bind(LSTM.kernels, get_backend("numpy", "fp64", 1), "test")
    place = backend.asarray
    on_gpu = [place(a) for a in (h, c, weight)] + [None if marks is None else place(marks)]
    acting = place(gates)
    y, cells = k.lstm_fwd(acting, *on_gpu)
    expected = numpy.lstm_fwd(gates, h, c, weight, marks)  # the gates act in place
    check(backend, (y, cells, acting), (*expected, gates), TOLERANCE[precision])

    dweight = backend.zeros(weight.shape, backend.master_dtype)
    wanted_dweight = np.zeros(weight.shape)
    found = k.lstm_bwd(dweight, place(dy), place(dc), acting, y, cells, *on_gpu)
    expected = numpy.lstm_bwd(wanted_dweight, dy, dc, gates, *expected, h, c, weight, marks)
    check(backend, (*found, dweight), (*expected, wanted_dweight), 2 * TOLERANCE[precision])


@pytest.mark.parametrize("fresh", [False, True])
def test_lstm_is_its_naive_sibling(fresh: bool) -> None:
    batch, length, width, backend = 5, 7, 33, get_backend("cupy", "fp64")
    rng = cp.random.default_rng(0)
    state, whole = (batch, width), (batch, length, width)
    shapes = (batch, length, 4 * width), state, state, whole, state
    gates, h, c, dy, dc = (rng.standard_normal(shape) for shape in shapes)
    weight = rng.standard_normal((4 * width, width)) * width**-0.5
    marks = (rng.random((batch, length)) < 0.3).astype(np.int32) if fresh else None
    k, sizes = bind(LSTM.kernels, backend, "test"), tuple(map(np.int32, (batch, length, width)))
    acting, y, cells, scratch = gates.copy(), cp.empty_like(dy), cp.empty_like(dy), cp.empty((batch, 2, width))
    null = np.uintp(0) if marks is None else marks
    load("ops/lstm.cu", "lstm_fwd_naive", SCALAR="double")(
        (1,), (32,), (y, cells, scratch, acting, h, c, weight, null, *sizes)
    )
    found = k.lstm_fwd(gates, h, c, weight, marks)
    check(backend, (*found, gates), map(cp.asnumpy, (y, cells, acting)), 1e-12)
    dgates, dh, dcs = cp.empty_like(gates), cp.empty_like(h), dc.copy()
    load("ops/lstm.cu", "lstm_bwd_naive", SCALAR="double")(
        (1,), (32,), (dgates, dh, dcs, dy, gates, cells, c, weight, null, *sizes)
    )
    found = k.lstm_bwd(cp.zeros_like(weight), dy, dc, gates, y, cells, h, c, weight, marks)
    check(backend, found, map(cp.asnumpy, (dgates, dh, dcs)), 1e-12)


@pytest.mark.parametrize("channels", [6, 64])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_packed_rows_are_read_and_written_where_they_lie(channels: int, precision: str) -> None:
    backend, rng = get_backend("cupy", precision), np.random.default_rng(0)
    place, length, states = backend.asarray, 41, 5
    packed, selected, delta, dy = (
        place(rng.normal(size=(2, length, n))) for n in (2 * channels, 3 + 2 * states, channels, channels)
    )
    weight, bias, skip, a_log = (
        place(rng.normal(size=s)) for s in ((channels, 1, 4), (channels,), (channels,), (channels, states))
    )
    x, z = packed[..., :channels], packed[..., channels:]
    b, c = selected[..., 3 : 3 + states], selected[..., 3 + states :]
    whole = [cp.ascontiguousarray(part) for part in (x, z, b, c)]
    conv, scan = bind(CausalConv.kernels, backend, "test"), bind(SelectiveScan.kernels, backend, "test")

    def results(x: Any, z: Any, b: Any, c: Any, dx: Any, dz: Any) -> list[np.ndarray]:
        sums = [backend.zeros(p.shape, backend.master_dtype) for p in (weight, bias, a_log, skip, bias)]
        y = conv.causal_conv_fwd(None, x, weight, bias)
        dx = conv.causal_conv_bwd(dx, *sums[:2], dy, x, weight, bias)
        out, kept = scan.selective_scan_fwd(None, x, delta, b, c, z, a_log, skip, bias, True)
        grads = scan.selective_scan_bwd(dz, *sums[2:], dy, x, delta, b, c, z, a_log, skip, bias, kept)
        return [backend.to_numpy(a) for a in (y, dx, out, kept, *grads, *sums)]

    room = backend.empty(packed.shape)
    found = results(x, z, b, c, room[..., :channels], room[..., channels:])
    for got, expected in zip(found, results(*whole, None, None), strict=True):
        assert np.array_equal(got, expected) and np.isfinite(got).all()
    assert np.array_equal(backend.to_numpy(room), np.concatenate([found[1], found[8]], axis=-1))


@each_precision
def test_the_scan_and_the_convolution_continue_from_their_states(precision: str) -> None:
    backend, rng = get_backend("cupy", precision), np.random.default_rng(0)
    place, (length, channels, states) = backend.asarray, (70, 37, 6)
    inputs = [place(rng.normal(size=(2, length, n))) for n in (channels, channels, states, states, channels)]
    params = [place(rng.normal(size=s)) for s in ((channels, states), (channels,), (channels,))]
    weight, bias = place(rng.normal(size=(channels, 1, 4))), place(rng.normal(size=channels))
    conv, scan = bind(CausalConv.kernels, backend, "test"), bind(SelectiveScan.kernels, backend, "test")
    y, _ = scan.selective_scan_fwd(None, *inputs, *params, False)
    expected = conv.causal_conv_fwd(None, inputs[0], weight, bias), y
    tail = backend.zeros((2, 3, channels))
    state = backend.zeros((2, channels, states), backend.master_dtype)
    found: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for part in (slice(0, 1), slice(1, 3), slice(3, 40), slice(40, length)):
        found[0].append(backend.to_numpy(conv.causal_conv_fwd(tail, inputs[0][:, part], weight, bias)))
        now = [x[:, part] for x in inputs]
        found[1].append(backend.to_numpy(scan.selective_scan_fwd(state, *now, *params, False)[0]))
    for parts, whole in zip(found, expected, strict=True):
        assert error(np.concatenate(parts, axis=1), np.float64(backend.to_numpy(whole))) <= TOLERANCE[precision]
